"""`mempo index`: build a search index of a corpus, or add documents to one."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "corpus",
        help="a .jsonl, .jsonl.gz, .parquet, .txt or .md file, a folder of such files, or a data set on the Hub",
    )
    parser.add_argument("out", type=Path, help="the folder of the index")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--add", action="store_true", help="add the documents to the index that is there")
    how.add_argument("--overwrite", action="store_true", help="replace the index that is there")
    _add_corpus_arguments(parser.add_argument_group("the corpus"))
    _add_bm25_arguments(parser.add_argument_group("BM25 (an index that is added to keeps what it was built with)"))


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from mempo_trl.search import BM25Index, read_corpus

    options = _bm25_options(args)
    if args.add:
        if options:
            given = ", ".join("--" + name.replace("_", "-") for name in options)
            raise ValueError(f"{given} cannot be given with --add: the index keeps the options it was built with.")
        index = BM25Index.load(args.out)
    corpus = read_corpus(
        args.corpus,
        id_column=args.id_column,
        contents_column=args.contents_column,
        title_column=args.title_column,
        text_column=args.text_column,
        config=args.config,
        split=args.split,
        revision=args.revision,
        passage_words=args.passage_words,
        overlap_words=args.overlap_words,
        skip_bad_lines=args.skip_bad_lines,
    )
    try:
        if args.add:
            index.add(corpus)
        else:
            index = BM25Index.build(corpus, args.out, overwrite=args.overwrite, **options)
    except FileExistsError as error:
        message = str(error).replace("pass overwrite=True to replace it", "use --overwrite to replace it, or --add")
        raise FileExistsError(message) from error
    if corpus.skipped:
        print(f"Skipped what is malformed: {corpus.skipped:,} lines or rows of {args.corpus}.", file=sys.stderr)
    print(f"{index.path}: {len(index):,} documents")


def _add_corpus_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--id-column", default="id", metavar="NAME", help="the key or column of the ids")
    group.add_argument(
        "--contents-column", default="contents", metavar="NAME", help="that of the contents, title and text in one"
    )
    group.add_argument("--title-column", metavar="NAME", help="that of the titles, where they stand apart")
    group.add_argument("--text-column", metavar="NAME", help="that of the texts, instead of the contents")
    group.add_argument("--config", help="configuration of the data set on the Hub")
    group.add_argument("--split", default="train", help="split of the data set on the Hub")
    group.add_argument("--revision", help="branch, tag or commit of the data set on the Hub")
    group.add_argument(
        "--passage-words", type=int, default=100, metavar="N", help="most words of a passage of a .txt or .md file"
    )
    group.add_argument(
        "--overlap-words", type=int, default=0, metavar="N", help="words that a passage repeats of the one before"
    )
    group.add_argument("--skip-bad-lines", action="store_true", help="skip and count malformed lines and rows")


def _add_bm25_arguments(group: argparse._ArgumentGroup) -> None:
    # What is not given is left to `BM25Index.build`, and can be told from what is.
    group.add_argument("--stem", metavar="LANGUAGE", help="reduce words of this language to their stem")
    group.add_argument(
        "--stop-words", metavar="LANGUAGE|FILE", help="words to leave out: a language's, or one a line of a file"
    )
    group.add_argument(
        "--ngram", type=int, metavar="N", help="most characters of a term in scripts without spaces (2 if not given)"
    )
    group.add_argument(
        "--no-store-text", action="store_true", help="leave the texts in the corpus, one uncompressed .jsonl file"
    )


def _bm25_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `BM25Index.build` that were given."""
    options: dict[str, Any] = {"stem": args.stem, "stop_words": args.stop_words, "ngram": args.ngram}
    if args.stop_words is not None and Path(args.stop_words).is_file():
        options["stop_words"] = Path(args.stop_words).read_text(encoding="utf-8").split()
    if args.no_store_text:
        options["store_text"] = False
    return {name: value for name, value in options.items() if value is not None}

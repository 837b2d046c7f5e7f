"""`mempo index`: build a search index of a corpus, or add documents to one."""

import argparse
import os
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
    parser.add_argument(
        "--kind", choices=["bm25", "dense", "hybrid"], default="bm25", help="by words, by vectors, or by both"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--add", action="store_true", help="add the documents to the index that is there")
    how.add_argument("--overwrite", action="store_true", help="replace the index that is there")
    _add_corpus_arguments(parser.add_argument_group("the corpus"))
    _add_bm25_arguments(parser.add_argument_group("BM25 (an index that is added to keeps what it was built with)"))
    _add_dense_arguments(
        parser.add_argument_group("dense and hybrid indexes (what is not given: see `DenseIndex.build`)")
    )


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from mempo_trl.search import BM25Index, read_corpus

    options, dense_options = _bm25_options(args), _dense_options(args)
    if args.kind == "bm25" and dense_options:
        raise ValueError(f"{_named(dense_options)} cannot be given with --kind bm25: choose --kind dense or hybrid.")
    if args.kind == "dense" and options:
        raise ValueError(f"{_named(options)} cannot be given with --kind dense: choose --kind bm25 or hybrid.")
    if args.kind != "bm25" and "model" not in dense_options:
        raise ValueError(f"--kind {args.kind} needs --model: the name of a sentence-transformers model, or its folder.")
    if args.add:
        if args.kind != "bm25":
            raise ValueError(f"--add cannot be given with --kind {args.kind}: build that index again.")
        if options:
            raise ValueError(f"{_named(options)} cannot be given with --add: the index keeps what it was built with.")
        index: Any = BM25Index.load(args.out)
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
        elif args.kind == "bm25":
            index = BM25Index.build(corpus, args.out, overwrite=args.overwrite, **options)
        elif args.kind == "dense":
            from mempo_trl.search import DenseIndex

            index = DenseIndex.build(corpus, args.out, overwrite=args.overwrite, **dense_options)
        else:
            from mempo_trl.search import HybridSearch

            model = dense_options.pop("model")
            index = HybridSearch.build(
                corpus, args.out, model, overwrite=args.overwrite, bm25=options, dense=dense_options
            )
    except FileExistsError as error:
        message = str(error).replace("pass overwrite=True to replace it", "use --overwrite to replace it, or --add")
        raise FileExistsError(message) from error
    if corpus.skipped:
        print(f"Skipped what is malformed: {corpus.skipped:,} lines or rows of {args.corpus}.", file=sys.stderr)
    size = "" if args.kind == "hybrid" else f": {len(index):,} documents"
    print(f"{args.out}{size}")


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
    if args.stop_words is not None and os.path.isfile(args.stop_words):
        try:
            options["stop_words"] = Path(args.stop_words).read_text(encoding="utf-8").split()
        except UnicodeDecodeError as error:
            raise ValueError(f"--stop-words: {args.stop_words} is not text in UTF-8 ({error}).") from error
    if args.no_store_text:
        options["store_text"] = False
    return {name: value for name, value in options.items() if value is not None}


def _add_dense_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", metavar="NAME|FOLDER", help="a sentence-transformers model, for instance intfloat/e5-base-v2"
    )
    group.add_argument("--query-prefix", metavar="TEXT", help="stands before each query")
    group.add_argument("--passage-prefix", metavar="TEXT", help="stands before each document")
    group.add_argument("--normalize", action=argparse.BooleanOptionalAction, default=None, help="vectors of length 1")
    group.add_argument("--max-length", type=int, metavar="N", help="tokens of a document that are encoded")
    group.add_argument("--batch-size", type=int, metavar="N", help="documents encoded together")
    group.add_argument("--shard-size", type=int, metavar="N", help="documents after which a killed build can go on")
    group.add_argument("--model-dtype", choices=["float32", "float16", "bfloat16"], help="precision of the model")
    group.add_argument("--embedding-dtype", choices=["float16", "float32"], help="precision of the vectors")
    group.add_argument("--device", help="where the model runs: cpu, cuda:1, …")
    group.add_argument("--model-revision", metavar="REVISION", help="branch, tag or commit of the model on the Hub")
    group.add_argument("--trust-remote-code", action="store_true", default=None, help="run the model's own code")
    group.add_argument("--factory", metavar="STRING", help="faiss's name for the kind of index: Flat, HNSW32, …")
    group.add_argument("--parameters", metavar="STRING", help="faiss's parameters of a search: nprobe=64")


def _dense_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `DenseIndex.build` that were given."""
    names = ["model", "query_prefix", "passage_prefix", "normalize", "max_length", "batch_size", "shard_size"]
    names += ["model_dtype", "embedding_dtype", "device", "trust_remote_code", "factory", "parameters"]
    options = {**{name: getattr(args, name) for name in names}, "revision": args.model_revision}
    return {name: value for name, value in options.items() if value is not None}


def _named(options: dict[str, Any]) -> str:
    names = {"store_text": "no-store-text", "revision": "model-revision"}
    return ", ".join("--" + names.get(name, name).replace("_", "-") for name in options)

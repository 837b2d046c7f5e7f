"""`mempo data`: look at question sets, convert them, and compose questions of several objectives."""

import argparse
import json
from pathlib import Path

from mempo_trl.cli.questions import QUESTIONS, add_question_arguments, read, read_named


TEST = "test set that needs none of the arguments below"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        return actions.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )

    show = add("show", "Say which schema a question set has, what is in it and what is dropped.")
    show.add_argument("source", help=QUESTIONS)
    show.add_argument("--test", metavar="TEST", help=f"count what both ask: a {TEST}")
    show.add_argument("--rows", type=int, default=3, metavar="N", help="questions that are shown")
    convert = add("convert", "Write a question set in this package's own columns.")
    convert.add_argument("source", help=QUESTIONS)
    convert.add_argument("out", type=Path, help="a .parquet or .jsonl file")
    compose = add("compose", "Make questions of several objectives of questions of one.")
    compose.add_argument("sources", nargs="+", metavar="source", help=QUESTIONS)
    compose.add_argument("--out", type=Path, required=True, help="a .parquet or .jsonl file")
    compose.add_argument("--objectives", type=int, nargs="+", required=True, metavar="N", help="of a question")
    compose.add_argument("--number", type=int, metavar="N", help="questions to make; if not given, each is used once")
    compose.add_argument("--seed", type=int, default=0, help="another one makes others")
    compose.add_argument("--across-sources", action="store_true", help="mix sources within a question")
    compose.add_argument(
        "--style", choices=["joined", "numbered"], default="joined", help="in one line as MEM1 does, or a line each"
    )
    for action in (convert, compose):
        action.add_argument(
            "--exclude", nargs="+", default=[], metavar="TEST", help=f"leave out what it asks: a {TEST}"
        )
        action.add_argument("--overwrite", action="store_true", help="replace the file")
    for action in (show, convert, compose):
        add_question_arguments(action)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    {"show": _show, "convert": _convert, "compose": _compose}[args.action](args)


def _show(args: argparse.Namespace) -> None:
    from mempo_trl.data import question_statistics

    questions = read(args, args.source, loud=False)
    test = None if args.test is None else read_named(args, args.test)
    print(f"{questions.report}\n\n{question_statistics(questions, test).to_markdown()}")
    for row in questions.rows[: max(args.rows, 0)]:
        print(json.dumps(row, ensure_ascii=False))


def _convert(args: argparse.Namespace) -> None:
    from mempo_trl.data import write_questions
    from mempo_trl.data.composing import without
    from mempo_trl.data.writing import check_output

    check_output(args.out, args.overwrite)
    questions = read(args, args.source, loud=False)
    print(questions.report)
    rows = questions.rows
    if args.exclude:
        rows = without(rows, [read_named(args, name) for name in args.exclude])
        print(f"  left out: {len(questions.rows) - len(rows):,}: a test set asks it, too")
        if not rows:
            raise ValueError("no question is left: --exclude asks all of them.")
    write_questions(rows, args.out, args.overwrite)
    print(f"{args.out}: {len(rows):,} questions")


def _compose(args: argparse.Namespace) -> None:
    from mempo_trl.data import compose, question_statistics
    from mempo_trl.data.writing import check_output

    check_output(args.out, args.overwrite)
    sets = [read(args, source, loud=False) for source in args.sources]
    for questions in sets:
        print(questions.report)
    composition = compose(
        sets,
        args.objectives,
        number=args.number,
        seed=args.seed,
        across_sources=args.across_sources,
        style=args.style,
        exclude=[read_named(args, name) for name in args.exclude],
    )
    composition.write(args.out, args.overwrite)
    print(f"{composition}\n\n{question_statistics(composition.rows).to_markdown()}\n{args.out}")

"""`mempo data`: look at questions, convert them, compose questions of several objectives."""

import argparse
import json
import sys
from pathlib import Path

from mempo_trl.cli.questions import QUESTIONS, add_question_arguments, open_questions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = "Look at questions, convert them, or make questions of several objectives of them."
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        return actions.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )

    show = add("show", "Say in what schema questions are, what is dropped, and show statistics and the first of them.")
    show.add_argument("questions", help=QUESTIONS)
    show.add_argument("--first", type=int, default=3, metavar="N", help="questions that are shown")
    convert = add("convert", "Write questions in the columns that training and evaluation read.")
    convert.add_argument("questions", help=QUESTIONS)
    compose = add("compose", "Make questions of several objectives of questions of one.")
    compose.add_argument("questions", nargs="+", help=QUESTIONS)
    compose.add_argument("--objectives", type=int, nargs="+", required=True, metavar="N", help="questions in a row")
    compose.add_argument("--number", type=int, metavar="N", help="rows; as many as use no question twice if not given")
    compose.add_argument("--seed", type=int, default=0, help="decides which questions come together")
    compose.add_argument("--across-sources", action="store_true", help="mix the sources within a row")
    compose.add_argument(
        "--exclude", nargs="+", default=[], metavar="QUESTIONS", help="use none of these, such as those of a test set"
    )
    for command in (convert, compose):
        command.add_argument("--out", type=Path, required=True, help="the .parquet or .jsonl file to write")
        command.add_argument("--overwrite", action="store_true", help="replace the file that is there")
    for command in (show, convert, compose):
        add_question_arguments(command)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from mempo_trl.data import compose, to_table, write_questions

    if args.action == "show":
        rows = open_questions(args, args.questions)
        print(to_table(rows))
        for row in rows[: max(args.first, 0)]:
            print(json.dumps(row, ensure_ascii=False))
        return
    if args.out.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"--out {args.out} is not allowed: it must end in .parquet or .jsonl.")
    if args.out.exists() and not args.overwrite:
        raise FileExistsError(f"{args.out} exists: name another file, or replace it with --overwrite.")
    if args.action == "convert":
        rows = open_questions(args, args.questions)
    else:
        questions = [row for source in args.questions for row in open_questions(args, source)]
        excluded = [row for source in args.exclude for row in open_questions(args, source)]
        composition = compose(
            questions,
            args.objectives,
            number=args.number,
            seed=args.seed,
            across_sources=args.across_sources,
            exclude=excluded,
        )
        print(composition, file=sys.stderr)
        rows = composition.rows
    write_questions(rows, args.out)
    print(to_table(rows))
    print(f"Written to {args.out}.")

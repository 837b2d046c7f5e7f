"""What commands that read questions have in common."""

import argparse
import sys
import warnings
from typing import Any


QUESTIONS = "questions with answers: a .jsonl, .json or .parquet file, a folder of such, or a data set on the Hub"


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `open_questions` reads."""
    group = parser.add_argument_group("the questions")
    group.add_argument("--schema", default="auto", help="the form that they are in, if not to be told by their columns")
    group.add_argument("--split", help="split of a folder or a data set")
    group.add_argument("--config", help="configuration of a data set")
    group.add_argument("--question-column", metavar="NAME", help="column of the questions; a dot leads into it")
    group.add_argument("--answers-column", metavar="NAME", help="column of the answers; a dot leads into it")
    group.add_argument("--id-column", metavar="NAME", help="column of the ids")


def open_questions(args: argparse.Namespace, source: str) -> list[dict[str, Any]]:
    """The questions that the arguments name; what is dropped of them is said."""
    from mempo_trl.data import read_questions

    names = ["schema", "split", "config", "question_column", "answers_column", "id_column"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says it
        found = read_questions(source, **{name: getattr(args, name) for name in names})
    print(found.report, file=sys.stderr)
    return found.rows

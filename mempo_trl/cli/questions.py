"""What commands that read questions have in common: which they are, and what is said of those that are dropped."""

import argparse
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from mempo_trl.data import QuestionSet


QUESTIONS = (
    "questions with answers: a .jsonl, .json, .parquet, .csv or .tsv file, a folder of such, or a data set on the Hub; "
    "NAME:SPLIT is a split of the last two"
)
_NAME_AND_SPLIT = re.compile(r"(.+):([\w.-]+(?:\[[^\]]*\])?)")
_OPTIONS = ("schema", "split", "config", "question_column", "answers_column", "id_column", "aliases")


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `read` reads."""
    group = parser.add_argument_group("the questions")
    group.add_argument("--schema", default="auto", help="the form that they are in, see docs/data.md")
    group.add_argument("--split", help="split of a folder or a data set on the Hub")
    group.add_argument("--config", help="configuration of a folder or a data set on the Hub")
    group.add_argument("--question-column", metavar="NAME", help="column of the questions; dots lead into nested ones")
    group.add_argument("--answers-column", metavar="NAME", help="column of the answers")
    group.add_argument("--id-column", metavar="NAME", help="column of the ids")
    group.add_argument("--aliases", metavar="FILE", help="id_aliases.json of 2WikiMultihopQA")


def read(args: argparse.Namespace, source: str, loud: bool = True) -> "QuestionSet":
    """The questions that the arguments name.

    Args:
        args: the command's arguments.
        source: where the questions are.
        loud: whether it is said on standard error what is dropped.
    """
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    return read_named(args, source, loud, **given)


def read_named(args: argparse.Namespace, source: str, loud: bool = True, **options: Any) -> "QuestionSet":
    """Questions that are read with these options of `read_questions`, whatever the command's arguments are."""
    from mempo_trl.data import FilesIgnored, QuestionsDropped, read_questions

    named = _NAME_AND_SPLIT.fullmatch(source)
    if named and not Path(source).expanduser().exists():
        source, split = named.groups()
        if options.get("split", split) != split:
            raise ValueError(f"{source}:{split} names another split than --split {options['split']}: give one of them.")
        options["split"] = split
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FilesIgnored)
        warnings.simplefilter("ignore", QuestionsDropped)
        questions = read_questions(source, **options)
    for warning in caught:
        if issubclass(warning.category, FilesIgnored):
            print(f"mempo {args.command}: {warning.message}", file=sys.stderr)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if loud and questions.report.dropped:
        print(f"mempo {args.command}: {questions.report.summary()}", file=sys.stderr)
    return questions

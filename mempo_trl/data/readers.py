"""Questions with answers, from the files and data sets that the field publishes. Nothing here needs torch.

What is known by its columns:

| schema | columns | question | answers |
| --- | --- | --- | --- |
| `verl` (Search-R1, MEM1, MemPO) | `reward_model` | `question`, `extra_info.question`, or the end of `prompt` | `reward_model.ground_truth`, with or without `target` |
| `flashrag` | `golden_answers` | `question` | `golden_answers` |
| `natural_questions` | `annotations` | `question.text` | short answers, or yes and no |
| `musique` | `answer_aliases` | `question` | `answer` and `answer_aliases`, where `answerable` |
| `2wikimultihopqa` | `answer`, `evidences` | `question` | `answer` |
| `hotpotqa` | `answer`, `supporting_facts` | `question` | `answer` |
| `own` | `answers` | `question`, or the end of `prompt` | `answers`; SQuAD's `answers.text` too |
| `plain` (NQ-open and others) | `answer` | `question` | `answer`, a text or several |
"""  # noqa: E501

import json
import math
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ..run_folder import short
from .sources import read_rows


Row = dict[str, Any]
Answers = list[list[str]]

# Where the instructions end and the question begins, in prompts of Search-R1, verl and MEM1.
_ASKED = re.compile(r"\bQuestion:|\bAnswer (?:all of )?the following (?:\w+ )?questions?:")
_ANSWER_SPLIT = "<|answer_split|>"  # between the answers of a row of MEM1's that has them in one text
_SHOWN = 3  # examples of each reason in a report


class UnusableError(ValueError):
    """A row has no question or no answer that could be used; the text is the reason, the same for all such rows."""


@dataclass
class Report:
    """What became of the rows of a source.

    Attributes:
        source: as it was named.
        schema: the one that they were read by.
        rows: how many there were.
        kept: how many questions came of them.
        dropped: why the others are not used, and how many for each reason.
        examples: for each reason, the first rows that it holds for, shortened.
    """

    source: str
    schema: str
    rows: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, row: Any) -> None:
        """Count a row that is not used."""
        self.dropped[reason] += 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < _SHOWN:
            shown.append(short(row))

    def __str__(self) -> str:
        text = f"{self.source}: {self.kept:,} of {self.rows:,} rows, read as {self.schema}"
        reasons = [f"{count:,} {reason} (such as {self.examples[reason][0]})" for reason, count in self.dropped.items()]
        return f"{text}; dropped: {'; '.join(reasons)}." if reasons else f"{text}."


@dataclass
class QuestionSet:
    """Questions of one source.

    Attributes:
        rows: `{"id", "question", "answers", "source"}`: texts, and for each objective the answers that count as right.
        report: what was read, and what was dropped.
    """

    rows: list[Row]
    report: Report


def read_questions(
    source: str | Path,
    *,
    schema: str = "auto",
    split: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    question_column: str | None = None,
    answers_column: str | None = None,
    id_column: str | None = None,
    max_rows: int | None = None,
) -> QuestionSet:
    """Read questions with answers in any of the schemas above.

    Rows without a question or an answer, and questions that were there before, are dropped, counted in the report, and
    warned of. Numbers and truth values become texts (`True` is "yes"). A missing id is the row's number; the second
    row of an id is called `<id>#2`.

    Args:
        source: a `.jsonl` (also `.gz`), `.json` or `.parquet` file, a folder of such, or the name of a data set on the
            Hub.
        schema: its name; "auto" tells it by the columns of the first row.
        split: of a folder (by the names of its files) or a data set; it may be left out where there is only one.
        config: configuration of a data set.
        revision: branch, tag or commit of a data set on the Hub.
        question_column, answers_column, id_column: where these are, instead of where the schema has them. A dot leads
            into a column: `reward_model.ground_truth.target`.
        max_rows: only the first so many rows.

    Raises:
        FileNotFoundError: if the source is neither there nor on the Hub.
        ValueError: if an argument is wrong, a line is damaged (it is named), or no question can be used.
    """
    if max_rows is not None and (not isinstance(max_rows, int) or max_rows < 1):
        raise ValueError(f"`max_rows={max_rows!r}` is not allowed: it must be a whole number, at least 1.")
    if schema not in ("auto", *SCHEMAS):
        raise ValueError(f"`schema={schema!r}` is not allowed: it must be auto, {', '.join(SCHEMAS)}.")
    rows = read_rows(source, split, config, revision)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{source} has no rows.")
    extract, name = _extractor(first, str(source), schema, question_column, answers_column)
    report = Report(str(source), name)
    taken: list[Row] = []
    before: dict[str, Answers] = {}
    ids: Counter[str] = Counter()
    for number, row in enumerate(chain([first], rows)):
        if max_rows is not None and number == max_rows:
            break
        report.rows += 1
        try:
            question, answers = extract(row)
            own_id = read_column(row, id_column) if id_column else _first(row, "id", "_id", "example_id")
        except UnusableError as error:
            report.drop(str(error), row)
            continue
        except KeyError as error:
            raise ValueError(f"Row {number} of {source} has no column {error.args[0]!r}: {short(row)}") from error
        key = same_question(question)
        if key in before:
            again = "with the question of a row before"
            report.drop(again if before[key] == answers else f"{again}, but other answers", row)
            continue
        before[key] = answers
        origin = row.get("source") or row.get("data_source") or Path(str(source)).name
        row_id = _unused(str(number) if own_id is None or own_id == "" else str(own_id), ids)
        taken.append({"id": row_id, "question": question, "answers": answers, "source": str(origin)})
    report.kept = len(taken)
    if not taken:
        raise ValueError(f"No row can be used. {report}")
    if report.dropped:
        warnings.warn(str(report), stacklevel=2)
    return QuestionSet(taken, report)


def read_column(row: Mapping[str, Any], column: str) -> Any:
    """What a row has in a column, into which dots may lead.

    Raises:
        KeyError: if it has no such column.
    """
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise KeyError(column)
        value = value[name]
    return value


def read_answers(row: Mapping[str, Any], column: str) -> Answers:
    """The accepted answers of each objective of a row.

    Args:
        row: of a data set.
        column: that holds them: a text, several, or several for each objective; or a `target` or `text` of these. Dots
            may lead into it.

    Raises:
        KeyError: if there is no such column.
        ValueError: if there is no answer for an objective.
    """
    return _objectives(read_column(row, column))


def _objectives(value: Any) -> Answers:
    if isinstance(value, Mapping):
        inner = value.get("target", value.get("text"))
        if inner is None:
            raise UnusableError("without an answer")
        return _objectives(inner)
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:  # lists that were made texts to fit into a table
            value = json.loads(value)
        except (ValueError, RecursionError):
            pass
    if not isinstance(value, list | tuple):
        value = [value]
    nested = any(isinstance(part, list | tuple) for part in value)
    objectives = [_accepted(part if isinstance(part, list | tuple) else [part]) for part in value] if nested else []
    objectives = objectives or [_accepted(value)]
    if not all(objectives):
        raise UnusableError("without an answer")
    return objectives


def _accepted(values: Iterable[Any]) -> list[str]:
    """Answers as texts, each once; blank ones are none."""
    texts = []
    for value in values:
        if isinstance(value, bool):
            texts.append("yes" if value else "no")
        elif isinstance(value, str | int | float):
            if not (isinstance(value, float) and math.isnan(value)):  # what a table has where nothing is
                texts.append(str(value).strip())
        elif value is not None:
            raise UnusableError("with answers that are no texts")
    return list(dict.fromkeys(text for text in texts if text))


def _question(value: Any) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not text:
        raise UnusableError("without a question")
    return text


def _from_prompt(prompt: Any) -> str:
    """The question that a conversation ends in: what follows the instructions in the last message, or all of it."""
    messages = prompt if isinstance(prompt, list | tuple) else [{"role": "user", "content": prompt}]
    asked = [message for message in messages if isinstance(message, Mapping) and message.get("role") == "user"]
    content = asked[-1].get("content") if asked else None
    if isinstance(content, str):
        *_, asked_part = _ASKED.split(content)
        if asked_part != content:
            content = asked_part.strip().partition("\n")[0]
    return _question(content)


def _unused(name: str, ids: Counter[str]) -> str:
    """The name, or `<name>#2` and so on if it is taken; it is taken then."""
    unused = name
    while unused in ids:
        ids[name] += 1
        unused = f"{name}#{ids[name]}"
    ids[unused] = 1
    return unused


def _first(row: Mapping[str, Any], *columns: str) -> Any:
    """What the first of these columns holds that is there, or `None`."""
    return next((row[column] for column in columns if row.get(column) is not None), None)


def same_question(question: str) -> str:
    """The same for questions that differ in nothing but spaces and in how Unicode spells them."""
    return unicodedata.normalize("NFC", " ".join(question.split()))


def _asked(row: Mapping[str, Any]) -> str:
    """The question of a row that has it in a column of its own, or at the end of a prompt."""
    extra = row.get("extra_info")
    for place in (row, extra if isinstance(extra, Mapping) else {}):
        if isinstance(place.get("question"), str):
            return _question(place["question"])
    if "prompt" not in row:
        raise UnusableError("without a question")
    return _from_prompt(row["prompt"])


def _simple(column: str) -> Callable[[Row], tuple[str, Answers]]:
    return lambda row: (_asked(row), read_answers(row, column))


def _verl(row: Row) -> tuple[str, Answers]:
    truth = read_column(row, "reward_model.ground_truth")
    if isinstance(truth, str) and _ANSWER_SPLIT in truth:
        truth = [[part] for part in truth.split(_ANSWER_SPLIT)]
    return _asked(row), _objectives(truth)


def _musique(row: Row) -> tuple[str, Answers]:
    if row.get("answerable") is False:
        raise UnusableError("that cannot be answered")
    answers = _accepted([row.get("answer"), *(row.get("answer_aliases") or [])])
    if not answers:
        raise UnusableError("without an answer")
    return _question(row.get("question")), [answers]


def _natural_questions(row: Row) -> tuple[str, Answers]:
    asked = row["question"]
    annotations = row["annotations"]
    if isinstance(annotations, Mapping):  # lists of columns, as `datasets` has it
        short_answers = annotations.get("short_answers") or []
        yes_no = annotations.get("yes_no_answer") or []
    else:
        short_answers = [answer for annotation in annotations for answer in annotation.get("short_answers") or []]
        yes_no = [annotation.get("yes_no_answer") for annotation in annotations]
    texts: list[Any] = []
    for answer in short_answers:
        text = answer.get("text") if isinstance(answer, Mapping) else None
        texts += text if isinstance(text, list) else [text]
    # On the Hub 0 and 1 stand for no and yes, -1 for neither; in Google's files "NONE" does.
    known = {0: "no", 1: "yes", "no": "no", "yes": "yes"}
    texts += [known.get(value.lower() if isinstance(value, str) else value) for value in yes_no]
    answers = _accepted(texts)
    if not answers:
        raise UnusableError("without a short answer")
    return _question(asked.get("text") if isinstance(asked, Mapping) else asked), [answers]


@dataclass(frozen=True)
class Schema:
    """How to know rows of a schema, and to read them.

    Attributes:
        columns: that they have.
        extract: question and answers of a row. Raises `UnusableError`, or `KeyError` with a missing column.
    """

    columns: frozenset[str]
    extract: Callable[[Row], tuple[str, Answers]]


# In the order in which they are tried: a row of Search-R1 has verl's columns and FlashRAG's.
SCHEMAS = {
    "verl": Schema(frozenset({"reward_model"}), _verl),
    "flashrag": Schema(frozenset({"golden_answers"}), _simple("golden_answers")),
    "natural_questions": Schema(frozenset({"question", "annotations"}), _natural_questions),
    "own": Schema(frozenset({"answers"}), _simple("answers")),
    "musique": Schema(frozenset({"question", "answer", "answer_aliases"}), _musique),
    "2wikimultihopqa": Schema(frozenset({"question", "answer", "evidences"}), _simple("answer")),
    "hotpotqa": Schema(frozenset({"question", "answer", "supporting_facts"}), _simple("answer")),
    "plain": Schema(frozenset({"question", "answer"}), _simple("answer")),
}


def _extractor(
    row: Row, source: str, schema: str, question_column: str | None, answers_column: str | None
) -> tuple[Callable[[Row], tuple[str, Answers]], str]:
    """How to read rows like this one, and what that is called."""
    name = schema
    if schema == "auto":
        found = [name for name, known in SCHEMAS.items() if known.columns <= row.keys()]
        name = found[0] if found else "columns"
    for column in (question_column, answers_column):
        if column is not None:
            try:
                read_column(row, column)
            except KeyError as error:
                raise ValueError(
                    f"There is no column {column!r} in {source}; its columns are: {', '.join(row)}."
                ) from error
    if answers_column is None:
        if name == "columns":
            raise ValueError(
                f"It is not known which column of {source} has the answers: name it (answers_column). Its columns are: "
                f"{', '.join(row)}."
            )
        missing = SCHEMAS[name].columns - row.keys()
        if missing:
            raise ValueError(
                f"{source} is not in the schema {name}: there is no column {', '.join(sorted(missing))}. Its columns "
                f"are: {', '.join(row)}."
            )
        whole = SCHEMAS[name].extract
        if question_column is None:
            return whole, name
        return lambda row: (_text_in(row, question_column), whole(row)[1]), name
    answers: str = answers_column
    if question_column is None:
        if name == "columns" and not {"question", "prompt", "extra_info"} & row.keys():
            raise ValueError(
                f"It is not known which column of {source} has the questions: name it (question_column). Its columns "
                f"are: {', '.join(row)}."
            )
        return lambda row: (_asked(row), read_answers(row, answers)), name
    return lambda row: (_text_in(row, question_column), read_answers(row, answers)), name


def _text_in(row: Row, column: str) -> str:
    value = read_column(row, column)
    return _question(value) if isinstance(value, str) or value is None else _from_prompt(value)

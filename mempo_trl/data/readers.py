"""Question sets in the forms in which they are published. Nothing here needs torch.

from mempo_trl.data import read_questions

questions = read_questions("hotpot_dev_fullwiki_v1.json")
print(questions.report)
"""

import json
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .answers import Unusable, as_list, get_column, top_level, unique
from .schemas import SCHEMAS, Parsed, Schema, column_schema, detect_schema, parse_question
from .sources import Source, open_source


_EXAMPLES = 3
# What composed questions keep of their parts.
PARTS = ("part_ids", "part_sources", "part_questions")


class QuestionsDropped(UserWarning):
    """Some rows of a question set could not be used."""


@dataclass
class ReadingReport:
    """What became of the rows of a question set.

    Attributes:
        source: what was read.
        schema: the name of the schema.
        about: what the schema is, in a few words.
        read: rows that were read; as many as were kept and dropped.
        kept: questions.
        dropped: for each reason how many rows were dropped.
        examples: for each reason the first few rows, each with its place.
        notes: what else was done, and how often.
    """

    source: str
    schema: str
    about: str
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, place: str, row: Mapping[str, Any]) -> None:
        """Count a row that is dropped."""
        self.dropped[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(f"{place}: {_short(row)}")

    def summary(self) -> str:
        """What was dropped, in one sentence."""
        reasons = "; ".join(f"{count:,}: {reason}" for reason, count in self.dropped.most_common())
        return f"{self.source}: {self.dropped.total():,} of {self.read:,} rows are dropped ({reasons})."

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.kept:,} of {self.read:,} rows are kept, schema {self.schema} ({self.about})"]
        for reason, count in self.dropped.most_common():
            lines.append(f"  dropped: {count:,}: {reason}")
            lines += [f"    {example}" for example in self.examples[reason]]
        lines += [f"  {count:,}: {note}" for note, count in self.notes.most_common()]
        return "\n".join(lines)


@dataclass
class QuestionSet:
    """Questions with accepted answers.

    Attributes:
        rows: one dictionary for each question: `id`, `question`, `answers` (accepted answers of each objective),
            `source`, `prompt` (a conversation) where the schema has one, and the parts of questions that
            `mempo_trl.data.compose` has made: `part_ids`, `part_sources`, `part_questions`.
        report: what was read, and what was dropped.
    """

    rows: list[dict[str, Any]]
    report: ReadingReport


def read_questions(
    source: str | Path | Iterable[Mapping[str, Any]],
    *,
    schema: str = "auto",
    split: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    question_column: str | None = None,
    answers_column: str | None = None,
    id_column: str | None = None,
    aliases: str | Path | None = None,
) -> QuestionSet:
    """Read a question set.

    Rows without a question or without an answer are dropped, and so is a row that is there already. A question that is
    there already with other answers adds its answers to those of the first. Whatever is dropped is counted in the
    report, and warned of.

    Args:
        source: a `.jsonl`, `.json` (both also `.gz`), `.parquet`, `.csv` or `.tsv` file; a folder of such, laid out as
            `datasets` reads it; the name of a data set on the Hub, if there is no such path; or rows.
        schema: a name of `mempo_trl.data.schemas.SCHEMAS`, or "auto": what the columns say.
        split: of a folder or a data set on the Hub. May be left out if there is one alone.
        config: of a folder or a data set on the Hub.
        revision: branch, tag or commit of a data set on the Hub.
        question_column: the column of the questions, if not the schema's: texts, or conversations whose last message
            asks. Dots lead into nested columns.
        answers_column: the column of the answers, if not the schema's, in a form of
            `mempo_trl.data.answers.parse_answers`.
        id_column: the column of the ids, if not the schema's. A row without one is called by its source and number, and
            an id that is taken gets a number.
        aliases: the file `id_aliases.json` of 2WikiMultihopQA, with further names of the answers.

    Returns:
        The questions, in their order, and a report.

    Raises:
        FileNotFoundError: if there is no such file, folder or data set.
        FilesIgnored: the warning that a folder has files which no split takes.
        ValueError: if a file is damaged, no schema fits or several do, a column is missing, or no row can be used.
    """
    found = open_source(source, split, config, revision)
    if not found.sample:
        raise ValueError(f"{found.shown} has no rows.")
    chosen = _choose_schema(found, schema, question_column, answers_column)
    names = _names_of(aliases) if aliases is not None else {}
    if id_column is not None:
        _check_column(found, "id_column", id_column)
    report = ReadingReport(found.shown, chosen.name, chosen.about)
    id_columns = (id_column,) if id_column is not None else chosen.ids
    columns = [*chosen.columns, *id_columns, *([chosen.source] if chosen.source else [])]
    for name in (question_column, answers_column, id_column):
        if name is not None:
            columns += [name, top_level(name)]
    rows: list[dict[str, Any]] = []
    known: dict[str, int] = {}
    ids = _Ids()
    for number, (place, row) in enumerate(found.rows(columns)):
        report.read += 1
        try:
            asked: Mapping[str, Any] = row
            if question_column is not None and chosen.name != "columns":
                asked = {**row, "question": parse_question(row, question_column), "prompt": None}
            parsed = chosen.read(asked, names)
        except Unusable as error:
            report.drop(str(error), place, row)
            continue
        key = _key(parsed)
        if key in known:
            _repeat(rows[known[key]], parsed, report, place, row)
            continue
        known[key] = len(rows)
        origin = get_text(row, chosen.source) or found.name
        own_id = next((text for column in id_columns if (text := get_text(row, column))), None)
        if own_id is None and id_column is not None:
            report.notes["without an id: called by source and number"] += 1
        unique_id = ids.take(own_id or f"{origin}-{number}")
        if own_id is not None and unique_id != own_id:
            report.notes["an id that is taken: got a number"] += 1
        if parsed.blank:
            report.notes["with blank accepted answers: left out"] += 1
        if parsed.whole_prompt:
            report.notes["its whole prompt is taken for the question: no instructions were found in it"] += 1
        kept: dict[str, Any] = {
            "id": unique_id,
            "question": parsed.question,
            "answers": parsed.objectives,
            "source": origin,
        }
        if parsed.prompt is not None:
            kept["prompt"] = parsed.prompt
        if chosen.name == "mempo":
            kept |= _parts(row)
        rows.append(kept)
    report.kept = len(rows)
    if not rows:
        raise ValueError(f"{report.summary()} No question is left.")
    if report.dropped:
        warnings.warn(report.summary(), QuestionsDropped, stacklevel=2)
    return QuestionSet(rows, report)


def get_text(row: Mapping[str, Any], column: str | None) -> str | None:
    """The text or whole number in a column, as text; `None` if there is none."""
    if column is None:
        return None
    try:
        value = get_column(row, column)
    except KeyError:
        return None
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value).encode("utf-8", "replace").decode().strip() or None


def _choose_schema(found: Source, schema: str, question_column: str | None, answers_column: str | None) -> Schema:
    if schema != "auto" and schema not in SCHEMAS:
        raise ValueError(f"`schema={schema}` is not known: {', '.join(('auto', *SCHEMAS))}.")
    for argument, column in (("question_column", question_column), ("answers_column", answers_column)):
        if column is not None:
            _check_column(found, argument, column)
    if answers_column is not None:
        # The answers' column stands for a schema: what is missing is the question.
        question = question_column or ("question" if "question" in found.columns else None)
        if question is not None:
            return column_schema(question, answers_column)
        if "prompt" in found.columns:
            return column_schema("prompt", answers_column)
        raise ValueError(
            f"{found.shown}: the columns are {', '.join(found.columns)}. Name the one of the questions, too "
            "(`question_column`)."
        )
    columns = [*found.columns, *(["question"] if question_column is not None else [])]
    if schema == "auto":
        try:
            return detect_schema(columns)
        except ValueError as error:
            raise ValueError(f"{found.shown}: {error}") from None
    chosen = SCHEMAS[schema]
    if missing := chosen.missing(columns):
        raise ValueError(
            f"{found.shown}: `schema={schema}` needs the column {missing[0]}, but the columns are "
            f"{', '.join(found.columns) or 'none'}."
        )
    return chosen


def _check_column(found: Source, argument: str, column: str) -> None:
    for row in found.sample:
        try:
            get_column(row, column)
        except KeyError:
            continue
        break
    else:
        raise ValueError(
            f"{found.shown}: `{argument}={column}` is not there, the columns are {', '.join(found.columns) or 'none'}."
        )


def _repeat(first: dict[str, Any], parsed: Parsed, report: ReadingReport, place: str, row: Mapping[str, Any]) -> None:
    """Deal with a question that is there already."""
    if len(first["answers"]) != len(parsed.objectives):
        report.drop("the question is there already, with another number of objectives", place, row)
        return
    both = [unique([*old, *new]) for old, new in zip(first["answers"], parsed.objectives, strict=True)]
    if both == first["answers"]:
        report.drop("the question is there already, with the same answers", place, row)
    else:
        first["answers"] = both
        report.drop("the question is there already: its other answers are accepted there, too", place, row)


def _key(parsed: Parsed) -> str:
    """What two rows of one question have in common."""
    text = parsed.question if parsed.prompt is None else json.dumps(parsed.prompt, sort_keys=True, default=str)
    return " ".join(unicodedata.normalize("NFC", text).split())


class _Ids:
    """Hands out ids, each once."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def take(self, wanted: str) -> str:
        name = wanted
        while name in self._next:
            self._next[wanted] += 1
            name = f"{wanted}-{self._next[wanted]}"
        self._next[name] = 1
        return name


def _parts(row: Mapping[str, Any]) -> dict[str, list[str]]:
    """What a composed question says of its parts."""
    parts = {name: row.get(name) for name in PARTS}
    if not all(isinstance(part, list) and all(isinstance(text, str) for text in part) for part in parts.values()):
        return {}
    return {name: list(part) for name, part in parts.items() if part is not None}


def _names_of(path: str | Path) -> dict[str, Sequence[str]]:
    """Further names by the id of an entity, from the file that 2WikiMultihopQA has of them."""
    if not Path(path).expanduser().is_file():
        raise FileNotFoundError(f"`aliases={path}` is no file: name the id_aliases.json that comes with the set.")
    found = open_source(Path(path))
    if "Q_id" not in found.columns or "aliases" not in found.columns:
        raise ValueError(f"`aliases={path}` needs the columns Q_id and aliases, but has {', '.join(found.columns)}.")
    return {
        str(row["Q_id"]): [*as_list(row.get("aliases")), *as_list(row.get("demonyms"))]
        for _, row in found.rows(None)
        if row.get("Q_id") is not None
    }


def _short(row: Mapping[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "replace").decode()
    return text if len(text) <= 120 else text[:119] + "…"

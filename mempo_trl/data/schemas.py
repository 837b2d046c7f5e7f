"""The forms in which question sets are published, and how they are told apart. Nothing here needs torch."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .answers import Objectives, Unusable, as_list, check_text, get_column, parse_answers, read_printed, top_level


Row = Mapping[str, Any]
Aliases = Mapping[str, Sequence[str]]
# Where instructions end and the question begins: Search-R1's, verl's and MEM1's, and a line of its own.
_INSTRUCTIONS = re.compile(
    r"</answer>\s*\.?\s+Question:\s+|\AQuestion:\s+|\nQuestion:\s+"
    r"|Answer (?:all of )?the following (?:\w+ )?questions?:\s+"
)
_TAG = re.compile(r"</?\w[^>]*>")
_ANSWER_SPLIT = "<|answer_split|>"  # between the answers of MEM1's questions for web search


@dataclass
class Parsed:
    """What a row holds.

    Attributes:
        question: the question's text.
        objectives: the accepted answers of each objective.
        blank: accepted answers that were left out because they are blank.
        prompt: a conversation that asks the question, if the schema brings one that fits every agent.
        whole_prompt: whether a prompt as a whole was taken for the question, because no instructions were found in it.
    """

    question: str
    objectives: Objectives
    blank: int = 0
    prompt: list[dict[str, Any]] | None = None
    whole_prompt: bool = False


@dataclass(frozen=True)
class Schema:
    """How a question set is laid out.

    Args:
        name: what it is called.
        about: what it is, in a few words.
        needs: the columns that it must have: one of each group.
        columns: top-level columns that are read, where they are there.
        read: makes of a row its question and answers.
        ids: columns that may hold the row's id, the first that is there counts.
        source: column that says which data set a row comes from.
        marks: the columns that tell it apart from others with those: one of them must be there, if any are named.
        covers: other schemas that sets of this one fit, too.
    """

    name: str
    about: str
    needs: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...]
    read: Callable[[Row, Aliases], Parsed] = field(repr=False)
    ids: tuple[str, ...] = ("id", "_id")
    source: str | None = None
    marks: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()

    def missing(self, columns: Sequence[str]) -> list[str]:
        """The columns that a set with these columns lacks."""
        return [" or ".join(group) for group in self.needs if not any(name in columns for name in group)]

    def fits(self, columns: Sequence[str]) -> bool:
        """Whether a set with these columns can be of this schema."""
        return not self.missing(columns) and (not self.marks or any(name in columns for name in self.marks))


def column_schema(question: str, answers: str) -> Schema:
    """The schema of a set whose question and answers are in two columns; dots lead into nested ones."""

    def read(row: Row, aliases: Aliases) -> Parsed:
        return Parsed(parse_question(row, question), *parse_answers(_value(row, answers)))

    roots = (question, answers, top_level(question), top_level(answers))
    return Schema("columns", "columns by name", ((question,), (answers,)), roots, read, source="source")


def parse_question(row: Row, column: str) -> str:
    """The question that a column holds: a text, or a conversation whose last message asks it."""
    value = _value(row, column)
    if isinstance(value, list) or hasattr(value, "tolist"):
        return _last_message(_conversation(value))
    return _question(row, column)


def _value(row: Row, column: str) -> Any:
    try:
        return get_column(row, column)
    except KeyError:
        return None


def _question(row: Row, column: str) -> str:
    value = _value(row, column)
    if value is None:
        raise Unusable("it has no question")
    if not isinstance(value, str):
        raise Unusable(f"its question is a {type(value).__name__}, not a text")
    text = check_text(value)
    if not text:
        raise Unusable("it has no question")
    return text


def _conversation(value: Any) -> list[dict[str, Any]]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list) or not value:
        raise Unusable("its prompt is no conversation")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise Unusable("its prompt is no conversation")
        check_text(message["content"])
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _last_message(messages: list[dict[str, Any]]) -> str:
    text = check_text(messages[-1]["content"])
    if not text:
        raise Unusable("it has no question")
    return text


# --- Schemas --------------------------------------------------------------------------------------------------------


def _read_own(row: Row, aliases: Aliases) -> Parsed:
    objectives, blank = parse_answers(_value(row, "answers"))
    prompt = row.get("prompt")
    if prompt is None:
        return Parsed(_question(row, "question"), objectives, blank)
    if isinstance(prompt, str):
        return Parsed(_question(row, "prompt"), objectives, blank)
    conversation = _conversation(prompt)
    last = _last_message(conversation)
    question = last if row.get("question") is None else _question(row, "question")
    return Parsed(question, objectives, blank, conversation)


def _read_verl(row: Row, aliases: Aliases) -> Parsed:
    nested = ("reward_model", "extra_info", "prompt")
    row = {name: _unprinted(value) if name in nested else value for name, value in row.items()}
    truth = _unprinted(_value(row, "reward_model.ground_truth"))
    if isinstance(truth, Mapping) and "target" in truth:
        truth = truth["target"]
    if isinstance(truth, str) and _ANSWER_SPLIT in truth:
        truth = truth.split(_ANSWER_SPLIT)
    objectives, blank = parse_answers(truth)
    for column in ("question", "extra_info.question"):
        if _value(row, column) is not None:
            return Parsed(_question(row, column), objectives, blank)
    prompt = row.get("prompt")
    if prompt is None:
        raise Unusable("it has no question")
    text = _question(row, "prompt") if isinstance(prompt, str) else _last_message(_conversation(prompt))
    found = _INSTRUCTIONS.search(text)
    question = text[found.end() :].strip() if found else text
    if not question:
        raise Unusable("it has no question")
    return Parsed(question, objectives, blank, whole_prompt=found is None)


def _unprinted(value: Any) -> Any:
    """What a table of texts alone holds of nested columns: a mapping or a conversation; other values as they are."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[", "array([")):
        return value
    read = read_printed(value)
    nested = isinstance(read, Mapping) or (isinstance(read, list) and read and isinstance(read[0], Mapping))
    return read if nested else value


def _read_flashrag(row: Row, aliases: Aliases) -> Parsed:
    return Parsed(_question(row, "question"), *parse_answers(_value(row, "golden_answers")))


def _read_answer(row: Row, aliases: Aliases) -> Parsed:
    return Parsed(_question(row, "question"), *parse_answers(_value(row, "answer")))


def _read_musique(row: Row, aliases: Aliases) -> Parsed:
    question = _question(row, "question")
    if row.get("answerable") is False:
        raise Unusable("it is marked as not answerable")
    return Parsed(question, *_with_aliases(row.get("answer"), row.get("answer_aliases")))


def _read_2wiki(row: Row, aliases: Aliases) -> Parsed:
    names = aliases.get(str(row.get("answer_id")))
    return Parsed(_question(row, "question"), *_with_aliases(row.get("answer"), names))


def _with_aliases(answer: Any, aliases: Any) -> tuple[Objectives, int]:
    objectives, blank = _one_objective(answer)
    more, blank_aliases = _one_objective([*objectives[0], *as_list(aliases)])
    return more, blank + blank_aliases


def _one_objective(value: Any) -> tuple[Objectives, int]:
    objectives, blank = parse_answers(value)
    if len(objectives) != 1:
        raise Unusable("its answers mix texts and lists")
    return objectives, blank


def _read_natural_questions(row: Row, aliases: Aliases) -> Parsed:
    columns = {"question_text": "question_text" in row, "question.text": isinstance(row.get("question"), Mapping)}
    question = _question(row, next((column for column, there in columns.items() if there), "question"))
    annotations = row.get("annotations")
    if isinstance(
        annotations, Mapping
    ):  # a list of structs is a struct of lists, as older versions of datasets write it
        short, yes_no = annotations.get("short_answers"), annotations.get("yes_no_answer")
    else:
        listed = [entry for entry in as_list(annotations) if isinstance(entry, Mapping)]
        short = [entry.get("short_answers") for entry in listed]
        yes_no = [entry.get("yes_no_answer") for entry in listed]
    texts: list[Any] = []
    for spans in as_list(short):
        for span in as_list(spans):
            if isinstance(span, Mapping):
                texts += as_list(span["text"]) if "text" in span else [_spanned_text(row, span)]
    for value in as_list(yes_no):
        if str(value).upper() in ("0", "NO", "1", "YES"):
            texts.append("yes" if str(value).upper() in ("1", "YES") else "no")
    if not texts:
        raise Unusable("it has neither a short answer nor yes or no")
    return Parsed(question, *parse_answers(texts))


def _spanned_text(row: Row, span: Mapping[str, Any]) -> str | None:
    """The words of a document from `start_token` to before `end_token`, but its tags, as Google's own files have it."""
    start, end = span.get("start_token"), span.get("end_token")
    if not isinstance(start, int) or not isinstance(end, int) or start < 0:
        return None
    tokens = row.get("document_tokens")
    if tokens is None:
        document = row.get("document_text")
        words = document.split(" ")[start:end] if isinstance(document, str) else []
        return " ".join(word for word in words if not _TAG.fullmatch(word))
    text, last = "", None
    for token in as_list(tokens)[start:end]:
        if not isinstance(token, Mapping) or token.get("html_token") or not isinstance(token.get("token"), str):
            continue
        touches = last is not None and token.get("start_byte") == last
        text += ("" if touches or not text else " ") + token["token"]
        last = token.get("end_byte")
    return text


_ANSWER_SCHEMAS = ("flashrag", "nq_open", "natural_questions", "musique", "2wiki", "hotpotqa")

SCHEMAS: dict[str, Schema] = {
    schema.name: schema
    for schema in (
        Schema(
            "mempo",
            "this package's own",
            (("question", "prompt"), ("answers",)),
            ("question", "prompt", "answers", "part_ids", "part_sources", "part_questions"),
            _read_own,
            source="source",
        ),
        Schema(
            "verl",
            "verl, Search-R1, MEM1, MemPO",
            (("reward_model",), ("question", "extra_info", "prompt")),
            ("question", "extra_info", "prompt", "reward_model"),
            _read_verl,
            source="data_source",
            covers=_ANSWER_SCHEMAS,
        ),
        Schema(
            "flashrag",
            "FlashRAG",
            (("question",), ("golden_answers",)),
            ("question", "golden_answers"),
            _read_flashrag,
            source="source",
        ),
        Schema(
            "natural_questions",
            "Natural Questions, Google's own",
            (("question", "question_text"), ("annotations",)),
            ("question", "question_text", "annotations", "document_text", "document_tokens"),
            _read_natural_questions,
            ids=("id", "_id", "example_id"),
        ),
        Schema(
            "musique",
            "MuSiQue",
            (("question",), ("answer",)),
            ("question", "answer", "answer_aliases", "answerable"),
            _read_musique,
            marks=("answer_aliases", "answerable", "question_decomposition"),
            covers=("nq_open", "hotpotqa"),
        ),
        Schema(
            "2wiki",
            "2WikiMultihopQA",
            (("question",), ("answer",)),
            ("question", "answer", "answer_id"),
            _read_2wiki,
            ids=("_id", "id"),
            marks=("evidences", "evidences_id", "answer_id"),
            covers=("nq_open", "hotpotqa"),
        ),
        Schema(
            "hotpotqa",
            "HotpotQA",
            (("question",), ("answer",)),
            ("question", "answer"),
            _read_answer,
            marks=("supporting_facts", "level"),
            covers=("nq_open",),
        ),
        Schema(
            "nq_open",
            "NQ-open, and whatever has these two columns",
            (("question",), ("answer",)),
            ("question", "answer"),
            _read_answer,
        ),
    )
}
"""Every schema by its name."""


def detect_schema(columns: Sequence[str]) -> Schema:
    """The schema of a set with these columns.

    Raises:
        ValueError: if none fits, or several do.
    """
    fitting = [schema for schema in SCHEMAS.values() if schema.fits(columns)]
    covered = {name for schema in fitting for name in schema.covers}
    found = [schema for schema in fitting if schema.name not in covered]
    there = f"The columns are {', '.join(columns) or 'none'}"
    if not found:
        raise ValueError(
            f"{there}: no known schema has those. Name the columns that hold the questions and the answers "
            "(`question_column`, `answers_column`; dots lead into nested columns)."
        )
    if len(found) > 1:
        names = " or ".join(f"{schema.name!r}" for schema in found)
        raise ValueError(f"{there}: that may be {names}. Say which (`schema`), or name the columns (`answers_column`).")
    return found[0]

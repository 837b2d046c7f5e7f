"""Accepted answers in whatever form a data set has them. Nothing here needs torch."""

import ast
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


Objectives = list[list[str]]
# The pieces of what Python, NumPy and pandas print of lists, dictionaries, texts and numbers.
_PIECES = re.compile(
    r"""(?P<space>\s+)
    | (?P<dtype>,\s*dtype=(?:'[^']*'|"[^"]*"|[\w.<>|]+))
    | (?P<call>(?:np\.|numpy\.)?(?:array|list|(?:str|int|float|bool)\d*_?)\()
    | (?P<text>u?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))
    | (?P<open>[\[({])
    | (?P<close>[\])}])
    | (?P<mark>[,:])
    | (?P<word>[^\s\[\](){},:'"]+)""",
    re.VERBOSE | re.DOTALL,
)


class Unusable(ValueError):
    """A row that cannot be used. The message is the reason, the same for all rows that it holds for."""


def get_column(row: Any, column: str) -> Any:
    """What a column holds; dots lead into nested ones.

    Args:
        row: the row, a mapping.
        column: its name, for instance `reward_model.ground_truth.target`. A name that has dots itself is found, too.

    Raises:
        KeyError: if there is no such column; its argument is the part that is missing.
    """
    if isinstance(row, Mapping) and column in row:
        return row[column]
    value = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise KeyError(name)
        value = value[name]
    return value


def top_level(column: str) -> str:
    """The column that a nested one is in."""
    return column.partition(".")[0]


def read_answers(row: Mapping[str, Any], column: str) -> Objectives:
    """The accepted answers of a row, for each objective.

    Args:
        row: a row of a data set.
        column: the column that holds them; dots lead into nested ones.

    Returns:
        A list of accepted answers for each objective: see `parse_answers`.

    Raises:
        ValueError: if the row has no such column, or no answers in it.
    """
    try:
        return parse_answers(get_column(row, column))[0]
    except KeyError as error:
        raise ValueError(f"`answers_column={column}`: there is no {error} in the row {_shown(row)}.") from error
    except Unusable as error:
        raise ValueError(f"`answers_column={column}`: {error} in the row {_shown(row)}.") from error


def parse_answers(value: Any) -> tuple[Objectives, int]:
    """Bring answers to one form.

    Args:
        value: one of

            - a text, a number or a truth value: the one accepted answer. `True` and `False` become "yes" and "no", and
              whole numbers lose the ".0" that they get where a column also has missing values;
            - a list of such: the accepted answers of one objective;
            - a list of lists of such: those of several objectives;
            - a text that is such a list in JSON, or as Python, NumPy or pandas print it, with texts alone in it;
            - SQuAD's `{"text": [...]}`, or TriviaQA's `{"value": ..., "aliases": [...]}`.

            Arrays of NumPy count as lists.

    Returns:
        The accepted answers of each objective, stripped, each once; and how many were left out because they are blank.

    Raises:
        Unusable: if an objective has no answer, or the value is none of these.
    """
    value = _plain(value)
    if isinstance(value, Mapping):
        if isinstance(_plain(value.get("text")), list):
            value = _plain(value["text"])
        elif "value" in value and "aliases" in value:
            value = [value["value"], *as_list(value["aliases"])]
        else:
            names = ", ".join(map(str, value))
            raise Unusable(f"its answers are a mapping: name the column in it (of {names}), with a dot")
    entries = [_plain(entry) for entry in as_list(value)]
    if not any(isinstance(entry, list) for entry in entries):
        accepted, blank = _accepted(entries)
        if not accepted:
            raise Unusable("it has no answer")
        return [accepted], blank
    objectives, blank = [], 0
    for entry in entries:
        if not isinstance(entry, list) and entry is not None:
            raise Unusable("its answers mix texts and lists")
        accepted, skipped = _accepted([_plain(part) for part in entry or []])
        if not accepted:
            raise Unusable("an objective of it has no answer" if len(entries) > 1 else "it has no answer")
        objectives.append(accepted)
        blank += skipped
    return objectives, blank


def as_list(value: Any) -> list[Any]:
    """The entries of a list or an array, of one that a text spells out, or the value alone; none of `None`."""
    value = _plain(value)
    if isinstance(value, str):
        listed = _list_in_text(value)
        value = value if listed is None else listed
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def read_printed(text: str) -> Any:
    """What a text spells out in JSON, or as Python, NumPy or pandas print it; `None` if it does not.

    Tables that are written as CSV hold nested columns so: `{'target': array(['a', 'b'], dtype=object)}`, or `['a' 'b']`
    without a comma, which Python itself would take for one text.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    pieces: list[str] = []
    calls: list[bool] = []  # of the brackets that are open, whether they are a call's, which is left out
    position, ended = 0, False
    while position < len(text):
        found = _PIECES.match(text, position)
        if found is None:
            return None
        position = found.end()
        kind, piece = found.lastgroup, found.group()
        if kind in ("space", "dtype"):
            continue
        if kind == "close":
            if not calls:
                return None
            ended = True
            if not calls.pop():
                pieces.append(piece)
            continue
        if ended and kind != "mark":
            pieces.append(",")
        ended = kind in ("text", "word")
        if kind in ("open", "call"):
            calls.append(kind == "call")
        if kind != "call":
            pieces.append("None" if piece in ("nan", "null", "<NA>", "NaT") else piece)
    try:
        return ast.literal_eval("".join(pieces))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def unique(texts: Iterable[str]) -> list[str]:
    """The texts, each once: those that differ in their Unicode form alone are the same."""
    kept: dict[str, str] = {}
    for text in texts:
        kept.setdefault(unicodedata.normalize("NFC", text), text)
    return list(kept.values())


def check_text(text: str) -> str:
    """The text without white space around it.

    Raises:
        Unusable: if it has a lone surrogate, which neither a file nor a tokenizer takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unusable("it has half a character (a lone surrogate)") from error
    return text.strip()


def _accepted(entries: Sequence[Any]) -> tuple[list[str], int]:
    texts = [_text(entry) for entry in entries]
    kept = [text for text in texts if text]
    return unique(kept), len(texts) - len(kept)


def _text(entry: Any) -> str:
    if entry is None or (isinstance(entry, float) and math.isnan(entry)):
        return ""
    if isinstance(entry, bool):
        return "yes" if entry else "no"
    if isinstance(entry, float) and entry.is_integer():
        return str(int(entry))
    if isinstance(entry, int | float):
        return str(entry)
    if not isinstance(entry, str):
        kind = "list" if isinstance(entry, list) else type(entry).__name__
        raise Unusable(f"an answer of it is a {kind}, neither text nor number")
    return check_text(entry)


def _plain(value: Any) -> Any:
    """Arrays and numbers of NumPy, and tuples, as Python's own types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _list_in_text(text: str) -> list[Any] | None:
    """The list of texts, or of lists of texts, that a text spells out, if it does."""
    if not text.lstrip().startswith(("[", "array([")):
        return None
    value = read_printed(text)
    # "[5]" may well be an answer, and so may "[sic]", which no parser takes.
    return value if isinstance(value, list) and _all_texts(value) else None


def _all_texts(value: list[Any]) -> bool:
    return all(isinstance(entry, str) or (isinstance(entry, list) and _all_texts(entry)) for entry in value)


def _shown(row: Any) -> str:
    text = repr(row)
    return text if len(text) <= 200 else text[:199] + "…"

"""Questions of several objectives, made of questions of one. Nothing here needs torch.

    from mempo_trl.data import compose, read_questions

    parts = [read_questions("nq_train.jsonl"), read_questions("hotpotqa_train.jsonl")]
    composition = compose(parts, [2, 4], number=1000)
    composition.write("train.parquet")

As in MEM1 (arXiv 2506.15841), the parts are asked in one line, separated by ";", which also separates the answers.
"""

import hashlib
import heapq
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

from ..rewards import OBJECTIVE_SEPARATOR, normalize_answer
from ..run_folder import short
from .columns import check_answers
from .readers import QuestionSet
from .writing import write_questions


Rows = QuestionSet | Iterable[Mapping[str, Any]]
_EXAMPLES = 3
# Deals that are tried until no question comes twice, which only happens where there are few.
_ATTEMPTS = 50


@dataclass
class Composition:
    """Questions of several objectives.

    Attributes:
        rows: one dictionary for each: `id`, `question`, `answers` (accepted answers of each objective, in the order of
            the parts), `source` (those of the parts, joined by "+"), and of the parts `part_ids`, `part_sources` and
            `part_questions`.
        parts: questions of one objective that could be used.
        uses: how often the parts are used: for each number of times, how many.
        dropped: for each reason how many questions were not used.
        examples: for each reason the first few of those.
        notes: what else was done, and how often.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    parts: int = 0
    uses: Counter[int] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def write(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the questions: see `mempo_trl.data.writing.write_questions`."""
        write_questions(self.rows, path, overwrite)

    def __str__(self) -> str:
        times = ", ".join(f"{count:,} {number}×" for number, count in sorted(self.uses.items()))
        lines = [f"{len(self.rows):,} questions are made of {self.parts:,} ({times})"]
        for reason, count in self.dropped.most_common():
            lines.append(f"  not used: {count:,}: {reason}")
            lines += [f"    {example}" for example in self.examples[reason]]
        lines += [f"  {count:,}: {note}" for note, count in self.notes.most_common()]
        return "\n".join(lines)


def compose(
    sets: Iterable[Rows],
    objectives: int | Iterable[int],
    *,
    number: int | None = None,
    seed: int = 0,
    across_sources: bool = False,
    style: str = "joined",
    exclude: Iterable[Rows] = (),
) -> Composition:
    """Make questions of several objectives.

    Every part is used once before any is used twice (in each source, unless they are mixed), and none twice in one
    question. What is made depends on the questions and the seed alone, not on the machine.

    Args:
        sets: what `read_questions` returns, or such rows. Left out are questions that have several objectives already,
            a conversation of their own, or no accepted answer without a semicolon, which separates the answers of
            several objectives; and what another one asks, too.
        objectives: how many parts a question has. Of several numbers, each gets as many questions.
        number: how many questions to make; by default as many as use each part once.
        seed: another one makes others.
        across_sources: whether a question may have parts of several sources.
        style: "joined": "who wrote Dune?; where is it set?", as MEM1 asks. "numbered": a line for each part, with its
            number.
        exclude: test sets. What they ask is left out: see `question_key`.

    Returns:
        The questions, and what was left out.

    Raises:
        ValueError: if the arguments do not fit, or there are not enough questions.
    """
    counts = _counts(objectives)
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
        raise ValueError(f"`number={number!r}` is not allowed: it must be a whole number, at least 1.")
    if style not in _STYLES:
        raise ValueError(f"`style={style!r}` is not allowed: it must be {' or '.join(map(repr, _STYLES))}.")
    composition = Composition()
    parts = _usable(sets, max(counts) > 1, _keys(exclude), composition)
    composition.parts = len(parts)
    pools: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        pools.setdefault("" if across_sources else part["source"], []).append(part)
    plan = _plan(counts, number, {name: len(pool) for name, pool in pools.items()}, seed)
    for attempt in range(_ATTEMPTS):
        decks = {name: _Deck(pools[name], seed, name, attempt) for name in sorted(pools)}
        seen: set[str] = set()
        rows = [_row(decks[name].draw(count), style, seen) for name, count in plan]
        found = [row for row in rows if row is not None]
        if len(found) == len(plan):
            composition.rows = found
            composition.uses = Counter(uses for deck in decks.values() for uses in deck.uses())
            return composition
    raise ValueError(
        f"`number={len(plan)}` is too many for so few questions: {len(plan)} different ones were not found. Give more "
        "questions, or make `number` smaller."
    )


def question_key(question: str) -> str:
    """What two questions have in common that ask the same: no case, no punctuation, no articles, no Unicode forms."""
    return normalize_answer(question) or " ".join(question.split())


def part_questions(row: Mapping[str, Any]) -> list[str]:
    """The questions that a row asks: those of its parts if it has several objectives, as far as they can be told."""
    if row.get("part_questions"):
        return list(row["part_questions"])
    question, objectives = row["question"], row.get("answers") or [""]
    if isinstance(objectives[0], list) and len(objectives) > 1:
        pieces = [piece.strip() for piece in question.split(";")]
        if len(pieces) == len(objectives):
            return pieces
    return [question]


def without(rows: Iterable[Mapping[str, Any]], exclude: Iterable[Rows]) -> list[dict[str, Any]]:
    """The rows that ask nothing that a test set asks: see `question_key`."""
    keys = _keys(exclude)
    return [dict(row) for row in rows if not any(question_key(part) in keys for part in part_questions(row))]


def rows_of(questions: Rows) -> Iterable[Mapping[str, Any]]:
    """The rows of a question set, or of what is rows already."""
    return questions.rows if isinstance(questions, QuestionSet) else questions


def _keys(sets: Iterable[Rows]) -> set[str]:
    rows = (_asking(row, number) for one in sets for number, row in enumerate(rows_of(one)))
    return {question_key(part) for row in rows for part in part_questions(row)}


def _counts(objectives: int | Iterable[int]) -> list[int]:
    counts = [objectives] if isinstance(objectives, int) else list(objectives)
    wrong = [count for count in counts if not isinstance(count, int) or isinstance(count, bool) or count < 1]
    if wrong or not counts or len(set(counts)) < len(counts):
        raise ValueError(f"`objectives={objectives!r}` is not allowed: give whole numbers, at least 1, each once.")
    return counts


def _usable(
    sets: Iterable[Rows], separated: bool, excluded: set[str], composition: Composition
) -> list[dict[str, Any]]:
    """The questions of one objective that can be parts."""

    def drop(reason: str, row: Mapping[str, Any]) -> None:
        composition.dropped[reason] += 1
        examples = composition.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(f"{row['id']}: {row['question'][:100]}")

    parts: list[dict[str, Any]] = []
    known: set[str] = set()
    for one in sets:
        for number, given in enumerate(rows_of(one)):
            row = _checked(given, number)
            answers = row["answers"]
            key = question_key(row["question"])
            accepted = [text for text in answers[0] if not (separated and OBJECTIVE_SEPARATOR.search(text))]
            if len(answers) > 1:
                drop("it has several objectives already", row)
            elif row.get("prompt") is not None:
                drop("it has a conversation of its own", row)
            elif not accepted:
                drop("all its accepted answers have a semicolon, which separates answers", row)
            elif key in excluded:
                drop("a test set asks it, too", row)
            elif key in known:
                drop("another one asks it, too", row)
            else:
                if len(accepted) < len(answers[0]):
                    composition.notes["with accepted answers left out that have a semicolon"] += 1
                known.add(key)
                part = {"id": str(row["id"]), "question": " ".join(row["question"].split()), "source": row["source"]}
                parts.append({**part, "answers": accepted})
    if not parts:
        reasons = "; ".join(f"{count:,}: {reason}" for reason, count in composition.dropped.most_common())
        raise ValueError(f"There is no question to compose of ({reasons or 'none was given'}).")
    return parts


def _asking(row: Any, number: int) -> Mapping[str, Any]:
    """The row.

    Raises:
        ValueError: if it has no question.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"Row {number} is no dictionary, but {short(row)}: give what `read_questions` returns.")
    if not isinstance(row.get("question"), str) or not row["question"].strip():
        raise ValueError(f"Row {number} has no text in `question`: {short(row)}")
    return row


def _checked(given: Any, number: int) -> dict[str, Any]:
    """A row with an id, a source and a list of accepted answers for each objective.

    Raises:
        ValueError: if it is no question with answers.
    """
    answers: Any = _asking(given, number).get("answers")
    check_answers(answers, f"row {number}")
    row = {"id": str(number), "source": "questions", **given}
    return {**row, "answers": answers if isinstance(answers[0], list) else [answers]}


def _plan(counts: list[int], number: int | None, sizes: dict[str, int], seed: int) -> list[tuple[str, int]]:
    """For each question to make the pool that its parts come from, and how many they are."""
    if max(counts) > max(sizes.values()):
        where = f"source {max(sizes, key=lambda name: sizes[name])!r}" if "" not in sizes else "all sources together"
        hint = " Mix sources (`across_sources`), or make" if len(sizes) > 1 else " Make"
        raise ValueError(
            f"{max(counts)} objectives need as many questions, but {where} has only {max(sizes.values())}.{hint} "
            "`objectives` smaller."
        )
    balance = _Balance(counts, sizes, once=number is None)
    plan: list[tuple[str, int]] = []
    if number is None:
        while len(taken := list(balance.take(sorted(counts, reverse=True)))) == len(counts):
            plan += taken
        if not plan:
            raise ValueError(
                f"One question for each of `objectives={counts}` needs more questions than there are: give `number`, "
                "to use some twice, or make `objectives` smaller."
            )
    else:
        shares = [number // len(counts) + (place < number % len(counts)) for place in range(len(counts))]
        for count, share in sorted(zip(counts, shares, strict=True), reverse=True):
            plan += balance.take([count] * share)
    order = sorted(range(len(plan)), key=lambda place: _hash(seed, "order", place))
    return [plan[place] for place in order]


class _Balance:
    """Picks pools such that their questions are used about equally often.

    Args:
        counts: how many questions are picked together.
        sizes: how many each pool has.
        once: whether no question may be used twice.
    """

    def __init__(self, counts: list[int], sizes: dict[str, int], once: bool):
        self._sizes, self._once = sizes, once
        self._used = dict.fromkeys(sizes, 0)
        # How much of a pool will be used then. It only grows, so that an entry that is out of date is never too large.
        self._heaps = {
            count: sorted((count / size, name) for name, size in sizes.items() if size >= count) for count in counts
        }

    def take(self, counts: Sequence[int]) -> Iterator[tuple[str, int]]:
        """A pool for each of these counts, until none has enough left."""
        for count in counts:
            heap = self._heaps[count]
            while heap:
                expected, name = heap[0]
                after = self._used[name] + count
                if self._once and after > self._sizes[name]:
                    heapq.heappop(heap)
                elif after / self._sizes[name] > expected:
                    heapq.heapreplace(heap, (after / self._sizes[name], name))
                else:
                    self._used[name] = after
                    yield name, count
                    break
            else:
                return


class _Deck:
    """Questions to draw from: all of them once, in an order of chance, before any of them again."""

    def __init__(self, parts: list[dict[str, Any]], seed: int, name: str, attempt: int):
        self._parts, self._name = parts, name
        self._seed = (seed,) if attempt == 0 else (seed, attempt)
        self._round = 0
        self._waiting: deque[int] = deque()
        self._uses = [0] * len(parts)

    def draw(self, count: int) -> list[dict[str, Any]]:
        drawn: list[int] = []
        taken: set[int] = set()
        skipped: list[int] = []
        while len(drawn) < count:
            if not self._waiting:
                self._shuffle()
            index = self._waiting.popleft()
            if index in taken:  # it ended the round before: it comes first in the next question
                skipped.append(index)
                continue
            taken.add(index)
            drawn.append(index)
        self._waiting.extendleft(reversed(skipped))
        for index in drawn:
            self._uses[index] += 1
        return [self._parts[index] for index in drawn]

    def uses(self) -> list[int]:
        return self._uses

    def _shuffle(self) -> None:
        self._round += 1

        def key(index: int) -> bytes:
            part = self._parts[index]
            return _hash(*self._seed, self._round, self._name, part["source"], part["id"], part["question"])

        self._waiting.extend(sorted(range(len(self._parts)), key=key))


def _row(parts: list[dict[str, Any]], style: str, seen: set[str]) -> dict[str, Any] | None:
    """The question that asks the parts, in an order that was not asked before; `None` if there is none."""
    for order in permutations(parts):
        question = _STYLES[style]([part["question"] for part in order])
        digest = _hash(question).hex()[:16]
        if digest not in seen:
            break
    else:
        return None
    seen.add(digest)
    return {
        "id": f"{len(parts)}-{digest}",
        "question": question,
        "answers": [list(part["answers"]) for part in order],
        "source": "+".join(dict.fromkeys(part["source"] for part in order)),
        "part_ids": [part["id"] for part in order],
        "part_sources": [part["source"] for part in order],
        "part_questions": [part["question"] for part in order],
    }


def _joined(questions: Sequence[str]) -> str:
    return "; ".join(questions if len(questions) == 1 else map(_asked, questions))


def _numbered(questions: Sequence[str]) -> str:
    if len(questions) == 1:
        return questions[0]
    return "\n".join(f"{place}. {_asked(question)}" for place, question in enumerate(questions, start=1))


def _asked(question: str) -> str:
    """The question with a mark at its end, by which the next one is told apart."""
    return question if question.endswith(("?", ".", "!", "？", "。", "！")) else f"{question}?"


_STYLES: dict[str, Callable[[Sequence[str]], str]] = {"joined": _joined, "numbered": _numbered}


def _hash(*parts: Any) -> bytes:
    """The same on every machine, unlike `hash` and, over versions of Python, `random`."""
    return hashlib.sha256(json.dumps(parts).encode()).digest()

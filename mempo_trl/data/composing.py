"""Questions of several objectives, made of questions of one (MEM1, https://huggingface.co/papers/2506.15841).

Nothing here needs torch.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..run_folder import json_lines, write_whole
from .readers import Row, same_question


# What stands between the questions of a row, as in MEM1, and in an answer between the answers.
SEPARATOR = "; "


@dataclass
class Composition:
    """Questions of several objectives.

    Attributes:
        rows: `{"id", "question", "answers", "source", "parts"}`: the questions one after the other, the accepted
            answers of each in the same order, the sources, and the ids of the questions that it is made of.
        dropped: why questions are not used, and how many for each reason.
    """

    rows: list[Row] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        text = f"{len(self.rows):,} rows"
        return f"{text}; questions not used: {_counts(self.dropped)}." if self.dropped else f"{text}."


def compose(
    questions: Iterable[Row],
    objectives: int | Sequence[int],
    *,
    number: int | None = None,
    seed: int = 0,
    across_sources: bool = False,
    exclude: Iterable[Row] = (),
) -> Composition:
    """Make questions of several objectives of questions of one.

    Questions are dealt like cards: each is used once before any is used twice, and none twice in a row. As ";" stands
    between the answers of a row, accepted answers with a ";" are left out, and questions that have no other.

    Args:
        questions: as `read_questions` gives them; of several sources, if you like.
        objectives: questions in a row. Of several numbers, each gets as many rows.
        number: rows; `None` makes as many as use no question twice.
        seed: the same seed gives the same rows, on every machine.
        across_sources: whether a row may be made of questions of different sources; if not, each source gets a share
            of the rows that is in proportion to its questions.
        exclude: questions that are not used, such as those of a test set.

    Raises:
        ValueError: if an argument is out of its range, or a source has too few questions.
    """
    sizes = [objectives] if isinstance(objectives, int) else list(objectives)
    if not sizes or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(f"`objectives={objectives!r}` is not allowed: it must be whole numbers, each at least 1.")
    if number is not None and (not isinstance(number, int) or number < 1):
        raise ValueError(f"`number={number!r}` is not allowed: it must be a whole number, at least 1.")
    composition = Composition()
    pools: dict[str, list[Row]] = {}
    for row in _usable(questions, exclude, composition.dropped):
        pools.setdefault("" if across_sources else row["source"], []).append(row)
    if not pools:
        raise ValueError(f"There is no question to compose: {_counts(composition.dropped) or 'none was given'}.")
    for source, pool in pools.items():
        if len(pool) < max(sizes):
            raise ValueError(
                f"{max(sizes)} objectives need as many questions, but {source or 'all sources together'} "
                f"{'has' if source else 'have'} {len(pool)}: give more, or fewer objectives."
            )
    rng = random.Random(seed)
    dealt: list[list[Row]] = []
    for pool, share in zip(pools.values(), _shares([len(pool) for pool in pools.values()], number), strict=True):
        rounds = len(pool) if share is None else share
        dealer = _Dealer(pool, rng)
        for turn in range(rounds):
            size = sizes[(len(dealt) if share is not None else turn) % len(sizes)]
            if share is None and dealer.left < size:
                break
            dealt.append(dealer.deal(size))
    rng.shuffle(dealt)
    for position, parts in enumerate(dealt):
        composition.rows.append(
            {
                "id": f"composed-{seed}-{position}",
                "question": SEPARATOR.join(part["question"] for part in parts),
                "answers": [part["answers"][0] for part in parts],
                "source": "+".join(dict.fromkeys(part["source"] for part in parts)),
                "parts": [part["id"] for part in parts],
            }
        )
    return composition


def _usable(questions: Iterable[Row], exclude: Iterable[Row], dropped: Counter[str]) -> Iterator[Row]:
    seen = {same_question(row["question"]) for row in exclude}
    excluded = frozenset(seen)
    for row in questions:
        key = same_question(row["question"])
        if key in excluded:
            dropped["excluded"] += 1
        elif key in seen:
            dropped["a second time"] += 1
        elif len(row["answers"]) != 1:
            dropped["with several objectives already"] += 1
        else:
            seen.add(key)
            accepted = [answer for answer in row["answers"][0] if ";" not in answer]
            if accepted:
                yield {**row, "answers": [accepted]}
            else:
                dropped['with ";" in every answer'] += 1


def _shares(sizes: list[int], number: int | None) -> list[int | None]:
    """Parts of a number in proportion to sizes, by the largest remainders."""
    if number is None:
        return [None] * len(sizes)
    exact = [number * size / sum(sizes) for size in sizes]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda n: (shares[n] - exact[n], n))
    for n in by_remainder[: number - sum(shares)]:
        shares[n] += 1
    return list(shares)


class _Dealer:
    """Deals questions; when none is left, all of them anew in another order."""

    def __init__(self, pool: list[Row], rng: random.Random):
        self._pool, self._rng = pool, rng
        self._deck: deque[Row] = deque()
        self._shuffle()

    @property
    def left(self) -> int:
        return len(self._deck)

    def deal(self, size: int) -> list[Row]:
        """Take different questions."""
        hand: dict[int, Row] = {}
        again: list[Row] = []
        while len(hand) < size:
            if not self._deck:
                self._shuffle()
            row = self._deck.popleft()
            if id(row) in hand:
                again.append(row)  # from a new round: its turn comes with the next row
            else:
                hand[id(row)] = row
        self._deck.extendleft(reversed(again))
        return list(hand.values())

    def _shuffle(self) -> None:
        order = list(self._pool)
        self._rng.shuffle(order)
        self._deck.extend(order)


def write_questions(rows: Sequence[Row], file: str | Path) -> None:
    """Write questions to a `.parquet` or `.jsonl` file, which appears whole or not at all.

    `read_questions` reads them back as they are, and `datasets.load_dataset` makes what `MemPOTrainer` takes.

    Raises:
        ValueError: if the name has another ending.
        OSError: if it cannot be written.
    """
    file = Path(file)
    if file.suffix == ".jsonl":
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json_lines(rows))
    elif file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.tmp")
        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), temporary)
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
    else:
        raise ValueError(f"{file} is not allowed as the name of the questions: it must end in .parquet or .jsonl.")


def to_table(rows: Sequence[Row], other: Sequence[Row] = ()) -> str:
    """Statistics of questions, as a Markdown table.

    Args:
        rows: questions.
        other: a second set, such as the test set: how many questions are in both is counted.
    """
    words = sorted(len(row["question"].split()) for row in rows)
    accepted = [len(answers) for row in rows for answers in row["answers"]]
    by_source: Counter[str] = Counter(row["source"] for row in rows)
    by_objectives: Counter[int] = Counter(len(row["answers"]) for row in rows)
    lines = ["| questions | |", "| --- | --- |", f"| rows | {len(rows):,} |"]
    lines += [f"| from {source.replace('|', '/')} | {count:,} |" for source, count in by_source.most_common(20)]
    lines += [f"| with {n} objective{'s' * (n != 1)} | {by_objectives[n]:,} |" for n in sorted(by_objectives)]
    if rows:
        lines.append(f"| words of a question: median, most | {words[len(words) // 2]:,}, {words[-1]:,} |")
        lines.append(f"| accepted answers of an objective: mean, most | {_mean(accepted):.2f}, {max(accepted):,} |")
    uses = Counter(part for row in rows for part in row.get("parts", []))
    if uses:
        lines.append(f"| uses of a question: least, most | {min(uses.values())}, {max(uses.values())} |")
    if other:
        asked = {same_question(row["question"]) for row in other}
        lines.append(f"| in the other set too | {sum(same_question(row['question']) in asked for row in rows):,} |")
    return "\n".join(lines) + "\n"


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)


def _counts(dropped: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())

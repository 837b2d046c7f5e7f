"""What a question set is like, in a short table. Nothing here needs torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from .composing import Rows, part_questions, question_key, rows_of


_EXAMPLES = 3


@dataclass
class Statistics:
    """What a question set is like.

    Attributes:
        rows: how many questions there are.
        sources: how many come from each source; of those with parts, for all sources of the parts together.
        objectives: for each number of objectives, how many have it.
        words: words of each question.
        accepted: accepted answers of each objective.
        shared: questions that ask something that the test set asks; `None` without one.
        examples: some of what both ask.
    """

    rows: int
    sources: Counter[str]
    objectives: Counter[int]
    words: list[int]
    accepted: list[int]
    shared: int | None = None
    examples: list[str] = field(default_factory=list)

    def to_markdown(self) -> str:
        """The table."""
        lines = [("questions", f"{self.rows:,}")]
        lines += [(f"source {name}".replace("|", "\\|"), self._share(n)) for name, n in self.sources.most_common(20)]
        if len(self.sources) > 20:
            lines.append((f"{len(self.sources) - 20} other sources", ""))
        lines += [(f"{n} objective{'s' * (n > 1)}", self._share(count)) for n, count in sorted(self.objectives.items())]
        lines.append(("words of a question", _spread(self.words)))
        lines.append(("accepted answers of an objective", _spread(self.accepted)))
        if self.shared is not None:
            lines.append(("ask what the test set asks", self._share(self.shared)))
        table = "| | |\n| --- | --- |\n" + "".join(f"| {name} | {value} |\n" for name, value in lines)
        return table + "".join(f"\nBoth ask: {example}\n" for example in self.examples)

    def _share(self, count: int) -> str:
        return f"{count:,} ({count / self.rows:.1%})"


def question_statistics(questions: Rows, test: Rows | None = None) -> Statistics:
    """Count what is in a question set.

    Args:
        questions: what `read_questions` returns, or such rows.
        test: another set, to find what both ask (see `mempo_trl.data.composing.question_key`).

    Raises:
        ValueError: if there are no questions.
    """
    rows = list(rows_of(questions))
    if not rows:
        raise ValueError("There are no questions to count.")
    lists: list[list[list[str]]] = [
        row["answers"] if isinstance(row["answers"][0], list) else [row["answers"]] for row in rows
    ]
    statistics = Statistics(
        len(rows),
        Counter(str(row.get("source", "unknown")) for row in rows),
        Counter(map(len, lists)),
        [len(row["question"].split()) for row in rows],
        [len(accepted) for answers in lists for accepted in answers],
    )
    if test is not None:
        asked = {question_key(part) for row in rows_of(test) for part in part_questions(row)}
        statistics.shared = 0
        for row in rows:
            both = [part for part in part_questions(row) if question_key(part) in asked]
            statistics.shared += bool(both)
            if both and len(statistics.examples) < _EXAMPLES:
                statistics.examples.append(both[0])
    return statistics


def _spread(values: Sequence[Any]) -> str:
    return f"mean {mean(values):.1f}, median {median(values):g}, most {max(values):,}"

"""The scores of one record, the summary of a run with intervals, and its table.

A record is what a run writes for one sample of one question, one line of `trajectories.jsonl`:

    {"id": str, "sample": int, "question": str,
     "answers": [[str]],              accepted answers of every objective
     "prediction": str or null,       the answer of the last turn
     "stop_reason": str,              one of `mempo_trl.rollout.STOP_REASONS`
     "steps": [{"text": str, "prompt_tokens": int, "completion_tokens": int, "observation": [message]}],
     "tool_calls": int, "tool_failures": int, "unavailable_calls": int, "malformed_calls": int}

Nothing here needs torch.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mempo_trl.evaluation.scorers import get_scorer
from mempo_trl.protocol import check_trajectory


Record = dict[str, Any]

# Every quantity of a record that is averaged, in the order of the summary.
METRICS = (
    "exact_match",
    "objective_exact_match",
    "f1",
    "turns",
    "tool_calls",
    "tool_failures",
    "malformed_calls",
    "unavailable_calls",
    "total_tokens",
    "peak_tokens",
    "well_formed",
)
MAX_FORMAT_ERRORS = 10
# Bounds the memory that a bootstrap takes: numbers of drawn questions held at a time.
_MAX_DRAWS = 4_000_000

_COUNTS = ("tool_calls", "tool_failures", "unavailable_calls", "malformed_calls")
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "sample": int,
    "question": str,
    "answers": list,
    "prediction": (str, type(None)),
    "stop_reason": str,
    "steps": list,
    **dict.fromkeys(_COUNTS, int),
}
_JSON_NAMES = {str: "a string", int: "an integer", list: "a list", type(None): "null"}
_STEP_FIELDS: dict[str, type | tuple[type, ...]] = {"text": str, "prompt_tokens": int, "completion_tokens": int}


def check_record(record: Any) -> None:
    """Check that a record has every field that scoring reads, each of its type.

    Raises:
        ValueError: With a sentence that names the field.
    """
    named = isinstance(record, dict) and "id" in record
    name = f"record of question {record['id']!r}" if named else "record"
    _check_fields(record, _FIELDS, name)
    for accepted in record["answers"] or [None]:
        if not (isinstance(accepted, list) and accepted and all(isinstance(answer, str) for answer in accepted)):
            raise ValueError(
                f'The field "answers" of the {name} must hold a list of one or more accepted answers for every '
                f"objective, got {record['answers']!r:.80}."
            )
    for number, step in enumerate(record["steps"], start=1):
        _check_fields(step, _STEP_FIELDS, f"step {number} of the {name}")


def score_record(record: Record, scorer: str = "default") -> dict[str, Any]:
    """Score one record.

    Args:
        record: The record; see the module.
        scorer: A name in `mempo_trl.evaluation.scorers.SCORERS`.

    Returns:
        - `exact_match`: 1.0 if every objective is answered right, else 0.0; `f1`: the mean over objectives.
        - `objective_exact_match`, `objective_f1`: one score per objective.
        - `turns`: how many steps there are.
        - `total_tokens`: prompt and completion tokens summed over the steps. What a step reads counts in every step
          that reads it again: TT of the MemPO paper (arXiv 2603.00680).
        - `peak_tokens`: prompt and completion tokens of the step that has most: PT of that paper. Both are 0 for a
          record without steps.
        - `format_errors`: the sentences of `mempo_trl.protocol.check_trajectory`.

    Raises:
        ValueError: If the scorer is unknown, or a field is missing or of another type.
    """
    score = get_scorer(scorer)
    check_record(record)
    exact = score(record["prediction"], record["answers"], "exact_match")
    f1 = score(record["prediction"], record["answers"], "f1")
    step_tokens = [step["prompt_tokens"] + step["completion_tokens"] for step in record["steps"]]
    return {
        "exact_match": float(all(exact)),
        "f1": sum(f1) / len(f1),
        "objective_exact_match": exact,
        "objective_f1": f1,
        "turns": len(step_tokens),
        "total_tokens": sum(step_tokens),
        "peak_tokens": max(step_tokens, default=0),
        "format_errors": check_trajectory([step["text"] for step in record["steps"]]),
    }


def summarize(
    records: Iterable[Record],
    *,
    scorer: str = "default",
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Summarise a run: means over questions, each with a bootstrap interval.

    The samples of a question are averaged first, so every question weighs the same. An interval is the percentile
    bootstrap's (Efron & Tibshirani, 1993, chapter 13): questions are drawn with replacement, as many as there are, and
    the bounds are the quantiles (1 - confidence) / 2 and (1 + confidence) / 2 of the means so found, linearly
    interpolated. With one question both bounds are its value.

    Args:
        records: The records, in any order; see the module.
        scorer: A name in `mempo_trl.evaluation.scorers.SCORERS`.
        confidence: Nominal coverage of the intervals, in (0, 1).
        resamples: How often the questions are drawn.
        seed: Seed of the draws. The same records and seed give the same intervals, whatever the records' order.

    Returns:
        A dict that JSON can hold: the arguments `scorer`, `confidence`, `resamples`, `seed`; `samples_per_question`
        (the most that any question has); `all`, the group of all questions; and `by_objectives`, a group for each
        number of objectives, with that number as a string for its key. An interval is `{"mean", "low", "high"}`. A
        group has

        - `questions`, `records`: how many there are; `incomplete_questions`: how many questions have fewer samples
          than `samples_per_question`, as an interrupted run leaves them.
        - `metrics`: an interval for each of `METRICS`. Shares are in [0, 1], tokens in tokens.
        - `best_of_n`: `None` with one sample per question, or if no question is complete. Else `n`, `questions` (the
          complete ones, the only ones used), and the interval of the share of them that at least one sample answers
          exactly: pass@n.
        - `position_exact_match`: a list with an interval for objective 1, 2, …, over the questions that have it, and
          their number as `questions`.
        - `stop_reasons`: how many records stopped for each reason, the most frequent first.
        - `format_errors`: the most frequent kinds (the sentence without the number of its turn), at most
          `MAX_FORMAT_ERRORS`, as `{"error", "records"}`: in how many records each occurs.

    Raises:
        ValueError: If there are no records, an argument is out of its range, a record lacks a field, a sample occurs
            twice, or the records of a question differ in their answers.
    """
    check_bootstrap(confidence, resamples)
    get_scorer(scorer)
    questions = group_by_question(records)
    if not questions:
        raise ValueError("There are no records to summarise: records is empty.")
    scored = {identifier: [_Scored(record, scorer) for record in questions[identifier]] for identifier in questions}
    samples = max(map(len, scored.values()))
    by_objectives: dict[int, list[list[_Scored]]] = {}
    for question in scored.values():
        by_objectives.setdefault(len(question[0].objectives), []).append(question)

    def group(members: Sequence[list[_Scored]]) -> dict[str, Any]:
        return _summarize_group(members, samples, confidence, resamples, seed)

    return {
        "scorer": scorer,
        "confidence": confidence,
        "resamples": resamples,
        "seed": seed,
        "samples_per_question": samples,
        "all": group(list(scored.values())),
        "by_objectives": {str(number): group(by_objectives[number]) for number in sorted(by_objectives)},
    }


def to_markdown(summary: dict[str, Any]) -> str:
    """Write a summary as a Markdown table, with a line for what it says and another table of stop reasons.

    Args:
        summary: What `summarize` returned.

    Returns:
        The text: one row for all questions and one for each number of objectives. Exact match, F1 and the share of
        well-formed trajectories are in per cent; turns, calls, failures, TT (total tokens) and PT (peak tokens) are
        counts per question. Each cell is the mean and its interval.
    """
    samples = summary["samples_per_question"]
    columns: list[tuple[str, str, float, int]] = [
        ("EM %", "exact_match", 100, 1),
        ("Objective EM %", "objective_exact_match", 100, 1),
        ("F1 %", "f1", 100, 1),
        ("Turns", "turns", 1, 2),
        ("Calls", "tool_calls", 1, 2),
        ("Failures", "tool_failures", 1, 2),
        ("TT", "total_tokens", 1, 0),
        ("PT", "peak_tokens", 1, 0),
        ("Well-formed %", "well_formed", 100, 1),
    ]
    header = ["Objectives", "Questions", *(title for title, *_ in columns)]
    if samples > 1:
        header.append(f"Best of {samples} EM %")
    rows = []
    for name, group in [("all", summary["all"]), *summary["by_objectives"].items()]:
        row = [name, str(group["questions"])]
        row += [format_interval(group["metrics"][key], scale, digits) for _, key, scale, digits in columns]
        if samples > 1:
            row.append(format_interval(group["best_of_n"], 100, 1) if group["best_of_n"] else "")
        rows.append(row)
    overall = summary["all"]
    lines = [
        f'Scorer "{summary["scorer"]}", questions: {overall["questions"]}, samples of each: {samples}. '
        f"In brackets: {100 * summary['confidence']:.4g} % bootstrap intervals ({summary['resamples']} resamples of "
        "the questions). TT: total tokens; PT: peak tokens.",
        "",
        *markdown_table(header, rows),
    ]
    if overall["incomplete_questions"]:
        lines += [
            "",
            f"{overall['incomplete_questions']} of {overall['questions']} questions have fewer than {samples} samples.",
        ]
    reasons = overall["stop_reasons"].items()
    lines += ["", *markdown_table(["Stop reason", "Records"], [[reason, str(count)] for reason, count in reasons])]
    return "\n".join(lines) + "\n"


def group_by_question(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Group records by the id of their question, in the order of ids; the samples of a question in their order.

    Raises:
        ValueError: If a record lacks a field, a sample of a question occurs twice, or the records of a question differ
            in their answers.
    """
    questions: dict[str, dict[int, Record]] = {}
    for record in records:
        check_record(record)
        identifier, sample = record["id"], record["sample"]
        samples = questions.setdefault(identifier, {})
        if sample in samples:
            raise ValueError(f"There are two records for sample {sample} of question {identifier!r}.")
        samples[sample] = record
        if record["answers"] != next(iter(samples.values()))["answers"]:
            raise ValueError(f"The records of question {identifier!r} have different answers.")
    return {
        identifier: [samples[sample] for sample in sorted(samples)] for identifier, samples in sorted(questions.items())
    }


def check_bootstrap(confidence: float, resamples: int) -> None:
    """Check the arguments of a bootstrap.

    Raises:
        ValueError: If one is out of its range.
    """
    if not isinstance(confidence, int | float) or not 0 < confidence < 1:
        raise ValueError(f"`confidence={confidence!r}` is not allowed: it must be between 0 and 1, both excluded.")
    if not isinstance(resamples, int) or isinstance(resamples, bool) or resamples < 1:
        raise ValueError(f"`resamples={resamples!r}` is not allowed: it must be a whole number, at least 1.")


def bootstrap_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Means of rows drawn with replacement.

    Draw i takes the rows `rng.integers(len(values), size=len(values))` of the i-th such call to
    `rng = numpy.random.default_rng(seed)`.

    Args:
        values: (questions, metrics)
        resamples: How often as many rows as there are are drawn.
        seed: Seed of the draws.

    Returns:
        (resamples, metrics)
    """
    rng = np.random.default_rng(seed)
    number = len(values)
    means = np.empty((resamples, values.shape[1]))
    block = max(1, _MAX_DRAWS // number)
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        # Drawn rows are counted and the counts multiplied with the values: gathering the rows themselves would take
        # as much memory again for every metric.
        drawn = rng.integers(number, size=(size, number)) + number * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * number).reshape(size, number)
        means[start : start + size] = counts @ values / number
    return means


def interval_bounds(means: np.ndarray, confidence: float) -> tuple[np.ndarray, np.ndarray]:
    """The percentile interval of bootstrap means.

    Args:
        means: (resamples, metrics)
        confidence: Nominal coverage, in (0, 1).

    Returns:
        Lower and upper bounds, (metrics,) each.
    """
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return low, high


def format_interval(interval: dict[str, Any], scale: float, digits: int) -> str:
    """Write an interval as "mean [low, high]", multiplied by `scale`, with this many digits and separated thousands."""
    mean, low, high = (f"{interval[key] * scale:,.{digits}f}" for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table. Cells are taken as they are."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


class _Scored:
    """What the summary needs of one record."""

    def __init__(self, record: Record, scorer: str):
        scores = score_record(record, scorer)
        self.objectives: list[float] = scores["objective_exact_match"]
        self.stop_reason: str = record["stop_reason"]
        self.error_kinds = {_error_kind(error) for error in scores["format_errors"]}
        values = {
            **{name: record[name] for name in _COUNTS},
            **scores,
            "objective_exact_match": sum(self.objectives) / len(self.objectives),
            "well_formed": not self.error_kinds,
        }
        self.values = [float(values[name]) for name in METRICS]


def _summarize_group(
    questions: Sequence[list[_Scored]], samples: int, confidence: float, resamples: int, seed: int
) -> dict[str, Any]:
    def intervals(values: list[list[float]]) -> list[dict[str, Any]]:
        table = np.array(values)  # (questions, metrics)
        low, high = interval_bounds(bootstrap_means(table, resamples, seed), confidence)
        return [
            {"mean": float(mean), "low": float(bottom), "high": float(top)}
            for mean, bottom, top in zip(table.mean(axis=0), low, high, strict=True)
        ]

    records = [record for question in questions for record in question]
    metrics = intervals([_column_means([record.values for record in question]) for question in questions])
    complete = [question for question in questions if len(question) == samples]
    best_of_n = None
    if samples > 1 and complete:
        solved = [[float(any(all(record.objectives) for record in question))] for question in complete]
        best_of_n = {"n": samples, "questions": len(complete), **intervals(solved)[0]}
    positions = []
    for position in range(max(len(question[0].objectives) for question in questions)):
        having = [question for question in questions if len(question[0].objectives) > position]
        values = [_column_means([[record.objectives[position]] for record in question]) for question in having]
        positions.append({"questions": len(having), **intervals(values)[0]})
    return {
        "questions": len(questions),
        "records": len(records),
        "incomplete_questions": len(questions) - len(complete),
        "metrics": dict(zip(METRICS, metrics, strict=True)),
        "best_of_n": best_of_n,
        "position_exact_match": positions,
        "stop_reasons": dict(_most_frequent(record.stop_reason for record in records)),
        "format_errors": [
            {"error": kind, "records": count}
            for kind, count in _most_frequent(kind for record in records for kind in record.error_kinds)
        ][:MAX_FORMAT_ERRORS],
    }


def _column_means(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _most_frequent(items: Iterable[str]) -> list[tuple[str, int]]:
    """Counts, the largest first; equal ones in alphabetical order, so that the order of records plays no part."""
    return sorted(Counter(items).items(), key=lambda item: (-item[1], item[0]))


def _error_kind(error: str) -> str:
    """A sentence of `check_trajectory` without what differs from one turn or one broken text to another."""
    kind = re.sub(r"^Turn \d+: ", "", error)
    kind = re.sub(r"^Turn \d+ ", "A turn ", kind)
    return re.sub(r"is not valid JSON \(.*\)\.$", "is not valid JSON.", kind)


def _check_fields(value: Any, fields: dict[str, type | tuple[type, ...]], name: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"The {name} must be a JSON object, got {value!r:.80}.")
    for field, kind in fields.items():
        if field not in value:
            raise ValueError(f'The {name} has no field "{field}".')
        if not isinstance(value[field], kind):
            expected = " or ".join(_JSON_NAMES[each] for each in (kind if isinstance(kind, tuple) else (kind,)))
            raise ValueError(f'The field "{field}" of the {name} must be {expected}, got {value[field]!r:.80}.')

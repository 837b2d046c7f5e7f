"""Read a run, and compare two runs over the same questions.

Nothing here needs torch.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mempo_trl.evaluation.scorers import get_scorer
from mempo_trl.evaluation.summary import (
    Record,
    bootstrap_means,
    check_bootstrap,
    check_record,
    format_interval,
    group_by_question,
    interval_bounds,
    markdown_table,
    score_record,
)
from mempo_trl.run_folder import TRAJECTORIES, read_trajectories


# What is compared, in the order of the result.
COMPARED = ("exact_match", "f1", "total_tokens", "peak_tokens", "turns")
# A mean difference this small beside the largest difference of a question is rounding, and counts as 0.
_ROUNDING = 1e-12
_MAX_CELL = 120


def read_run(path: str | Path) -> list[Record]:
    """Read the records of a run; an unfinished last line, as a kill leaves it, is left out.

    Args:
        path: The run's folder; its file `trajectories.jsonl` is read.

    Returns:
        The records in the file's order.

    Raises:
        FileNotFoundError: If the folder has no such file.
        ValueError: If a line is not a record; the message names file and line.
    """
    records = []
    for number, record in enumerate(read_trajectories(path), start=1):
        try:
            check_record(record)
        except ValueError as error:
            raise ValueError(f"Line {number} of {Path(path) / TRAJECTORIES}: {error}") from None
        records.append(record)
    return records


def compare(
    a: Iterable[Record],
    b: Iterable[Record],
    *,
    scorer: str = "default",
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare two runs by the questions that both have, each question with itself.

    The samples of a question are averaged first. The questions are then drawn with replacement, as many as there are
    and the same ones for both runs (the paired bootstrap of Koehn, 2004), and the mean difference d* of b - a is taken
    of each draw. Its interval is the percentile bootstrap's (see `mempo_trl.evaluation.summary.summarize`). The p-value
    for no difference is the level at which that interval begins to exclude 0 (Efron & Tibshirani, 1993, section 15.4),
    with one added to the counts and to the number of draws R so that it is never 0 (Davison & Hinkley, 1997, section
    4.2):

        p = min(1, 2 * (min(#{d* <= 0}, #{d* >= 0}) + 1) / (R + 1))

    Draws with a difference of 0 count on both sides, so two runs that do not differ have p = 1. It says nothing of
    other seeds of training, nor is it corrected for the number of quantities compared.

    Args:
        a: The records of the run that is compared with, such as a baseline; see `mempo_trl.evaluation.summary`.
        b: The records of the other run.
        scorer: A name in `mempo_trl.evaluation.scorers.SCORERS`.
        confidence: Nominal coverage of the intervals, in (0, 1).
        resamples: How often the questions are drawn; p is at least 2 / (resamples + 1).
        seed: Seed of the draws.

    Returns:
        A dict that JSON can hold: the arguments `scorer`, `confidence`, `resamples`, `seed`; `questions`, the number of
        those compared; `only_a` and `only_b`, the number of questions left out since the other run lacks them;
        `metrics`, for each of `COMPARED` a dict with the means `a` and `b`, their `difference` b - a, its bounds `low`
        and `high`, and `p_value`; and `wins`, `losses`, `ties`: the questions whose exact match (mean over samples) is
        higher in b, higher in a, and equal, in the order of ids, each with its `id`, `question`, `answers`,
        `exact_match_a`, `exact_match_b`, and `predictions_a`, `predictions_b` (one per sample).

    Raises:
        ValueError: If the runs share no question, have different texts or answers for one, or as
            `mempo_trl.evaluation.summary.summarize`.
    """
    check_bootstrap(confidence, resamples)
    get_scorer(scorer)
    runs_a, runs_b = group_by_question(a), group_by_question(b)
    shared = [identifier for identifier in runs_a if identifier in runs_b]
    if not shared:
        raise ValueError(
            f"The runs share no question: a has {len(runs_a)}, b has {len(runs_b)}, and no id is in both. "
            "Evaluate them on the same questions."
        )
    outcomes: dict[str, list[dict[str, Any]]] = {"wins": [], "losses": [], "ties": []}
    values_a, values_b = [], []
    for identifier in shared:
        samples_a, samples_b = runs_a[identifier], runs_b[identifier]
        answers = samples_a[0]["answers"]
        for name, said in (("question", "texts"), ("answers", "answers")):
            if samples_a[0][name] != samples_b[0][name]:
                raise ValueError(
                    f"The runs have different {said} for question {identifier!r}: they cannot be compared."
                )
        values_a.append(_question_means(samples_a, scorer))
        values_b.append(_question_means(samples_b, scorer))
        exact_a, exact_b = (values[-1][COMPARED.index("exact_match")] for values in (values_a, values_b))
        outcome = "wins" if exact_b > exact_a else "losses" if exact_b < exact_a else "ties"
        outcomes[outcome].append(
            {
                "id": identifier,
                "question": samples_a[0]["question"],
                "answers": answers,
                "exact_match_a": exact_a,
                "exact_match_b": exact_b,
                "predictions_a": [record["prediction"] for record in samples_a],
                "predictions_b": [record["prediction"] for record in samples_b],
            }
        )

    table_a, table_b = np.array(values_a), np.array(values_b)  # (questions, metrics)
    differences = table_b - table_a
    drawn = bootstrap_means(differences, resamples, seed)  # (resamples, metrics)
    drawn[np.abs(drawn) <= _ROUNDING * np.abs(differences).max(axis=0)] = 0.0
    low, high = interval_bounds(drawn, confidence)
    tail = np.minimum((drawn <= 0).sum(axis=0), (drawn >= 0).sum(axis=0))
    p_values = np.minimum(1.0, 2 * (tail + 1) / (resamples + 1))
    columns = (table_a.mean(axis=0), table_b.mean(axis=0), differences.mean(axis=0), low, high, p_values)
    keys = ("a", "b", "difference", "low", "high", "p_value")
    return {
        "scorer": scorer,
        "confidence": confidence,
        "resamples": resamples,
        "seed": seed,
        "questions": len(shared),
        "only_a": len(runs_a) - len(shared),
        "only_b": len(runs_b) - len(shared),
        "metrics": {
            metric: {key: float(column[index]) for key, column in zip(keys, columns, strict=True)}
            for index, metric in enumerate(COMPARED)
        },
        **outcomes,
    }


def comparison_markdown(comparison: dict[str, Any], limit: int = 20) -> str:
    """Write a comparison as Markdown: what differs by how much, then the questions won, lost and tied.

    Args:
        comparison: What `compare` returned.
        limit: How many questions are listed of each outcome. Long questions and predictions are shortened.

    Returns:
        The text. Exact match and F1 are in per cent, total tokens (TT), peak tokens (PT) and turns counts per question.
    """
    if limit < 0:
        raise ValueError(f"limit must not be negative, got {limit}.")
    rows = []
    for title, key, scale, digits in (
        ("EM %", "exact_match", 100, 1),
        ("F1 %", "f1", 100, 1),
        ("TT", "total_tokens", 1, 0),
        ("PT", "peak_tokens", 1, 0),
        ("Turns", "turns", 1, 2),
    ):
        metric = comparison["metrics"][key]
        difference = format_interval({**metric, "mean": metric["difference"]}, scale, digits)
        means = [f"{metric[run] * scale:,.{digits}f}" for run in ("a", "b")]
        rows.append([title, *means, difference, f"{metric['p_value']:.4f}"])
    left_out = comparison["only_a"] + comparison["only_b"]
    lines = [
        f'Scorer "{comparison["scorer"]}", questions in both runs: {comparison["questions"]}, left out: {left_out} '
        f"({comparison['only_a']} only in a, {comparison['only_b']} only in b). In brackets: "
        f"{100 * comparison['confidence']:.4g} % paired bootstrap intervals ({comparison['resamples']} resamples of "
        "the questions). TT: total tokens; PT: peak tokens.",
        "",
        *markdown_table(["", "a", "b", "b - a", "p"], rows),
    ]
    for outcome, title in (
        ("wins", "Wins (b has the higher exact match)"),
        ("losses", "Losses (a has the higher exact match)"),
        ("ties", "Ties"),
    ):
        questions = comparison[outcome]
        lines += ["", f"{title}: {len(questions)}"]
        listed = questions[:limit]
        if listed:
            cells = [[_cell(text) for text in _texts(question)] for question in listed]
            lines += ["", *markdown_table(["Id", "Question", "Answers", "a", "b"], cells)]
        if listed and len(questions) > limit:
            lines += ["", f"{len(questions) - limit} more are not listed."]
    return "\n".join(lines) + "\n"


def _question_means(samples: list[Record], scorer: str) -> list[float]:
    scores = [score_record(record, scorer) for record in samples]
    return [sum(score[metric] for score in scores) / len(scores) for metric in COMPARED]


def _texts(question: dict[str, Any]) -> list[str]:
    answers = " ; ".join(" / ".join(accepted) for accepted in question["answers"])
    predictions = [
        " // ".join("(none)" if prediction is None else prediction for prediction in question[f"predictions_{run}"])
        for run in ("a", "b")
    ]
    return [question["id"], question["question"], answers, *predictions]


def _cell(text: str) -> str:
    """Text as a cell shows it: in one line, not too long, and without what Markdown would take for markup."""
    line = " ".join(text.split())
    if len(line) > _MAX_CELL:
        line = line[: _MAX_CELL - 1] + "…"
    for markup, escaped in (
        ("\\", "\\\\"),
        ("&", "&amp;"),
        ("|", "\\|"),
        ("<", "&lt;"),
        ("`", "\\`"),
        ("*", "\\*"),
        ("_", "\\_"),
    ):
        line = line.replace(markup, escaped)
    return line

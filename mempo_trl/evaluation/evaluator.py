"""Evaluation of an agent: a model over questions, scored."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engines import open_engine
from ..run_folder import SUMMARY, SUMMARY_TABLE, Record, RunFolder
from ..runs import check_questions, check_samples, describe, run_questions
from .scorers import get_scorer
from .summary import check_bootstrap, summarize, to_markdown


@dataclass
class Evaluation:
    """What an evaluation found.

    Attributes:
        summary: metrics with confidence intervals, see `mempo_trl.evaluation.summarize`.
        records: one for each question and sample, see `mempo_trl.runs.run_questions`.
    """

    summary: dict[str, Any]
    records: list[Record]

    def to_markdown(self) -> str:
        """The summary as a table."""
        return to_markdown(self.summary)


def evaluate(
    model: Any,
    questions: Any,
    tools: Any = None,
    *,
    output_dir: str | Path | None = None,
    samples: int = 1,
    max_questions: int | None = None,
    scorer: str = "default",
    confidence: float = 0.95,
    resamples: int = 2000,
    overwrite: bool = False,
    progress: bool = True,
    notes: dict[str, Any] | None = None,
    **options: Any,
) -> Evaluation:
    """Run an agent over questions and score it.

    Args:
        model: as [`mempo_trl.engines.open_engine`] takes it: a checkpoint, a name on the Hub, the URL of an endpoint, a
            model of transformers.
        questions: rows with `question` (or `prompt`) and `answers`, and an `id` each: a list of dictionaries, a
            `datasets.Dataset`, or what [`mempo_trl.data.read_questions`] reads: a file, a folder, a name on the Hub.
        tools: functions that the agent may call.
        output_dir: folder for `trajectories.jsonl`, `summary.json` and `summary.md`. A run that was killed goes on
            there; more questions or samples are added to it. `None` writes nothing.
        samples: episodes of each question; more than one make sense with a temperature.
        max_questions: only the first so many.
        scorer: how answers are compared: "default", "squad" or "mem1".
        confidence: level of the intervals, of a bootstrap over questions.
        resamples: bootstrap samples.
        overwrite: whether to begin anew in `output_dir`.
        progress: whether there is a progress bar.
        notes: what else the run depends on, for instance where the tools search: `output_dir` is refused if it was
            begun with something else.
        **options: what else `open_engine` takes: `backend`, `endpoint`, `sampling`, `context_turns`, …

    Raises:
        ValueError, TypeError, ImportError, OSError: for arguments and data that are wrong, before anything is run.
        EndpointError, RuntimeError: if the endpoint, or a tool, cannot be reached again and again. What was done is in
            `output_dir`.
    """
    rows = load_questions(questions, max_questions, needs_answers=True)
    check_samples(samples)
    get_scorer(scorer)
    check_bootstrap(confidence, resamples)
    summarize_with: dict[str, Any] = {"scorer": scorer, "confidence": confidence, "resamples": resamples}
    engine = open_engine(model, tools, **options)
    if output_dir is None:
        records = run_questions(engine, rows, None, samples, "Evaluating", progress)
        return Evaluation(summarize(records, **summarize_with), records)
    with RunFolder(output_dir, describe(engine, model, "evaluation", notes), overwrite) as folder:
        records = run_questions(engine, rows, folder, samples, "Evaluating", progress)
        evaluation = Evaluation(summarize(records, **summarize_with), records)
        folder.write(SUMMARY, [json.dumps(evaluation.summary, indent=2, ensure_ascii=False) + "\n"])
        folder.write(SUMMARY_TABLE, [evaluation.to_markdown()])
    return evaluation


def load_questions(
    questions: Any, max_questions: int | None = None, needs_answers: bool = False
) -> list[dict[str, Any]]:
    """Questions from wherever they are.

    Args:
        questions: see `evaluate`.
        max_questions: only the first so many.
        needs_answers: whether every question must have answers.

    Raises:
        ValueError: if there are none, or a row is none.
    """
    number = max_questions
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
        raise ValueError(f"`max_questions={max_questions!r}` is not allowed: it must be a whole number, at least 1.")
    if isinstance(questions, str | Path):
        from ..data import read_questions

        questions = read_questions(str(questions)).rows
    rows = check_questions(itertools.islice(questions, number))
    if needs_answers and any(row["answers"] is None for row in rows):
        raise ValueError("Questions without `answers` cannot be scored: give a column `answers`.")
    return rows

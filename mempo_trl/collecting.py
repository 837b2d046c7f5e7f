"""Collecting traces: a model that can already do the work shows how, for a policy to imitate."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .data.traces import Selection, select_traces, turn_pairs
from .engines import open_engine
from .evaluation.evaluator import load_questions
from .evaluation.scorers import get_scorer
from .evaluation.summary import score_record
from .protocol import NO_MEMORY_SYSTEM_PROMPT, build_prompt
from .run_folder import SFT, SFT_NO_MEMORY, SUMMARY, RunFolder, json_lines
from .runs import Question, check_samples, describe, run_questions


@dataclass
class Collection:
    """What was collected.

    Attributes:
        episodes: how many were run.
        selection: which of them are kept, and why the others are not.
        pairs: rows of `sft.jsonl`: turns of the episodes that are kept.
    """

    episodes: int
    selection: Selection
    pairs: int

    def summary(self) -> dict[str, Any]:
        """The numbers, in plain types."""
        kept = self.selection.kept
        return {
            "episodes": self.episodes,
            "kept": len(kept),
            "questions": len({record["id"] for record in kept}),
            "pairs": self.pairs,
            "dropped": dict(self.selection.dropped.most_common()),
        }


def collect(
    model: Any,
    questions: Any,
    tools: Any,
    output_dir: str | Path,
    *,
    samples: int = 1,
    max_questions: int | None = None,
    metric: str = "exact_match",
    min_score: float = 1.0,
    max_per_question: int | None = 1,
    sft_context_turns: int | None = None,
    sft_system_prompt: str | None = None,
    scorer: str = "default",
    overwrite: bool = False,
    progress: bool = True,
    notes: dict[str, Any] | None = None,
    **options: Any,
) -> Collection:
    """Run a model over questions, and write what it does well as fine-tuning data.

    The folder gets `trajectories.jsonl` with every episode, `sft.jsonl` with a (context, turn) pair for each turn of
    those that are kept, `sft_no_memory.jsonl` with the same turns without memories in full context, for baselines, and
    `summary.json`. A run that was killed goes on there.

    Args:
        model, questions, tools, samples, max_questions, scorer, overwrite, progress, notes: as
            [`mempo_trl.evaluation.evaluate`] takes them.
        output_dir: the folder.
        metric: what is compared with `min_score`: "exact_match" or "f1".
        min_score: the least score of what is kept.
        max_per_question: episodes kept of a question, those with the fewest tokens; `None` for all.
        sft_context_turns: earlier turns that a turn of `sft.jsonl` sees beside the prompt, as the policy will be
            trained; `None` for all of them.
        sft_system_prompt: system message of `sft.jsonl`; `None` takes the one that the model was given. A teacher often
            needs to be told more than a policy that is trained.
        **options: what else [`mempo_trl.engines.open_engine`] takes.

    Raises:
        ValueError, TypeError, ImportError, OSError, EndpointError, RuntimeError: as `evaluate`.
    """
    if metric not in ("exact_match", "f1"):
        raise ValueError(f"`metric={metric!r}` is not allowed: it must be 'exact_match' or 'f1'.")
    if not isinstance(min_score, int | float) or not 0 <= min_score <= 1:
        raise ValueError(f"`min_score={min_score!r}` is not allowed: it must be from 0 to 1.")
    for name, number in (("sft_context_turns", sft_context_turns), ("max_per_question", max_per_question)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ValueError(f"`{name}={number!r}` is not allowed: it must be a whole number, at least 1, or None.")
    rows = load_questions(questions, max_questions, needs_answers=True)
    check_samples(samples)
    get_scorer(scorer)
    engine = open_engine(model, tools, **options)
    about = describe(engine, model, "collection", notes)
    with RunFolder(output_dir, about, overwrite) as folder:
        records = run_questions(engine, rows, folder, samples, "Collecting", progress)
        selection = select_traces(
            records, lambda record: score_record(record, scorer)[metric], min_score, max_per_question
        )

        def pairs(system_prompt: str | None, context_turns: int | None, memory: bool) -> list[dict[str, Any]]:
            prompts = {row["id"]: _opening(row, engine.settings.system_prompt, system_prompt) for row in rows}
            return [
                pair
                for record in selection.kept
                for pair in turn_pairs(
                    record,
                    prompts[record["id"]],
                    context_turns,
                    about["tools"],
                    memory,
                )
            ]

        with_memory = pairs(sft_system_prompt, sft_context_turns, memory=True)
        folder.write(SFT, json_lines(with_memory))
        folder.write(SFT_NO_MEMORY, json_lines(pairs(NO_MEMORY_SYSTEM_PROMPT, None, memory=False)))
        collection = Collection(len(records), selection, len(with_memory))
        folder.write(SUMMARY, [json.dumps(collection.summary(), indent=2) + "\n"])
    return collection


def _opening(question: Question, own: str, system_prompt: str | None) -> list[dict[str, Any]]:
    """The conversation that opens an episode, with another system message if one is given."""
    prompt = question["prompt"] or build_prompt(question["question"], own)
    if system_prompt is None:
        return prompt
    rest = prompt[1:] if prompt[0]["role"] == "system" else prompt
    return [{"role": "system", "content": system_prompt}, *rest] if system_prompt else rest

"""Running an agent over many questions."""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from .data.columns import check_answers
from .engines import EndpointError, Engine, Episode
from .evaluation.summary import check_record
from .protocol import build_prompt
from .run_folder import Record, RunFolder, json_lines, short


Question = dict[str, Any]


def check_questions(rows: Iterable[dict[str, Any]]) -> list[Question]:
    """Bring rows to the form that runs work with.

    Args:
        rows: dictionaries with `question` (a string) or `prompt` (a conversation whose last message asks), `answers`
            (as `MemPOTrainer` takes them; may be missing, then nothing can be scored), and `id` (the row's number if
            missing).

    Returns:
        `{"id": str, "question": str, "prompt": conversation or None, "answers": list of lists of strings}`.

    Raises:
        ValueError: for a row that is none, or two rows of one id.
    """
    questions: list[Question] = []
    seen: set[str] = set()
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"Row {number} is no dictionary: {short(row)}")
        prompt = row.get("prompt")
        question = row.get("question")
        if isinstance(prompt, list):
            if not prompt or not all(isinstance(message, Mapping) and "role" in message for message in prompt):
                raise ValueError(f"Row {number} has no conversation in `prompt`: {short(prompt)}")
            question = prompt[-1].get("content") if question is None else question
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"Row {number} has no text in `question`: {short(row)}")
        answers = row.get("answers")
        if answers is not None:
            check_answers(answers, f"row {number}")
            answers = answers if isinstance(answers[0], list) else [answers]
        name = str(number if row.get("id") is None else row["id"])
        if name in seen:
            raise ValueError(f"Two rows have the id {name!r}: give each its own.")
        seen.add(name)
        prompt = prompt if isinstance(prompt, list) else None
        try:
            # As it will be read from the run's folder.
            [line] = json_lines([{"id": name, "question": question, "prompt": prompt, "answers": answers}])
        except TypeError as error:
            raise ValueError(f"Row {number} holds what JSON cannot ({error}): {short(row)}") from error
        questions.append(json.loads(line))
    if not questions:
        raise ValueError("There are no questions.")
    return questions


def run_questions(
    engine: Engine,
    questions: Sequence[Question],
    folder: RunFolder | None = None,
    samples: int = 1,
    description: str = "Questions",
    progress: bool = True,
) -> list[Record]:
    """Run an agent over questions, those aside that the folder has already.

    Args:
        engine: runs the agent.
        questions: as `check_questions` returns them.
        folder: where to add what is done; `None` keeps it in memory alone.
        samples: episodes of each question.
        description: what the progress bar says.
        progress: whether there is a progress bar.

    Returns:
        The records of these questions and samples, in their order: `id`, `sample`, `question`, `answers`, `prediction`
        and what `Episode.to_dict` has.

    Raises:
        ValueError: if the folder has another question or other answers under an id.
        EndpointError: if an endpoint refuses every request.
    """
    check_samples(samples)
    if samples > 1 and engine.sampling.temperature == 0:
        warnings.warn(
            "All samples of a question will be the same: give `sampling=Sampling(temperature=1.0)`, or the like.",
            stacklevel=2,
        )
    records = {(record["id"], record["sample"]): record for record in (folder.records if folder else [])}
    for question in questions:
        for sample in range(samples):
            record = records.get((question["id"], sample))
            if record and any(record.get(name) != question[name] for name in ("question", "answers")):
                raise ValueError(
                    f"The question {question['id']!r} is another one than in {folder.path if folder else 'the run'}: "
                    "name another folder, or begin anew (overwrite)."
                )
    keys = [(question, sample) for question in questions for sample in range(samples)]
    waiting = [(question, sample) for question, sample in keys if (question["id"], sample) not in records]
    prompts = [
        question["prompt"] or build_prompt(question["question"], engine.settings.system_prompt)
        for question, _ in waiting
    ]
    seeds = [_seed(engine.sampling.seed, question["id"], sample) for question, sample in waiting]
    bar = tqdm(
        total=len(keys), initial=len(keys) - len(waiting), desc=description, unit="episode", disable=not progress
    )
    with bar, contextlib.closing(engine.rollout(prompts, seeds)) as rollout:
        for position, episode in _but_refusals_of_everything(rollout, any(map(_came_to_something, records.values()))):
            question, sample = waiting[position]
            record = to_record(question, sample, episode)
            if question["answers"] is not None:
                check_record(record)
            if folder is not None:
                folder.append(record)
            records[question["id"], sample] = record
            bar.update()
    return [records[question["id"], sample] for question, sample in keys]


def _came_to_something(record: Record) -> bool:
    """Whether an endpoint answered at all."""
    return bool(record["steps"]) or record.get("error") is None


def _but_refusals_of_everything(episodes: Iterator[tuple[int, Episode]], works: bool) -> Iterator[tuple[int, Episode]]:
    """The same episodes; those that an endpoint refused only once it is seen that it does not refuse everything.

    A server that was started with a wrong option would else leave a folder full of wrong answers.

    Args:
        episodes: `(position, episode)`, as they end.
        works: whether the run has other episodes already.

    Raises:
        EndpointError: with what the endpoint says, if it refused all of them and the run has no other.
    """
    refused: list[tuple[int, Episode]] = []
    for position, episode in episodes:
        if episode.error is not None and not episode.steps:
            refused.append((position, episode))
            continue
        works = True
        yield from refused
        refused.clear()
        yield position, episode
    if refused and not works:
        raise EndpointError(f"The endpoint refuses every request: {refused[-1][1].error}")
    yield from refused


def check_samples(samples: Any) -> None:
    """Raise `ValueError` unless this is a number of episodes."""
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        raise ValueError(f"`samples={samples!r}` is not allowed: it must be a whole number, at least 1.")


def to_record(question: Question, sample: int, episode: Episode) -> Record:
    """The line that an episode makes in `trajectories.jsonl`."""
    about = {"id": question["id"], "sample": sample, "question": question["question"], "answers": question["answers"]}
    return {**about, "prediction": episode.answer, **episode.to_dict()}


def describe(engine: Engine, model: Any, purpose: str, notes: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a run depends on: the model and its files, the settings, the tools, how tokens are drawn.

    Args:
        engine: runs the agent.
        model: what the user named; if it is a folder, its files count.
        purpose: "evaluation" or "collection".
        notes: what else must not change, for instance where the tools search.
    """
    import dataclasses

    from transformers.utils import get_json_schema

    settings = dataclasses.asdict(engine.settings)
    settings["tools"] = [get_json_schema(tool) for tool in engine.tools]
    files: list[list[Any]] = []
    if isinstance(model, str) and Path(model).is_dir():
        files = [
            [file.name, file.stat().st_size, file.stat().st_mtime_ns]
            for file in sorted(Path(model).glob("*.safetensors")) + sorted(Path(model).glob("*.bin"))
        ]
    return {
        "format": 1,
        "purpose": purpose,
        "model": engine.identity,
        "model_files": files,
        "engine": type(engine).__name__,
        **engine.details,
        "sampling": dataclasses.asdict(engine.sampling),
        **settings,
        **(notes or {}),
    }


def _seed(seed: int, name: str, sample: int) -> int:
    """A number that is the same wherever and in whatever order a question is run."""
    digest = hashlib.sha256(json.dumps([seed, name, sample]).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1

"""Evaluation during training: held-out questions, every so many steps."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers import Trainer, TrainerCallback

from ..engines.tokens import episode
from ..protocol import build_prompt
from ..run_folder import SUMMARY, SUMMARY_TABLE, TRAJECTORIES, Record, json_lines, write_whole
from ..runs import to_record
from .evaluator import load_questions
from .scorers import get_scorer
from .summary import summarize, to_markdown


if TYPE_CHECKING:
    from ..mempo_trainer import MemPOTrainer


_LOGGED = ("exact_match", "objective_exact_match", "f1", "turns", "total_tokens", "peak_tokens", "well_formed")


class EvaluationCallback(TrainerCallback):
    """Evaluates the policy on held-out questions while it is trained, with the trainer's own engine and tools.

    What it finds is logged under `heldout/` (exact match, F1, turns, tokens), and written to a folder for each time:
    `trajectories.jsonl`, `summary.json`, `summary.md`, as [`mempo_trl.evaluation.evaluate`] writes them, so that
    `mempo eval --compare` can compare two of them. All processes share the questions.

    Example:

    ```python
    >>> trainer.add_callback(EvaluationCallback(trainer, held_out, steps=50))
    ```

    Args:
        trainer: the trainer that it is added to.
        questions: as `evaluate` takes them.
        steps: optimizer steps between two evaluations; there is one before the first step and one at the end, too.
        output_dir: where the folders go; `heldout` in the trainer's output folder if not given.
        temperature: sampling temperature; 0 takes the most probable token each time.
        max_questions: only the first so many.
        scorer: how answers are compared.

    Raises:
        ValueError: for questions or arguments that are wrong.
    """

    def __init__(
        self,
        trainer: "MemPOTrainer",
        questions: Any,
        steps: int = 100,
        output_dir: str | Path | None = None,
        temperature: float = 0.0,
        max_questions: int | None = None,
        scorer: str = "default",
    ):
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"`steps={steps!r}` is not allowed: it must be a whole number, at least 1.")
        if not isinstance(temperature, int | float) or temperature < 0:
            raise ValueError(f"`temperature={temperature!r}` is not allowed: it must be 0 or more.")
        if trainer.environment_factories is not None:
            raise ValueError(
                "With `environment_factory`, questions come from the environment: give the trainer an `eval_dataset` "
                "instead of this callback."
            )
        get_scorer(scorer)
        self.trainer, self.steps, self.temperature, self.scorer = trainer, steps, temperature, scorer
        self.questions = load_questions(questions, max_questions, needs_answers=True)
        self.output_dir = Path(output_dir or Path(str(trainer.args.output_dir)) / "heldout")

    def on_train_begin(self, args, state, control, **kwargs):
        """Evaluate before the first step."""
        self._evaluate(state)

    def on_step_end(self, args, state, control, **kwargs):
        """Evaluate every so many steps."""
        if state.global_step % self.steps == 0:
            self._evaluate(state)

    def on_train_end(self, args, state, control, **kwargs):
        """Evaluate what came out."""
        self._evaluate(state)

    def _evaluate(self, state) -> None:
        step = state.global_step
        # The history is part of checkpoints: a run that goes on from one knows what was evaluated before it.
        if any(entry["step"] == step and "heldout/f1" in entry for entry in state.log_history):
            return
        accelerator = self.trainer.accelerator
        records = self._run(accelerator.process_index, accelerator.num_processes)
        summary = summarize(records, scorer=self.scorer)
        logs = {f"heldout/{name}": summary["all"]["metrics"][name]["mean"] for name in _LOGGED}
        # GRPOTrainer's own `log` would take along what training has counted since its last entry, and forget it. Nor
        # may this entry be taken for the one that training is to make after this step.
        should_log = self.trainer.control.should_log
        Trainer.log(self.trainer, logs)
        self.trainer.control.should_log = should_log
        if accelerator.is_main_process:
            folder = self.output_dir / f"step-{step}"
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / TRAJECTORIES, json_lines(records))
            write_whole(folder / SUMMARY, json_lines([summary]))
            write_whole(folder / SUMMARY_TABLE, [to_markdown(summary)])

    def _run(self, process: int, processes: int) -> list[Record]:
        """The records of all questions, on every process."""
        each = -(-len(self.questions) // processes)
        # Every process has as many questions: some are asked twice, and counted once.
        own = [(process * each + number) % len(self.questions) for number in range(each)]
        size = self.trainer.args.per_device_eval_batch_size
        found: list[tuple[int, Record]] = []
        for start in range(0, each, size):
            batch = own[start : start + size]
            questions = [self.questions[number] for number in batch]
            prompts = [q["prompt"] or build_prompt(q["question"], self.trainer.args.system_prompt) for q in questions]
            trajectories = self.trainer.run_agent(prompts, self.temperature)
            found += [
                (number, to_record(question, 0, episode(trajectory)))
                for number, question, trajectory in zip(batch, questions, trajectories, strict=True)
            ]
        by_number = dict(gather_object(found))
        return [by_number[number] for number in range(len(self.questions))]

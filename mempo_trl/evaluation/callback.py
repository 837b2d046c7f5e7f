"""Evaluation during training: held-out questions, every so many steps."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from ..engines.tokens import episode
from ..protocol import build_prompt
from ..run_folder import TRAJECTORIES, Record, json_lines, write_whole
from ..runs import to_record
from .evaluator import load_questions
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
        self.trainer, self.steps, self.temperature, self.scorer = trainer, steps, temperature, scorer
        self.questions = load_questions(questions, max_questions, needs_answers=True)
        self.output_dir = Path(output_dir or Path(str(trainer.args.output_dir)) / "heldout")
        self._last = -1

    def on_train_begin(self, args, state, control, **kwargs):
        """Evaluate before the first step."""
        self._evaluate(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        """Evaluate every so many steps."""
        if state.global_step % self.steps == 0:
            self._evaluate(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        """Evaluate what came out."""
        self._evaluate(state.global_step)

    def _evaluate(self, step: int) -> None:
        if step == self._last:
            return
        self._last = step
        accelerator = self.trainer.accelerator
        records = self._run(accelerator.process_index, accelerator.num_processes)
        summary = summarize(records, scorer=self.scorer)
        self.trainer.log({f"heldout/{name}": summary["all"]["metrics"][name]["mean"] for name in _LOGGED})
        if accelerator.is_main_process:
            folder = self.output_dir / f"step-{step}"
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / TRAJECTORIES, json_lines(records))
            write_whole(folder / "summary.json", json_lines([summary]))
            write_whole(folder / "summary.md", [to_markdown(summary)])

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

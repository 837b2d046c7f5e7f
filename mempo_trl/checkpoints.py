"""Checkpoints that appear whole or not at all, and that a run continues from as if it had never stopped."""

import errno
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from datasets import IterableDataset
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from trl import GRPOConfig, GRPOTrainer


logger = logging.getLogger(__name__)

# Inside the output directory. Nothing takes them for checkpoints, and none of them outlives the next save.
STAGING = "_mempo_incomplete"
_DISCARDED = "_mempo_discarded"
_STATE = "rollouts_{process}.pt"
# safetensors and torch tell it in words alone, torch in these.
_WORDS_OF_A_FULL_DISK = (
    "No space left",
    "Disk quota exceeded",
    "file write failed",
    "iostream error",
    "unexpected pos",
)


@contextmanager
def staged(run_dir: str | Path, local_main: bool, wait: Callable[[], None]) -> Iterator[Path]:
    """Let a checkpoint be written to a folder of its own, and move it to its place once every process has written.

    Args:
        run_dir: folder that checkpoints belong in.
        local_main: whether this process is the first one of its machine. These move what was written, since machines
            may not share a file system.
        wait: returns when every process has called it.

    Yields:
        The folder to write `checkpoint-N` into, on the file system of `run_dir`.

    Raises:
        OSError: if the disk is full. What was written is removed again, and the checkpoints before are untouched.
    """
    staging = Path(run_dir) / STAGING
    try:
        if local_main:
            clean(run_dir)
            staging.mkdir(parents=True, exist_ok=True)
        wait()
        yield staging
        wait()
        if local_main:
            for folder in sorted(staging.glob("*")):
                _flush(folder)
                _replace(folder, Path(run_dir) / folder.name)
            shutil.rmtree(staging, ignore_errors=True)
        wait()
    except Exception as error:
        full = _disk_is_full(error)
        shutil.rmtree(staging, ignore_errors=True)
        if full:
            raise OSError(
                errno.ENOSPC,
                f"The disk is full, or cannot be written to: no checkpoint was written to {run_dir}. Those before it "
                "are whole: make room (a smaller `save_total_limit` or `save_only_model=True` helps), and go on with "
                "`train(resume_from_checkpoint=True)`",
            ) from error
        raise


def clean(run_dir: str | Path) -> None:
    """Remove what a process that was killed in the middle of a save has left."""
    for name in (STAGING, _DISCARDED):
        shutil.rmtree(Path(run_dir) / name, ignore_errors=True)


def discard(checkpoint: str | Path) -> None:
    """Delete a checkpoint so that a process killed meanwhile leaves nothing that looks like one."""
    aside = Path(checkpoint).parent / _DISCARDED / Path(checkpoint).name
    aside.parent.mkdir(exist_ok=True)
    os.rename(checkpoint, aside)
    shutil.rmtree(aside.parent, ignore_errors=True)


def _replace(source: Path, target: Path) -> None:
    """Rename a folder, in place of another one if there is."""
    if target.exists():
        discard(target)
    try:
        os.rename(source, target)
    except FileNotFoundError:  # another machine that shares the file system was faster
        if not target.exists():
            raise
    _flush_folder(target.parent)


def _disk_is_full(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, means that there is no room left."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return True
        if any(words in str(error) for words in _WORDS_OF_A_FULL_DISK):
            return True
        error = error.__cause__ or error.__context__
    return False


def _flush(folder: Path) -> None:
    """Bring a folder's files to the disk, so that not even a power failure leaves a complete name with torn files."""
    for directory, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(directory, name), "rb") as file:
                os.fsync(file.fileno())
        _flush_folder(directory)


def _flush_folder(folder: str | Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rotate(run_dir: str | Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints, so that `limit` are left, never the last one nor the best.

    Args:
        run_dir: folder that they are in.
        limit: how many to keep; `None` for all.
        best: path of the best one.
    """
    checkpoints = sort_checkpoints(str(run_dir), use_mtime=True)
    kept = {checkpoints[-1], str(Path(best)) if best else checkpoints[-1]} if checkpoints else set()
    spare = len(checkpoints) - max(limit, len(kept)) if limit else 0
    for checkpoint in [c for c in checkpoints if c not in kept][: max(spare, 0)]:
        discard(checkpoint)


def save_rollouts(
    checkpoint: str | Path,
    process: int,
    layout: dict[str, int],
    step: int,
    buffer: Any,
    metrics: dict[str, list[float]],
) -> None:
    """Save what TRL's trainer holds between two steps of a generation.

    Args:
        checkpoint: folder of the checkpoint.
        process: index of this process.
        layout: how rollouts are spread over processes and steps.
        step: forwards and backwards so far, those in an accumulation each counted.
        buffer: the rollouts that later steps train on; `None` if the next step generates.
        metrics: values that have not been logged yet.
    """
    state = {"layout": layout, "step": step, "buffer": buffer, "metrics": metrics}
    torch.save(state, Path(checkpoint) / _STATE.format(process=process))


def load_rollouts(checkpoint: str | Path, process: int, layout: dict[str, int], device: torch.device) -> dict | None:
    """Load what `save_rollouts` saved.

    Args:
        checkpoint, process, layout: as there.
        device: where tensors go.

    Returns:
        What was saved, without the rollouts if they are not for this layout; `None` if nothing was.
    """
    path = Path(checkpoint) / _STATE.format(process=process)
    if not path.exists():
        return None
    # torch cannot restore a CPU that has a number, as accelerate gives it to one of several processes.
    state = torch.load(path, map_location="cpu" if device.type == "cpu" else device, weights_only=True)
    if state["layout"] != layout:
        logger.warning(
            "%s was saved with %s, but now it is %s: the next step generates new rollouts.",
            checkpoint,
            state["layout"],
            layout,
        )
        state["buffer"] = None
        state["step"] = None
    return state


class ResumableTrainer(GRPOTrainer):
    """The part of a trainer that loses nothing: neither when it is killed, nor when the disk fills up, nor to a NaN."""

    args: GRPOConfig
    _staging: Path | None = None
    _sampler: Any = None
    _broken_steps = 0  # in a row, up to now

    def train(self, *args, **kwargs):
        self._broken_steps = 0
        return super().train(*args, **kwargs)

    def _get_output_dir(self, trial) -> str:
        return str(self._staging or super()._get_output_dir(trial))

    def _save_checkpoint(self, model, trial) -> None:
        if self._broken_steps and self.is_deepspeed_enabled:
            logger.warning("Step %d was not finite: no checkpoint is made of it.", self.state.global_step)
            return
        run_dir = Path(self._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        # Where it is now: the folder of a run may have been moved.
        best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if self.state.best_global_step and best.exists():
            self.state.best_model_checkpoint = str(best)
        with staged(run_dir, self.args.local_process_index == 0, self.accelerator.wait_for_everyone) as staging:
            self._staging = staging
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staging = None
            if self.state.best_model_checkpoint == str(staging / name):
                self.state.best_model_checkpoint = str(run_dir / name)
                if self.args.should_save:
                    self.state.save_to_json(str(staging / name / TRAINER_STATE_NAME))
        if self.args.should_save:
            rotate(run_dir, self.args.save_total_limit, self.state.best_model_checkpoint)
        self._checkpoint_saved(run_dir / name)

    def _push_from_checkpoint(self, checkpoint_folder) -> None:
        """Not yet: it is not in its place."""

    def _checkpoint_saved(self, checkpoint: Path) -> None:
        """Called on every process once a checkpoint is in its place."""

    def _save_rng_state(self, output_dir) -> None:
        super()._save_rng_state(output_dir)
        steps = cast(int, self.args.steps_per_generation) * self.num_iterations
        save_rollouts(
            output_dir,
            self.accelerator.process_index,
            self._layout(),
            self._step,
            None if self._step % steps == 0 else self._buffered_inputs,
            dict(self._metrics["train"]),
        )

    def _layout(self) -> dict[str, int]:
        return {
            "processes": self.accelerator.num_processes,
            "per_device_train_batch_size": self.args.per_device_train_batch_size,
            "steps_per_generation": self.args.steps_per_generation,
            "num_iterations": self.num_iterations,
        }

    def _get_train_sampler(self, dataset=None):
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if isinstance(self.train_dataset, IterableDataset) and (self.state.epoch or 0) >= 1:
            logger.warning(
                "`train_dataset` is a stream, so the place in it where %s was saved, after its first pass, cannot be "
                "found: training goes on with the beginning of the stream.",
                checkpoint,
            )
        self._buffered_inputs = None
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        state = load_rollouts(checkpoint, self.accelerator.process_index, self._layout(), self.accelerator.device)
        if state is not None:
            self._buffered_inputs = state["buffer"]
            self._step = self._step if state["step"] is None else state["step"]
            self._metrics["train"].update(state["metrics"])
        # Every epoch has an order of its own, drawn when it begins.
        if getattr(self._sampler, "shuffle", False):
            for _ in range(int(self.state.epoch or 0)):
                torch.randperm(self._sampler.num_samples, generator=self._sampler.generator)

    def _get_grad_norm(self, model, grad_norm=None):
        grad_norm = super()._get_grad_norm(model, grad_norm)
        # With fp16 a step that overflows is how the loss scale is found.
        if grad_norm is not None and self.accelerator.mixed_precision != "fp16":
            self._refuse_broken_steps(model, float(grad_norm))
        return grad_norm

    def _refuse_broken_steps(self, model, grad_norm: float) -> None:
        """Skip an optimizer step that would make every weight NaN, and stop at the second in a row."""
        if math.isfinite(grad_norm) and grad_norm >= 0:  # DeepSpeed calls one that is not −1
            self._broken_steps = 0
            return
        self._broken_steps += 1
        step = self.state.global_step + 1
        if self._broken_steps >= 2:
            raise FloatingPointError(
                f"Steps {step - 1} and {step} have gradients that are not finite (NaN or infinite), so training stops. "
                f"{self._last_checkpoint_before(step)} Lower `learning_rate` or `max_grad_norm`, or look at the "
                "rewards and log-probabilities of these steps."
            )
        logger.warning("Step %d has gradients that are not finite: its update is skipped.", step)
        for parameter in model.parameters():
            parameter.grad = None

    def _last_checkpoint_before(self, step: int) -> str:
        run_dir = self._get_output_dir(None)
        checkpoints = sort_checkpoints(run_dir) if os.path.isdir(run_dir) else []
        for checkpoint in reversed(checkpoints):
            if int(checkpoint.rpartition("-")[2]) < step:  # later ones are another run's
                return f"The last checkpoint, {checkpoint}, is from before."
        return "There is no checkpoint from before."

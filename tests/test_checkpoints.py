"""What is on the disk at any moment is whole, and a run that goes on from it is the run that never stopped."""

import errno
import json
import os
import random
import shutil
import signal
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from support import byte_tokenizer, one_step, search, tiny_llama
from tqdm import tqdm
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from mempo_trl import MemPOConfig, MemPOTrainer
from mempo_trl.checkpoints import STAGING


def length_reward(completions, **kwargs):
    return [float(len(completion[0]["content"]) % 7) for completion in completions]


def build(output_dir: Path, callbacks=(), train_dataset=None, **config) -> MemPOTrainer:
    """A trainer that really samples, of questions that each come once in an epoch of four steps."""
    tokenizer = byte_tokenizer()
    questions = [f"Where is {name}?" for name in ("Ada", "Bo", "Cy", "Di", "Ed", "Flo", "Gus", "Hal")]
    data = Dataset.from_dict({"question": questions, "answers": [["Paris"]] * len(questions)})
    options = {
        **one_step(output_dir, 4),
        "max_steps": 6,
        "num_generations": 2,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 1,
        "max_turns": 2,
        "max_turn_length": 12,
        "disable_tqdm": True,
        "seed": 7,
        **config,
    }
    return MemPOTrainer(
        tiny_llama(tokenizer),
        reward_funcs=length_reward,
        args=MemPOConfig(**options),
        train_dataset=train_dataset or data,
        eval_dataset=data.select(range(2)),
        processing_class=tokenizer,
        tools=[search],
        callbacks=list(callbacks),
    )


def weights(trainer: MemPOTrainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def logs(trainer: MemPOTrainer) -> list[dict]:
    """All that was logged but how long things took, and the loss, whose mean begins anew with a run."""
    others = ("time/", "step_time", "train_", "total_flos", "loss")
    return [
        {name: value for name, value in entry.items() if not name.startswith(others)}
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps_per_generation": 4, "context_turns": 1},
        {"steps_per_generation": 2, "num_iterations": 2, "logging_steps": 4},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "per_device_train_batch_size": 2},
        {"optim": "adamw_torch_fused", "shuffle_dataset": False, "lr_scheduler_type": "cosine"},
    ],
    ids=["plain", "within a generation", "within its iterations", "with accumulation", "in order"],
)
@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, options, step):
    whole = build(tmp_path / "whole", **options)
    whole.train()
    resumed = build(tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert resumed.state.global_step == whole.state.global_step == 6
    assert torch.equal(weights(resumed), weights(whole))
    assert logs(resumed) == logs(whole)


def test_rollouts_of_another_layout_are_generated_anew(tmp_path, caplog):
    build(tmp_path, steps_per_generation=4, max_steps=2).train()
    trainer = build(tmp_path, steps_per_generation=2, max_steps=4)
    with caplog.at_level("WARNING", logger="mempo_trl"):
        trainer.train(resume_from_checkpoint=True)
    assert "the next step generates new rollouts" in caplog.text
    assert trainer.state.global_step == 4


def test_a_checkpoint_of_grpo_can_be_continued(tmp_path):
    build(tmp_path, steps_per_generation=4, max_steps=2).train()
    (tmp_path / "checkpoint-2" / "rollouts_0.pt").unlink()
    trainer = build(tmp_path, steps_per_generation=4, max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4


def test_the_best_checkpoint_is_kept_and_known_by_its_place(tmp_path):
    trainer = build(
        tmp_path,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=2,
        num_generations_eval=2,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
        load_best_model_at_end=True,
        save_total_limit=2,
    )
    evaluate = trainer.evaluate
    # The second step is the best.
    trainer.evaluate = lambda **kwargs: {**evaluate(**kwargs), "eval_reward": float(trainer.state.global_step == 2)}
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    for step in (2, 4):
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")
    best = load_file(tmp_path / "checkpoint-2" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(trainer.model.lm_head.weight, best)


def test_the_best_checkpoint_of_a_run_that_was_moved_is_kept(tmp_path):
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 2,
        "num_generations_eval": 2,
        "metric_for_best_model": "eval_reward",
        "greater_is_better": True,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
    }

    def train(output_dir, steps, resume):
        trainer = build(output_dir, max_steps=steps, **options)
        evaluate = trainer.evaluate
        trainer.evaluate = lambda **kw: {**evaluate(**kw), "eval_reward": float(trainer.state.global_step == 2)}
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    train(tmp_path / "a", 3, None)
    (tmp_path / "a").rename(tmp_path / "b")
    trainer = train(tmp_path / "b", 5, True)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "b" / "checkpoint-2")
    assert sorted(path.name for path in (tmp_path / "b").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-5"]


def test_a_stream_is_resumed_within_its_first_pass(tmp_path, caplog):
    def stream(output_dir):
        trainer = build(output_dir, max_steps=6)
        return build(output_dir, max_steps=6, train_dataset=trainer.train_dataset.to_iterable_dataset())

    whole = stream(tmp_path)
    whole.train()
    resumed = stream(tmp_path)
    with caplog.at_level("WARNING", logger="mempo_trl"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert torch.equal(weights(resumed), weights(whole))
        assert "is a stream" not in caplog.text
        stream(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert "`train_dataset` is a stream, so the place in it" in caplog.text


# --- Killed processes -----------------------------------------------------------------------------------------------


def spawn(action) -> int:
    """Run in a process of its own, without the seconds that imports take."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        # tqdm's own is shared between processes: one that is killed while it holds it would stop all those after it.
        tqdm.set_lock(threading.RLock())
        action()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def test_a_run_killed_at_any_moment_goes_on(tmp_path):
    """Killed ten times, half of them while a checkpoint is written, it ends with the weights of a run left alone."""
    options = {"max_steps": 8, "steps_per_generation": 2, "save_total_limit": 2}
    assert os.waitpid(spawn(lambda: build(tmp_path / "alone", **options).train()), 0)[1] == 0
    run_dir = tmp_path / "killed"

    def go_on():
        trainer = build(run_dir, **options)
        trainer.train(resume_from_checkpoint=run_dir.exists() and get_last_checkpoint(run_dir))

    moments = random.Random(0)
    kills = while_saving = 0
    while kills < 10:
        before = get_last_checkpoint(run_dir) if run_dir.exists() else None
        child = spawn(go_on)
        # Every other time at a moment of a save, else at any after the start.
        saving = kills % 2 == 0
        wait = moments.uniform(0, 0.02) if saving else moments.uniform(0.1, 1.5)
        while saving and not (run_dir / STAGING).exists() and os.waitpid(child, os.WNOHANG)[0] == 0:
            time.sleep(0.0005)
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        while_saving += (run_dir / STAGING).exists()
        last = get_last_checkpoint(run_dir) if run_dir.exists() else None
        assert before is None or last is not None
        if last is not None:
            assert (Path(last) / "trainer_state.json").exists()
            if Path(last).name == "checkpoint-8":  # done too early to be killed ten times
                shutil.rmtree(run_dir)
    assert while_saving
    assert os.waitpid(spawn(go_on), 0)[1] == 0
    assert sorted(path.name for path in run_dir.iterdir() if path.is_dir()) == ["checkpoint-7", "checkpoint-8"]
    alone, killed = (load_file(tmp_path / name / "checkpoint-8" / "model.safetensors") for name in ("alone", "killed"))
    assert all(torch.equal(alone[name], killed[name]) for name in alone)


# --- Disks and numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["optimizer.pt", "rollouts_0.pt", "trainer_state.json"])
def test_a_full_disk(tmp_path, file):
    trainer = build(tmp_path, max_steps=3)
    save_model = trainer.save_model

    def fill_the_disk(output_dir=None, _internal_call=False):
        save_model(output_dir, _internal_call)
        if trainer.state.global_step == 2:
            (Path(output_dir) / file).symlink_to("/dev/full")

    trainer.save_model = fill_the_disk
    with pytest.raises(
        OSError,
        match=r"The disk is full, or cannot be written to: .* Those before it are whole",
    ):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["checkpoint-1"]
    resumed = build(tmp_path, max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


def test_a_disk_without_room_for_a_folder(tmp_path, monkeypatch):
    trainer = build(tmp_path, max_steps=2)
    mkdir = Path.mkdir

    def full(self, *args, **kwargs):
        if self.name == STAGING and trainer.state.global_step == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="Those before it are whole"):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["checkpoint-1"]


def test_what_others_keep_beside_the_checkpoints_stays(tmp_path):
    for name in ("incomplete", "discarded"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    build(tmp_path, max_steps=2, save_total_limit=1).train()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"incomplete", "discarded", "checkpoint-2"}
    assert len(list(tmp_path.glob("*/mine.txt"))) == 2


class Poison(TrainerCallback):
    """Makes gradients NaN in some steps."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_begin(self, args, state, control, model, **kwargs):
        def poison(gradient):
            return gradient * float("nan") if state.global_step + 1 in self.steps else gradient

        model.lm_head.weight.register_hook(poison)


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_two_steps_of_nan_in_a_row_stop(tmp_path, caplog, max_grad_norm):
    trainer = build(tmp_path, callbacks=[Poison({2, 4, 5})], max_grad_norm=max_grad_norm)
    with pytest.raises(FloatingPointError, match=r"Steps 4 and 5 have .* last checkpoint, .*checkpoint-4, is from"):
        trainer.train()
    assert caplog.text.count("its update is skipped") == 2
    assert weights(trainer).isfinite().all()
    # The step that was skipped left no trace in the weights.
    one, two = (load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_second_training_is_watched_as_well(tmp_path):
    trainer = build(tmp_path, callbacks=[Poison({1, 2, 3, 4, 5, 6})])
    for _ in range(2):
        with pytest.raises(FloatingPointError, match=r"Steps 1 and 2 have"):
            trainer.train()


def test_checkpoints_of_another_run_are_not_from_before(tmp_path):
    build(tmp_path).train()
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    with pytest.raises(FloatingPointError, match=r"Steps 1 and 2 have .* There is no checkpoint from before"):
        build(tmp_path, callbacks=[Poison({1, 2})], save_strategy="no").train()

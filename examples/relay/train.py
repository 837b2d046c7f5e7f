"""Train a search agent with memory from scratch, on the CPU, in a few minutes.

    python examples/relay/train.py

A small policy is cold-started on expert traces whose memories lose every other fact, so it loses them too. Then
`MemPOTrainer` trains it with real BM25 search, until it keeps what it found. With `--context-turns 1`, the default, a
turn sees nothing but the question and the turn before it, so what a memory lacks is lost for good.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch
import transformers
import trl
from policy import ANSWER_PREAMBLE, MAX_OBSERVATION_LENGTH, SYSTEM_PROMPT, ColdStart, load_or_train
from transformers import TrainerCallback, set_seed

import mempo_trl
from mempo_trl import MemPOConfig, MemPOTrainer
from mempo_trl.rewards import exact_match_reward, f1_reward, outcome_reward
from mempo_trl.search import BM25Index, make_search_tool


matplotlib.use("Agg")
import matplotlib.pyplot as plt


ROOT = Path(__file__).resolve().parent.parent.parent
TRAIN_SEED, HELD_OUT_SEED = 40, 41  # worlds with other facts than those of the cold start, and than one another
SHOWN = {
    "exact match": "eval_rewards/exact_match_reward/mean",
    "F1": "eval_rewards/f1_reward/mean",
    "turns": "eval_turns/mean",
    "memory length (tokens)": "eval_memory/length",
    "P(answer | memory)": "eval_memory/probability",
    "tokens per question": "eval_tokens/total",
    "the same, full context": "eval_tokens/full_context",
    "largest turn (tokens)": "eval_tokens/peak",
}


class JsonLines(TrainerCallback):
    """Appends what the trainer logs to a file, as it comes."""

    def __init__(self, path: Path):
        self.path = path
        path.unlink(missing_ok=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs" / "demo")
    parser.add_argument("--cache-dir", type=Path, default=ROOT / ".cache" / "relay", help="of cold-started policies")
    parser.add_argument("--context-turns", type=int, default=1, help="earlier turns that a turn sees; 0: all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold-start-steps", type=int, default=ColdStart.steps)
    parser.add_argument("--steps", type=int, default=25, help="of MemPOTrainer")
    parser.add_argument("--questions", type=int, default=8, help="in a step")
    parser.add_argument("--generations", type=int, default=8, help="rollouts of a question")
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--memory-coefficient", type=float, default=1.0)
    parser.add_argument("--held-out", type=int, default=128, help="questions to evaluate on")
    return parser.parse_args()


def main() -> None:
    started = time.perf_counter()
    args = parse_arguments()
    set_seed(args.seed)
    args.output_dir.mkdir(parents=True, exist_ok=True)

    settings = ColdStart(context_turns=args.context_turns or None, steps=args.cold_start_steps, seed=args.seed)
    model, tokenizer = load_or_train(settings, args.cache_dir)
    cold_started = time.perf_counter()

    train_world = settings.world(TRAIN_SEED, 160)
    held_out = settings.world(HELD_OUT_SEED, args.held_out)
    # The two worlds tell different things of the same people, so each has its index, and the tool asks the one in use.
    indexes = {
        name: BM25Index.build(world.documents, args.output_dir / f"index-{name}", overwrite=True)
        for name, world in (("train", train_world), ("held-out", held_out))
    }

    class Backend:
        """BM25 search in the corpus of the questions that are being asked."""

        def search(self, queries: list[str], k: int = 1) -> list[list[Any]]:
            return indexes["train" if model.training else "held-out"].search(queries, k)

    trainer = MemPOTrainer(
        model=model,
        # The outcome is what is trained on; the other two are only watched.
        reward_funcs=[outcome_reward, exact_match_reward, f1_reward],
        args=MemPOConfig(
            output_dir=str(args.output_dir),
            reward_weights=[1.0, 0.0, 0.0],
            per_device_train_batch_size=args.questions * args.generations,
            per_device_eval_batch_size=args.held_out,
            num_generations=args.generations,
            num_generations_eval=1,
            max_steps=args.steps,
            learning_rate=args.learning_rate,
            lr_scheduler_type="linear",
            loss_type="grpo",
            context_turns=args.context_turns or None,
            memory_coefficient=args.memory_coefficient,
            # Once every memory is good, what is left of their differences is noise.
            memory_std_floor=0.01,
            temperature=0.7,
            max_turns=6,
            max_turn_length=64,
            max_observation_length=MAX_OBSERVATION_LENGTH,
            system_prompt=SYSTEM_PROMPT,
            answer_preamble=ANSWER_PREAMBLE,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
            seed=args.seed,
        ),
        train_dataset=train_world.to_dataset(),
        eval_dataset=held_out.to_dataset(),
        processing_class=tokenizer,
        tools=[make_search_tool(Backend(), k=1)],
        callbacks=[JsonLines(args.output_dir / "metrics.jsonl")],
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model(str(args.output_dir / "checkpoint"))

    history = [logs for logs in trainer.state.log_history if "reward" in logs]
    plot(history, args.output_dir / "learning_curve.png")
    summary = {
        "em_before": before[SHOWN["exact match"]],
        "em_after": after[SHOWN["exact match"]],
        "f1_before": before[SHOWN["F1"]],
        "f1_after": after[SHOWN["F1"]],
        "seconds": time.perf_counter() - started,
        "cold_start_seconds": cold_started - started,
        "before": {name: before[key] for name, key in SHOWN.items()},
        "after": {name: after[key] for name, key in SHOWN.items()},
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "versions": {module.__name__: module.__version__ for module in (mempo_trl, trl, transformers, torch)},
    }
    (args.output_dir / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")

    print(f"\n{args.held_out} questions held out from training:\n")
    print(f"{'':24}{'before':>10}{'after':>10}")
    for name, key in SHOWN.items():
        print(f"{name:24}{show(before[key])}{show(after[key])}")
    if args.context_turns:
        saved = 1 - after[SHOWN["tokens per question"]] / after[SHOWN["the same, full context"]]
        print(f"\nWith {args.context_turns} earlier turn(s) in sight, a question takes {saved:.0%} fewer tokens.")
    print(f"\n{summary['seconds']:.0f} seconds. Checkpoint, metrics, learning curve and summary: {args.output_dir}")


def show(value: float | None) -> str:
    """A cell of the table. A policy that writes no memory has no length of memories."""
    return f"{'–' if value is None else format(value, '.2f'):>10}"


def plot(history: list[dict[str, float]], path: Path) -> None:
    """Reward and P(answer | memory) over the steps, as a PNG."""
    steps = range(1, len(history) + 1)
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(steps, [logs["reward"] for logs in history], label="reward")
    axes.plot(steps, [logs["memory/probability"] or 0 for logs in history], label="P(answer | memory)")
    axes.set(xlabel="step", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    main()

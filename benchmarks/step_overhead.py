"""The share of a training step that the memory pass takes.

    python benchmarks/step_overhead.py                                   # the demo's policy
    python benchmarks/step_overhead.py --model .cache/smollm2 --turns 4  # a checkpoint

A step is rollout, loss and backward, as `MemPOTrainer` times it: `time/memory` of `step_time` in its logs.

The demo's policy is trained as the demo trains it. With `--model`, every turn costs what it costs to sample it, but
what was sampled is replaced by as many tokens that keep to the protocol, so that each rollout has the same number of
turns, memories and observations whatever the checkpoint has learned.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from common import load, median, parser, report


ROOT = Path(__file__).resolve().parent.parent
TIMES = ("step_time", "time/generation", "time/tools", "time/memory")


def demo(args, folder: str) -> list[dict]:
    """Logs of the demo."""
    command = [sys.executable, ROOT / "examples" / "relay" / "train.py", "--output-dir", folder, "--held-out", "16"]
    subprocess.run([*command, "--steps", str(args.runs + 1)], check=True, stdout=sys.stderr)
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def checkpoint(args, folder: str) -> list[dict]:
    """Logs of steps in which each turn is replaced."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    from mempo_trl import MemPOConfig, MemPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    words = tokenizer(" fact" * args.turn, add_special_tokens=False)["input_ids"]

    def search(query: str) -> str:
        """Search the corpus.

        Args:
            query: What to look for.

        Returns:
            Passages.
        """
        return " fact" * args.observation

    rows = args.questions * args.generations
    trainer = MemPOTrainer(
        load(args),
        reward_funcs=lambda completions, **kwargs: [float(n % 2) for n in range(len(completions))],
        args=MemPOConfig(
            output_dir=folder,
            per_device_train_batch_size=rows,
            num_generations=args.generations,
            max_steps=args.runs + 1,
            context_turns=args.context_turns or None,
            max_turns=args.turns,
            max_turn_length=args.turn,
            max_observation_length=args.observation,
            generation_kwargs={"min_new_tokens": args.turn},
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=args.device == "cpu",
            bf16=args.device != "cpu",
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"question": ["Who is it?"] * 64, "answers": [["Somebody Else"]] * 64}),
        processing_class=tokenizer,
        tools=[search],
    )
    sample = trainer._generate_single_turn
    turn = 0

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def replace(contexts, *rest):
        nonlocal turn
        sampled, logprobs = sample(contexts, *rest)
        turn = turn % args.turns + 1
        head = encode("<mem>\n") + words[: args.memory] + encode("</mem>\n") if turn > 1 else []
        act = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'
        tail = encode("<think>" if turn < args.turns else "<think></think><answer>")
        close = encode("</think>" + act) if turn < args.turns else encode("Nobody</answer>")
        filler = args.turn - len(head) - len(tail) - len(close) - 1
        ids = [*head, *tail, *words[:filler], *close, tokenizer.eos_token_id]
        if not all(len(ids) == len(own) == args.turn for own in sampled):
            raise SystemExit(
                f"Turn {turn} does not have {args.turn} tokens: choose a longer --turn if the tags do not fit into it, "
                "or fewer and shorter ones if all of them do not fit into a rollout."
            )
        return [list(ids) for _ in sampled], logprobs

    trainer._generate_single_turn = replace
    trainer.train()
    assert all(len(trajectory.turns) == args.turns for trajectory in trainer._trajectories)
    return trainer.state.log_history


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--turns", type=int, default=4)
    arguments.add_argument("--turn", type=int, default=100, help="tokens of a turn, its memory included")
    arguments.add_argument("--memory", type=int, default=40)
    arguments.add_argument("--observation", type=int, default=100)
    arguments.add_argument("--context-turns", type=int, default=1, help="0: all of them")
    arguments.add_argument("--questions", type=int, default=1)
    arguments.add_argument("--generations", type=int, default=8)
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    # What training prints is no part of the report.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        logs = (checkpoint if args.model else demo)(args, folder)
    steps = [step for step in logs if "step_time" in step][1:]  # after one to warm up
    report(
        args,
        seconds={name: median([step[name] for step in steps]) for name in TIMES},
        memory_share=median([step["time/memory"] / step["step_time"] for step in steps]),
        turns=median([step["turns/mean"] for step in steps]),
        memories_per_rollout=median([step["memory/per_rollout"] for step in steps]),
    )


if __name__ == "__main__":
    main()

"""A training step's forward and backward with a window, against full context, as rollouts grow longer.

    python benchmarks/windowed_policy.py --turns 4 8 16 32 --plot windowed_policy.png

One rollout of T turns is trained on, with the mean log-probability of its sampled tokens as the loss:

- windowed: each turn under the prompt and the last k turns (`--window`), as `MemPOTrainer` does, in prefix trees of
  at most `--max-tokens` (`max_tokens_per_forward`);
- full: the row as it is, as TRL does.

Memory is the peak that forward and backward add to the model and its gradients. Each peak is taken in a process of its
own, since a process does not give back what it once had.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable

import torch
from common import KEEP_MEMORY, keep_memory, load, median, parser, peak_memory, ratios, report, timed
from trl.trainer.utils import add_fused_lm_head

from mempo_trl.mempo_trainer import turn_branches
from mempo_trl.prefix_tree import BranchScorer, PrefixTree


def rollout(args, turns: int) -> tuple[list[int], list[int], list[int]]:
    """Prompt, completion and segments of a rollout, in random tokens."""
    generator = torch.Generator().manual_seed(turns)
    segments = [s for turn in range(turns) for s in [2 * turn] * args.turn + [2 * turn + 1] * args.observation]
    segments = segments[: len(segments) - args.observation]  # the last turn answers
    ids = torch.randint(10, 8000, (args.prompt + len(segments),), generator=generator).tolist()
    return ids[: args.prompt], ids[args.prompt :], segments


def make_step(args, model, turns: int, variant: str) -> Callable[[], None]:
    """Forward and backward of one variant."""
    prompt, completion, segments = rollout(args, turns)
    scorer = BranchScorer(0, args.device, max_tokens=args.max_tokens)
    branches, _ = turn_branches(prompt, completion, segments, args.window)

    def windowed() -> None:
        model.zero_grad(set_to_none=False)
        logps, _, _ = scorer.logps_and_entropies(model, [branches], packed=args.form == "packed")
        torch.cat(logps[0]).mean().backward()

    ids = torch.tensor([prompt + completion], device=args.device)
    sampled = torch.tensor([[False] * args.prompt + [segment % 2 == 0 for segment in segments]], device=args.device)

    def full() -> None:
        model.zero_grad(set_to_none=False)
        labels = ids.masked_fill(~sampled, -100)
        outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
        (outputs.log_probs.sum() / sampled.sum()).backward()

    return {"windowed": windowed, "full": full}[variant]


def measure_peak(args, turns: int, variant: str) -> int:
    """Bytes that a step adds, measured in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--peak-of", variant, str(turns)]
    environment = {name: value for name, value in os.environ.items() if name not in KEEP_MEMORY}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout)


def print_peak(args, variant: str, turns: int) -> None:
    model = load(args)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step = make_step(args, model, turns, variant)
    make_step(args, model, 1, variant)()  # what is allocated once and for all
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else peak_memory()
    step()
    print(json.dumps(peak_memory() - before))


def plot(turns: list[int], seconds: dict, peaks: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for variant in ("windowed", "full"):
        axes[0].plot(turns, [seconds[f"{variant} {n}"] for n in turns], "o-", label=variant)
        axes[1].plot(turns, [peaks[f"{variant} {n}"] / 2**20 for n in turns], "o-", label=variant)
    axes[0].set(xlabel="turns", ylabel="seconds, forward and backward")
    axes[1].set(xlabel="turns", ylabel="peak memory (MiB)")
    for axis in axes:
        axis.set(xlim=0, ylim=0)
        axis.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--turns", type=int, nargs="+", default=[4, 8, 16, 32])
    arguments.add_argument("--window", type=int, default=1, help="earlier turns that a turn sees")
    arguments.add_argument("--prompt", type=int, default=400)
    arguments.add_argument("--turn", type=int, default=200)
    arguments.add_argument("--observation", type=int, default=200)
    arguments.add_argument("--form", choices=["packed", "unrolled"], default="packed")
    arguments.add_argument("--max-tokens", type=int, default=8192, help="in one forward")
    arguments.add_argument("--plot", help="path of a PNG")
    arguments.add_argument("--peak-of", nargs=2, help="only print the peak memory of a variant at a number of turns")
    args = arguments.parse_args()
    if args.peak_of:
        print_peak(args, args.peak_of[0], int(args.peak_of[1]))
        return
    keep_memory()
    cases = {f"{variant} {turns}": (turns, variant) for turns in args.turns for variant in ("windowed", "full")}
    peaks = {name: measure_peak(args, *case) for name, case in cases.items()}
    model = load(args)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    times = timed({name: make_step(args, model, *case) for name, case in cases.items()}, args.runs)
    seconds = {name: median(values) for name, values in times.items()}
    least, most = min(args.turns), max(args.turns)

    def tokens(turns: int, variant: str) -> int:
        prompt, completion, segments = rollout(args, turns)
        if variant == "full":
            return len(prompt + completion)
        return len(PrefixTree(turn_branches(prompt, completion, segments, args.window)[0]))

    report(
        args,
        tokens={name: tokens(*case) for name, case in cases.items()},
        seconds=seconds,
        peak_bytes=peaks,
        # How much more a turn costs in the longest rollout than in the shortest: 1 is linear growth.
        seconds_per_turn_ratio={
            v: ratios(times, f"{v} {most}", f"{v} {least}") * least / most for v in ("windowed", "full")
        },
        peak_per_turn_ratio={
            v: peaks[f"{v} {most}"] / peaks[f"{v} {least}"] * least / most for v in ("windowed", "full")
        },
    )
    if args.plot:
        plot(args.turns, seconds, peaks, args.plot)


if __name__ == "__main__":
    main()

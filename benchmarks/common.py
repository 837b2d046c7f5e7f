"""What the benchmarks share: models, sizes, medians, and the report."""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel


# glibc hands large blocks back to the system as soon as they are free. Asking for them again costs page faults, more
# than the arithmetic of a small model, and the more the larger the tensors.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "100000000000", "MALLOC_TRIM_THRESHOLD_": "100000000000"}


def keep_memory() -> None:
    """Start this script again in a process that keeps the memory it frees, if this one does not."""
    if KEEP_MEMORY.items() <= os.environ.items():
        return
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    arguments.add_argument("--model", help="path of a checkpoint; a random Llama of --layers and --width if not given")
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--vocabulary", type=int, default=8192)
    arguments.add_argument("--runs", type=int, default=5, help="measured runs of each variant, after one to warm up")
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return arguments


def load(args: argparse.Namespace) -> PreTrainedModel:
    """The model that a benchmark runs on."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model).to(args.device)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=max(args.width // 64, 1),
        num_key_value_heads=max(args.width // 64, 1),
        max_position_embeddings=65536,
    )
    return LlamaForCausalLM(config).to(args.device)


def timed(variants: dict[str, Callable[[], Any]], runs: int) -> dict[str, list[float]]:
    """Seconds of each variant, `runs` times each, in turn, so that a machine that slows down slows all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for run in range(runs + 1):
        for name, variant in variants.items():
            start = time.perf_counter()
            variant()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if run:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median(values: list[float]) -> float:
    return statistics.median(values)


def ratios(seconds: dict[str, list[float]], of: str, to: str) -> float:
    """Median over the runs of how many times longer `of` took than `to`."""
    return median([a / b for a, b in zip(seconds[of], seconds[to], strict=True)])


def peak_memory() -> int:
    """Peak resident memory of this process so far, in bytes (of the GPU, where there is one)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(args: argparse.Namespace, **results: Any) -> None:
    """Print command, sizes, hardware, versions and results as JSON."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    about = {"command": command, "sizes": vars(args), "hardware": hardware(), "versions": versions}
    print(json.dumps({**about, **results}, indent=2))


def hardware() -> str:
    """What the benchmark runs on, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}"

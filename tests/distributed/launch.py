"""Launching scripts on two processes, plainly or under an engine."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


CONFIGS = Path(__file__).parent.parent.parent / "accelerate_configs"

# Engine: the file that a user launches it with, what accelerate should say it is, the ZeRO stage.
ENGINES = {
    "ddp": ("multi_gpu", "MULTI_CPU", None),
    "zero2": ("zero2", "DEEPSPEED", 2),
    "zero3": ("zero3", "DEEPSPEED", 3),
    "zero3_lora": ("zero3", "DEEPSPEED", 3),
    "fsdp2": ("fsdp2", "FSDP", None),
}
ALONE: tuple[str, ...] = ()
PLAIN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def under(engine: str) -> tuple[str, ...]:
    """The launcher of an engine on two processes."""
    config = str(CONFIGS / f"{ENGINES[engine][0]}.yaml")
    options = ("--mixed_precision", "no", "--num_processes", "2", "--main_process_port", "0")
    return ("-m", "accelerate.commands.launch", "--config_file", config, *options)


def launch(launcher: tuple[str, ...], script: Path, *arguments: Any, **environment: str) -> str:
    """Run a script, which must succeed, and return what it wrote to stderr."""
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stderr

"""A question whose rollouts are spread over two processes is scored as on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


WORKER = Path(__file__).with_name("worker.py")


def run(out: Path, processes: int) -> list[dict]:
    out.mkdir()
    command = [sys.executable, str(WORKER), str(out)]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command[1:1] = launcher
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{process}.json").read_text()) for process in range(processes)]


def test_two_processes_equal_one(tmp_path):
    (one,) = run(tmp_path / "one", 1)
    two = run(tmp_path / "two", 2)
    assert one["type"].endswith("NO")
    assert all(process["type"].endswith("MULTI_CPU") for process in two)
    # As many calls everywhere, although the first process's rollouts end after the first.
    assert one["calls"] == [[4, 2, 1, 1]] * 2
    assert [process["calls"] for process in two] == [[[2, 1, 1, 1]] * 2, [[2, 2, 1, 1]] * 2]
    # The pool of memory rewards reaches over both.
    together = two[0]["advantages"] + two[1]["advantages"]
    for alone, shared in zip(one["advantages"], together, strict=True):
        assert alone == pytest.approx(shared, abs=1e-4)
    assert max(abs(a) for row in one["advantages"] for a in row) > 0.5
    assert two[0]["weights"] == pytest.approx(two[1]["weights"], abs=0)
    assert one["weights"] == pytest.approx(two[0]["weights"], abs=1e-5)
    for name in ("memory/reward", "memory/per_rollout", "turns/mean", "stop/max_turns", "tools/failure_frequency"):
        assert one["logs"][name] == pytest.approx(two[0]["logs"][name], abs=1e-5), name

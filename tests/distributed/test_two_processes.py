"""Training on two processes, under every engine that shards, equals training on one."""

from pathlib import Path

import pytest
import torch
from launch import ALONE, ENGINES, launch, under


WORKER = Path(__file__).with_name("worker.py")


def run(launcher: tuple[str, ...], out: Path, engine: str, processes: int) -> list[dict]:
    """What each process wrote."""
    launch(launcher, WORKER, out, engine)
    return [torch.load(out / f"{process}.pt") for process in range(processes)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process wrote, with all weights trained and with adapters."""
    return {engine: run(ALONE, tmp_path_factory.mktemp(engine), engine, 1)[0] for engine in ("single", "single_lora")}


@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_equal_one(tmp_path, alone, engine):
    two = run(under(engine), tmp_path, engine, 2)
    for name, one in alone["single_lora" if engine.endswith("lora") else "single"].items():
        first, second = two[0][name], two[1][name]
        assert one["type"] == "NO"
        assert [(process["type"], process["zero_stage"]) for process in (first, second)] == [ENGINES[engine][1:]] * 2

        # As many calls everywhere, although the first process's rollouts end before the others'.
        generations = 1 if name == "windowed" else 2
        if name == "failing":
            assert one["calls"] == [[2, 2, 1, 1]] * generations
            assert [first["calls"], second["calls"]] == [[[1, 1, 1, 1]] * generations, [[2, 2, 1, 1]] * generations]
        else:
            assert one["calls"] == [[4, 2, 1, 1]] * generations
            assert [first["calls"], second["calls"]] == [[[2, 1, 1, 1]] * generations, [[2, 2, 1, 1]] * generations]

        # The pool of memory rewards reaches over both.
        for single, shared in zip(one["advantages"], first["advantages"] + second["advantages"], strict=True):
            assert single == pytest.approx(shared, abs=1e-4)
        assert max(abs(a) for row in one["advantages"] for a in row) > 0.5
        for metric in (
            "memory/reward",
            "memory/per_rollout",
            "turns/mean",
            "stop/max_turns",
            "tools/failure_frequency",
        ):
            assert one["logs"][metric] == pytest.approx(first["logs"][metric], abs=1e-5), metric

        assert first["weights"].keys() == one["weights"].keys()
        for weight, single in one["weights"].items():
            torch.testing.assert_close(first["weights"][weight], single, atol=1e-5, rtol=0, msg=f"{name}: {weight}")
            if second["weights"]:
                torch.testing.assert_close(first["weights"][weight], second["weights"][weight], atol=0, rtol=0)

"""Under every engine, a run that goes on from a checkpoint is the run that never stopped."""

from pathlib import Path

import pytest
import torch
from launch import ENGINES, launch, under

from mempo_trl.checkpoints import STAGING


WORKER = Path(__file__).with_name("resume_worker.py")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, engine):
    launch(under(engine), WORKER, tmp_path, engine)
    for process in range(2):
        runs = torch.load(tmp_path / f"{process}.pt")
        whole = runs.pop("whole")
        assert (whole["type"], whole["zero_stage"]) == ENGINES[engine][1:]
        assert whole["generated"] == [0, 2]
        assert whole["weights"] or process == 1
        for checkpoint, resumed in runs.items():
            assert resumed["generated"] == ([] if checkpoint == 3 else [2])  # what was generated before is not again
            assert resumed["rewards"] == whole["rewards"]
            assert resumed["weights"].keys() == whole["weights"].keys()
            for name, weight in whole["weights"].items():
                assert torch.equal(resumed["weights"][name], weight), f"from {checkpoint}: {name}"
    assert not list(tmp_path.glob(f"*/{STAGING}"))
    assert {path.name for path in (tmp_path / "whole").glob("checkpoint-*")} == {
        f"checkpoint-{n}" for n in (1, 2, 3, 4)
    }

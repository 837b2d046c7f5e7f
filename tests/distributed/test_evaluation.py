"""Held-out questions that two processes share are evaluated as by one."""

import json
from pathlib import Path

from launch import ALONE, PLAIN, launch

from mempo_trl.evaluation import read_run


WORKER = Path(__file__).with_name("evaluation_worker.py")


def test_two_processes_equal_one(tmp_path):
    for name, launcher in (("one", ALONE), ("two", PLAIN)):
        (tmp_path / name).mkdir()
        launch(launcher, WORKER, tmp_path / name)
    one = json.loads((tmp_path / "one" / "0.json").read_text())
    first, second = (json.loads((tmp_path / "two" / f"{process}.json").read_text()) for process in range(2))
    # Five questions, which the processes cannot share equally.
    assert len(one["before"]) == 1
    assert first["before"] == second["before"] == one["before"]
    step = Path("heldout-0", "step-0")
    records = read_run(tmp_path / "one" / step)
    assert len(records) == 5
    assert read_run(tmp_path / "two" / step) == records
    for name in ("summary.json", "summary.md"):
        assert (tmp_path / "two" / step / name).read_text() == (tmp_path / "one" / step / name).read_text()
    # And in training; only the main process writes.
    assert [entry["step"] for entry in first["all"] if "heldout/f1" in entry] == [0, 1]
    assert [entry["step"] for entry in first["all"] if "reward" in entry] == [1]
    assert len(read_run(tmp_path / "two" / "heldout-0" / "step-1")) == 5
    assert not (tmp_path / "two" / "heldout-1").exists()

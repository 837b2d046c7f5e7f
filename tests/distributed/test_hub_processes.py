"""Of several processes only the main one pushes, and whatever the Hub says, none waits for another."""

import json
from pathlib import Path

from hub_server import Hub, failing, status
from launch import PLAIN, launch


WORKER = Path(__file__).with_name("hub_worker.py")


def test_two_processes(tmp_path):
    with Hub() as hub:
        # The upload of the checkpoint is refused, the one at the end succeeds.
        hub.fail = failing("/commit/", status(403), times=1)
        hub_environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        stderr = launch(PLAIN, WORKER, tmp_path, **hub_environment)
    said = [json.loads((tmp_path / f"{process}.json").read_text()) for process in range(2)]
    assert said == [{"refused": True, "steps": 1, "commit": main} for main in (True, False)]
    assert hub.commits == ["End of training"]
    assert hub.count("/repos/create") == 2
    assert "safe on disk" in stderr

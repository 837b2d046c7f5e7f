"""The search server as a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import requests
from prometheus_client.parser import text_string_to_metric_families


ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 60  # seconds after which a test that waits in vain fails


def wait_until(holds) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "This never happened."
        time.sleep(0.01)


class Server:
    """A server process, which has said that it is ready."""

    def __init__(self, arguments, errors: Path, **environment):
        with errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.errors = errors
        assert self.line.startswith("Serving "), errors.read_text()
        self.url = self.line.split()[-1]
        self.port = int(self.url.rpartition(":")[2])

    def post(self, body, **arguments):
        return requests.post(f"{self.url}/retrieve", json=body, timeout=PATIENCE, **arguments)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def metric(self, name: str, **labels: str) -> float:
        text = requests.get(f"{self.url}/metrics", timeout=PATIENCE).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def wait_for(self, name: str, value: float, **labels: str) -> None:
        wait_until(lambda: self.metric(name, **labels) == value)

    def peak_memory(self) -> int:
        """In bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))

    def end(self, *signals: signal.Signals) -> int:
        for number in signals:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE)

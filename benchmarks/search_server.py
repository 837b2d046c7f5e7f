"""The search server under many clients, alone and beside clients that mean it harm.

    python benchmarks/search_server.py --folder /tmp/corpora > docs/search/server.json

A server process with a BM25 index of generated passages (those of search_bm25.py); 64 clients in another process, each
with one connection, that ask for one query after the other. In the second part hostile clients come as well, each
again and again: garbage, a body of 100 MB, 10,000 queries, topk 10^9, and connections that say nothing. The clients
take processor time from the server, since both run on one machine.
"""

import argparse
import contextlib
import http.client
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import hardware
from search_bm25 import build_mempo, queries, write_corpus


CLIENTS = 64
LENGTH = {"Content-Type": "application/json"}


@contextlib.contextmanager
def served(index: Path) -> Iterator[tuple[int, int]]:
    """The port and the process id of a server."""
    server = subprocess.Popen(
        [sys.executable, "-m", "mempo_trl.cli", "serve", str(index), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        yield int(server.stdout.readline().rpartition(":")[2]), server.pid
    finally:
        server.terminate()
        server.wait()


def memory(pid: int) -> int:
    """Resident bytes that are no file's: the index is mapped into memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def ask(port: int, texts: list[str], until: float, first: int, latencies: list[float], outcomes: Counter) -> None:
    """One client: as many searches as it can make until then."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    number = first
    while time.monotonic() < until:
        body = json.dumps({"queries": [texts[number % len(texts)]], "topk": 3, "return_scores": True})
        number += CLIENTS
        started = time.perf_counter()
        try:
            connection.request("POST", "/retrieve", body, LENGTH)
            response = connection.getresponse()
            answer = json.loads(response.read())
            outcome = str(response.status) if len(answer.get("result", [])) == 1 else "no result"
        except (OSError, ValueError, http.client.HTTPException) as error:
            outcome = type(error).__name__
            connection.close()
        latencies.append(time.perf_counter() - started)
        outcomes[outcome] += 1


def post(body: bytes) -> Callable[[int], str]:
    def attack(port: int) -> str:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            try:
                connection.request("POST", "/retrieve", body, LENGTH)
            except OSError:  # refused before all of it was sent
                pass
            return str(connection.getresponse().status)

    return attack


def say_nothing(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        return "dropped" if not connection.recv(1) else "answered"


ATTACKS: dict[str, Callable[[int], str]] = {
    "garbage": post(b"\x00\xff{]" * 100),
    "100 MB": post(b" " * 100_000_000),
    "10,000 queries": post(json.dumps({"queries": ["q"] * 10_000}).encode()),
    "topk 10^9": post(json.dumps({"queries": ["q"], "topk": 10**9}).encode()),
    "silence": say_nothing,
}


def harm(port: int, attack: Callable[[int], str], until: float, outcomes: Counter) -> None:
    while time.monotonic() < until:
        try:
            outcomes[attack(port)] += 1
        except (OSError, http.client.HTTPException) as error:
            outcomes[type(error).__name__] += 1
        time.sleep(0.2)


def load(port: int, pid: int, texts: list[str], seconds: float, hostile: bool) -> dict[str, Any]:
    """What the clients saw."""
    until = time.monotonic() + seconds
    latencies: list[list[float]] = [[] for _ in range(CLIENTS)]
    outcomes: Counter = Counter()
    attacks = {name: Counter() for name in ATTACKS} if hostile else {}
    threads = [
        threading.Thread(target=ask, args=(port, texts, until, number, latencies[number], outcomes))
        for number in range(CLIENTS)
    ]
    threads += [threading.Thread(target=harm, args=(port, ATTACKS[name], until, attacks[name])) for name in attacks]
    used = [memory(pid)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        time.sleep(seconds / 4.5)
        used.append(memory(pid))
    for thread in threads:
        thread.join()
    times = sorted(latency for of_client in latencies for latency in of_client)
    cuts = statistics.quantiles(times, n=1000)
    return {
        "seconds": seconds,
        "requests_per_second": len(times) / seconds,
        "ms": {"p50": 1000 * cuts[499], "p99": 1000 * cuts[989], "p99.9": 1000 * cuts[998], "most": 1000 * times[-1]},
        "outcomes": dict(outcomes),
        "errors": sum(count for outcome, count in outcomes.items() if outcome != "200"),
        "memory_bytes": [*used, memory(pid)],
        "attacks": {name: dict(counts) for name, counts in attacks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the corpus and the index go, or are")
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=60, help="of each part")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    corpus, index = args.folder / f"{args.passages}.jsonl", args.folder / f"{args.passages}-served"
    write_corpus(corpus, args.passages)
    if not index.exists():
        build_mempo(corpus, index)
    texts = queries(5000, args.passages)
    parts = {}
    with served(index) as (port, pid):
        load(port, pid, texts, min(args.seconds, 5), hostile=False)  # to warm up
        for name, hostile in (("alone", False), ("beside hostile clients", True)):
            parts[name] = load(port, pid, texts, args.seconds, hostile)
    print(
        json.dumps(
            {
                "command": " ".join(["python", "benchmarks/search_server.py", *sys.argv[1:]]),
                "hardware": hardware(),
                "versions": {name: version(name) for name in ("uvicorn", "starlette", "tantivy")},
                "passages": args.passages,
                "clients": CLIENTS,
                "parts": parts,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()

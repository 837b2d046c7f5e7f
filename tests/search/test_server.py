"""The search server, as a process of its own, on loopback."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from served import PATIENCE, ROOT, Server, wait_until

from mempo_trl.search import BM25Index, HttpSearch
from mempo_trl.search.limits import ServerLimits
from mempo_trl.search.server import make_app, serve


WORDS = "amber birch cedar delta ember fjord grove haven inlet jetty".split()

# A backend that writes down what it is asked, and answers only while there is a file "open".
GATED = """
import json, resource, sys, time
from pathlib import Path
from mempo_trl.search import Document
from mempo_trl.search.limits import ServerLimits
from mempo_trl.search.server import serve

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
files = options.pop("files", None)
if files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

class Gated:
    def search(self, queries, k):
        with (folder / "searches").open("a") as searches:
            searches.write(json.dumps([queries, k]) + "\\n")
        while not (folder / "open").exists():
            time.sleep(0.01)
        if "raise" in queries:
            raise RuntimeError("This query is poison.")
        if "panic" in queries:
            raise BaseException("So is this.")
        if "few" in queries:
            return []
        text = "x" * 1_000_000 if "long" in queries else "text"
        return [[Document(f"{query} {n}", text) for n in range(k)] for query in queries]

serve(Gated(), port=0, limits=ServerLimits(**options))
"""


class GatedServer(Server):
    def __init__(self, folder: Path, **limits):
        self.folder = folder
        folder.joinpath("searches").touch()
        super().__init__(["-c", GATED, folder, json.dumps(limits)], folder / "stderr")

    def open(self) -> None:
        self.folder.joinpath("open").touch()

    @property
    def searches(self) -> list:
        return [json.loads(line) for line in self.folder.joinpath("searches").read_text().splitlines()]

    def begin(self, pool: ThreadPoolExecutor, query: str = "first"):
        """Keep the worker busy with a request."""
        response = pool.submit(self.post, {"queries": [query]})
        wait_until(lambda: self.searches)
        return response


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    documents = [
        {
            "id": n,
            "contents": f'"Place {n}"\n' + " ".join(WORDS[(n * step) % len(WORDS)] for step in range(1, n % 7 + 2)),
        }
        for n in range(500)
    ]
    return BM25Index.build(
        [*documents, {"id": "é", "contents": '"\ud800"\nörtlich 木'}], tmp_path_factory.mktemp("i") / "places"
    )


@pytest.fixture(scope="module")
def server(index, tmp_path_factory):
    server = Server(["-m", "mempo_trl.cli", "serve", index.path, "--port", 0], tmp_path_factory.mktemp("s") / "stderr")
    yield server
    assert server.end(signal.SIGTERM) == 0
    assert "Traceback" not in server.errors.read_text()


@pytest.fixture
def start(tmp_path):
    """Makes gated servers."""
    with contextlib.ExitStack() as stack:

        def start(**limits) -> GatedServer:
            server = GatedServer(tmp_path, **limits)
            stack.callback(server.process.kill)
            return server

        yield start


@pytest.fixture
def pool():
    with ThreadPoolExecutor(64) as pool:
        yield pool


def expected(index, queries, k):
    return [
        [{"document": {"id": r.id, "contents": r.contents}, "score": r.score} for r in of_query]
        for of_query in index.search(queries, k)
    ]


def test_protocol(server, index):
    queries = ["amber birch", "木", "nowhere"]
    scored = server.post({"queries": queries, "topk": 2, "return_scores": True})
    assert scored.status_code == 200
    assert scored.json() == {"result": expected(index, queries, 2)}
    assert [len(found) for found in scored.json()["result"]] == [2, 1, 0]
    # Without scores, the documents of Search-R1's and verl's servers stand by themselves.
    for body in ({"queries": queries}, {"queries": queries, "topk": None, "return_scores": False, "model": "e5"}):
        bare = server.post(body).json()["result"]
        assert bare == [[found["document"] for found in of_query] for of_query in expected(index, queries, 3)]
    assert server.post({"queries": [], "topk": 3, "return_scores": True}).json() == {"result": []}


def test_client(server, index):
    queries = ["amber", "birch cedar", "nowhere", "amber"]
    assert HttpSearch(f"{server.url}/retrieve").search(queries, 5) == index.search(queries, 5)


def test_concurrent_requests_get_what_a_search_finds(server, index, pool):
    bodies = [
        {
            "queries": [f"{WORDS[n % 10]} {WORDS[n * m % 9]}" for m in range(n % 5 + 1)],
            "topk": n % 4 + 1,
            "return_scores": True,
        }
        for n in range(200)
    ]
    responses = list(pool.map(server.post, bodies))
    for body, response in zip(bodies, responses, strict=True):
        assert response.json()["result"] == expected(index, body["queries"], body["topk"])


def test_health(server, index):
    response = requests.get(f"{server.url}/health", timeout=PATIENCE)
    assert response.json() == {
        "ready": True,
        "index": "places",
        "documents": len(index),
        "identity": getattr(index, "identity", None),
        "topk": 3,
    }


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ("[" * 100_000, 400, "The body is not JSON ("),
        ('{"queries": ["a"], "topk": ' + "9" * 5000 + "}", 400, "The body is not JSON ("),
        (b"\xff\xfe\x00", 400, "The body is not JSON ("),
        ("", 400, "The body is not JSON ("),
        ("[]", 422, "The body must be an object"),
        ('{"query": "a"}', 422, "The body must be an object"),
        ('{"queries": "a"}', 422, "`queries` must be a list of strings, got 'a'."),
        ('{"queries": ["a", 1]}', 422, "`queries` must be a list of strings, got ['a', 1]."),
        (
            '{"queries": ["a"], "topk": 1000000000}',
            422,
            "`topk` must be a whole number between 1 and 1000, got 1000000000",
        ),
        ('{"queries": ["a"], "topk": 0}', 422, "`topk` must be a whole number between 1 and 1000, got 0."),
        ('{"queries": ["a"], "topk": true}', 422, "`topk` must be a whole number between 1 and 1000, got True."),
        ('{"queries": ["a"], "topk": NaN}', 422, "`topk` must be a whole number between 1 and 1000, got nan."),
        ('{"queries": ["a"], "return_scores": "yes"}', 422, "`return_scores` must be true or false, got 'yes'."),
        (json.dumps({"queries": ["a"] * 10_000}), 422, "`queries` must be at most 4096, got 10000."),
        (json.dumps({"queries": ["a" * 1_000_000]}), 422, "at most 8192 characters, one has 1000000."),
        (json.dumps({"queries": ["a"] * 51, "topk": 1000}), 422, "must be at most 50000, got 1000 times 51."),
        ("x" * (4 << 20), 400, "The body is not JSON ("),
        ("x" * ((4 << 20) + 1), 413, "The body must have at most 4194304 bytes."),
    ],
)
def test_what_is_refused(server, body, status, sentence):
    response = requests.post(f"{server.url}/retrieve", data=body, timeout=PATIENCE)
    assert response.status_code == status
    assert sentence in response.json()["detail"]
    assert server.post({"queries": ["amber"]}).status_code == 200


def test_wrong_paths_and_methods(server):
    missing = requests.post(f"{server.url}/search", json={}, timeout=PATIENCE)
    assert (missing.status_code, missing.json()) == (
        404,
        {"detail": "There is nothing here. Searches are POST /retrieve."},
    )
    wrong = requests.get(f"{server.url}/retrieve", timeout=PATIENCE)
    assert (wrong.status_code, wrong.headers["Allow"], wrong.json()) == (
        405,
        "POST",
        {"detail": "GET is not allowed here, but POST."},
    )


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body_is_refused_and_never_held(server, chunked):
    size, piece = 100_000_000, b"x" * 100_000
    before = server.peak_memory()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    headers = {} if chunked else {"Content-Length": str(size)}
    connection.request("POST", "/retrieve", (piece for _ in range(size // len(piece))), headers, encode_chunked=chunked)
    response = connection.getresponse()
    assert response.status == 413
    assert json.load(response) == {"detail": "The body must have at most 4194304 bytes."}
    assert server.peak_memory() - before < 30_000_000
    # The rest was read and thrown away: the connection can be used again.
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", b"GET /health\r\n\r\n", b"A" * 1_000_000]
)
def test_garbage_instead_of_http(server, garbage):
    with server.connect() as connection:
        with contextlib.suppress(ConnectionError):  # the server may be done with it sooner
            connection.sendall(garbage)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
            assert answer.startswith(b"HTTP/1.1 400 ") or answer.startswith(b"HTTP/1.1 431 ") or not answer
    assert server.post({"queries": ["amber"]}).status_code == 200


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (b"POST /retrieve HTTP/1.1\r\nHost: x\r\n", b"HTTP/1.1 408 "),
        (b'POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"queries": [', b"HTTP/1.1 408 "),
        (b"POST /retrieve HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", b"HTTP/1.1 408 "),
        (b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\nabc", b"HTTP/1.1 413 "),
        # A second request that is not finished, sent with the first.
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea", b"HTTP/1.1 200 "),
    ],
)
def test_clients_that_send_no_whole_request_are_dropped(start, pool, sent, answered):
    server = start(timeout=1.0)
    server.open()
    with server.connect() as connection:
        connection.sendall(sent)
        assert all(r.status_code == 200 for r in pool.map(server.post, [{"queries": ["a"]}] * 20))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))  # until the server closes the connection
    assert answer.startswith(answered) and bool(answer) == bool(answered)
    assert server.end(signal.SIGTERM) == 0
    assert "Traceback" not in server.errors.read_text()


def test_a_body_that_trickles_in_is_not_waited_for(start):
    server = start(timeout=1.0)
    with server.connect() as connection:
        connection.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(PATIENCE * 100):
                connection.sendall(b"x")
                time.sleep(0.01)


def test_a_client_that_does_not_take_its_answer_is_dropped(start):
    server = start(timeout=1.0)
    server.open()
    connections = server.metric("process_open_fds")
    body = json.dumps({"queries": ["long"], "topk": 50}).encode()
    with server.connect() as connection:
        head = f"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        server.wait_for("mempo_search_requests_total", 1, path="/retrieve", status="200")
        server.wait_for("process_open_fds", connections)
    assert server.end(signal.SIGTERM) == 0


def test_requests_that_come_during_a_search_are_searched_together(start, pool):
    server = start()
    first = server.begin(pool)
    others = [pool.submit(server.post, {"queries": [f"a{n}", f"b{n}"]}) for n in range(20)]
    server.wait_for("mempo_search_queue_queries", 40)
    assert server.metric("mempo_search_in_flight_requests") == 21
    server.open()
    assert [[d["id"] for d in found] for found in first.result().json()["result"]] == [
        ["first 0", "first 1", "first 2"]
    ]
    for n, response in enumerate(others):
        assert [found[0]["id"] for found in response.result().json()["result"]] == [f"a{n} 0", f"b{n} 0"]
    assert [len(queries) for queries, _ in server.searches] == [1, 40]
    assert server.metric("mempo_search_batch_queries_count") == 2
    assert server.metric("mempo_search_batch_queries_sum") == server.metric("mempo_search_queries_total") == 41
    assert server.metric("mempo_search_requests_total", path="/retrieve", status="200") == 21
    assert server.metric("mempo_search_seconds_count") == 21
    assert server.metric("mempo_search_queue_queries") == server.metric("mempo_search_in_flight_requests") == 0


def test_each_topk_has_its_own_search(start, pool):
    server = start()
    server.begin(pool)
    responses = [pool.submit(server.post, {"queries": [f"q{n}"], "topk": n % 3 + 1}) for n in range(9)]
    server.wait_for("mempo_search_queue_queries", 9)
    server.open()
    for n, response in enumerate(responses):
        assert [d["id"] for d in response.result().json()["result"][0]] == [f"q{n} {m}" for m in range(n % 3 + 1)]
    searches = server.searches[1:]
    assert sorted(k for _, k in searches) == [1, 2, 3]
    assert all(sorted(queries) == [f"q{n}" for n in range(9) if n % 3 + 1 == k] for queries, k in searches)


def test_a_request_with_many_queries_does_not_hold_up_others(start, pool):
    server = start(batch=10)
    server.begin(pool)
    large = pool.submit(server.post, {"queries": [f"large {n}" for n in range(95)]})
    server.wait_for("mempo_search_queue_queries", 95)
    small = [pool.submit(server.post, {"queries": [f"small {n}"]}) for n in range(3)]
    server.wait_for("mempo_search_queue_queries", 98)
    other = pool.submit(server.post, {"queries": ["other"], "topk": 1})
    server.wait_for("mempo_search_queue_queries", 99)
    server.open()
    assert [found[0]["id"] for found in large.result().json()["result"]] == [f"large {n} 0" for n in range(95)]
    assert all(response.result().status_code == 200 for response in [*small, other])
    searches = [queries for queries, _ in server.searches]
    assert {"small 0", "small 1", "small 2"} < set(searches[1]) and len(searches[1]) == 10
    assert searches[2] == ["other"]
    assert [query for queries in searches for query in queries if "large" in query] == [f"large {n}" for n in range(95)]
    assert max(map(len, searches)) == 10


@pytest.mark.parametrize("poison", ["raise", "panic", "few"])
def test_a_search_that_fails_fails_alone(start, pool, poison):
    server = start()
    server.begin(pool)
    bad = pool.submit(server.post, {"queries": ["innocent", poison, "innocent"]})
    good = [pool.submit(server.post, {"queries": [f"good {n}"]}) for n in range(3)]
    server.wait_for("mempo_search_queue_queries", 6)
    server.open()
    assert bad.result().status_code == 500
    assert bad.result().json() == {"detail": "The search failed; the reason is in the log of the server."}
    assert [r.result().json()["result"][0][0]["id"] for r in good] == ["good 0 0", "good 1 0", "good 2 0"]
    assert server.post({"queries": [poison]}).status_code == 500
    assert server.post({"queries": ["later"]}).status_code == 200
    assert server.metric("mempo_search_requests_total", path="/retrieve", status="500") == 2
    assert server.end(signal.SIGTERM) == 0
    assert "A search for 3 queries failed." in server.errors.read_text()


def test_overload(start, pool):
    server = start(queue=4, queries=4)
    first = server.begin(pool)
    waiting = pool.submit(server.post, {"queries": ["a", "b", "c"]})
    server.wait_for("mempo_search_queue_queries", 3)
    refused = server.post({"queries": ["d", "e"]})
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert refused.json() == {"detail": "The server is busy: 3 queries wait already. Try again in a second."}
    fits = pool.submit(server.post, {"queries": ["d"]})
    server.wait_for("mempo_search_queue_queries", 4)
    server.open()
    assert [response.result().status_code for response in (first, waiting, fits)] == [200] * 3
    assert server.post({"queries": ["d", "e"]}).status_code == 200


def test_more_connections_than_files_wait(start, pool):
    # As many as the process may have, less what it needs itself: about 20 connections.
    server = start(timeout=3600.0, files=64)
    server.open()
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(100)]
        wait_until(lambda: "others wait" in server.errors.read_text())
        waiting = pool.submit(server.post, {"queries": ["a"]})
        for connection in idle:
            connection.close()
        assert waiting.result().status_code == 200
    assert [r.status_code for r in pool.map(server.post, [{"queries": ["a"]}] * 64)] == [200] * 64
    assert server.end(signal.SIGTERM) == 0
    assert len(server.errors.read_text().splitlines()) == 1


def test_nothing_is_searched_for_a_client_that_went_away(start, pool):
    server = start()
    first = server.begin(pool)
    with server.connect() as connection:
        body = b'{"queries": ["gone", "too"]}'
        connection.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        server.wait_for("mempo_search_queue_queries", 2)
    server.wait_for("mempo_search_queue_queries", 0)
    server.open()
    assert first.result().status_code == 200
    assert server.post({"queries": ["later"]}).status_code == 200
    assert [queries for queries, _ in server.searches] == [["first"], ["later"]]
    assert server.metric("mempo_search_requests_total", path="/retrieve", status="499") == 1


def refuses_connections(server) -> bool:
    try:
        server.connect().close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_server_finish_what_it_took(start, pool, number):
    server = start()
    responses = [server.begin(pool), *(pool.submit(server.post, {"queries": [f"q{n}"]}) for n in range(5))]
    server.wait_for("mempo_search_queue_queries", 5)
    idle = server.connect()
    server.process.send_signal(number)
    wait_until(lambda: refuses_connections(server))
    assert idle.recv(1) == b""  # closed
    assert server.process.poll() is None
    server.open()
    assert [response.result().status_code for response in responses] == [200] * 6
    assert server.process.wait(PATIENCE) == 0
    assert "Traceback" not in server.errors.read_text()


def test_a_second_signal_kills(start, pool):
    server = start()
    response = server.begin(pool)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: refuses_connections(server))
    assert server.end(signal.SIGTERM) == -signal.SIGTERM
    with pytest.raises(requests.ConnectionError):
        response.result()


def test_killed_while_loaded(start, pool):
    server = start()
    responses = [server.begin(pool), *(pool.submit(server.post, {"queries": ["a"] * 100}) for _ in range(20))]
    server.wait_for("mempo_search_queue_queries", 2000)
    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    for response in responses:
        with pytest.raises(requests.ConnectionError):
            response.result()


def test_token(index, tmp_path):
    command = ["-m", "mempo_trl.cli", "serve", index.path, "--port", 0]
    server = Server(command, tmp_path / "stderr", MEMPO_SERVER_TOKEN="open sesame\n")
    body = {"queries": ["amber"]}
    for headers in (
        {},
        {"Authorization": "Bearer open"},
        {"Authorization": "Basic open sesame"},
        {"Authorization": "Bearer öffne".encode()},
    ):
        refused = server.post(body, headers=headers)
        assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert "wants its token" in refused.json()["detail"]
        assert requests.get(f"{server.url}/metrics", headers=headers, timeout=PATIENCE).status_code == 401
        assert requests.get(f"{server.url}/health", headers=headers, timeout=PATIENCE).json() == {"ready": True}
    token = {"Authorization": "Bearer open sesame"}
    assert len(server.post(body, headers=token).json()["result"][0]) == 3
    assert requests.get(f"{server.url}/metrics", headers=token, timeout=PATIENCE).status_code == 200
    assert requests.get(f"{server.url}/health", headers=token, timeout=PATIENCE).json()["index"] == "places"
    assert server.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("token", ["", "secret"])
def test_warning_of_an_open_server(index, tmp_path, token):
    command = ["-m", "mempo_trl.cli", "serve", index.path, "--host", "0.0.0.0", "--port", 0]
    server = Server(command, tmp_path / "stderr", MEMPO_SERVER_TOKEN=token)
    assert server.end(signal.SIGTERM) == 0
    assert ("Anyone who reaches 0.0.0.0 can search" in server.errors.read_text()) == (not token)


def test_options(index, tmp_path):
    options = {
        "--max-body": 200,
        "--max-queries": 2,
        "--max-query-length": 10,
        "--max-topk": 5,
        "--max-results": 8,
        "--topk": 4,
        "--max-batch": 1,
    }
    command = ["-m", "mempo_trl.cli", "serve", index.path, "--port", 0, "--access-log"]
    server = Server([*command, *(word for option in options.items() for word in option)], tmp_path / "stderr")
    assert [len(found) for found in server.post({"queries": ["amber", "birch"]}).json()["result"]] == [4, 4]
    assert server.metric("mempo_search_batch_queries_count") == 2
    for body, status in (
        ({"queries": ["a"] * 3}, 422),
        ({"queries": ["a" * 11]}, 422),
        ({"queries": ["a"], "topk": 6}, 422),
        ({"queries": ["a", "b"], "topk": 5}, 422),
        ({"queries": ["a"], "more": "x" * 200}, 413),
    ):
        assert server.post(body).status_code == status
    assert server.end(signal.SIGTERM) == 0
    assert '"POST /retrieve HTTP/1.1" 200' in server.errors.read_text()


def run_cli(*arguments, **environment):
    command = [sys.executable, "-m", "mempo_trl.cli", "serve", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_what_goes_wrong_at_the_start(server, index, tmp_path):
    taken = run_cli(index.path, "--port", server.port)
    assert (taken.returncode, taken.stdout) == (1, "")
    assert taken.stderr == f"mempo serve: Cannot listen on 127.0.0.1, port {server.port}: Address already in use.\n"
    missing = run_cli(tmp_path)
    assert missing.returncode == 1 and len(missing.stderr.splitlines()) == 1
    a_file = run_cli(ROOT / "setup.cfg")
    assert (a_file.returncode, a_file.stderr) == (
        1,
        f"mempo serve: {ROOT / 'setup.cfg'} is a file; give the folder of an index.\n",
    )
    no_token = run_cli(index.path, MEMPO_SERVER_TOKEN="öffne")
    assert (no_token.returncode, no_token.stderr) == (
        1,
        "mempo serve: The token (MEMPO_SERVER_TOKEN) must be printable ASCII, and not be empty.\n",
    )
    narrow = run_cli(index.path, "--max-queue", 10)
    assert narrow.returncode == 1 and "(10) must not be below" in narrow.stderr


def test_arguments_are_checked(index):
    for arguments, sentence in (
        ({"topk": 0}, "topk must be between 1 and the limit 1000, got 0"),
        ({"topk": 1001}, "topk must be between 1 and the limit 1000, got 1001"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"token": " "}, r"token \(MEMPO_SERVER_TOKEN\) must be printable ASCII"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make_app(index, **arguments)
    with pytest.raises(ValueError, match="`timeout` must be at least 1"):
        ServerLimits(timeout=0)
    with pytest.raises(OSError, match=r"Cannot listen on 127.0.0.1, port 70000"):
        serve(index, port=70000)
    with pytest.raises(OSError, match="Cannot listen on no host"):
        serve(index, host="no host")

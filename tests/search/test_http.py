"""The client against a real server on loopback."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mempo_trl.search import HttpSearch, make_search_tool


class Server(ThreadingHTTPServer):
    """Answers with what `answers` holds, one after the other, then with the last of them for ever."""

    def __init__(self):
        self.answers: list[tuple[int, object]] = []
        self.requests: list[dict] = []

        class Handler(BaseHTTPRequestHandler):
            server: Server

            def do_POST(self):
                self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                answers = self.server.answers
                status, body = answers.pop(0) if len(answers) > 1 else answers[0]
                body = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/retrieve"


@pytest.fixture
def server():
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def found(*contents):
    return [{"document": {"id": n, "contents": text}, "score": 0.9 - n} for n, text in enumerate(contents)]


def test_all_queries_are_one_request(server):
    server.answers = [(200, {"result": [found('"Dune"\nA novel.', '"Emma"\nAnother.'), []]})]
    results = HttpSearch(server.url).search(["dune", "nothing"], k=2)
    assert server.requests == [{"queries": ["dune", "nothing"], "topk": 2, "return_scores": True}]
    assert [(r.id, r.title, r.text, r.score) for r in results[0]] == [
        ("0", "Dune", "A novel.", 0.9),
        ("1", "Emma", "Another.", pytest.approx(-0.1)),
    ]
    assert results[1] == []


def test_documents_without_scores(server):
    server.answers = [(200, {"result": [[{"id": "7", "contents": '"Dune"\nA novel.'}]]})]
    tool = make_search_tool(HttpSearch(server.url), k=1)
    assert tool(query="dune") == "Doc 1 (Title: Dune)\nA novel."


def test_a_busy_server_is_asked_again(server):
    server.answers = [(503, "busy"), (500, "broken"), (200, {"result": [found("text")]})]
    assert len(HttpSearch(server.url, retries=2).search(["q"], 1)[0]) == 1
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, "not found"),
        (500, "broken"),
        (200, "{half a"),
        (200, {"results": []}),
        (200, []),
        (200, {"result": [["text"]]}),
        (200, {"result": [found("a"), found("b")]}),
    ],
)
def test_what_is_no_answer_is_an_error(server, status, body):
    server.answers = [(status, body)]
    with pytest.raises(RuntimeError, match=f"The search server {server.url} "):
        HttpSearch(server.url, retries=0).search(["q"], 1)


def test_a_server_that_is_down():
    with pytest.raises(RuntimeError, match=r"The search server http://127.0.0.1:1/retrieve does not work"):
        HttpSearch("http://127.0.0.1:1/retrieve", retries=0).search(["q"])

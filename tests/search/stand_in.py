"""A search service on loopback that does as it is told, well or badly."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Service(ThreadingHTTPServer):
    """Answers with what `answers` holds, one after the other, then with the last of them for ever.

    An answer is a status and a body (JSON, or text that is sent as it is), or a function that is given the handler.
    """

    daemon_threads = True

    def __init__(self):
        self.answers: list[tuple[int, Any] | Callable] = []
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self._lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            server: Service
            protocol_version = "HTTP/1.1"

            def setup(self):
                self.server.connections += 1
                super().setup()

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with self.server._lock:
                    self.server.requests.append(request)
                    self.server.headers.append(dict(self.headers))
                    answers = self.server.answers
                    answer = answers.pop(0) if len(answers) > 1 else answers[0]
                if callable(answer):
                    answer(self)
                    return
                status, body, *more = answer
                self.answer(status, body, **(more[0] if more else {}))

            def answer(self, status, body, **headers):
                if callable(body):
                    body = body(self.server.requests[-1])
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                for name, value in {"Content-Length": len(data), **headers}.items():
                    self.send_header(name.replace("_", "-"), str(value))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/retrieve"


def half(handler) -> None:
    """Announces more than it sends."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"result": [[')
    handler.close_connection = True


def trickle(handler) -> None:
    """Sends a byte now and then, without end."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    while True:
        try:
            handler.wfile.write(b" ")
        except OSError:
            return
        time.sleep(0.05)


def freeze(handler) -> None:
    """Takes the request and says nothing."""
    time.sleep(2)
    handler.close_connection = True

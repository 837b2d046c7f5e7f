"""A server that plays an OpenAI-compatible endpoint: scripted, or with a real model behind it, as vLLM would have."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


class OpenAIStandIn:
    """Answers requests with `reply(path, body)`: the answer's JSON or its bytes, `(status, JSON)`, `(status, JSON,
    headers)`, or `None` to hang up.

    Use it as a context manager.

    Attributes:
        url: the base URL.
        requests: what was asked: `(path, body)`.
    """

    def __init__(self, reply: Callable[[str, dict[str, Any]], Any], models: list[str] | None = None):
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self._send(200, {"object": "list", "data": [{"id": m, "object": "model"} for m in models or ["model"]]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand_in.requests.append((self.path, body))
                stand_in.headers.append({name.lower(): value for name, value in self.headers.items()})
                answer = reply(self.path, body)
                if answer is None:
                    self.close_connection = True
                    self.connection.close()
                    return
                self._send(*(answer if isinstance(answer, tuple) else (200, answer)))

            def _send(self, status, content, headers=None):
                text = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                fields = {"Content-Type": "application/json", "Content-Length": str(len(text)), **(headers or {})}
                for name, value in fields.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> "OpenAIStandIn":
        threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._server.server_close()


def chat_answer(text: str, finish_reason: str = "stop", prompt_tokens: int = 7, completion_tokens: int = 3) -> dict:
    """The answer of `/v1/chat/completions`."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return {**_about("chat.completion", prompt_tokens, completion_tokens), "choices": [choice]}


def error(status: int, message: str) -> tuple[int, dict]:
    """An answer that is an error."""
    return status, {"error": {"message": message, "type": "invalid_request_error", "code": None}}


def _about(kind: str, prompt_tokens: int, completion_tokens: int) -> dict:
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return {"id": "answer-1", "object": kind, "created": 0, "model": "model", "usage": usage}


class ModelReply:
    """Plays vLLM with a model of transformers, greedily: renders conversations, takes and gives token ids."""

    def __init__(self, model: Any, tokenizer: Any):
        self.model, self.tokenizer = model, tokenizer
        self._lock = threading.Lock()

    def __call__(self, path: str, body: dict[str, Any]) -> dict:
        chat = path.endswith("/chat/completions")
        context = body.get("prompt")
        if chat:
            context = self.tokenizer.apply_chat_template(
                body["messages"], tools=body.get("tools"), add_generation_prompt=True, return_dict=False
            )
        with self._lock, torch.inference_mode():
            output = self.model.generate(
                torch.tensor([context]), max_new_tokens=body["max_tokens"], do_sample=False, use_cache=True
            )
        ids = output[0, len(context) :].tolist()
        finish = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        if chat:
            return chat_answer(text, finish, len(context), len(ids))
        choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None, "token_ids": ids}
        return {**_about("text_completion", len(context), len(ids)), "choices": [choice]}

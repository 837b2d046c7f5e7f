"""A server that speaks what TRL's client asks of vLLM, and plays a policy that says in every turn what it has seen."""

import json
import re
import threading
import zlib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support import byte_tokenizer, call


MAX_MODEL_LEN = 2000


def checksum(context: list[int]) -> int:
    return zlib.crc32(json.dumps(context).encode())


def logprob(token: int) -> float:
    """Tells the tokens apart."""
    return -(token % 97) / 100


class StandIn:
    """The policy behind the server.

    Every completion of a first turn is a rollout with a number of its own. A question holds a plan, digits that the
    rollouts take in turn: in how many turns to answer.

    Attributes:
        requests: what every `/v1/completions` asked for.
        paths: the path of every POST.
    """

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        self.rollouts = 0
        self.requests: list[dict] = []
        self.paths: list[str] = []

    def write(self, context: list[int]) -> str:
        text = self.tokenizer.decode(context)
        plan = re.search(r"plan (\d+)", text)
        if plan is None:  # no rollout's context, but one that a process sends to take part
            return "nothing"
        said = re.findall(r"rollout (\d+), turn (\d+)", text)
        if said:
            rollout, number = int(said[-1][0]), int(said[-1][1]) + 1
        else:
            rollout, number = self.rollouts, 1
            self.rollouts += 1
        turns = int(plan[1][rollout % len(plan[1])])
        section = "think" if number == 1 else "mem"
        action = "<answer>Paris</answer>" if number >= turns else call("x")
        return f"<{section}>rollout {rollout}, turn {number}, saw {checksum(context):010}</{section}>{action}"

    def complete(self, request: dict) -> dict | str:
        """The answer to a request, or what is wrong with it."""
        self.requests.append(request)
        longest = max(map(len, request["prompt"]))
        if longest + request["max_tokens"] > MAX_MODEL_LEN:
            return f"{longest} tokens and {request['max_tokens']} more were asked for, of at most {MAX_MODEL_LEN}."
        choices = []
        for context in request["prompt"]:
            for _ in range(request["n"]):
                ids = self.tokenizer(self.write(context), add_special_tokens=False)["input_ids"]
                ids = [*ids, self.tokenizer.eos_token_id][: request["max_tokens"]]
                choices.append(
                    {
                        "prompt_token_ids": context,
                        "token_ids": ids,
                        "logprobs": {
                            "tokens": [f"token_id:{i}" for i in ids],
                            "token_logprobs": [logprob(i) for i in ids],
                            "top_logprobs": [{f"token_id:{i}": logprob(i)} for i in ids],
                        },
                    }
                )
        return {"choices": choices}


@contextmanager
def serve():
    """Run a stand-in; yields it and its address."""
    stand_in = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(
                {
                    "/health": {},
                    "/v1/models": {"data": [{"id": "policy"}]},
                    "/server_info": {
                        "vllm_config": {
                            "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": MAX_MODEL_LEN}
                        }
                    },
                }[self.path.partition("?")[0]]
            )

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
            stand_in.paths.append(self.path)
            self.answer(stand_in.complete(request) if self.path == "/v1/completions" else {"success": True})

        def answer(self, content: dict | str):
            body = json.dumps(content).encode()
            self.send_response(400 if isinstance(content, str) else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield stand_in, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

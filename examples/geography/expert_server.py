"""The expert behind an OpenAI-compatible endpoint, as a strong hosted model would be.

    python examples/geography/expert_server.py --port 8001
    mempo collect expert outputs/geography/train.jsonl --endpoint http://127.0.0.1:8001/v1 ...

It writes nothing but what its script says: it stands in for a model that could do this work, so that the whole way from
questions to a trained agent can be walked without one.
"""

import argparse
import json
import re

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from world import Expert


MODEL = "expert"


def make_app(expert: Expert) -> Starlette:
    """The endpoint: `/v1/models` and `/v1/chat/completions`, without streaming."""

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def chat(request: Request) -> JSONResponse:
        try:
            asked = await request.json()
            text = expert.turn(asked["messages"], asked.get("seed") or 0)
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)
        read, written = _tokens(json.dumps(asked["messages"])), _tokens(text)
        return JSONResponse(
            {
                "id": "turn",
                "object": "chat.completion",
                "model": MODEL,
                "choices": [
                    {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}},
                ],
                "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
            }
        )

    return Starlette(
        routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])],
    )


def _tokens(text: str) -> int:
    """Words and signs: there is no tokenizer behind this endpoint."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--failures", type=float, default=0.1, help="share of the turns in which it fails")
    parser.add_argument("--seed", type=int, default=0, help="decides in which turns")
    args = parser.parse_args()
    app = make_app(Expert(args.failures, args.seed))
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()

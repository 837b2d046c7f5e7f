"""`mempo serve`: serve a search index over HTTP."""

import argparse
import logging
from pathlib import Path

from mempo_trl.search.arguments import TOKEN_VARIABLE, token_of_environment
from mempo_trl.search.limits import ServerLimits


# Options, the fields of `ServerLimits` that they set, and what those limit.
LIMITS = {
    "max-body": ("body_bytes", "bytes of a request"),
    "max-queries": ("queries", "queries of a request"),
    "max-query-length": ("query_characters", "characters of a query"),
    "max-topk": ("topk", "documents for a query"),
    "max-results": ("results", "documents for all queries of a request together"),
    "max-batch": ("batch", "queries searched for together"),
    "max-queue": ("queue", "queries that wait for a search; requests beyond them are answered 503"),
    "timeout": ("timeout", "seconds that a client may take for its request, and take nothing of its answer"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Serve a search index over HTTP, in the protocol of Search-R1, verl and MEM1. If the environment variable "
        f"{TOKEN_VARIABLE} is set, requests must bear it as their token. SIGTERM or SIGINT ends the server when it has "
        "answered what it took."
    )
    parser.add_argument("index", type=Path, help="folder of the index")
    parser.add_argument("--host", default="127.0.0.1", help="name or address of the interface to listen on")
    parser.add_argument("--port", type=int, default=8000, help="TCP port; 0 takes a free one and prints it")
    parser.add_argument("--topk", type=int, default=3, help="documents for each query of a request that does not say")
    parser.add_argument("--workers", type=int, default=1, help="searches at the same time")
    for option, (limit, meaning) in LIMITS.items():
        default = getattr(ServerLimits, limit)
        parser.add_argument(f"--{option}", type=type(default), default=default, help=f"at most: {meaning}")
    parser.add_argument("--access-log", action="store_true", help="log each request to stderr")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from mempo_trl.search.indexes import open_index
    from mempo_trl.search.server import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    limits = ServerLimits(**{limit: getattr(args, option.replace("-", "_")) for option, (limit, _) in LIMITS.items()})
    token = token_of_environment()
    serve(
        open_index(args.index),
        host=args.host,
        port=args.port,
        name=args.index.resolve().name,
        topk=args.topk,
        token=token,
        workers=args.workers,
        limits=limits,
        access_log=args.access_log,
    )

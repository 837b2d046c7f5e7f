"""What commands that run an agent have in common: the model, its tools, its settings."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from mempo_trl.cli.questions import add_question_arguments, read
from mempo_trl.search.arguments import TOKEN_VARIABLE, token_of_environment


MODEL = "a checkpoint's folder, a name on the Hub, an endpoint's URL, or with --endpoint what it calls the model"


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `agent_options` and `open_tools` read. Those that are not given stay `None`."""
    group = parser.add_argument_group("the model")
    group.add_argument("--backend", choices=["transformers", "vllm", "openai"], help="what runs it")
    group.add_argument(
        "--endpoint",
        metavar="URL",
        help="an OpenAI-compatible endpoint, like http://localhost:8000/v1; its key is in OPENAI_API_KEY",
    )
    group.add_argument(
        "--tokenizer",
        metavar="NAME|FOLDER",
        help="of the model behind an endpoint: it is sent token ids then, which vLLM takes",
    )
    group.add_argument("--revision", help="branch, tag or commit on the Hub")
    group.add_argument("--dtype", default="auto", help="precision: float32, bfloat16, …")
    group.add_argument("--device", help="where transformers runs the model: cpu, cuda:1, …")
    group.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")
    group.add_argument("--batch-size", type=int, metavar="N", help="questions together, in this process")
    group.add_argument("--concurrency", type=int, default=16, metavar="N", help="questions together, at an endpoint")
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="of an attempt at an endpoint; there are nine"
    )
    group.add_argument(
        "--tool-role", choices=["user", "tool"], default="user", help="the role of search results at an endpoint"
    )
    group.add_argument(
        "--request", type=_json_object, metavar="JSON", help="what else a request to an endpoint holds, or instead"
    )
    group.add_argument(
        "--vllm-options", type=_json_object, metavar="JSON", help="further arguments of vllm.LLM, as a JSON object"
    )

    group = parser.add_argument_group("how tokens are drawn")
    group.add_argument("--temperature", type=float, default=0.0, help="0 takes the most probable token each time")
    group.add_argument("--top-p", type=float, default=1.0, help="from the most probable with this probability together")
    group.add_argument("--top-k", type=int, default=0, help="from the most probable so many; 0 draws from all")
    group.add_argument("--seed", type=int, default=0, help="of everything that is random")

    group = parser.add_argument_group("search")
    group.add_argument(
        "--search", metavar="URL|FOLDER", help=f"a search server (its token is in {TOKEN_VARIABLE}), or an index"
    )
    group.add_argument("--search-results", type=int, default=3, metavar="N", help="documents that a search gives")
    group.add_argument("--query-list", action="store_true", help="the tool takes a list of queries, as verl's does")

    group = parser.add_argument_group("the agent (what is not given is as in training, if the checkpoint says)")
    group.add_argument(
        "--context-turns",
        type=context_turns,
        metavar="N|all",
        help="earlier turns that a turn sees beside the question",
    )
    group.add_argument("--max-turns", type=int, metavar="N", help="turns of an episode")
    group.add_argument("--max-turn-length", type=int, metavar="N", help="tokens of a turn")
    group.add_argument("--max-observation-length", type=int, metavar="N", help="tokens of what a turn's tools answer")
    group.add_argument("--system-prompt", metavar="TEXT|FILE", help="system message, or a file that holds it")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a run over many questions."""
    group = parser.add_argument_group("the run")
    group.add_argument("--out", type=Path, help="folder; a run that was killed goes on there")
    group.add_argument("--overwrite", action="store_true", help="begin anew in that folder")
    group.add_argument("--samples", type=int, default=1, metavar="N", help="episodes of each question")
    group.add_argument("--max-questions", type=int, metavar="N", help="only the first so many questions")
    group.add_argument("--scorer", default="default", help="how answers are compared: default, squad or mem1")
    add_question_arguments(parser)


def agent_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `open_engine` beside model and tools."""
    from mempo_trl.engines import Sampling

    names = ["backend", "endpoint", "tokenizer", "revision", "dtype", "device", "trust_remote_code", "batch_size"]
    names += ["concurrency", "timeout", "tool_role", "request", "vllm_options"]
    options = {name: getattr(args, name) for name in names}
    for name in ("max_turns", "max_turn_length", "max_observation_length"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    if args.context_turns is not None:
        options["context_turns"] = None if args.context_turns == "all" else args.context_turns
    if args.system_prompt is not None:
        options["system_prompt"] = text_or_file(args.system_prompt)
    options["sampling"] = Sampling(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed)
    return options


def run_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that `evaluate` and `collect` share, those of the agent among them."""
    notes = {"search": args.search, "search_results": args.search_results}
    names = ["overwrite", "samples", "max_questions", "scorer"]
    return {**agent_options(args), **{name: getattr(args, name) for name in names}, "notes": notes}


def open_tools(args: argparse.Namespace) -> list[Any]:
    """The search tool that the arguments name, if any.

    A server is asked once: that it is down should be known before a model is loaded, and not be taken for its failure.
    """
    if args.search is None:
        return []
    from mempo_trl.search import HttpSearch, make_search_tool, open_index

    if args.search.startswith(("http://", "https://")):
        backend: Any = HttpSearch(args.search, token=token_of_environment())
        tool = make_search_tool(backend, args.search_results, args.query_list)
        backend.search(["test"], args.search_results)
        return [tool]
    return [make_search_tool(open_index(args.search), args.search_results, args.query_list)]


def open_questions(args: argparse.Namespace, source: str) -> list[dict[str, Any]]:
    """The questions that the arguments name; what is wrong with some of them is said."""
    return read(args, source).rows


def text_or_file(text: str) -> str:
    """The text, or what the file of that name holds."""
    if not os.path.isfile(text):  # a `Path` would raise for what is too long for a name
        return text
    try:
        return Path(text).read_text(encoding="utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{text} is not text in UTF-8 ({error}).") from error


def context_turns(text: str) -> int | str:
    """A number of turns, or `all`."""
    if text == "all":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: it must be a whole number, at least 1, or all")
    return int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object, which is like {{"key": 1}}')
    return value

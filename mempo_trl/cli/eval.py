"""`mempo eval`: evaluate an agent, or compare two evaluations."""

import argparse
from pathlib import Path
from typing import Any

from mempo_trl.cli.agents import (
    MODEL,
    add_agent_arguments,
    add_run_arguments,
    open_questions,
    open_tools,
    run_options,
)
from mempo_trl.cli.questions import QUESTIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Run an agent over questions and score it: exact match, F1, turns, calls, tokens, with confidence intervals. "
        "With --compare, compare two such runs question by question instead."
    )
    parser.add_argument("model", nargs="?", help=MODEL)
    parser.add_argument("questions", nargs="?", help=QUESTIONS)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="folders of two runs to compare")
    parser.add_argument("--confidence", type=float, default=0.95, help="level of the intervals")
    parser.add_argument("--resamples", type=int, default=2000, metavar="N", help="bootstrap samples")
    add_run_arguments(parser)
    add_agent_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    bootstrap: dict[str, Any] = {"scorer": args.scorer, "confidence": args.confidence, "resamples": args.resamples}
    if args.compare is not None:
        from mempo_trl.evaluation import compare, comparison_markdown, read_run

        if args.model is not None:
            raise ValueError("--compare takes two runs that are there: leave out model and questions.")
        first, second = (read_run(path) for path in args.compare)
        table = comparison_markdown(compare(first, second, **bootstrap))
        print(f"A: {args.compare[0]}\nB: {args.compare[1]}\n\n{table}", end="")
        return
    if args.model is None or args.questions is None or args.out is None:
        raise ValueError("give a model, questions and --out, or --compare with two runs.")
    from mempo_trl.evaluation import evaluate

    options = {**run_options(args), **bootstrap}
    questions = open_questions(args, args.questions)
    evaluation = evaluate(args.model, questions, open_tools(args), output_dir=args.out, **options)
    print(evaluation.to_markdown(), end="")
    print(f"\nEpisodes, summary.json and summary.md: {args.out}")

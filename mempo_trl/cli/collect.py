"""`mempo collect`: run a model over questions and keep what is worth imitating."""

import argparse

from mempo_trl.cli.agents import (
    MODEL,
    add_agent_arguments,
    add_run_arguments,
    context_turns,
    open_questions,
    open_tools,
    run_options,
    text_or_file,
)
from mempo_trl.cli.questions import QUESTIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Run a model over questions, keep the episodes that are right and well-formed, and write their turns as "
        "fine-tuning data: sft.jsonl, and sft_no_memory.jsonl for baselines."
    )
    parser.add_argument("model", help=MODEL)
    parser.add_argument("questions", help=QUESTIONS)
    add_run_arguments(parser)
    group = parser.add_argument_group("what is kept")
    group.add_argument("--metric", choices=["exact_match", "f1"], default="exact_match", help="what decides")
    group.add_argument("--min-score", type=float, default=1.0, help="the least score that is kept")
    group.add_argument("--max-per-question", type=int, default=1, metavar="N", help="episodes kept of a question")
    group.add_argument(
        "--sft-context-turns",
        type=context_turns,
        default="all",
        metavar="N|all",
        help="earlier turns that a turn of sft.jsonl sees, as the policy will be trained",
    )
    group.add_argument(
        "--sft-system-prompt", metavar="TEXT|FILE", help="system message of sft.jsonl, if not the model's own"
    )
    add_agent_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from mempo_trl.collecting import collect

    if args.out is None:
        raise ValueError("give --out, the folder of the run.")
    window = None if args.sft_context_turns == "all" else args.sft_context_turns
    prompt = None if args.sft_system_prompt is None else text_or_file(args.sft_system_prompt)
    questions = open_questions(args, args.questions)
    collection = collect(
        args.model,
        questions,
        open_tools(args),
        args.out,
        metric=args.metric,
        min_score=args.min_score,
        max_per_question=args.max_per_question,
        sft_context_turns=window,
        sft_system_prompt=prompt,
        **run_options(args),
    )
    summary = collection.summary()
    print(f"{summary['kept']:,} of {summary['episodes']:,} episodes are kept, with {summary['pairs']:,} turns.")
    for reason, count in summary["dropped"].items():
        print(f"{count:,} dropped: {reason}")
    print(f"Everything is in {args.out}.")

"""`mempo ask`: let an agent answer a question."""

import argparse

from mempo_trl.cli.agents import MODEL, add_agent_arguments, agent_options, open_tools


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = "Let an agent answer a question, and show each of its turns as it comes."
    parser.add_argument("model", help=MODEL)
    parser.add_argument("question", help="the question")
    parser.add_argument("--quiet", action="store_true", help="print the answer alone")
    add_agent_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from mempo_trl.agent import MemoryAgent

    agent = MemoryAgent(args.model, open_tools(args), **agent_options(args))
    turn = None
    for number, turn in enumerate(agent.stream(args.question), start=1):
        if args.quiet:
            continue
        print(f"--- Turn {number}: {turn.prompt_tokens} tokens read, {turn.completion_tokens} written")
        print(turn.text, flush=True)
        for message in turn.observation:
            print(f"[{message['name']}] {message['content']}", flush=True)
    if turn is None or turn.answer is None:
        raise ValueError("the agent gave no answer.")
    print(turn.answer if args.quiet else f"--- Answer: {turn.answer}")

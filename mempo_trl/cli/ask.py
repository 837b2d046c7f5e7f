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
    told, episode = 0, None
    for episode in agent.episodes(args.question):
        for turn in episode.steps[told:]:
            told += 1
            if args.quiet:
                continue
            print(f"--- Turn {told}: {turn.prompt_tokens} tokens read, {turn.completion_tokens} written")
            print(turn.text, flush=True)
            for message in turn.observation:
                print(f"[{message['name']}] {message['content']}", flush=True)
    if episode is None or episode.answer is None:
        why = "no turn" if episode is None else episode.error or episode.stop_reason
        raise ValueError(f"the agent gave no answer ({why}).")
    print(episode.answer if args.quiet else f"--- Answer: {episode.answer}")

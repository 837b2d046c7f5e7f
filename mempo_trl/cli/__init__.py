"""The command `mempo`. Each of its commands is a module of this package, imported only when it is asked for."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn


# In each module: `add_arguments(parser)` and `run(args)`. What goes wrong with what the user gave is raised as
# `ValueError` or `OSError`, in a sentence.
COMMANDS = {
    "ask": "Let an agent answer a question.",
    "collect": "Run a model over questions and keep what is worth imitating.",
    "data": "Look at questions, convert them, compose questions of several objectives.",
    "eval": "Evaluate an agent, or compare two evaluations.",
    "index": "Build a search index of a corpus, or add documents to one.",
    "serve": "Serve a search index over HTTP.",
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in a sentence, as commands do."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{self.prog}: {message} ({self.prog} --help says more).")


class _UsageError(Exception):
    """The arguments cannot be read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; `None` takes those of the process.

    Returns:
        The exit status: 0, or 1 if the command failed.
    """
    parser = _Parser(prog="mempo", description="Search agents that keep their own memory.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((word for word in (sys.argv[1:] if argv is None else argv) if word in COMMANDS), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        if name == asked:
            module = importlib.import_module(f"{__name__}.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    try:
        args = parser.parse_args(argv)
        args.run(args)
    except _UsageError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever reads the output has had enough
        # What is left of it is flushed when the interpreter ends, and must not fail there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
            message = f"{error.filename}: {error.strerror}."  # without the number
        print(f"mempo {args.command}: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0

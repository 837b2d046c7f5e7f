"""Questions, a script of what a model behind an endpoint writes to them, and a server that plays it."""

from openai_stand_in import chat_answer
from support import call


def answer(text: str, memory: str | None = None) -> str:
    """A turn that answers."""
    return f"{'' if memory is None else f'<mem>{memory}</mem>'}<think>t</think><answer>{text}</answer>"


def ask(query: str, memory: str | None = None, name: str = "search") -> str:
    """A turn that calls a tool."""
    return f"{'' if memory is None else f'<mem>{memory}</mem>'}<think>t</think>{call(query, name)}"


class Play:
    """Answers `/v1/chat/completions` with the turns of the question that the conversation asks.

    A turn reads 100 tokens for each message of the conversation, and is as long as it has characters.

    Args:
        turns: for each question its turns, or for each sample of it a list of turns: the n-th conversation that is
            begun about it plays the n-th.

    Attributes:
        begun: how often each question was begun.
    """

    def __init__(self, turns: dict[str, list]):
        self.turns = {name: rows if isinstance(rows[0], list) else [rows] for name, rows in turns.items()}
        self.begun = dict.fromkeys(turns, 0)

    def __call__(self, path, body):
        messages = body["messages"]
        question = next(message["content"] for message in messages if message["role"] == "user")
        written = [message["content"] for message in messages if message["role"] == "assistant"]
        rows = self.turns[question]
        if written:
            row = next(row for row in rows if written[-1] in row)
            text = row[row.index(written[-1]) + 1]
        else:
            text = rows[self.begun[question] % len(rows)][0]
            self.begun[question] += 1
        return chat_answer(text, prompt_tokens=100 * len(messages), completion_tokens=len(text))

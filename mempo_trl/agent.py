"""`MemoryAgent`: a trained model answers questions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .engines import Episode, Step, open_engine
from .protocol import build_prompt, clean_text


@dataclass
class Answer:
    """What an agent found out.

    Attributes:
        text: the answer, as the model wrote it; `None` if it gave none. Answers to several questions at once are
            separated by ";".
        turns: everything it did: of each turn `text`, `memory`, `thought`, `tool_calls`, `answer`, `observation`.
        tokens: tokens read and written in all turns together; each turn reads its context anew.
        stop_reason: why it ended, see [`mempo_trl.engines.Episode`].
        error: what the endpoint said, if it refused a request; `None` if not.
    """

    text: str | None
    turns: list[Step]
    tokens: int
    stop_reason: str
    error: str | None = None


class MemoryAgent:
    """Answers questions with tools and a memory, as the model was trained to.

    Example:

    ```python
    >>> from mempo_trl import MemoryAgent
    >>> from mempo_trl.search import BM25Index, make_search_tool

    >>> agent = MemoryAgent("me/my-agent", tools=[make_search_tool(BM25Index.load("index"), k=3)])
    >>> agent.run("Who wrote Dune?").text
    'Frank Herbert'
    ```

    Args:
        model_or_endpoint: a checkpoint's folder or its name on the Hub, a model of transformers with its `tokenizer`,
            or the URL of an OpenAI-compatible endpoint; see [`mempo_trl.engines.open_engine`].
        tools: functions that the agent may call, as `MemPOTrainer` takes them.
        **options: what else `open_engine` takes: `context_turns` and the other settings, where they are to differ from
            those that the checkpoint was trained with (its `agent.json`); `sampling`, `endpoint`, `backend`, …

    Raises:
        ValueError, TypeError, ImportError, OSError: as `open_engine`.
    """

    def __init__(self, model_or_endpoint: Any, tools: Any = None, **options: Any):
        self.engine = open_engine(model_or_endpoint, tools, **options)

    def run(self, question: str) -> Answer:
        """Answer a question.

        Args:
            question: the question; several may be asked at once. Special tokens of the tokenizer's that it spells out
                are such tokens to the model, as in training: clean what strangers ask.

        Raises:
            ValueError: if the question is empty.
            EndpointError: if the model is behind an endpoint that does not answer.
            RuntimeError: if a tool could not be reached again and again.
        """
        episode = Episode()
        for episode in self.episodes(question):  # noqa: B007
            pass
        return Answer(episode.answer, episode.steps, episode.total_tokens, episode.stop_reason, episode.error)

    def stream(self, question: str) -> Iterator[Step]:
        """Answer a question, giving each turn once it is over and its tools have answered.

        Arguments and errors are those of `run`. The last turn's `answer` is the answer.
        """
        told = 0
        for episode in self.episodes(question):
            if len(episode.steps) > told:  # an episode may also end before its next turn
                told = len(episode.steps)
                yield episode.steps[-1]

    def episodes(self, question: str) -> Iterator[Episode]:
        """Answer a question, giving the growing episode after each turn: it says in the end why it ended.

        Arguments and errors are those of `run`.
        """
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"`question` must be a text, but it is {question!r}.")
        return self.engine.turns(build_prompt(clean_text(question), self.engine.settings.system_prompt))

"""What every engine offers, and what it is told."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..agent_settings import AgentSettings
from .episode import Episode, Message


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: 0 takes the most probable token each time.
        top_p, top_k: draw from the most probable tokens that have this probability together, or are that many; 1 and 0
            draw from all.
        seed: of everything that is random, as far as the engine can be told.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed, wanted in (
            ("temperature", lambda value: value >= 0, "0 or more"),
            ("top_p", lambda value: 0 < value <= 1, "more than 0, and at most 1"),
            ("top_k", lambda value: value >= 0 and value == int(value), "a whole number, 0 for no limit"),
            ("seed", lambda value: value >= 0 and value == int(value), "a whole number, at least 0"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not allowed(value):
                raise ValueError(f"`{name}={value!r}` is not allowed: it must be {wanted}.")


class Engine(Protocol):
    """Runs an agent with its tools.

    Attributes:
        identity: what runs, in words: the same for the same model, whatever the hardware.
        settings: what the agent is run with.
        sampling: how tokens are drawn.
        tools: what it may call.
        details: what else its answers depend on, in plain types.
    """

    identity: str
    settings: AgentSettings
    sampling: Sampling
    tools: list[Callable]
    details: dict[str, Any]

    def turns(self, prompt: list[Message]) -> Iterator[Episode]:
        """Run one question; gives the growing episode after each turn, its observation included, and at its end."""
        ...

    def rollout(self, prompts: Sequence[list[Message]], seeds: Sequence[int]) -> Iterator[tuple[int, Episode]]:
        """Run many questions.

        Args:
            prompts: conversations that open an episode, see `mempo_trl.protocol.build_prompt`.
            seeds: for each what is drawn with, where the engine draws for each on its own.

        Returns:
            `(position, episode)`, as they end.
        """
        ...


def in_threads(jobs: Sequence[Callable[[], T]], threads: int) -> Iterator[tuple[int, T]]:
    """Run jobs in threads; gives `(position, result)` as they end, and begins no other once the caller has had enough.

    After the first exception no other begins. Those that run come to their end, so that what they have cost is not
    lost; then it is raised.
    """
    failure: Exception | None = None
    with ThreadPoolExecutor(threads) as pool:
        running: dict[Future[T], int] = {}
        waiting = iter(enumerate(jobs))
        try:
            while True:
                while failure is None and len(running) < threads and (job := next(waiting, None)) is not None:
                    running[pool.submit(job[1])] = job[0]
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    position = running.pop(future)
                    try:
                        result = future.result()
                    except Exception as error:
                        failure = failure or error
                        continue
                    yield position, result
        finally:
            for future in running:
                future.cancel()
    if failure is not None:
        raise failure

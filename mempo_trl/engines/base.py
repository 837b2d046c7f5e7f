"""What every engine offers, and what it is told."""

import logging
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..agent_settings import AgentSettings
from .episode import Episode, EpisodeStop, Message


logger = logging.getLogger(__name__)

T = TypeVar("T")
Episodes = Generator[tuple[int, Episode], None, None]  # with their positions; closing it stops what runs


class EndpointError(ConnectionError):
    """An endpoint does not answer, or refuses everything."""


class RefusedError(ValueError):
    """An endpoint refuses this request, which ends the episode; the message is the endpoint's own."""

    stop_reason: EpisodeStop = "refused"


class ContextTooLongError(RefusedError):
    """A request has more tokens than the model takes."""

    stop_reason = "max_context_length"


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

    def rollout(self, prompts: Sequence[list[Message]], seeds: Sequence[int]) -> Episodes:
        """Run many questions.

        Args:
            prompts: conversations that open an episode, see `mempo_trl.protocol.build_prompt`.
            seeds: for each what is drawn with, where the engine draws for each on its own.

        Returns:
            `(position, episode)`, as they end.
        """
        ...


def last_turn(turns: Callable[[], Iterator[Episode]], stop: threading.Event) -> Episode | None:
    """The whole episode of `turns`; `None` if it is to stop and another turn would come."""
    found = None
    for found in turns():
        if stop.is_set() and (not found.steps or found.steps[-1].observation):
            return None
    return found


def in_threads(
    jobs: Sequence[Callable[[threading.Event], T | None]], threads: int
) -> Generator[tuple[int, T], None, None]:
    """Run jobs in threads; gives `(position, result)` as they end.

    After the first exception no other job begins. Those that run come to their end, so that what they have cost is not
    lost; then it is raised. After `KeyboardInterrupt`, or once the caller has had enough, jobs are told to stop where
    they can; a second `KeyboardInterrupt` is raised at once.

    Args:
        jobs: what to run. Each is given an event, and returns `None` if it stopped because that was set.
        threads: how many run at the same time.
    """
    stop = threading.Event()
    # Not a `ThreadPoolExecutor`: the interpreter would wait for its threads whatever they wait for.
    ended: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()

    def work(position: int, job: Callable[[threading.Event], T | None]) -> None:
        try:
            ended.put((position, job(stop), None))
        except BaseException as error:
            ended.put((position, None, error))

    failure: BaseException | None = None
    waiting, running = iter(enumerate(jobs)), 0
    try:
        while True:
            while failure is None and running < threads and (job := next(waiting, None)) is not None:
                threading.Thread(target=work, args=job, daemon=True).start()
                running += 1
            if not running:
                break
            try:
                position, result, error = ended.get()
            except KeyboardInterrupt as interrupt:
                if stop.is_set():
                    raise
                stop.set()
                failure = interrupt
                logger.warning(
                    "Interrupted: no further turn begins; waiting for the %d under way. Interrupt again to drop them.",
                    running,
                )
                continue
            running -= 1
            if error is not None:
                failure = failure or error
            elif result is not None:
                yield position, result
    finally:
        stop.set()
    if failure is not None:
        raise failure

"""Calls side by side."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar


T = TypeVar("T")
R = TypeVar("R")


def map_in_threads(function: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Call a function with every item.

    Whoever interrupts this, a limit of time for instance, does not wait for the calls that still run.

    Args:
        function: Is called in other threads, unless there is a single item.
        items: What to call it with.
        threads: Calls at the same time, at most.

    Returns:
        The results, in the order of the items. What a call raises is raised here.
    """
    if len(items) <= 1:
        return [function(item) for item in items]
    pool = ThreadPoolExecutor(min(threads, len(items)))
    try:
        return list(pool.map(function, items))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

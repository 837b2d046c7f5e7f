"""Running the tool calls of one turn, for all rollouts at once. Nothing a tool does ends the training."""

import asyncio
import contextlib
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from .protocol import ToolCall


# What may escape from a tool and still be the tool's own failure. `KeyboardInterrupt` is not: it is the user's.
_TOOL_ERRORS = (Exception, SystemExit, asyncio.CancelledError)


@dataclass
class ToolResult:
    """What one request was answered with.

    Attributes:
        name: the tool's name, `"unknown"` for a malformed request.
        text: the observation: the tool's result as a string, or a sentence that begins with "Error:".
        failed: whether it is an error.
        malformed: whether the request itself could not be read.
    """

    name: str
    text: str
    failed: bool = False
    malformed: bool = False


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TimeoutError` in the body once `seconds` have passed.

    Tools run in the main thread, where they would run in TRL: a worker thread would change what they see (SQLite
    connections, the current CUDA device) and could not be stopped. So the limit is an interval timer of the process,
    whose signal interrupts the tool wherever Python runs or a system call blocks. Elsewhere (another thread, Windows)
    there are no such timers, and the body runs without a limit.
    """
    can_interrupt = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if seconds is None or not can_interrupt:
        yield
        return

    def interrupt(signum, frame):
        raise TimeoutError(f"no result within {seconds:g} seconds")

    previous_handler = signal.signal(signal.SIGALRM, interrupt)
    # Repeated, since a tool that catches every exception in a retry loop would swallow a single one.
    previous_timer = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
        if previous_timer[0]:
            signal.setitimer(signal.ITIMER_REAL, *previous_timer)


class ToolRunner:
    """Answers requests with the tools of their rollouts.

    Args:
        timeout: seconds that one call may take (one batched call answers all rollouts), no limit if `None`.
        event_loop: a running loop in another thread, for tools that are coroutine functions.
    """

    def __init__(self, timeout: float | None = None, event_loop: asyncio.AbstractEventLoop | None = None):
        self.timeout = timeout
        self.event_loop = event_loop

    def run(self, requests: list[tuple[dict[str, Callable], ToolCall | str]]) -> list[ToolResult]:
        """Answer every request; never raises what a tool raises.

        Calls of one tool that carries `.batch(list_of_arguments) -> list_of_results` are answered by a single call, all
        coroutine functions run concurrently, other tools run one after the other, in the order of the requests.

        Args:
            requests: pairs of the tools of a rollout by name, and a call or the sentence that says why it is malformed.

        Returns:
            One result for each request, in their order.
        """
        results: dict[int, ToolResult] = {}
        batched: dict[Callable, list[int]] = {}
        concurrent: list[int] = []
        for index, (tools, request) in enumerate(requests):
            if isinstance(request, str):
                results[index] = ToolResult("unknown", f"Error: {request}", failed=True, malformed=True)
            elif request["name"] not in tools:
                known = ", ".join(tools) or "none"
                text = f"Error: there is no tool named {request['name']!r}. Available tools: {known}."
                results[index] = ToolResult(request["name"], text, failed=True)
            elif (reason := _mismatch(tools[request["name"]], request["arguments"])) is not None:
                results[index] = _failure(request["name"], reason)
            elif hasattr(tools[request["name"]], "batch"):
                batched.setdefault(tools[request["name"]], []).append(index)
            elif inspect.iscoroutinefunction(tools[request["name"]]):
                concurrent.append(index)
            else:
                results[index] = self._call(tools[request["name"]], request)

        calls = {index: request for index, (_, request) in enumerate(requests) if not isinstance(request, str)}
        for tool, indices in batched.items():
            results.update(zip(indices, self._call_batch(tool, [calls[i] for i in indices]), strict=True))
        if concurrent:
            answers = self._call_async([(requests[i][0][calls[i]["name"]], calls[i]) for i in concurrent])
            results.update(zip(concurrent, answers, strict=True))
        return [results[index] for index in range(len(requests))]

    def _call(self, tool: Callable, call: ToolCall) -> ToolResult:
        try:
            with time_limit(self.timeout):
                return ToolResult(call["name"], str(tool(**call["arguments"])))
        except _TOOL_ERRORS as error:
            return _failure(call["name"], error)

    def _call_batch(self, tool: Any, calls: list[ToolCall]) -> list[ToolResult]:
        try:
            with time_limit(self.timeout):
                answers = list(tool.batch([call["arguments"] for call in calls]))
        except OSError as error:  # the backend is down or too slow (TimeoutError too): asking it again helps nobody
            return [_failure(call["name"], error) for call in calls]
        except _TOOL_ERRORS as error:
            # One rollout's arguments must not fail the others.
            return [self._call(tool, call) for call in calls] if len(calls) > 1 else [_failure(calls[0]["name"], error)]
        if len(answers) != len(calls):
            wrong = ValueError(f"the tool returned {len(answers)} results for {len(calls)} calls")
            return [_failure(call["name"], wrong) for call in calls]
        return [_result(call["name"], answer) for call, answer in zip(calls, answers, strict=True)]

    def _call_async(self, calls: list[tuple[Callable, ToolCall]]) -> list[ToolResult]:
        async def call_all() -> list[Any]:
            tasks = [asyncio.wait_for(tool(**call["arguments"]), self.timeout) for tool, call in calls]
            return await asyncio.gather(*tasks, return_exceptions=True)

        if self.event_loop is None:
            answers = asyncio.run(call_all())
        else:
            future = asyncio.run_coroutine_threadsafe(call_all(), self.event_loop)
            try:
                # A coroutine that blocks its loop cannot be timed out from inside.
                answers = future.result(None if self.timeout is None else 2 * self.timeout)
            except FutureTimeoutError as error:
                answers = [error] * len(calls)
        return [_result(call["name"], answer) for (_, call), answer in zip(calls, answers, strict=True)]


def _mismatch(tool: Callable, arguments: dict[str, Any]) -> TypeError | None:
    """Why the arguments do not fit the tool's signature, known before anything runs."""
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError as error:
        return TypeError(f"{getattr(tool, '__name__', 'the tool')}: {error}")
    except ValueError:  # no signature to be had, as for some built-in functions
        pass
    return None


def _result(name: str, answer: Any) -> ToolResult:
    if isinstance(answer, _TOOL_ERRORS):
        return _failure(name, answer)
    try:
        return ToolResult(name, str(answer))
    except Exception as error:
        return _failure(name, error)


def _failure(name: str, error: BaseException) -> ToolResult:
    if isinstance(error, TimeoutError):
        return ToolResult(name, f"Error: the tool {name} timed out ({str(error) or 'no result in time'}).", failed=True)
    return ToolResult(name, f"Error: {type(error).__name__}: {error}", failed=True)

"""Running the tool calls of one turn, for all rollouts at once. Nothing a tool does ends the training."""

import asyncio
import inspect
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, TypeVar

from .protocol import ToolCall, clean_text


logger = logging.getLogger(__name__)

T = TypeVar("T")


class TimeLimitError(TimeoutError):
    """The time that a tool may take is over."""


class ToolUnavailableError(ConnectionError):
    """For tools to raise if what they ask does not answer, whatever it is asked."""


@dataclass
class ToolResult:
    """What one request was answered with.

    Attributes:
        name: the tool's name, `"unknown"` if there is no such tool.
        text: the observation: the tool's result as a string, or a sentence that begins with "Error:". Always text that
            can be encoded.
        failed: whether it is an error.
        malformed: whether the request itself could not be read.
        unavailable: why the tool could not be reached at all; `None` if it could. A `ConnectionError` or `TimeoutError`
            says so.
    """

    name: str
    text: str
    failed: bool = False
    malformed: bool = False
    unavailable: str | None = None


def check_tools(tools: Any) -> list[Callable]:
    """The tools as a list.

    Args:
        tools: what a user gave; `None` for no tools.

    Raises:
        ValueError: unless they are functions with names of their own.
    """
    if tools is None:
        return []
    if not isinstance(tools, list | tuple) or not all(callable(tool) for tool in tools):
        raise ValueError(f"`tools` must be a list of functions, but it is {tools!r}.")
    names = [tool_name(tool) for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"`tools` has several functions named {name!r}: rename all but one.")
    return list(tools)


def tool_name(tool: Callable) -> str:
    """The name that a model calls a tool by."""
    return getattr(tool, "__name__", type(tool).__name__)


class time_limit:
    """Raise `TimeLimitError` in the body once `seconds` have passed.

    Tools run in the main thread, where they would run in TRL: a worker thread would change what they see (SQLite
    connections, the current CUDA device) and could not be stopped. So the limit is an interval timer of the process,
    whose signal interrupts the tool wherever Python runs or a system call blocks. Elsewhere (another thread, Windows)
    there are no such timers, and the body runs without a limit.

    Args:
        seconds: the limit; none if `None`.
    """

    def __init__(self, seconds: float | None):
        self.seconds = seconds

    def __enter__(self) -> None:
        can_interrupt = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
        self._armed = self.seconds is not None and can_interrupt
        if self._armed:
            self._handler = signal.signal(signal.SIGALRM, self._interrupt)
            # Repeated, since a tool that catches every exception in a retry loop would swallow a single one.
            self._timer = signal.setitimer(signal.ITIMER_REAL, self.seconds, self.seconds)  # type: ignore[arg-type]

    def __exit__(self, *exception) -> None:
        if self._armed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._handler)
            if self._timer[0]:
                signal.setitimer(signal.ITIMER_REAL, *self._timer)

    def _interrupt(self, signum, frame) -> None:
        # The signal may come while the timer is switched on or off, which must not be cut short, or while an earlier
        # one is handled there.
        while frame is not None and frame.f_code is _INTERRUPT:
            frame = frame.f_back
        if frame is None or frame.f_code not in _SWITCHES:
            raise TimeLimitError(f"no result within {self.seconds:g} seconds")


_INTERRUPT = time_limit._interrupt.__code__
_SWITCHES = (time_limit.__enter__.__code__, time_limit.__exit__.__code__)


class ToolRunner:
    """Answers requests with the tools of their rollouts.

    Args:
        timeout: seconds that one call may take (one batched call answers all rollouts), no limit if `None`.
        event_loop: a running loop in another thread, for tools that are coroutine functions.

    Attributes:
        unavailable: for each tool that could not be reached when it was last called: in how many runs in a row, and
            why in the last one. A run in which one call is answered is none of them.
    """

    def __init__(self, timeout: float | None = None, event_loop: asyncio.AbstractEventLoop | None = None):
        self.timeout = timeout
        self.event_loop = event_loop
        self.unavailable: dict[str, tuple[int, str]] = {}
        self._lock = threading.Lock()

    def run(self, requests: list[tuple[dict[str, Callable], ToolCall | str]]) -> list[ToolResult]:
        """Answer every request; of what a tool raises, only `KeyboardInterrupt` comes through: it is the user's.

        Calls of one tool that carries `.batch(list_of_arguments) -> list_of_results` are answered by a single call, all
        coroutine functions run concurrently, other tools run one after the other, in the order of the requests.

        Args:
            requests: pairs of the tools of a rollout by name, and a call or the sentence that says why it is malformed.

        Returns:
            One result for each request, in their order.
        """
        results: dict[int, ToolResult] = {}
        batched: dict[int, list[int]] = {}  # by the tool's identity
        concurrent: list[int] = []
        calls: dict[int, tuple[Any, ToolCall]] = {}
        for index, (tools, request) in enumerate(requests):
            if isinstance(request, str):
                results[index] = ToolResult("unknown", clean_text(f"Error: {request}"), failed=True, malformed=True)
                continue
            tool: Any = tools.get(request["name"])
            if tool is None:
                known = ", ".join(tools) or "none"
                text = f"Error: there is no tool named {request['name']!r}. Available tools: {known}."
                results[index] = ToolResult("unknown", clean_text(text), failed=True)
                continue
            calls[index] = (tool, request)
            if (reason := _mismatch(tool, request["arguments"])) is not None:
                results[index] = _failure(request["name"], reason)
            elif hasattr(tool, "batch"):
                batched.setdefault(id(tool), []).append(index)
            elif inspect.iscoroutinefunction(tool) or inspect.iscoroutinefunction(type(tool).__call__):
                concurrent.append(index)
            else:
                results[index] = self._call(tool, request)

        for indices in batched.values():
            tool = calls[indices[0]][0]
            results.update(zip(indices, self._call_batch(tool, [calls[i][1] for i in indices]), strict=True))
        if concurrent:
            results.update(zip(concurrent, self._call_async([calls[i] for i in concurrent]), strict=True))
        in_order = [results[index] for index in range(len(requests))]
        with self._lock:
            self._watch(in_order)
        return in_order

    def stop_if_unavailable(
        self, limit: int | None, how_to_go_on: str, max_over_processes: Callable[[int], int] = int
    ) -> None:
        """Raise if a tool could not be reached in so many runs in a row.

        Args:
            limit: runs; `None` for no limit.
            how_to_go_on: what a user does once the tool works again, for the message.
            max_over_processes: the largest of an integer over all processes, which then raise together.

        Raises:
            RuntimeError: with the tool and the reason.
        """
        if limit is None:
            return
        with self._lock:
            absent = [(turns, name, reason) for name, (turns, reason) in self.unavailable.items()]
        turns, name, reason = max(absent, default=(0, "", ""))
        if max_over_processes(turns) < limit:
            return
        where = f"The tool {name} was" if turns else "A tool of another process was"
        raise RuntimeError(
            f"{where} not available in {limit} turns in a row, so this run stops rather than go on with answers that "
            f"nothing was found for. {reason or 'Its own message says why.'} Once the tool works again, "
            f"{how_to_go_on}; `max_unavailable_turns=None` never stops."
        )

    def _watch(self, results: list[ToolResult]) -> None:
        """Count the runs in which a tool could not be reached. A call that was wrong in itself tells nothing."""
        answered = {result.name for result in results if not result.failed}
        reasons = {result.name: result.unavailable for result in results if result.unavailable is not None}
        for name in answered & self.unavailable.keys():
            del self.unavailable[name]
            logger.warning("The tool %s is available again.", name)
        for name in reasons.keys() - answered:
            turns = self.unavailable.get(name, (0, ""))[0] + 1
            self.unavailable[name] = turns, reasons[name]
            logger.warning("The tool %s is not available, %d turns in a row: %s", name, turns, reasons[name])

    def _call(self, tool: Callable, call: ToolCall) -> ToolResult:
        answer: Any
        try:
            with time_limit(self.timeout):
                answer = tool(**call["arguments"])
                if not inspect.isawaitable(answer):
                    return _result(call["name"], answer)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too, and what Rust extensions raise when they panic
            return _failure(call["name"], error)

        async def wait() -> Any:
            return await answer

        return _result(call["name"], self._await_all([wait])[0])

    def _call_batch(self, tool: Any, calls: list[ToolCall]) -> list[ToolResult]:
        try:
            with time_limit(self.timeout):
                answers = list(tool.batch([call["arguments"] for call in calls]))
        except KeyboardInterrupt:
            raise
        except OSError as error:  # the backend is down or too slow (TimeoutError too): asking it again helps nobody
            return [_failure(call["name"], error) for call in calls]
        except BaseException as error:
            # One rollout's arguments must not fail the others.
            return [self._call(tool, call) for call in calls] if len(calls) > 1 else [_failure(calls[0]["name"], error)]
        if len(answers) != len(calls):
            wrong = ValueError(f"the tool returned {len(answers)} results for {len(calls)} calls")
            return [_failure(call["name"], wrong) for call in calls]
        return [_result(call["name"], answer) for call, answer in zip(calls, answers, strict=True)]

    def _call_async(self, calls: list[tuple[Callable, ToolCall]]) -> list[ToolResult]:
        def started(tool: Callable, call: ToolCall) -> Callable[[], Awaitable[Any]]:
            async def run() -> Any:
                return await tool(**call["arguments"])

            return run

        answers = self._await_all([started(tool, call) for tool, call in calls])
        return [_result(call["name"], answer) for (_, call), answer in zip(calls, answers, strict=True)]

    def _await_all(self, coroutines: list[Callable[[], Awaitable[Any]]]) -> list[Any]:
        """Run coroutine functions concurrently; what one raises stands in the place of its result."""

        async def guarded(coroutine: Callable[[], Awaitable[Any]]) -> Any:
            try:
                return await coroutine()
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # `SystemExit` would end the loop's thread
                return error

        async def all_of_them() -> list[Any]:
            limited = [asyncio.wait_for(guarded(coroutine), self.timeout) for coroutine in coroutines]
            return await asyncio.gather(*limited, return_exceptions=True)

        try:
            if self.event_loop is None:
                return _run_in_own_loop(all_of_them)
            future = asyncio.run_coroutine_threadsafe(all_of_them(), self.event_loop)
            # A coroutine that blocks its loop cannot be timed out from inside.
            return future.result(None if self.timeout is None else 2 * self.timeout)
        except KeyboardInterrupt:
            raise
        except FutureTimeoutError as error:
            return [error] * len(coroutines)
        except BaseException as error:  # a tool that cancels every task of the loop
            return [error] * len(coroutines)


def _run_in_own_loop(coroutine: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function, also where a loop runs already: in a notebook, in an asynchronous server."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(coroutine())).result()


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
    if isinstance(answer, BaseException):
        return _failure(name, answer)
    try:
        return ToolResult(name, clean_text(str(answer)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _failure(name, error)


def _failure(name: str, error: BaseException) -> ToolResult:
    try:
        message = str(error)
    except Exception:
        message = "an error that cannot be shown"
    if isinstance(error, ToolUnavailableError):  # names of servers are not for the model
        return ToolResult(name, f"Error: {name} is not available at the moment.", True, unavailable=message)
    if isinstance(error, TimeoutError):
        message = message or "no result in time"
        text = clean_text(f"Error: the tool {name} timed out ({message}).")
        return ToolResult(name, text, True, unavailable=message)
    if isinstance(error, ConnectionError):
        text = clean_text(f"Error: {type(error).__name__}: {message}")
        return ToolResult(name, text, True, unavailable=message)
    return ToolResult(name, clean_text(f"Error: {type(error).__name__}: {message}"), True)

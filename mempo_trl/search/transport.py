"""HTTP requests to a search service that may be slow, busy, restarted or down."""

import json
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.exceptions import TimeoutError as ReadTimeout

from mempo_trl.search.arguments import check_counts
from mempo_trl.tools import TimeLimitError, ToolUnavailableError


T = TypeVar("T")

# What a service says for a while: it is busy, restarting, or too slow.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})
# What it says of a request that it understands, but does not want.
_REFUSING = frozenset({400, 413, 414, 422})
_CHUNK = 1 << 16
_MAX_BACKOFF = 20.0
_MOST_REFUSALS = 20  # in a row


class SearchUnavailableError(ToolUnavailableError):
    """A search service does not answer, or answers nonsense."""


class SearchRefusedError(ValueError):
    """A search service that works does not want this query."""


class _NoAnswer(Exception):
    """An attempt failed.

    Attributes:
        reason: why.
        passes: whether another attempt may find an answer.
        wait: seconds that the service asks to be left alone.
    """

    def __init__(self, reason: str, passes: bool = True, wait: float = 0.0):
        super().__init__(reason)
        self.reason, self.passes, self.wait = reason, passes, wait


class Transport:
    """Sends JSON to a service and reads JSON, again and again if need be. Threads may share one, and so may processes
    that were forked: each has its own connections.

    After `failures_to_open` calls in a row that found no answer, for all their attempts, the circuit is open: calls
    fail at once for `cooldown` seconds. Then a call tries once, and if that finds an answer, all is as before.

    Args:
        name: What errors call the service.
        timeout: Seconds that an attempt may take, from connecting to the last byte.
        retries: Attempts after the first.
        patience: Seconds that a call may take with all its attempts. It should be less than what the tool may take
            (`tool_timeout`).
        backoff: Seconds before the second attempt, doubled for each one after, up to 20. Each is drawn between half and
            one and a half of it, so that many processes do not come back together. A `Retry-After` of the service is
            waited for instead, if it is no more than 60.
        failures_to_open: Calls without an answer in a row that open the circuit.
        cooldown: Seconds that it stays open.
        connections: Kept open.
        max_answer: Bytes that an answer may have.

    Raises:
        ValueError: If a number is out of its range.
    """

    def __init__(
        self,
        name: str,
        timeout: float = 30.0,
        retries: int = 4,
        patience: float = 50.0,
        backoff: float = 0.5,
        failures_to_open: int = 3,
        cooldown: float = 10.0,
        connections: int = 16,
        max_answer: int = 1 << 28,
    ):
        for argument, seconds, positive in (
            ("timeout", timeout, True),
            ("patience", patience, True),
            ("backoff", backoff, False),
            ("cooldown", cooldown, False),
        ):
            least = 1e-3 if positive else 0
            if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds >= least:
                raise ValueError(f"`{argument}={seconds!r}` is not allowed: it must be a number, at least {least}.")
        check_counts(retries=(retries, 0), failures_to_open=(failures_to_open, 1))
        check_counts(connections=(connections, 1), max_answer=(max_answer, 1))
        self.name = name
        self.timeout, self.retries, self.patience, self.backoff = timeout, retries, patience, backoff
        self.failures_to_open, self.cooldown = failures_to_open, cooldown
        self.connections, self.max_answer = connections, max_answer
        self._has_answered = False
        self._refusals = 0  # in a row
        self._failures = 0  # calls in a row
        self._closed_again_at = 0.0
        self._connect()

    def _connect(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._session = requests.Session()
        for scheme in ("http://", "https://"):
            adapter = HTTPAdapter(pool_connections=self.connections, pool_maxsize=self.connections)
            self._session.mount(scheme, adapter)

    def call(self, method: str, url: str, read: Callable[[Any], T], **request: Any) -> T:
        """Make a request until its answer can be read.

        Args:
            method, url, request: As `requests.Session.request` takes them.
            read: Makes the result of the answer's JSON. What it raises means that the answer is nonsense.

        Returns:
            What `read` returned.

        Raises:
            SearchUnavailableError: If no attempt found an answer, or the circuit is open.
            SearchRefusedError: If a service that answers others refuses this request.
        """
        if self._process != os.getpid():  # forked: answers on a shared connection could be another process's
            self._connect()
        attempts = self._allowed_attempts()
        end = time.monotonic() + self.patience
        asked = 0
        try:
            while True:
                try:
                    result = self._attempt(method, url, read, min(self.timeout, end - time.monotonic()), request)
                    break
                except _NoAnswer as error:
                    asked += 1
                    pause = min(self.backoff * 2 ** (asked - 1), _MAX_BACKOFF) * random.uniform(0.5, 1.5)
                    pause = max(pause, error.wait)
                    if not error.passes or asked == attempts or time.monotonic() + pause >= end:
                        often = "" if asked == 1 else f" It was asked {asked} times."
                        message = f"{self.name} does not work: {error.reason}.{often}"
                        raise SearchUnavailableError(message) from error
                time.sleep(pause)
        except SearchRefusedError:
            raise
        except BaseException:  # the user, or a limit of time around this call: not an answer either
            with self._lock:
                self._failures += 1
                self._closed_again_at = time.monotonic() + self.cooldown
            raise
        with self._lock:
            self._failures = self._refusals = 0
            self._has_answered = True
        return result

    def _allowed_attempts(self) -> int:
        """How many attempts a call has: one to find out whether an open circuit can be closed."""
        with self._lock:
            if self._failures < self.failures_to_open:
                return 1 + self.retries
            if time.monotonic() < self._closed_again_at:
                raise SearchUnavailableError(
                    f"{self.name} did not answer {self._failures} calls in a row, and is not asked again before "
                    f"{self.cooldown:g} seconds have passed."
                )
            # Others that come meanwhile do not wait for it.
            self._closed_again_at = time.monotonic() + self.timeout + self.cooldown
            return 1

    def _attempt(self, method: str, url: str, read: Callable[[Any], T], limit: float, request: dict[str, Any]) -> T:
        """Ask once. Raises `_NoAnswer`, or `SearchRefusedError`."""
        try:
            status, headers, body = self._exchange(method, url, limit, request)
        except (requests.RequestException, HTTPError) as error:
            if (interrupted := _time_limit_behind(error)) is not None:
                raise interrupted from None
            raise _NoAnswer(_reason(error)) from error
        if status == 200:
            try:
                return read(json.loads(body))
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
                what = f"it answers something else than search results ({type(error).__name__}: {error})"
                raise _NoAnswer(what) from error
        reason = f"status {status}: {_detail(body)}"
        if status in _REFUSING:
            with self._lock:
                self._refusals += 1
                # A service that refuses everything, from the start or from now on, does not work.
                if self._has_answered and self._refusals <= _MOST_REFUSALS:
                    self._failures = 0
                    raise SearchRefusedError(f"{self.name} refuses this request, {reason}")
        raise _NoAnswer(reason, passes=status in _PASSING, wait=_retry_after(headers))

    def _exchange(self, method: str, url: str, limit: float, request: dict[str, Any]) -> tuple[int, Any, bytes]:
        """Send and receive. The timeout of `requests` is for each read, so a trickle of bytes has to be timed here."""
        end = time.monotonic() + limit
        with self._session.request(method, url, timeout=limit, stream=True, **request) as response:
            body = bytearray()
            while chunk := response.raw.read1(_CHUNK, decode_content=True):
                body += chunk
                if time.monotonic() > end:
                    raise requests.Timeout
                if len(body) > self.max_answer:
                    raise requests.ConnectionError(f"its answer has more than {self.max_answer:,} bytes")
            return response.status_code, response.headers, bytes(body)


def _time_limit_behind(error: BaseException | None) -> TimeLimitError | None:
    """The limit of the tool that asks, which libraries take for a timeout of the socket."""
    while error is not None and not isinstance(error, TimeLimitError):
        error = error.__cause__ or error.__context__
    return error


def _reason(error: Exception) -> str:
    """The cause, without the layers of libraries around it."""
    if isinstance(error, requests.Timeout | ReadTimeout):
        return "no answer in time"
    cause: BaseException = error
    while (inner := getattr(cause, "reason", None) or cause.__cause__ or cause.__context__) and isinstance(
        inner, BaseException
    ):
        cause = inner
    return str(cause).strip() or type(cause).__name__


def _detail(body: bytes) -> str:
    text = body[:2000].decode("utf-8", "replace").strip()
    try:
        answer = json.loads(body)
        text = str(answer.get("detail") or answer.get("error") or answer)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300] or "without a word"


def _retry_after(headers: Any) -> float:
    try:
        seconds = float(headers.get("Retry-After", 0))
    except ValueError:  # a date
        return 0.0
    return seconds if 0 < seconds <= 60 else 0.0

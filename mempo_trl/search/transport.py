"""HTTP requests to a search service that may be slow, busy, restarted or down."""

import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.exceptions import TimeoutError as ReadTimeout

from mempo_trl.tools import ToolUnavailableError


T = TypeVar("T")

# What a service says for a while: it is busy, restarting, or too slow.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})
# What it says of a request that it understands, but does not want.
_REFUSING = frozenset({400, 413, 414, 422})
_CHUNK = 1 << 16
_MAX_BACKOFF = 20.0


class SearchUnavailableError(ToolUnavailableError):
    """A search service does not answer, or answers nonsense."""


class SearchRefusedError(ValueError):
    """A search service that works does not want this query."""


class Transport:
    """Sends JSON to a service and reads JSON, again and again if need be. Threads may share one.

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
        for argument, value, least in (
            ("timeout", timeout, 1e-3),
            ("retries", retries, 0),
            ("patience", patience, 1e-3),
            ("backoff", backoff, 0),
            ("failures_to_open", failures_to_open, 1),
            ("cooldown", cooldown, 0),
        ):
            if not isinstance(value, int | float) or isinstance(value, bool) or not value >= least:
                raise ValueError(f"`{argument}={value!r}` is not allowed: it must be a number, at least {least}.")
        self.name = name
        self.timeout, self.retries, self.patience, self.backoff = timeout, retries, patience, backoff
        self.failures_to_open, self.cooldown = failures_to_open, cooldown
        self.max_answer = max_answer
        self._has_answered = False
        self._failures = 0
        self._closed_again_at = 0.0
        self._lock = threading.Lock()
        self._session = requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_connections=connections, pool_maxsize=connections))

    def call(self, method: str, url: str, read: Callable[[Any], T], **request: Any) -> T:
        """Make a request until its answer can be read.

        Args:
            method, url, request: As `requests.Session.request` takes them.
            read: Makes the result of the answer's JSON. What it raises means that the answer is nonsense.

        Returns:
            What `read` returned.

        Raises:
            SearchUnavailableError: If no attempt found an answer, or the circuit is open.
            SearchRefusedError: If a service that has answered before refuses this request.
        """
        attempts, asked = 1 + self.retries, 0
        with self._lock:
            if self._failures >= self.failures_to_open:
                if time.monotonic() < self._closed_again_at:
                    raise SearchUnavailableError(
                        f"{self.name} did not answer {self._failures} calls in a row, and is not asked again before "
                        f"{self.cooldown:g} seconds have passed."
                    )
                # One call tries, others that come meanwhile do not wait for it.
                self._closed_again_at = time.monotonic() + self.timeout + self.cooldown
                attempts = 1
        end = time.monotonic() + self.patience
        reason, wait = "", 0.0
        while asked < attempts:
            if asked:
                pause = min(self.backoff * 2 ** (asked - 1), _MAX_BACKOFF) * random.uniform(0.5, 1.5)
                pause = max(pause, wait)
                if time.monotonic() + pause >= end:
                    break
                time.sleep(pause)
            asked, wait = asked + 1, 0.0
            try:
                limit = min(self.timeout, end - time.monotonic())
                status, headers, body = self._attempt(method, url, limit, request)
            except (requests.RequestException, HTTPError) as error:
                reason = _reason(error)
                continue
            except BaseException:  # the user, or a limit of time around this call: not an answer either
                self._count_failure()
                raise
            if status == 200:
                try:
                    result = read(json.loads(body))
                except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
                    reason = f"it answers something else than search results ({type(error).__name__}: {error})"
                    continue
                with self._lock:
                    self._failures, self._has_answered = 0, True
                return result
            reason = f"status {status}: {_detail(body)}"
            if status in _REFUSING and self._has_answered:
                with self._lock:
                    self._failures = 0
                raise SearchRefusedError(f"{self.name} refuses this request, {reason}")
            if status not in _PASSING:
                break
            wait = _retry_after(headers)
        self._count_failure()
        often = "" if asked == 1 else f" It was asked {asked} times."
        raise SearchUnavailableError(f"{self.name} does not work: {reason}.{often}")

    def _count_failure(self) -> None:
        with self._lock:
            self._failures += 1
            self._closed_again_at = time.monotonic() + self.cooldown

    def _attempt(self, method: str, url: str, limit: float, request: dict[str, Any]) -> tuple[int, Any, bytes]:
        """One request. The timeout of `requests` is for each read, so a trickle of bytes has to be timed here."""
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

"""A search server that speaks the protocol of Search-R1, verl and MEM1, and searches for many clients at once."""

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import reprlib
import secrets
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mempo_trl.search.arguments import clean_token
from mempo_trl.search.corpus import Document
from mempo_trl.search.limits import ServerLimits
from mempo_trl.search.tool import SearchBackend


try:
    import h11
    import uvicorn
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        ProcessCollector,
        generate_latest,
    )
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ImportError(f"A search server needs more packages ({error}): pip install 'mempo_trl[server]'") from error


logger = logging.getLogger(__name__)

# Seconds that a connection without a request stays open. Long, since trainers search between long steps, and a request
# that meets a closing connection fails.
_KEEP_ALIVE = 75
_SPARE_FILES = 16  # that the process may want to open beside its connections
_SEARCH_PATH = "/retrieve"
_CLIENT_GONE = 499  # as nginx counts requests whose client went away; nobody receives it


def make_app(
    backend: SearchBackend,
    *,
    name: str = "index",
    topk: int = 3,
    token: str | None = None,
    workers: int = 1,
    limits: ServerLimits | None = None,
) -> ASGIApp:
    """Make the ASGI application of a search server. `serve` runs it; any other ASGI server can.

    - `POST /retrieve` with `{"queries": ["…"], "topk": 3, "return_scores": true}` answers `{"result": [[{"document":
      {"id": "…", "contents": "…"}, "score": 0.9}, …], …]}`, a list for each query, best document first. `topk` may be
      left out or null. Unless `return_scores` is true, the documents stand in the lists by themselves, as in Search-R1.
    - `GET /health` tells whether the server is ready, and what it serves.
    - `GET /metrics` has metrics in the text format of Prometheus.

    Errors are answered `{"detail": "…"}`, one sentence. The timeout for reading a request is not the application's, but
    `serve`'s.

    Args:
        backend: What to search. It is called from `workers` threads. If it has `identity` or a length, these are told
            at `/health`. Where its documents have no `score`, they get 0, −1, −2, ….
        name: What `/health` calls the index.
        topk: Documents for each query of a request that does not say.
        token: If given, requests must have the header `Authorization: Bearer <token>`, except that `/health` tells
            anyone whether the server is ready. White space around it does not count.
        workers: Searches at the same time.
        limits: What to accept, `ServerLimits()` if `None`.

    Raises:
        ValueError: If a number is out of its range, or the token is empty or not printable ASCII.
    """
    limits = limits or ServerLimits()
    if not 1 <= topk <= limits.topk:
        raise ValueError(f"topk must be between 1 and the limit {limits.topk}, got {topk!r}.")
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers!r}.")
    token = clean_token(token)
    metrics = _Metrics()
    batcher = _Batcher(backend, workers, limits, metrics)
    about = {"index": name, "documents": _length(backend), "identity": getattr(backend, "identity", None), "topk": topk}

    async def retrieve(request: Request) -> Response:
        _authorize(request, token)
        queries, k, scores = _read_request(await _read_body(request, limits.body_bytes), topk, limits)
        with metrics.in_flight.track_inprogress():
            start = time.perf_counter()
            found = await _unless_gone(request, batcher.submit(queries, k, scores))
            metrics.seconds.observe(time.perf_counter() - start)
        return Response(b'{"result": [' + b", ".join(found) + b"]}", media_type="application/json")

    async def health(request: Request) -> Response:
        return JSONResponse({"ready": True, **(about if _is_authorized(request, token) else {})})

    async def show_metrics(request: Request) -> Response:
        _authorize(request, token)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette):
        with batcher:
            yield

    app = Starlette(
        routes=[
            Route(_SEARCH_PATH, retrieve, methods=["POST"]),
            Route("/health", health),
            Route("/metrics", show_metrics),
        ],
        exception_handlers={HTTPException: _answer_error, ClientDisconnect: _answer_nobody},
        lifespan=lifespan,
    )
    return _count_requests(app, metrics)


def serve(
    backend: SearchBackend,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str = "index",
    topk: int = 3,
    token: str | None = None,
    workers: int = 1,
    limits: ServerLimits | None = None,
    access_log: bool = False,
) -> None:
    """Serve a backend over HTTP until SIGTERM or SIGINT; must run in the main thread.

    When it is ready, it prints one line to stdout that ends with its URL. At the first signal it accepts no more
    connections, finishes the requests that it has, and returns; a second signal kills the process. Connections beyond
    the process's limit of open files wait until others are closed.

    Args:
        backend: See `make_app`, also for `name`, `topk`, `token`, `workers` and `limits`.
        host: Name or address of the interface to listen on.
        port: TCP port; 0 takes a free one.
        access_log: Log each request (by the logger "uvicorn.access").

    Raises:
        OSError: If the address cannot be listened on.
        ValueError: As `make_app`.
    """
    limits = limits or ServerLimits()
    app = make_app(backend, name=name, topk=topk, token=token, workers=workers, limits=limits)
    config = uvicorn.Config(
        app,
        http=type("Protocol", (_Protocol,), {"timeout": limits.timeout}),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=access_log,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
    )
    with _listen(host, port) as listener:
        address, port = listener.getsockname()[:2]
        if token is None and not ipaddress.ip_address(address).is_loopback:
            logger.warning(
                "Anyone who reaches %s can search: this is not a loopback address, and there is no token.", address
            )
        url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        _Server(config, listener, f"Serving {name} at {url}").run(sockets=[])


def _listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. It refuses connections until the server listens on it."""
    if not 0 <= port <= 65535:  # the C library would take it modulo 65536
        raise OSError(f"Cannot listen on {host}, port {port}: ports are numbers from 0 to 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"Cannot listen on {host}, port {port}: {reason}.") from error
    return listener


def _length(backend: SearchBackend) -> int | None:
    return len(backend) if isinstance(backend, Sized) else None


# Requests and answers


def _is_authorized(request: Request, token: str | None) -> bool:
    if token is None:
        return True
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), token.encode())


def _authorize(request: Request, token: str | None) -> None:
    if not _is_authorized(request, token):
        raise HTTPException(
            401,
            "This server wants its token, in the header `Authorization: Bearer <token>`.",
            {"WWW-Authenticate": "Bearer"},
        )


async def _read_body(request: Request, limit: int) -> bytes:
    too_large = HTTPException(413, f"The body must have at most {limit} bytes.")
    declared = request.headers.get("content-length", "0")
    if int(declared) > limit:  # h11 lets only digits pass
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def _read_request(body: bytes, default_topk: int, limits: ServerLimits) -> tuple[list[str], int, bool]:
    """Queries, documents for each, and whether to give scores."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The body is not JSON ({error}).") from error
    if not isinstance(request, dict) or "queries" not in request:
        raise HTTPException(422, 'The body must be an object {"queries": […], "topk": …, "return_scores": …}.')
    queries, topk, scores = request["queries"], request.get("topk"), request.get("return_scores")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise HTTPException(422, f"`queries` must be a list of strings, got {reprlib.repr(queries)}.")
    if len(queries) > limits.queries:
        raise HTTPException(422, f"`queries` must be at most {limits.queries}, got {len(queries)}.")
    longest = max(map(len, queries), default=0)
    if longest > limits.query_characters:
        raise HTTPException(422, f"A query must have at most {limits.query_characters} characters, one has {longest}.")
    topk = default_topk if topk is None else topk
    if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= limits.topk:
        raise HTTPException(
            422, f"`topk` must be a whole number between 1 and {limits.topk}, got {reprlib.repr(topk)}."
        )
    if topk * len(queries) > limits.results:
        raise HTTPException(
            422,
            f"`topk` times the number of queries must be at most {limits.results}, got {topk} times {len(queries)}.",
        )
    if not isinstance(scores, bool | None):
        raise HTTPException(422, f"`return_scores` must be true or false, got {reprlib.repr(scores)}.")
    return queries, topk, bool(scores)


async def _unless_gone(request: Request, answer: "asyncio.Future[list[bytes]]") -> list[bytes]:
    """Wait for an answer while there is somebody who wants it."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait((answer, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        if not answer.done():
            answer.cancel()
    if answer.cancelled():
        raise ClientDisconnect
    return answer.result()


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if error.status_code == 404:
        detail = f"There is nothing here. Searches are POST {_SEARCH_PATH}."
    elif error.status_code == 405:
        detail = f"{request.method} is not allowed here, but {(error.headers or {})['Allow']}."
    return JSONResponse({"detail": detail}, error.status_code, error.headers)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


# Searching


class _Request:
    """The queries of a request, and their results as JSON, as far as there are any."""

    def __init__(self, queries: list[str], topk: int, scores: bool, answer: "asyncio.Future[list[bytes]]"):
        self.queries, self.topk, self.scores, self.answer = queries, topk, scores, answer
        self.results: list[bytes] = [b""] * len(queries)
        self.taken = 0  # queries that a search has begun with
        self.missing = len(queries)


class _Batcher:
    """Searches for many requests at once.

    Queries that arrive while a search runs wait; the next search takes them together. A batch takes one query of each
    request in turn until it is full, so that one with thousands of queries does not hold up those with few. All of a
    batch have the same `topk`, so that results are exactly those of a search of its own.

    Everything but `_search` runs in the event loop's thread.
    """

    def __init__(self, backend: SearchBackend, workers: int, limits: ServerLimits, metrics: "_Metrics"):
        self._backend, self._workers, self._limits, self._metrics = backend, workers, limits, metrics
        self._waiting: deque[_Request] = deque()
        self._queued = 0
        self._running = 0

    def __enter__(self) -> "_Batcher":
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="search")
        return self

    def __exit__(self, *exception: Any) -> None:
        self._pool.shutdown()

    def submit(self, queries: list[str], topk: int, scores: bool) -> "asyncio.Future[list[bytes]]":
        """Queue the queries of a request. Cancelling the answer takes those that were not begun off the queue."""
        if self._queued + len(queries) > self._limits.queue:
            raise HTTPException(
                503,
                f"The server is busy: {self._queued} queries wait already. Try again in a second.",
                {"Retry-After": "1"},
            )
        answer: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        if not queries:  # as Search-R1's trainer asks when no rollout searches
            answer.set_result([])
            return answer
        request = _Request(queries, topk, scores, answer)
        answer.add_done_callback(lambda _: self._drop(request))
        self._waiting.append(request)
        self._count_queue(len(queries))
        self._start_searches()
        return answer

    def _drop(self, request: _Request) -> None:
        """Take what was not begun off the queue: the client went away, or part of its search failed."""
        if request.taken < len(request.queries):
            self._waiting.remove(request)
            self._count_queue(request.taken - len(request.queries))

    def _count_queue(self, change: int) -> None:
        self._queued += change
        self._metrics.queue.set(self._queued)

    def _start_searches(self) -> None:
        loop = asyncio.get_running_loop()
        while self._running < self._workers and self._waiting:
            batch = self._next_batch()
            self._running += 1
            loop.run_in_executor(self._pool, self._search, batch).add_done_callback(
                lambda done, batch=batch: self._finish(batch, done.result())  # type: ignore[misc]
            )

    def _next_batch(self) -> list[tuple[_Request, int]]:
        """Requests and the places of their queries in them."""
        topk = self._waiting[0].topk
        turns = deque(request for request in self._waiting if request.topk == topk)
        batch: list[tuple[_Request, int]] = []
        while turns and len(batch) < self._limits.batch:
            request = turns.popleft()
            batch.append((request, request.taken))
            request.taken += 1
            if request.taken < len(request.queries):
                turns.append(request)
        # Those that had a turn wait behind those that had none.
        served = {id(request) for request, _ in batch}
        self._waiting = deque(
            [request for request in self._waiting if id(request) not in served]
            + [request for request in turns if id(request) in served]
        )
        self._count_queue(-len(batch))
        return batch

    def _search(self, batch: list[tuple[_Request, int]]) -> list[bytes | None]:
        """Results of each query as JSON, `None` where the backend failed."""
        self._metrics.batch.observe(len(batch))
        try:
            found = self._backend.search([request.queries[place] for request, place in batch], batch[0][0].topk)
            if len(found) != len(batch):
                raise ValueError(f"The backend gave {len(found)} lists of results for {len(batch)} queries.")
            return [_encode(of_query, request.scores) for (request, _), of_query in zip(batch, found, strict=True)]
        except BaseException:  # a panic of a Rust library is no `Exception`
            requests = list(dict.fromkeys(request for request, _ in batch))
            if len(requests) > 1:
                # Others must not suffer from what one of them asks.
                alone: dict[_Request, Iterator[bytes | None]] = {
                    request: iter(self._search([entry for entry in batch if entry[0] is request]))
                    for request in requests
                }
                return [next(alone[request]) for request, _ in batch]
            logger.exception("A search for %d queries failed.", len(batch))
            return [None] * len(batch)

    def _finish(self, batch: list[tuple[_Request, int]], results: list[bytes | None]) -> None:
        self._running -= 1
        for (request, place), result in zip(batch, results, strict=True):
            if request.answer.done():
                continue
            if result is None:
                request.answer.set_exception(
                    HTTPException(500, "The search failed; the reason is in the log of the server.")
                )
                continue
            request.results[place] = result
            request.missing -= 1
            if not request.missing:
                request.answer.set_result(request.results)
        self._metrics.queries.inc(len(batch))
        self._start_searches()


def _encode(documents: Sequence[Document], scores: bool) -> bytes:
    found: list[dict[str, Any]] = [{"id": document.id, "contents": document.contents} for document in documents]
    if scores:
        found = [
            {"document": entry, "score": float(getattr(document, "score", -position))}
            for position, (entry, document) in enumerate(zip(found, documents, strict=True))
        ]
    # ASCII, since documents may have lone surrogates, which JSON can spell and UTF-8 cannot.
    return json.dumps(found).encode("ascii")


# Metrics


class _Metrics:
    """What `/metrics` shows. Each application has its own, so that a process can have several."""

    def __init__(self):
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter("mempo_search_requests", "Requests answered.", ["path", "status"], registry=registry)
        self.queries = Counter("mempo_search_queries", "Queries searched for.", registry=registry)
        self.seconds = Histogram(
            "mempo_search_seconds",
            "Time from a request, read, to its results.",
            buckets=[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60],
            registry=registry,
        )
        self.batch = Histogram(
            "mempo_search_batch_queries",
            "Queries of each search of the backend.",
            buckets=[2**n for n in range(13)],
            registry=registry,
        )
        self.queue = Gauge("mempo_search_queue_queries", "Queries that wait for a search.", registry=registry)
        self.in_flight = Gauge("mempo_search_in_flight_requests", "Requests that wait for results.", registry=registry)


def _count_requests(app: ASGIApp, metrics: _Metrics) -> ASGIApp:
    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in (_SEARCH_PATH, "/health", "/metrics") else "other"
                metrics.requests.labels(path, message["status"]).inc()
            await send(message)

        await app(scope, receive, count if scope["type"] == "http" else send)

    return counted


# HTTP


class _Protocol(H11Protocol):
    """uvicorn's HTTP/1.1, except that no client can hold a connection for ever.

    uvicorn limits how long a connection is idle between two requests, but not how long a client takes to send one, the
    rest of one that was refused, or to take its answer.
    """

    timeout: float  # seconds
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reading = self.loop.call_later(self.timeout, self._read_too_long)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reading()
        self._watch_writing()

    def _watch_reading(self) -> None:
        """Let the time run while there is a part of a request, from its first byte on."""
        if self.transport.is_closing():
            return
        idle = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if self.conn.their_state is h11.SEND_BODY or (self.conn.their_state is h11.IDLE and not idle):
            if self._reading is None:
                self._reading = self.loop.call_later(self.timeout, self._read_too_long)
        elif self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if idle and self.timeout_keep_alive_task is None:  # after the end of a body that was refused
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _read_too_long(self) -> None:
        begun = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
        self._close_with(408, f"The request was not complete after {self.timeout:g} seconds." if begun else None)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._close_with(400, msg)

    def _close_with(self, status: int, sentence: str | None) -> None:
        if self.transport.is_closing():
            return
        if sentence and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"detail": sentence}).encode("ascii")
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
            for event in (
                h11.Response(status_code=status, headers=[*headers, ("Connection", "close")]),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._watch_writing()

    def _watch_writing(self) -> None:
        """Let the time run while a part of an answer is not sent, even of a connection that is being closed."""
        if self._writing is not None:
            self._writing.cancel()
        unsent = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self.timeout, self._written_since, unsent) if unsent else None

    def _written_since(self, unsent: int) -> None:
        if self.transport.get_write_buffer_size() < unsent:
            self._watch_writing()
        else:
            self.transport.abort()


def _most_connections() -> int:
    """How many connections the limit of open files leaves room for."""
    try:
        import resource
    except ImportError:  # Windows
        return sys.maxsize
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, limit - len(os.listdir("/dev/fd")) - _SPARE_FILES)


class _Server(uvicorn.Server):
    """uvicorn's, but it accepts connections by itself, no more than there can be.

    asyncio's servers accept until there are no file descriptors left, and then again and again, with a traceback each.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket, announcement: str):
        super().__init__(config)
        self._listener = listener
        self._announcement = announcement

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listener.setblocking(False)
        self._listener.listen(self.config.backlog)
        self._accepting = asyncio.create_task(self._accept(_most_connections()))
        print(self._announcement, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.close()
        await super().shutdown(sockets)

    async def _accept(self, most: int) -> None:
        loop = asyncio.get_running_loop()
        told = False
        while True:
            if len(self.server_state.connections) >= most:
                if not told:
                    logger.warning("There are %d connections; others wait, since no more files may be open.", most)
                    told = True
                await asyncio.sleep(0.05)
                continue
            try:
                connection, _ = await loop.sock_accept(self._listener)
                await loop.connect_accepted_socket(self._make_protocol, connection)
            except ConnectionAbortedError:
                continue
            except Exception as error:
                logger.warning("A connection was not accepted: %s.", error)
                await asyncio.sleep(1)

    def _make_protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the process ends with status 0, and any second signal kills it."""

        def stop(number: int, frame: Any) -> None:
            self.should_exit = True
            for signal_number in previous:
                signal.signal(signal_number, signal.SIG_DFL)

        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in previous:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

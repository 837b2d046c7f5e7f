"""Answers of a search backend that are remembered, in memory and on disk."""

import json
import logging
import os
import random
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mempo_trl.search.arguments import check_counts, distinct_queries
from mempo_trl.search.corpus import Document, SearchResult


logger = logging.getLogger(__name__)

_PATIENCE = 10  # seconds that a process waits for others that write


class IdentifiedBackend(Protocol):
    """A search backend that tells what its results depend on, as those of this package do."""

    @property
    def identity(self) -> str:
        """Changes whenever the results for a query may change."""
        ...

    def search(self, queries: list[str], k: int) -> Sequence[Sequence[Document]]:
        """Return at most `k` documents for every query, best first."""
        ...


class CachedSearch:
    """Remembers what a backend found, the least recently used forgotten first.

    Worth it where search is slow or costs money, and queries come again: the rollouts of a question, the next epoch.
    What is remembered belongs to the backend's `identity`, so an index that was built anew is asked anew. A server is
    known by its URL alone: delete the file when it gets another index. Errors are not remembered.

    Args:
        backend: What to ask; it has an `identity`.
        path: A file (SQLite) that keeps the answers over runs, and that several processes may share; `None` keeps them
            in memory alone.
        max_entries: Answers kept in memory.
        max_entries_on_disk: Answers kept in the file, about; the oldest go first.

    Attributes:
        hits, misses: Queries that were answered from memory or disk, and by the backend.

    Raises:
        ValueError: If `path` is a file that is no cache, `backend` has no identity, or a number is out of its range.
    """

    def __init__(
        self,
        backend: IdentifiedBackend,
        path: str | Path | None = None,
        max_entries: int = 100_000,
        max_entries_on_disk: int = 10_000_000,
    ):
        check_counts(max_entries=(max_entries, 1), max_entries_on_disk=(max_entries_on_disk, 1))
        if not isinstance(getattr(backend, "identity", None), str):
            raise ValueError(
                "`backend` has no `identity`: give it an attribute that changes whenever its results may change."
            )
        self.backend = backend
        self.max_entries = max_entries
        self.hits = self.misses = 0
        self._memory: OrderedDict[tuple[str, int, str], list[Document]] = OrderedDict()
        self._disk = None if path is None else _Disk(Path(path).expanduser(), max_entries_on_disk)
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        """The backend's."""
        return self.backend.identity

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[Document]]:
        """Find the best documents for each query, as the backend does; it is asked for what is not known, at once."""
        if self._process != os.getpid():  # forked: neither the lock nor the connection is this process's
            self._start()
            if self._disk is not None:
                self._disk = self._disk.opened_again()
        distinct = distinct_queries(queries, k)
        identity = self.backend.identity
        found: dict[str, list[Document]] = {}
        with self._lock:
            for query in distinct:
                key = (identity, k, query)
                results = self._memory.get(key)
                if results is not None:
                    self._memory.move_to_end(key)
                elif self._disk is not None and (results := self._disk.get(key)) is not None:
                    self._remember(key, results)
                if results is not None:
                    found[query] = results
            unknown = [query for query in distinct if query not in found]
            self.hits += len(queries) - len(unknown)
            self.misses += len(unknown)
        if unknown:
            new = dict(zip(unknown, map(list, self.backend.search(unknown, k)), strict=True))
            found.update(new)
            with self._lock:
                for query, results in new.items():
                    self._remember((identity, k, query), results)
                if self._disk is not None:
                    self._disk.put([((identity, k, query), results) for query, results in new.items()])
        return [list(found[query]) for query in queries]

    def _remember(self, key: tuple[str, int, str], results: list[Document]) -> None:
        self._memory[key] = results
        self._memory.move_to_end(key)
        if len(self._memory) > self.max_entries:
            self._memory.popitem(last=False)


class _Disk:
    """The file of a cache. Once it cannot be read or written, it is left alone: a search must not fail for it."""

    def __init__(self, path: Path, max_entries: int, inherited: Any = None):
        self.path, self.max_entries = path, max_entries
        self._inherited = inherited  # another process's, which must not be closed here
        self._puts = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._connection: sqlite3.Connection | None = sqlite3.connect(
                path, timeout=_PATIENCE, check_same_thread=False
            )
            _use_write_ahead_log(self._connection)
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS answers "
                "(identity TEXT, k INTEGER, query TEXT, results TEXT, PRIMARY KEY (identity, k, query))"
            )
        except sqlite3.Error as error:
            raise ValueError(
                f"{path} cannot be used as a cache of search results ({error}): give another path."
            ) from error

    def opened_again(self) -> "_Disk | None":
        """The same file in a process that was forked; `None` if it cannot be used any more."""
        try:
            return _Disk(self.path, self.max_entries, inherited=self)
        except (ValueError, OSError) as error:
            self._warn(error)
            return None

    def get(self, key: tuple[str, int, str]) -> list[Document] | None:
        if self._connection is None:
            return None
        try:
            row = self._connection.execute(
                "SELECT results FROM answers WHERE identity = ? AND k = ? AND query = ?", _storable(key)
            ).fetchone()
            return None if row is None else [_decode(result) for result in json.loads(row[0])]
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._leave(error)
            return None

    def put(self, entries: list[tuple[tuple[str, int, str], list[Document]]]) -> None:
        if self._connection is None:
            return
        rows = []
        for key, results in entries:
            try:
                rows.append((*_storable(key), json.dumps([_encode(result) for result in results])))
            except (TypeError, ValueError):  # documents of the backend's own kind: they stay in memory
                continue
        try:
            with self._connection:
                self._connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", rows)
                self._puts += len(rows)
                if self._puts * 10 > self.max_entries:
                    self._puts = 0
                    self._connection.execute(
                        "DELETE FROM answers WHERE rowid <= (SELECT max(rowid) FROM answers) - ?", (self.max_entries,)
                    )
        except sqlite3.Error as error:
            self._leave(error)

    def _leave(self, error: Exception) -> None:
        self._warn(error)
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _warn(self, error: Exception) -> None:
        logger.warning("The cache %s is used no longer: %s. Searches go on without it.", self.path, error)


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Let readers and a writer go on at the same time."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            # For this SQLite does not wait by itself while another process does the same with a new file.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(random.uniform(0.01, 0.05))


def _encode(document: Document) -> list[Any]:
    score = [float(document.score)] if isinstance(document, SearchResult) else []
    return [document.id, document.contents, *score]


def _decode(values: list[Any]) -> Document:
    return SearchResult(*values) if len(values) == 3 else Document(*values)


def _storable(key: tuple[str, int, str]) -> tuple[str, int, str]:
    """SQLite cannot hold lone surrogates, which JSON can spell."""
    identity, k, query = key
    return identity, k, query.encode("utf-8", "surrogatepass").decode("latin-1")

"""Answers of a search backend that are remembered, in memory and on disk."""

import json
import logging
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mempo_trl.search.corpus import SearchResult


logger = logging.getLogger(__name__)


class IdentifiedBackend(Protocol):
    """A search backend that tells what its results depend on, as those of this package do."""

    @property
    def identity(self) -> str:
        """Changes whenever the results for a query may change."""
        ...

    def search(self, queries: list[str], k: int) -> list[list[SearchResult]]:
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
        ValueError: If `path` is a file that is no cache, or a number is out of its range.
    """

    def __init__(
        self,
        backend: IdentifiedBackend,
        path: str | Path | None = None,
        max_entries: int = 100_000,
        max_entries_on_disk: int = 10_000_000,
    ):
        for name, value in (("max_entries", max_entries), ("max_entries_on_disk", max_entries_on_disk)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}={value!r}` is not allowed: it must be a whole number, at least 1.")
        self.backend = backend
        self.max_entries = max_entries
        self.hits = self.misses = 0
        self._memory: OrderedDict[tuple[str, int, str], list[SearchResult]] = OrderedDict()
        self._lock = threading.Lock()
        self._disk = None if path is None else _Disk(Path(path).expanduser(), max_entries_on_disk)

    @property
    def identity(self) -> str:
        """The backend's."""
        return self.backend.identity

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[SearchResult]]:
        """Find the best documents for each query, as the backend does; it is asked for what is not known, at once."""
        identity = self.backend.identity
        found: dict[str, list[SearchResult]] = {}
        with self._lock:
            for query in dict.fromkeys(queries):
                key = (identity, k, query)
                results = self._memory.get(key)
                if results is not None:
                    self._memory.move_to_end(key)
                elif self._disk is not None and (results := self._disk.get(key)) is not None:
                    self._remember(key, results)
                if results is not None:
                    found[query] = results
            unknown = [query for query in dict.fromkeys(queries) if query not in found]
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

    def _remember(self, key: tuple[str, int, str], results: list[SearchResult]) -> None:
        self._memory[key] = results
        self._memory.move_to_end(key)
        if len(self._memory) > self.max_entries:
            self._memory.popitem(last=False)


class _Disk:
    """The file of a cache. Once it cannot be read or written, it is left alone: a search must not fail for it."""

    def __init__(self, path: Path, max_entries: int):
        self.path, self.max_entries = path, max_entries
        self._puts = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._connection: sqlite3.Connection | None = sqlite3.connect(path, timeout=10, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS answers "
                "(identity TEXT, k INTEGER, query TEXT, results TEXT, PRIMARY KEY (identity, k, query))"
            )
        except sqlite3.Error as error:
            raise ValueError(
                f"{path} cannot be used as a cache of search results ({error}): give another path."
            ) from error

    def get(self, key: tuple[str, int, str]) -> list[SearchResult] | None:
        if self._connection is None:
            return None
        try:
            row = self._connection.execute(
                "SELECT results FROM answers WHERE identity = ? AND k = ? AND query = ?", _storable(key)
            ).fetchone()
            return None if row is None else [SearchResult(*result) for result in json.loads(row[0])]
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._leave(error)
            return None

    def put(self, entries: list[tuple[tuple[str, int, str], list[SearchResult]]]) -> None:
        if self._connection is None:
            return
        rows = [
            (*_storable(key), json.dumps([(r.id, r.contents, r.score) for r in results])) for key, results in entries
        ]
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
        logger.warning("The cache %s is used no longer: %s. Searches go on without it.", self.path, error)
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _storable(key: tuple[str, int, str]) -> tuple[str, int, str]:
    """SQLite cannot hold lone surrogates, which JSON can spell."""
    identity, k, query = key
    return identity, k, query.encode("utf-8", "surrogatepass").decode("latin-1")

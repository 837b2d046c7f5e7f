"""What a cache remembers, and that a search never fails for it."""

import os
import sqlite3
import threading

import numpy
import pytest

from mempo_trl.search import CachedSearch, Document, SearchResult


class Backend:
    identity = "one"

    def __init__(self):
        self.asked = []

    def search(self, queries, k):
        self.asked.append((list(queries), k))
        return [
            [SearchResult(f"{query}{n}", f'"{self.identity}"\n{query}é', 1.5 - n) for n in range(k)]
            for query in queries
        ]


def test_memory_and_disk(tmp_path):
    path = tmp_path / "deep" / "cache.sqlite"
    backend = Backend()
    cached = CachedSearch(backend, path)
    wanted = Backend().search(["a", "b", "a"], 2)
    assert cached.search(["a", "b", "a"], 2) == wanted
    assert cached.search(["b", "c"], 2)[0] == wanted[1]
    assert cached.search(["a"], 1) == Backend().search(["a"], 1)
    assert backend.asked == [(["a", "b"], 2), (["c"], 2), (["a"], 1)]
    assert (cached.hits, cached.misses) == (2, 4)
    other = CachedSearch(Backend(), path)  # another process, say
    assert other.search(["b", "a"], 2) == [wanted[1], wanted[0]]
    assert other.backend.asked == []
    other.backend.identity = "two"  # the index was built anew
    assert other.search(["a"], 2)[0][0].title == "two"
    assert cached.search(["a"], 2)[0][0].title == "one"


def test_the_least_recently_used_is_forgotten():
    backend = Backend()
    cached = CachedSearch(backend, max_entries=2)
    for query in ("a", "b", "a", "c", "a", "b"):
        cached.search([query], 1)
    assert [queries for queries, _ in backend.asked] == [["a"], ["b"], ["c"], ["b"]]


def test_the_file_stays_small(tmp_path):
    cached = CachedSearch(Backend(), tmp_path / "cache", max_entries_on_disk=50)
    for n in range(300):
        cached.search([f"q{n}"], 1)
    with sqlite3.connect(tmp_path / "cache") as connection:
        kept = [query for (query,) in connection.execute("SELECT query FROM answers")]
    assert 50 <= len(kept) <= 60
    assert "q299" in kept


def test_results_are_the_callers_own():
    cached = CachedSearch(Backend())
    cached.search(["a"], 1)[0].clear()
    assert len(cached.search(["a"], 1)[0]) == 1


def test_errors_are_not_remembered_and_lone_surrogates_are(tmp_path):
    backend = Backend()
    cached = CachedSearch(backend, tmp_path / "cache")
    answer, backend.search = backend.search, lambda queries, k: (_ for _ in ()).throw(ConnectionError("down"))
    with pytest.raises(ConnectionError):
        cached.search(["\ud83d"], 1)
    backend.search = answer
    assert cached.search(["\ud83d"], 1)[0][0].id == "\ud83d0"
    assert CachedSearch(Backend(), tmp_path / "cache").search(["\ud83d"], 1)[0][0].id == "\ud83d0"
    assert len(backend.asked) == 1


def test_a_file_that_breaks_is_left_alone(tmp_path, caplog):
    with pytest.raises(ValueError, match=r"notes.txt cannot be used as a cache"):
        (tmp_path / "notes.txt").write_text("no database, " * 100)
        CachedSearch(Backend(), tmp_path / "notes.txt")
    cached = CachedSearch(Backend(), tmp_path / "cache")
    cached.search(["a"], 1)
    with sqlite3.connect(tmp_path / "cache") as connection:
        connection.execute("DROP TABLE answers")
    with caplog.at_level("WARNING", logger="mempo_trl"):
        assert cached.search(["b"], 1) == Backend().search(["b"], 1)
        assert cached.search(["a", "c"], 1) == Backend().search(["a", "c"], 1)
    assert caplog.text.count("Searches go on without it") == 1


@pytest.mark.parametrize("name", ["max_entries", "max_entries_on_disk"])
def test_numbers_are_checked(name):
    with pytest.raises(ValueError, match=f"`{name}=0` is not allowed"):
        CachedSearch(Backend(), **{name: 0})


def test_any_documents(tmp_path):
    class Odd(Backend):
        def search(self, queries, k):
            self.asked.append((list(queries), k))
            return [
                [
                    Document("1", "bare"),
                    SearchResult("2", "scored", numpy.float32(0.5)),
                    SearchResult(object(), "odd", 1),
                ]
                if query == "odd"
                else [Document("1", "bare"), SearchResult("2", "scored", numpy.float32(0.5))]
                for query in queries
            ]

    cached = CachedSearch(Odd(), tmp_path / "cache")
    assert len(cached.search(["plain", "odd"], 3)[1]) == 3
    again = CachedSearch(Odd(), tmp_path / "cache")
    assert again.search(["plain"], 3) == [[Document("1", "bare"), SearchResult("2", "scored", 0.5)]]
    again.search(["odd"], 3)
    assert again.backend.asked == [(["odd"], 3)]  # what cannot be written is asked for again


def test_forked_processes_share_the_file(tmp_path):
    cached = CachedSearch(Backend(), tmp_path / "cache", max_entries=1)
    cached.search(["a", "b"], 1)
    children = []
    for name in "wxyz":
        child = os.fork()
        if not child:
            done = all(
                cached.search([f"{name}{n}", "a"], 1) == Backend().search([f"{name}{n}", "a"], 1) for n in range(50)
            )
            os._exit(0 if done and cached.backend.asked[1:] == [([f"{name}{n}"], 1) for n in range(50)] else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    names = [f"{name}{n}" for name in "wxyz" for n in range(50)]
    assert cached.search([*names, "b"], 1) == Backend().search([*names, "b"], 1)
    assert len(cached.backend.asked) == 1


def test_processes_that_begin_a_file_at_once_wait_for_each_other(tmp_path):
    other = sqlite3.connect(tmp_path / "cache", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.2, other.execute, ["COMMIT"])
    timer.start()
    cached = CachedSearch(Backend(), tmp_path / "cache")
    timer.join()
    assert cached.search(["a"], 1) == CachedSearch(Backend(), tmp_path / "cache").search(["a"], 1)


def test_arguments():
    with pytest.raises(ValueError, match="`backend` has no `identity`"):
        CachedSearch(object())
    with pytest.raises(TypeError, match="queries must be a list"):
        CachedSearch(Backend()).search("abc", 1)

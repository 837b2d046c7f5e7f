"""A disk that is full: told in a sentence, and what was there stays. Files that may not grow stand in for it."""

import json
import os
import subprocess
import sys

import pytest
from served import ROOT
from support import encoder

from mempo_trl.search import open_index


# Python ignores the signal that a file is too large by itself, so that writing fails as on a full disk.
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
"""
BUILD = LIMITED + "from mempo_trl.cli import main; sys.exit(main(['index', *sys.argv[2:]]))"
CACHE = (
    LIMITED
    + """
from mempo_trl.search import CachedSearch, Document
class Backend:
    identity = "one"
    def search(self, queries, k):
        return [[Document(query, "x" * 1000)] for query in queries]
cached = CachedSearch(Backend(), sys.argv[2])
assert [cached.search([f"{n}"], 1)[0][0].id for n in range(200)] == [f"{n}" for n in range(200)]
assert cached.search(["3"], 1)[0][0].id == "3" and cached.hits == 1
"""
)


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        stderr=subprocess.PIPE,  # which has no limit
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"},
    )


def corpus(path, documents):
    records = ({"id": n, "contents": " ".join(f"w{n * m % 997}" for m in range(60))} for n in range(documents))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("kind", ["bm25", "dense", "hybrid"])
def test_an_index_that_is_replaced_stays(tmp_path, kind):
    out = tmp_path / "index"
    options = ["--kind", kind, "--overwrite"] + ([] if kind == "bm25" else ["--model", encoder()])
    built = run(BUILD, 1 << 30, corpus(tmp_path / "few.jsonl", 3), out, *options)
    assert built.returncode == 0, built.stderr
    query = ["w2"]
    before = open_index(out).search(query)
    assert before[0]
    full = run(BUILD, 40_000, corpus(tmp_path / "many.jsonl", 300), out, *options)
    assert full.returncode == 1
    assert full.stderr.startswith(f"mempo index: {out} cannot be written, because the disk is full")
    assert len(full.stderr.splitlines()) == 1
    assert open_index(out).search(query) == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["few.jsonl", "index", "many.jsonl"]


def test_a_cache_is_left_alone_and_searches_go_on(tmp_path):
    full = run(CACHE, 40_000, tmp_path / "cache")
    assert full.returncode == 0, full.stderr
    assert f"The cache {tmp_path / 'cache'} is used no longer: " in full.stderr
    assert len(full.stderr.splitlines()) == 1


def test_a_cache_that_cannot_be_begun(tmp_path):
    full = run(CACHE, 100, tmp_path / "cache")
    assert f"ValueError: {tmp_path / 'cache'} cannot be used as a cache of search results (" in full.stderr

import subprocess
import sys

import pytest
from passages import DOCUMENTS
from support import encoder

from mempo_trl.search import BM25Index, DenseIndex, HybridSearch, open_index


MODEL = encoder()


@pytest.mark.parametrize(("kind", "arguments"), [(BM25Index, ()), (DenseIndex, (MODEL,)), (HybridSearch, (MODEL,))])
def test_opens_each_kind(tmp_path, kind, arguments):
    built = kind.build(DOCUMENTS, tmp_path / "index", *arguments)
    opened = open_index(str(tmp_path / "index"), device="cpu")
    assert type(opened) is kind
    queries = ["the central bank", "a kitty napping"]
    assert opened.search(queries, 3) == built.search(queries, 3)


def test_no_index(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match=rf"There is no index at {path}; make one with BM25Index\.build, "):
            open_index(path)
    (tmp_path / "index.jsonl").touch()
    with pytest.raises(NotADirectoryError, match=r"index\.jsonl is a file; give the folder of an index"):
        open_index(tmp_path / "index.jsonl")


def test_dense_search_says_which_extra_it_needs():
    # An interpreter without faiss, as far as Python can tell.
    code = "import sys; sys.modules['faiss'] = None; from mempo_trl.search import DenseIndex"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("ImportError: Dense search needs faiss and sentence-transformers")
    assert process.stderr.splitlines()[-1].endswith("pip install 'mempo_trl[dense]'")


def test_imports_nothing_heavy_before_use():
    code = (
        "import sys, mempo_trl.search, mempo_trl.search.hybrid; "
        "print([m for m in ('torch', 'faiss', 'sentence_transformers', 'tantivy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

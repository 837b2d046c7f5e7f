"""Search backends, and the tool that offers one to the model."""

from typing import TYPE_CHECKING, Any

from mempo_trl.search.corpus import Document, SearchResult, read_corpus
from mempo_trl.search.indexes import open_index
from mempo_trl.search.tool import make_search_tool


if TYPE_CHECKING:
    from mempo_trl.search.bm25 import BM25Index
    from mempo_trl.search.dense import DenseIndex
    from mempo_trl.search.http import HttpSearch
    from mempo_trl.search.hybrid import HybridSearch

__all__ = [
    "BM25Index",
    "DenseIndex",
    "Document",
    "HttpSearch",
    "HybridSearch",
    "SearchResult",
    "make_search_tool",
    "open_index",
    "read_corpus",
]


def __getattr__(name: str) -> Any:
    # Only BM25 needs tantivy, only dense search faiss, and only a search server requests: none loads the others'.
    if name == "BM25Index":
        from mempo_trl.search.bm25 import BM25Index

        return BM25Index
    if name == "DenseIndex":
        from mempo_trl.search.dense import DenseIndex

        return DenseIndex
    if name == "HybridSearch":
        from mempo_trl.search.hybrid import HybridSearch

        return HybridSearch
    if name == "HttpSearch":
        from mempo_trl.search.http import HttpSearch

        return HttpSearch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

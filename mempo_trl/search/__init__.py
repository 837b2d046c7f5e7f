"""Search backends, and the tool that offers one to the model."""

from typing import TYPE_CHECKING, Any

from mempo_trl.search.corpus import CorpusReader, Document, SearchResult, read_corpus
from mempo_trl.search.tool import make_search_tool


if TYPE_CHECKING:
    from mempo_trl.search.bm25 import BM25Index
    from mempo_trl.search.http import HttpSearch

__all__ = ["BM25Index", "CorpusReader", "Document", "HttpSearch", "SearchResult", "make_search_tool", "read_corpus"]


def __getattr__(name: str) -> Any:
    # Only BM25 needs tantivy, and only a search server requests: a trainer does without the other.
    if name == "BM25Index":
        from mempo_trl.search.bm25 import BM25Index

        return BM25Index
    if name == "HttpSearch":
        from mempo_trl.search.http import HttpSearch

        return HttpSearch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Search backends, and the tool that offers one to the model."""

import importlib
from typing import TYPE_CHECKING, Any

from mempo_trl.search.corpus import CorpusReader, Document, SearchResult, read_corpus
from mempo_trl.search.indexes import open_index
from mempo_trl.search.tool import make_search_tool


if TYPE_CHECKING:
    from mempo_trl.search.bm25 import BM25Index
    from mempo_trl.search.cache import CachedSearch
    from mempo_trl.search.dense import DenseIndex
    from mempo_trl.search.http import HttpSearch
    from mempo_trl.search.hybrid import HybridSearch
    from mempo_trl.search.transport import SearchRefusedError, SearchUnavailableError
    from mempo_trl.search.web import SerperAPI, WebSearch

# Imported when they are asked for, since each needs libraries that the others do without.
_LAZY = {
    "BM25Index": "bm25",
    "CachedSearch": "cache",
    "DenseIndex": "dense",
    "HttpSearch": "http",
    "HybridSearch": "hybrid",
    "SearchRefusedError": "transport",
    "SearchUnavailableError": "transport",
    "SerperAPI": "web",
    "WebSearch": "web",
}

__all__ = [
    "BM25Index",
    "CachedSearch",
    "CorpusReader",
    "DenseIndex",
    "Document",
    "HttpSearch",
    "HybridSearch",
    "SearchRefusedError",
    "SearchResult",
    "SearchUnavailableError",
    "SerperAPI",
    "WebSearch",
    "make_search_tool",
    "open_index",
    "read_corpus",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

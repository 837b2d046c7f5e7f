"""The search tool as the model sees it."""

import reprlib
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

from mempo_trl.search.corpus import Document


class SearchBackend(Protocol):
    """Anything that finds documents: `BM25Index`, a client of a search server, a dense index."""

    def search(self, queries: list[str], k: int) -> Sequence[Sequence[Document]]:
        """Return at most `k` documents for every query, best first."""
        ...


class SearchTool(Protocol):
    """A function `search`, for one call, that carries a second one for many."""

    __name__: str

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        """Answer one call."""
        ...

    def batch(self, list_of_arguments: list[dict[str, Any]]) -> list[str | TypeError]:
        """Answer one call per dictionary of arguments, in order, with one search."""
        ...


def make_search_tool(backend: SearchBackend, k: int = 3, query_list: bool = False) -> SearchTool:
    """Make a TRL tool named `search` of a search backend.

    The tool answers one call; its `batch` answers the calls of many rollouts with a single `backend.search`. Arguments
    that are wrong raise a `TypeError` whose sentence is meant for the model. In a batch the `TypeError` is that call's
    result instead, since the other rollouts must go on.

    Args:
        backend: Has `search(queries, k)`; its documents have a `title` and a `text`.
        k: The number of documents per query, at least 1.
        query_list: `False` makes `search(query: str)`. `True` makes `search(query_list: list[str])`, the signature of
            verl's search tool, which models that were trained there expect.

    Returns:
        A function with type hints and a docstring from which `transformers.utils.get_json_schema` reads the tool's
        schema. Its result has one block per document, "Doc 1 (Title: ...)" and the text below; with more than one
        query, the blocks of each follow a line "Query: ...".

    Raises:
        ValueError: If `k` is not a whole number of at least 1.
    """
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a whole number of at least 1, got {k!r}.")
    argument = "query_list" if query_list else "query"
    read_queries = _read_query_list if query_list else _read_query

    def answer(calls: list[list[str]]) -> list[str]:
        queries = [query for call in calls for query in call]
        found = list(backend.search(queries, k)) if queries else []
        if len(found) != len(queries):
            raise ValueError(f"The search backend gave {len(found)} lists of results for {len(queries)} queries.")
        remaining = iter(zip(queries, found, strict=True))
        return [_render(list(islice(remaining, len(call)))) for call in calls]

    def batch(list_of_arguments: list[dict[str, Any]]) -> list[str | TypeError]:
        calls = [try_to_read(arguments) for arguments in list_of_arguments]
        results = iter(answer([call for call in calls if not isinstance(call, TypeError)]))
        return [call if isinstance(call, TypeError) else next(results) for call in calls]

    def try_to_read(arguments: Any) -> list[str] | TypeError:
        try:
            if not isinstance(arguments, dict) or set(arguments) != {argument}:
                raise TypeError(f"search takes exactly one argument, {argument}; got {reprlib.repr(arguments)}.")
            return read_queries(arguments[argument])
        except TypeError as error:
            return error

    def search_query(query: str) -> str:
        """Search the corpus for passages that answer a query.

        Args:
            query: What to search for, in plain words.

        Returns:
            The best passages, each with its title.
        """
        return answer([read_queries(query)])[0]

    def search_query_list(query_list: list[str]) -> str:
        """Search the corpus for passages that answer each of several queries.

        Args:
            query_list: What to search for, each query in plain words.

        Returns:
            The best passages for every query, each with its title.
        """
        return answer([read_queries(query_list)])[0]

    search: Any = search_query_list if query_list else search_query
    search.__name__ = search.__qualname__ = "search"
    search.batch = batch
    return search


def _read_query(query: Any) -> list[str]:
    if not isinstance(query, str):
        raise TypeError(f"query must be a string, got {reprlib.repr(query)}.")
    return [query]


def _read_query_list(query_list: Any) -> list[str]:
    if not isinstance(query_list, list) or not query_list or not all(isinstance(query, str) for query in query_list):
        raise TypeError(f"query_list must be a list of one or more strings, got {reprlib.repr(query_list)}.")
    return query_list


def _render(found: list[tuple[str, Sequence[Document]]]) -> str:
    lines = []
    for query, documents in found:
        if len(found) > 1:
            lines.append(f"Query: {query}")
        for number, document in enumerate(documents, start=1):
            lines.append(f"Doc {number} (Title: {document.title})\n{document.text}")
        if not documents:
            lines.append("No documents found.")
    # A lone surrogate, which JSON can spell (so in a query too), would stop the tokenizer.
    return "\n".join(lines).encode("utf-8", "replace").decode("utf-8")

"""A client for search servers that speak the protocol of Search-R1, verl and MEM1."""

import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from mempo_trl.search.arguments import check_counts, clean_token, distinct_queries
from mempo_trl.search.corpus import SearchResult
from mempo_trl.search.transport import Transport


class HttpSearch:
    """Searches on a server, `POST {"queries": […], "topk": k, "return_scores": true}`, all queries in one request.

    Results may be documents, or have one as `document`, and a `score` beside it or not. Documents may be texts, or have
    `contents`, or `text` and perhaps a `title`.

    Args:
        url: Where the server answers, for instance `http://localhost:8000/retrieve`, which a URL without a path means
            as well.
        timeout: Seconds that an attempt may take.
        retries: Attempts after a first one that found no server, a busy or broken one (429, 5xx), or no results.
        max_batch: Queries in one request. More of them are sent in several.
        max_query_length: Characters of a query that are sent.
        token: Sent as `Authorization: Bearer …`, if given, without white space around it.
        connection: How to retry and when to give up, see [`Transport`]: `patience`, `backoff`, `failures_to_open`,
            `cooldown`.

    Attributes:
        identity: What its results depend on, for a cache: the URL.

    Raises:
        ValueError: If `url` is none, the token is empty or not printable ASCII, or a number is out of its range.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 30.0,
        retries: int = 4,
        max_batch: int = 512,
        max_query_length: int = 2000,
        token: str | None = None,
        **connection: Any,
    ):
        try:
            parts = urlsplit(url)
            fits = (
                parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not set(url) & set(" \n")
            )
        except ValueError:  # a port that is none, half an IPv6 address
            fits = False
        if not fits:
            raise ValueError(f"`url={url!r}` is no URL of a server: give one like http://localhost:8000/retrieve.")
        token = clean_token(token)
        check_counts(max_batch=(max_batch, 1), max_query_length=(max_query_length, 1))
        if not parts.path.strip("/"):
            parts = parts._replace(path="/retrieve")
        self.url = parts.geturl()
        # Without the password that a URL may have.
        self.identity = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        self.timeout = timeout
        self.max_batch, self.max_query_length = max_batch, max_query_length
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._transport = Transport(f"The search server {self.identity}", timeout, retries, **connection)

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[SearchResult]]:
        """Find the best documents for each query. Equal queries are sent once.

        Args:
            queries: What to search for.
            k: Documents for each query.

        Returns:
            For each query at most `k` documents, best first. Where the server gives no scores, they are 0, −1, −2, ….

        Raises:
            TypeError, ValueError: If `queries` is not a list of strings, or `k` not a whole number of at least 1.
            SearchUnavailableError: If the server cannot be reached, or answers with anything but results for these
                queries.
            SearchRefusedError: If a server that has answered before does not want these queries.
        """
        distinct_queries(queries, k)
        # A lone surrogate, which JSON can spell, is no text for most servers.
        sent = [query[: self.max_query_length].encode("utf-8", "replace").decode("utf-8") for query in queries]
        distinct = list(dict.fromkeys(sent))  # what is cut may be equal
        found: dict[str, list[SearchResult]] = {}
        for first in range(0, len(distinct), self.max_batch):
            batch = distinct[first : first + self.max_batch]

            def read(answer: Any, batch: list[str] = batch) -> list[list[SearchResult]]:
                results = [
                    [_read(position, result) for position, result in enumerate(of_query)]
                    for of_query in answer["result"]
                ]
                if len(results) != len(batch):
                    raise ValueError(f"results for {len(results)} queries instead of {len(batch)}")
                return results

            request = {"queries": batch, "topk": k, "return_scores": True}
            results = self._transport.call("POST", self.url, read, json=request, headers=self._headers)
            found.update(zip(batch, (of_query[:k] for of_query in results), strict=True))
        return [list(found[query]) for query in sent]


def _read(position: int, result: Any) -> SearchResult:
    """A result in whatever dialect."""
    score = result.get("score") if isinstance(result, dict) else None
    document = result.get("document", result) if isinstance(result, dict) else result
    if isinstance(document, str):
        document = {"contents": document}
    contents = document.get("contents")
    if contents is None:
        contents = document["text"]
        if document.get("title"):
            contents = f'"{document["title"]}"\n{contents}'
    if not isinstance(contents, str):
        raise TypeError(f"the text of a document is a {type(contents).__name__}")
    score = float(-position if score is None else score)
    if not math.isfinite(score):
        raise ValueError(f"the score of a document is {score}")
    return SearchResult(id=str(document.get("id", "")), contents=contents, score=score)

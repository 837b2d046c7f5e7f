"""A client for search servers that speak the protocol of Search-R1 and verl."""

from collections.abc import Sequence
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from mempo_trl.search.corpus import SearchResult


class HttpSearch:
    """Searches on a server, `POST {"queries": […], "topk": k, "return_scores": true}`, all queries in one request.

    Args:
        url: Where the server answers, for instance `http://localhost:8000/retrieve`.
        timeout: Seconds to wait for a connection, and for an answer.
        retries: Attempts after a first one that found no server, or one that was busy or broken (429, 5xx).
    """

    def __init__(self, url: str, timeout: float = 30.0, retries: int = 3):
        self.url = url
        self.timeout = timeout
        retry = Retry(
            total=retries,
            backoff_factor=0.5,
            status_forcelist=[429, 500, 502, 503, 504],
            allowed_methods=None,  # POST too: a search changes nothing
            raise_on_status=False,
        )
        self._session = requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=retry))

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[SearchResult]]:
        """Find the best documents for each query.

        Args:
            queries: What to search for.
            k: Documents for each query.

        Returns:
            For each query at most `k` documents, best first.

        Raises:
            RuntimeError: If the server cannot be reached, or answers with anything but results for these queries.
        """
        request: dict[str, Any] = {"queries": list(queries), "topk": k, "return_scores": True}
        try:
            response = self._session.post(self.url, json=request, timeout=self.timeout)
            response.raise_for_status()
            results = response.json()["result"]
            found = [[_read(position, result) for position, result in enumerate(of_query)] for of_query in results]
        except (requests.RequestException, ValueError, LookupError, TypeError, AttributeError) as error:
            raise RuntimeError(f"The search server {self.url} does not work: {error}") from error
        if len(found) != len(request["queries"]):
            raise RuntimeError(
                f"The search server {self.url} gave results for {len(found)} queries instead of {len(queries)}."
            )
        return [of_query[:k] for of_query in found]


def _read(position: int, result: dict[str, Any]) -> SearchResult:
    """A result with a score, or the bare document of a server that gives none."""
    document = result.get("document", result)
    return SearchResult(
        id=str(document.get("id", "")),
        contents=str(document["contents"]),
        score=float(result.get("score", -position)),
    )

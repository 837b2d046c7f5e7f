"""Search in the web, through services that answer in JSON."""

import os
from collections.abc import Sequence
from typing import Any, Protocol

from mempo_trl.search.arguments import check_counts, distinct_queries
from mempo_trl.search.corpus import SearchResult
from mempo_trl.search.threads import map_in_threads
from mempo_trl.search.transport import Transport


class WebAPI(Protocol):
    """What is particular about a service. To use another one, write such a class and give it to `WebSearch`."""

    name: str
    url: str

    def request(self, query: str, k: int) -> dict[str, Any]:
        """Arguments of `requests.Session.request`, `method` among them, that ask for `k` results."""
        ...

    def read(self, answer: Any) -> list[SearchResult]:
        """The results in the JSON of an answer, best first. Raise `LookupError` or `TypeError` if it holds none."""
        ...


class SerperAPI:
    """Google's results through [serper.dev](https://serper.dev).

    Args:
        key: The key; by default that of the environment variable `SERPER_API_KEY`.
        url: Where the service answers.
        country, language: As Google calls them (`gl` and `hl`).

    Raises:
        ValueError: If there is no key.
    """

    name = "serper.dev"

    def __init__(
        self,
        key: str | None = None,
        url: str = "https://google.serper.dev/search",
        country: str = "us",
        language: str = "en",
    ):
        key = key or os.environ.get("SERPER_API_KEY")
        if not key:
            raise ValueError("There is no key for serper.dev: set the environment variable SERPER_API_KEY.")
        self.url = url
        self._headers = {"X-API-KEY": key}
        self._where = {"gl": country, "hl": language}

    def request(self, query: str, k: int) -> dict[str, Any]:
        """A search for `k` pages."""
        return {"method": "POST", "json": {"q": query, "num": k, **self._where}, "headers": self._headers}

    def read(self, answer: Any) -> list[SearchResult]:
        """An answer that Google gives itself, then the pages: title and snippet, the link as the id."""
        pages = [answer["answerBox"]] if isinstance(answer.get("answerBox"), dict) else []
        pages += answer.get("organic", []) if pages else answer["organic"]
        results: list[SearchResult] = []
        for page in pages:
            text = page.get("answer") or page.get("snippet") or ""
            if text or page.get("title"):
                contents = f'"{page.get("title", "")}"\n{text}'
                results.append(SearchResult(id=page.get("link", ""), contents=contents, score=-float(len(results))))
        return results


class WebSearch:
    """Searches the web. Such services take one query a request, so those of a turn are sent side by side.

    Args:
        api: The service; by default `SerperAPI()`.
        max_concurrency: Requests at the same time.
        connection: How to retry and when to give up, see [`Transport`]: `timeout`, `retries`, `patience` and so on.
    """

    def __init__(self, api: WebAPI | None = None, max_concurrency: int = 8, **connection: Any):
        self.api: WebAPI = api or SerperAPI()
        check_counts(max_concurrency=(max_concurrency, 1))
        self.max_concurrency = max_concurrency
        self._transport = Transport(f"Search with {self.api.name}", **connection)

    @property
    def identity(self) -> str:
        """What its results depend on, for a cache: the service. The web changes, and a cache does not notice."""
        return self.api.url

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[SearchResult]]:
        """Find the best pages for each query. Equal queries are sent once, queries without text not at all.

        Args:
            queries: What to search for.
            k: Pages for each query.

        Returns:
            For each query at most `k` pages, best first.

        Raises:
            TypeError, ValueError: If `queries` is not a list of strings, or `k` not a whole number of at least 1.
            SearchUnavailableError: If the service cannot be reached for one of the queries, or refuses all of them.
            SearchRefusedError: If the service answers others, but refuses one of these.
        """
        distinct = [query for query in distinct_queries(queries, k) if query.strip()]
        results = map_in_threads(lambda query: self._search(query, k), distinct, self.max_concurrency)
        found = dict(zip(distinct, results, strict=True))
        return [list(found.get(query, [])) for query in queries]

    def _search(self, query: str, k: int) -> list[SearchResult]:
        return self._transport.call(url=self.api.url, read=self.api.read, **self.api.request(query, k))[:k]

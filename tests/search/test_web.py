"""Web search against a local stand-in for the service."""

import time

import pytest
from stand_in import freeze

from mempo_trl.search import (
    CachedSearch,
    SearchRefusedError,
    SearchUnavailableError,
    SerperAPI,
    WebSearch,
    make_search_tool,
)
from mempo_trl.tools import TimeLimitError, ToolRunner, time_limit


def pages(request):
    organic = [{"title": f"{request['q']} {n}", "link": f"https://x/{n}", "snippet": f"page {n}"} for n in range(5)]
    return {"searchParameters": request, "organic": organic}


@pytest.fixture
def web(service, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "secret")
    return WebSearch(SerperAPI(url=service.url), backoff=0.001, timeout=0.5, retries=2)


def test_pages(service, web):
    service.answers = [(200, pages)]
    results = web.search(["b", "a", "b", " "], k=2)
    assert [[(r.id, r.title, r.text) for r in of_query] for of_query in results] == [
        [("https://x/0", f"{q} 0", "page 0"), ("https://x/1", f"{q} 1", "page 1")] if q != " " else []
        for q in ("b", "a", "b", " ")
    ]
    assert sorted(request["q"] for request in service.requests) == ["a", "b"]
    assert all(request["num"] == 2 for request in service.requests)
    assert {headers["X-API-KEY"] for headers in service.headers} == {"secret"}


def test_an_answer_of_the_service_itself_comes_first(service, web):
    service.answers = [(200, {"answerBox": {"title": "Height", "answer": "42 m", "link": "l"}})]
    assert [(r.id, r.contents) for r in web.search(["q"], 2)[0]] == [("l", '"Height"\n42 m')]


def test_trouble(service, web):
    service.answers = [(429, "slow down"), (200, pages)]
    assert len(web.search(["a"], 3)[0]) == 3
    service.answers = [(400, {"message": "Query too long"})]
    with pytest.raises(SearchRefusedError, match="Query too long"):
        web.search(["a"], 3)
    service.answers = [(200, {"credits": 0})]
    with pytest.raises(SearchUnavailableError, match=r"Search with serper.dev does not work: .*'organic'"):
        web.search(["a"], 3)


def test_a_key_that_is_wrong_or_missing(service, web, monkeypatch):
    service.answers = [(403, {"message": "Unauthorized."})]
    with pytest.raises(SearchUnavailableError, match="status 403"):
        web.search(["a"], 3)
    assert len(service.requests) == 1
    monkeypatch.delenv("SERPER_API_KEY")
    with pytest.raises(ValueError, match="SERPER_API_KEY"):
        WebSearch()


def test_an_account_without_credits_is_no_lack_of_pages(service, web, tmp_path):
    """It answers like a bad query, but whatever is asked."""
    service.answers = [(200, pages), (400, {"message": "Not enough credits"})]
    runner = ToolRunner()
    web = WebSearch(web.api, cooldown=0.0)
    tools = {"search": make_search_tool(CachedSearch(web, tmp_path / "cache"), k=1)}
    requests = [(tools, {"name": "search", "arguments": {"query": query}}) for query in "abcdefgh"]
    assert not runner.run(requests[:1])[0].failed
    for _ in range(4):
        results = runner.run(requests[1:])
        assert all(result.failed and "No documents" not in result.text for result in results)
    assert runner.unavailable["search"][0] >= 2
    service.answers = [(200, pages)]
    assert "Doc 1" in runner.run(requests[1:2])[0].text
    assert runner.unavailable == {}


def test_a_limit_around_a_search_ends_it(service, web):
    service.answers = [freeze]
    started = time.monotonic()
    with pytest.raises(TimeLimitError), time_limit(0.3):
        WebSearch(web.api, timeout=30).search(["a", "b"], 1)
    assert time.monotonic() - started < 1.5

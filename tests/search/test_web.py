"""Web search against a local stand-in for the service."""

import pytest

from mempo_trl.search import SearchUnavailableError, SerperAPI, WebSearch


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
    assert web.search(["a"], 3) == [[]]
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

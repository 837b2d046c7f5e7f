"""The client against a real server on loopback."""

import os
import time

import pytest
from stand_in import freeze, half, trickle

from mempo_trl.search import HttpSearch, SearchRefusedError, SearchUnavailableError, make_search_tool
from mempo_trl.tools import TimeLimitError, time_limit


def found(*contents):
    return [{"document": {"id": n, "contents": text}, "score": 0.9 - n} for n, text in enumerate(contents)]


RESULT = (200, {"result": [found("text")]})


def client(server, **options):
    return HttpSearch(server.url, **{"backoff": 0.001, "timeout": 0.5, **options})


def test_all_queries_are_one_request(service):
    service.answers = [(200, {"result": [found('"Dune"\nA novel.', '"Emma"\nAnother.'), []]})]
    results = client(service).search(["dune", "nothing", "dune"], k=2)
    assert service.requests == [{"queries": ["dune", "nothing"], "topk": 2, "return_scores": True}]
    assert [(r.id, r.title, r.text, r.score) for r in results[0]] == [
        ("0", "Dune", "A novel.", 0.9),
        ("1", "Emma", "Another.", pytest.approx(-0.1)),
    ]
    assert results[1] == []
    assert results[2] == results[0]


def test_many_queries_are_several_requests_over_one_connection(service):
    service.answers = [(200, lambda request: {"result": [found(query) for query in request["queries"]]})]
    results = client(service, max_batch=3).search([f"q{n}" for n in range(7)], k=1)
    assert [of_query[0].contents for of_query in results] == [f"q{n}" for n in range(7)]
    assert [len(request["queries"]) for request in service.requests] == [3, 3, 1]
    assert service.connections == 1


def test_queries_that_no_server_takes(service):
    service.answers = [(200, {"result": [[], []]})]
    client(service, max_query_length=10).search(["long " * 100, "half \ud83d"], k=1)
    assert service.requests[0]["queries"] == ["long long ", "half ?"]
    assert client(service).search([], k=1) == []
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("result", "contents"),
    [
        ({"document": {"contents": '"T"\nx'}, "score": 2}, '"T"\nx'),
        ({"document": {"text": "x", "title": "T"}}, '"T"\nx'),
        ({"document": {"text": "x"}}, "x"),
        ({"document": "x", "score": 1.5}, "x"),
        ({"id": "7", "contents": "x"}, "x"),
        ({"title": "T", "text": "x"}, '"T"\nx'),
        ("x", "x"),
    ],
)
def test_dialects(service, result, contents):
    service.answers = [(200, {"result": [[result, result]]})]
    first, second = client(service).search(["q"], k=2)[0]
    assert first.contents == second.contents == contents
    scored = isinstance(result, dict) and "score" in result
    assert (first.score, second.score) == ((result["score"],) * 2 if scored else (0, -1))


def test_a_url_without_a_path_and_a_token(service):
    service.answers = [RESULT]
    asked = HttpSearch(service.url.removesuffix("/retrieve"), token="secret\n")
    assert asked.url == asked.identity == service.url
    assert make_search_tool(asked, k=1)(query="q") == "Doc 1 (Title: )\ntext"
    assert service.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    "trouble",
    [
        (503, "busy"),
        (500, "broken"),
        (429, "slow down", {"Retry_After": "0.01"}),
        (200, "{half a"),
        (200, {"results": []}),
        (200, []),
        (200, {"result": [[{"text": 7}]]}),
        (200, {"result": [[{"contents": None}]]}),
        (200, {"result": [[{"contents": "text", "score": 10**400}]]}),
        (200, '{"result": [[{"contents": "text", "score": NaN}]]}'),
        (200, "[" * 100_000),
        (200, {"result": [found("a"), found("b")]}),
        half,
        trickle,
        freeze,
    ],
)
def test_what_passes_is_waited_for(service, trouble):
    service.answers = [trouble, trouble, RESULT]
    assert len(client(service, retries=2, timeout=0.2).search(["q"], 1)[0]) == 1
    assert len(service.requests) == 3
    service.answers, service.requests = [trouble], []
    with pytest.raises(SearchUnavailableError, match=rf"server {service.url} does not work: .*asked 2 times"):
        client(service, retries=1, timeout=0.2).search(["q"], 1)
    assert len(service.requests) == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 422])
def test_a_server_of_another_protocol_is_not_asked_again(service, status):
    service.answers = [(status, {"detail": "queries: unknown field"})]
    with pytest.raises(SearchUnavailableError, match=f"status {status}: queries: unknown field"):
        client(service).search(["q"], 1)
    assert len(service.requests) == 1


def test_a_query_that_a_working_server_refuses(service):
    refusal = (422, {"detail": "a query has at most 10 characters"})
    service.answers = [RESULT, refusal]
    asked = client(service, failures_to_open=1)
    asked.search(["q"], 1)
    for _ in range(3):  # no trouble of the server's: the circuit stays closed
        with pytest.raises(SearchRefusedError, match="at most 10 characters"):
            asked.search(["q" * 20], 1)


def test_a_server_that_refuses_everything_does_not_work(service):
    service.answers = [RESULT, (400, {"detail": "not enough credits"})]
    asked = client(service)
    asked.search(["q"], 1)
    for _ in range(20):
        with pytest.raises(SearchRefusedError):
            asked.search(["q"], 1)
    with pytest.raises(SearchUnavailableError, match="not enough credits"):
        asked.search(["q"], 1)
    service.answers = [RESULT]
    assert asked.search(["q"], 1)


def test_a_limit_around_a_search_ends_it(service):
    service.answers = [freeze]
    started = time.monotonic()
    with pytest.raises(TimeLimitError), time_limit(0.3):
        client(service, timeout=30, retries=5).search(["q"], 1)
    assert time.monotonic() - started < 1.5
    assert len(service.requests) == 1


def test_forked_processes_have_connections_of_their_own(service):
    service.answers = [(200, lambda request: {"result": [found(query) for query in request["queries"]]})]
    asked = client(service, timeout=20)
    asked.search(["warm"], 1)

    def right(name):
        return all(asked.search([f"{name} {n}"], 1)[0][0].contents == f"{name} {n}" for n in range(20))

    children = []
    for name in "abcd":
        child = os.fork()
        if not child:
            os._exit(0 if right(name) else 1)
        children.append(child)
    assert right("parent")
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert service.connections == 5


def test_passwords_are_not_told(service):
    service.answers = [(500, "broken")]
    asked = HttpSearch(service.url.replace("//", "//me:secret@"), retries=0)
    assert asked.identity == service.url
    with pytest.raises(SearchUnavailableError) as caught:
        asked.search(["q"], 1)
    assert "secret" not in str(caught.value)
    assert service.headers[0]["Authorization"].startswith("Basic ")


@pytest.mark.parametrize(("queries", "k"), [("abc", 1), (["a"], 0), (["a"], "3"), ([5], 1)])
def test_searches_that_are_none(service, queries, k):
    with pytest.raises((TypeError, ValueError), match=r"queries must be|Every query must|k must be"):
        client(service).search(queries, k)
    assert service.requests == []


def test_the_circuit_opens_and_closes(service):
    service.answers = [(500, "broken")]
    asked = client(service, retries=1, failures_to_open=2, cooldown=0.3)
    for _ in range(2):
        with pytest.raises(SearchUnavailableError, match="asked 2 times"):
            asked.search(["q"], 1)
    with pytest.raises(SearchUnavailableError, match="is not asked again before"):
        asked.search(["q"], 1)
    assert len(service.requests) == 4
    time.sleep(0.35)
    with pytest.raises(SearchUnavailableError, match="status 500: broken"):
        asked.search(["q"], 1)
    assert len(service.requests) == 5  # one attempt
    service.answers = [RESULT]
    time.sleep(0.35)
    assert asked.search(["q"], 1)[0][0].contents == "text"
    service.answers = [(500, "broken"), RESULT]
    assert asked.search(["q"], 1)[0][0].contents == "text"  # as many attempts as before


def test_a_call_ends_when_patience_does(service):
    service.answers = [(503, "busy")]
    started = time.monotonic()
    with pytest.raises(SearchUnavailableError):
        client(service, retries=1000, backoff=0.05, patience=0.5).search(["q"], 1)
    assert time.monotonic() - started < 5
    assert 2 <= len(service.requests) < 20


def test_a_server_that_is_down():
    with pytest.raises(
        SearchUnavailableError, match=r"The search server http://127.0.0.1:1/retrieve does not work: .*ref"
    ):
        HttpSearch("http://127.0.0.1:1/retrieve", retries=0).search(["q"])


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("localhost:8000", {}, "`url='localhost:8000'` is no URL"),
        ("http:///x", {}, "is no URL"),
        ("http://a:99999", {}, "is no URL"),
        ("http://a b/", {}, "is no URL"),
        ("http://[::1", {}, "is no URL"),
        ("http://a", {"token": "a\nb"}, "token .* must be printable ASCII"),
        ("http://a", {"token": "日本"}, "token .* must be printable ASCII"),
        ("http://a", {"retries": 1.5}, r"`retries=1.5`"),
        ("http://a", {"connections": 0}, "`connections=0`"),
        ("http://a", {"max_answer": 0}, "`max_answer=0`"),
        ("http://a", {"timeout": 0}, "`timeout=0` is not allowed"),
        ("http://a", {"retries": -1}, "`retries=-1`"),
        ("http://a", {"max_batch": 0}, "`max_batch=0`"),
        ("http://a", {"cooldown": float("nan")}, "`cooldown=nan`"),
    ],
)
def test_arguments_that_are_refused(url, options, message):
    with pytest.raises(ValueError, match=message):
        HttpSearch(url, **options)

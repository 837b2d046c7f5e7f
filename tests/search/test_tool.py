import inspect
from typing import Any

import pytest

from mempo_trl.search import SearchResult, make_search_tool


class Backend:
    """Finds one passage for each word of a query."""

    def __init__(self):
        self.calls = []

    def search(self, queries, k):
        self.calls.append((queries, k))
        return [
            [SearchResult(word, f'"{word.title()}"\nAbout {word}.', 1.0) for word in q.split()][:k] for q in queries
        ]


PARIS = "Doc 1 (Title: Paris)\nAbout paris."
PARIS_ROME = f"{PARIS}\nDoc 2 (Title: Rome)\nAbout rome."


class TestCall:
    def test_query(self):
        backend = Backend()
        assert make_search_tool(backend, k=2)(query="paris rome oslo") == PARIS_ROME
        assert backend.calls == [(["paris rome oslo"], 2)]

    def test_nothing_found(self):
        assert make_search_tool(Backend())(query="") == "No documents found."

    def test_query_list(self):
        backend = Backend()
        tool = make_search_tool(backend, query_list=True)
        assert tool(query_list=["paris"]) == PARIS
        assert tool(query_list=["paris", "", "paris rome"]) == (
            f"Query: paris\n{PARIS}\nQuery: \nNo documents found.\nQuery: paris rome\n{PARIS_ROME}"
        )
        assert backend.calls == [(["paris"], 3), (["paris", "", "paris rome"], 3)]

    def test_the_result_can_be_encoded(self):
        tool = make_search_tool(Backend(), query_list=True)
        assert tool(query_list=["\ud83d", "paris"]).startswith("Query: ?\nDoc 1 (Title: ?)\nAbout ?.")

    @pytest.mark.parametrize("query", [3, None, ["paris"], {"q": "paris"}])
    def test_wrong_query(self, query):
        with pytest.raises(TypeError, match="query must be a string, got "):
            make_search_tool(Backend())(query=query)

    @pytest.mark.parametrize("query_list", ["paris", 3, None, [], ["paris", 3], {"q": "paris"}])
    def test_wrong_query_list(self, query_list):
        with pytest.raises(TypeError, match="query_list must be a list of one or more strings, got "):
            make_search_tool(Backend(), query_list=True)(query_list=query_list)

    def test_a_huge_wrong_argument_is_not_repeated_in_full(self):
        with pytest.raises(TypeError) as error:
            make_search_tool(Backend())(query=["paris"] * 10_000)
        assert len(str(error.value)) < 200


class TestBatch:
    def test_one_search_for_all(self):
        backend = Backend()
        tool = make_search_tool(backend, k=2)
        assert tool.batch([{"query": "paris"}, {"query": ""}, {"query": "paris rome"}]) == [
            PARIS,
            "No documents found.",
            PARIS_ROME,
        ]
        assert backend.calls == [(["paris", "", "paris rome"], 2)]

    def test_query_lists(self):
        backend = Backend()
        tool = make_search_tool(backend, query_list=True)
        arguments = [{"query_list": ["paris", "rome"]}, {"query_list": ["paris"]}]
        assert tool.batch(arguments) == [tool(**row) for row in arguments]
        assert backend.calls[0] == (["paris", "rome", "paris"], 3)

    def test_wrong_arguments_leave_the_other_calls_alone(self):
        backend = Backend()
        wrong: list[Any] = [{"query": 3}, {"q": "x"}, {}, {"query": "x", "k": 9}, ["query"]]
        results = make_search_tool(backend).batch([*wrong, {"query": "paris"}])
        assert results[-1] == PARIS
        assert all(isinstance(result, TypeError) for result in results[:-1])
        assert [str(result) for result in results[:2]] == [
            "query must be a string, got 3.",
            "search takes exactly one argument, query; got {'q': 'x'}.",
        ]
        assert backend.calls == [(["paris"], 3)]

    def test_no_valid_call_is_no_search(self):
        backend = Backend()
        assert make_search_tool(backend).batch([]) == []
        assert isinstance(make_search_tool(backend).batch([{"query": 3}])[0], TypeError)
        assert backend.calls == []

    def test_a_backend_that_loses_results(self):
        class Losing:
            def search(self, queries, k):
                return [[]]

        with pytest.raises(ValueError, match="gave 1 lists of results for 2 queries"):
            make_search_tool(Losing()).batch([{"query": "a"}, {"query": "b"}])


class TestMake:
    @pytest.mark.parametrize("k", [0, -1, 1.5, "3", None])
    def test_wrong_k(self, k):
        with pytest.raises(ValueError, match="k must be a whole number of at least 1"):
            make_search_tool(Backend(), k=k)

    @pytest.mark.parametrize(
        ("query_list", "name", "schema"),
        [(False, "query", {"type": "string"}), (True, "query_list", {"type": "array", "items": {"type": "string"}})],
    )
    def test_schema(self, query_list, name, schema):
        from transformers.utils import get_json_schema

        tool = make_search_tool(Backend(), query_list=query_list)
        function = get_json_schema(tool)["function"]
        assert function["name"] == tool.__name__ == "search"
        assert function["description"].startswith("Search the corpus")
        assert function["parameters"]["required"] == [name]
        parameter = function["parameters"]["properties"][name]
        assert parameter.pop("description")
        assert parameter == schema
        assert list(inspect.signature(tool).parameters) == [name]

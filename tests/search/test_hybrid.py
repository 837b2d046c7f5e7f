import json
import threading

import pytest
from passages import DOCUMENTS, PARAPHRASES
from support import encoder

from mempo_trl.search import BM25Index, CachedSearch, DenseIndex, Document, HybridSearch, SearchResult, open_index
from mempo_trl.search.hybrid import reciprocal_rank_fusion


MODEL = encoder()


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return HybridSearch.build(DOCUMENTS, tmp_path_factory.mktemp("hybrid") / "index", MODEL)


class Ranking:
    """A backend that knows its answers, and what it was asked."""

    def __init__(self, found, identity="ranking"):
        self.found = found
        self.identity = identity
        self.asked = []

    def search(self, queries, k):
        self.asked.append((list(queries), k))
        return [
            [Document(identifier, f"{identifier} of {self.identity}") for identifier in self.found[q][:k]]
            for q in queries
        ]


class TestFusion:
    def test_by_hand(self):
        # a: 1/61 + 1/63; b: 1/62; c: 1/63 + 1/61; d: 1/62; e: 1/64
        rankings = [[Document(i, i) for i in ranking] for ranking in ("abc", "cdae")]
        assert reciprocal_rank_fusion(rankings) == [
            SearchResult("a", "a", 0.032266458496),
            SearchResult("c", "c", 0.032266458496),
            SearchResult("b", "b", 0.016129032258),
            SearchResult("d", "d", 0.016129032258),
            SearchResult("e", "e", 0.015625),
        ]

    def test_rank_constant(self):
        rankings = [[Document(i, i) for i in ranking] for ranking in ("abc", "cb")]
        # b: 1/2 + 1/2, c: 1/3 + 1, a: 1
        assert [(r.id, r.score) for r in reciprocal_rank_fusion(rankings, 0)] == [
            ("c", pytest.approx(4 / 3)),
            ("a", 1),
            ("b", 1),
        ]
        # The larger the constant, the more it counts in how many rankings a document is.
        assert [r.id for r in reciprocal_rank_fusion(rankings, 1000)] == ["c", "b", "a"]

    def test_repeated_documents_count_once(self):
        rankings = [[Document(i, i) for i in "aab"]]
        assert [(r.id, r.score) for r in reciprocal_rank_fusion(rankings, 1)] == [("a", 0.5), ("b", 0.25)]

    def test_nothing(self):
        assert reciprocal_rank_fusion([]) == reciprocal_rank_fusion([[], []]) == []


class TestSearch:
    def test_one_batched_call_of_each_backend(self):
        backends = [Ranking({"p": "abc", "q": "c"}, "one"), Ranking({"p": "cb", "q": ""}, "two")]
        hybrid = HybridSearch(backends, depth=7)
        found = hybrid.search(["p", "q", "p"], 2)
        assert [[r.id for r in results] for results in found] == [["c", "b"], ["c"], ["c", "b"]]
        assert found[0][0].contents == "c of one"
        assert [backend.asked for backend in backends] == [[(["p", "q"], 7)]] * 2
        hybrid.search(["p"], 9)
        assert backends[1].asked[-1] == (["p"], 9)
        assert hybrid.search([]) == []

    def test_backends_search_at_the_same_time(self):
        barrier = threading.Barrier(2, timeout=60)

        class Waiting(Ranking):
            def search(self, queries, k):
                barrier.wait()  # fails unless both come here
                return super().search(queries, k)

        hybrid = HybridSearch([Waiting({"q": "a"}), Waiting({"q": "b"})])
        assert [result.id for result in hybrid.search(["q"])[0]] == ["a", "b"]

    def test_errors_of_a_backend(self):
        class Broken:
            def search(self, queries, k):
                raise RuntimeError("no connection")

        class Short:
            def search(self, queries, k):
                return []

        good = Ranking({"q": "a"})
        with pytest.raises(RuntimeError, match="no connection"):
            HybridSearch([good, Broken()]).search(["q"])
        with pytest.raises(ValueError, match="Short gave 0 lists of results for 1 queries"):
            HybridSearch([good, Short()]).search(["q"])

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (([],), "backends must name at least one"),
            (([Ranking({})], -1), "rank_constant must be a number of at least 0, got -1"),
            (([Ranking({})], float("nan")), "rank_constant must be a number"),
            (([Ranking({})], 60, 0), "`depth=0` is not allowed"),
        ],
    )
    def test_wrong_arguments(self, arguments, reason):
        with pytest.raises(ValueError, match=reason):
            HybridSearch(*arguments)

    def test_wrong_queries(self):
        hybrid = HybridSearch([Ranking({})])
        with pytest.raises(TypeError, match="got the single string 'q'"):
            hybrid.search("q")
        with pytest.raises(ValueError, match="k must be a whole number"):
            hybrid.search(["q"], 0)

    def test_identity(self):
        one, two = Ranking({}, "one"), Ranking({}, "two")
        identities = {
            HybridSearch([one, two]).identity,
            HybridSearch([one]).identity,
            HybridSearch([one, two], 10).identity,
            HybridSearch([one, two], depth=10).identity,
        }
        assert len(identities) == 4
        assert "one" in HybridSearch([one, two]).identity

    def test_every_backend_is_cached(self, tmp_path, index):
        bm25 = BM25Index.build(DOCUMENTS, tmp_path / "bm25")
        for backend in (bm25, index):
            cached = CachedSearch(backend, tmp_path / "cache")
            wanted = backend.search(["the central bank"], 2)
            assert cached.search(["the central bank"], 2) == cached.search(["the central bank"], 2) == wanted
            assert (cached.hits, cached.misses) == (1, 1)
        before = HybridSearch([bm25]).identity
        bm25.add([Document("new", "another")])
        assert HybridSearch([BM25Index.load(bm25.path)]).identity != before


class TestSaved:
    def test_finds_words_and_meanings(self, index):
        # The one only BM25 can find, the other only the encoder.
        assert index.search(["showers"], 1)[0][0].id == "rain"
        for query, best in PARAPHRASES.items():
            assert best in [result.id for result in index.search([query], 2)[0]]

    def test_is_the_fusion_of_its_parts(self, index):
        path = next(iter(index.backends)).path.parent
        parts = [BM25Index.load(path / "bm25"), DenseIndex.load(path / "dense")]
        queries = [*PARAPHRASES, "the central bank", ""]
        assert index.search(queries, 8) == HybridSearch(parts).search(queries, 8)
        assert open_index(path).search(queries, 8) == index.search(queries, 8)

    def test_settings_are_saved(self, tmp_path):
        HybridSearch.build(
            iter(DOCUMENTS),
            tmp_path / "index",
            MODEL,
            rank_constant=7,
            depth=9,
            bm25={"stem": "english"},
            dense={"query_prefix": "q: ", "shard_size": 3},
        )
        loaded = HybridSearch.load(tmp_path / "index")
        assert (loaded.rank_constant, loaded.depth) == (7, 9)
        lexical, dense = loaded.backends
        assert [result.id for result in lexical.search(["astronaut circles planets"], 3)[0]] == ["space"]
        assert dense.metadata["query_prefix"] == "q: "
        assert len(lexical) == len(dense) == len(DOCUMENTS)
        assert sorted(entry.name for entry in (tmp_path / "index").iterdir()) == ["bm25", "dense", "mempo_hybrid.json"]
        assert [entry.name for entry in tmp_path.iterdir()] == ["index"]

    @pytest.mark.parametrize(
        ("options", "error", "reason"),
        [
            ({"stem": "klingon"}, ValueError, "stem must be one of"),
            ({"store_text": False}, ValueError, "bm25 cannot have store_text=False"),
            ({"no_such_option": 1}, TypeError, "no_such_option"),
        ],
    )
    def test_wrong_options_of_bm25_are_refused_before_encoding(self, tmp_path, options, error, reason):
        def corpus():
            pytest.fail("The corpus was read.")
            yield

        with pytest.raises(error, match=reason):
            HybridSearch.build(corpus(), tmp_path / "index", MODEL, bm25=options)
        assert list(tmp_path.iterdir()) == []

    def test_options_may_be_iterators(self, tmp_path):
        index = HybridSearch.build(DOCUMENTS, tmp_path / "index", MODEL, bm25={"stop_words": iter(["the"])})
        assert index.backends[0].search(["the"]) == [[]]

    def test_an_interrupted_build_keeps_the_dense_index(self, tmp_path, monkeypatch):
        def interrupt(*args, **kwargs):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(BM25Index, "build", interrupt)
            HybridSearch.build(DOCUMENTS, tmp_path / "index", MODEL)
        assert [entry.name for entry in tmp_path.iterdir()] == [".index.building"]
        before = DenseIndex.load(tmp_path / ".index.building" / "dense").identity
        index = HybridSearch.build(DOCUMENTS, tmp_path / "index", MODEL)
        # The same build, at another place.
        assert index.backends[1].identity.partition("#")[2] == before.partition("#")[2]
        assert [entry.name for entry in tmp_path.iterdir()] == ["index"]

    def test_two_at_a_time_are_refused(self, tmp_path, monkeypatch):
        build = BM25Index.build

        def refused_meanwhile(*args, **kwargs):
            with pytest.raises(BlockingIOError, match="Another process is building the index"):
                HybridSearch.build(DOCUMENTS[:2], tmp_path / "index", MODEL)
            return build(*args, **kwargs)

        monkeypatch.setattr(BM25Index, "build", refused_meanwhile)
        index = HybridSearch.build(DOCUMENTS, tmp_path / "index", MODEL)
        assert [len(backend) for backend in index.backends] == [len(DOCUMENTS)] * 2

    def test_what_a_killed_dense_build_left_is_removed(self, tmp_path):
        shards = tmp_path / ".index.building" / "shards"
        shards.mkdir(parents=True)
        for file in (shards / "000000.npy", shards.parent / "lock"):
            file.touch()
        HybridSearch.build(DOCUMENTS[:2], tmp_path / "index", MODEL)
        assert sorted(entry.name for entry in (tmp_path / "index").iterdir()) == ["bm25", "dense", "mempo_hybrid.json"]

    def test_bad_corpus_leaves_the_previous_index(self, tmp_path):
        HybridSearch.build(DOCUMENTS, tmp_path / "index", MODEL)
        with pytest.raises(ValueError, match="The corpus holds no documents"):
            HybridSearch.build([], tmp_path / "index", MODEL, overwrite=True)
        assert [entry.name for entry in tmp_path.iterdir()] == ["index"]
        with pytest.raises(FileExistsError, match=r"There already is a hybrid index at .*; pass overwrite=True"):
            HybridSearch.build(DOCUMENTS, tmp_path / "index", MODEL)
        replaced = HybridSearch.build(DOCUMENTS[:2], tmp_path / "index", MODEL, overwrite=True)
        assert [len(backend) for backend in replaced.backends] == [2, 2]

    @pytest.mark.parametrize(
        ("metadata", "reason"),
        [
            ("{", "is damaged"),
            ('{"format": 1}', "is damaged"),
            ('{"format": 9}', "has format 9, but this version of mempo_trl reads format 1"),
            (
                json.dumps({"format": 1, "backends": [], "rank_constant": 60, "depth": 9}),
                "backends must name at least one",
            ),
        ],
    )
    def test_wrong_metadata(self, tmp_path, metadata, reason):
        (tmp_path / "mempo_hybrid.json").write_text(metadata)
        with pytest.raises(ValueError, match=reason):
            HybridSearch.load(tmp_path)

    def test_missing(self, tmp_path):
        with pytest.raises(
            FileNotFoundError, match=r"There is no hybrid index at .*; make one with HybridSearch\.build"
        ):
            HybridSearch.load(tmp_path)
        settings = {"format": 1, "backends": ["bm25"], "rank_constant": 60, "depth": 9}
        (tmp_path / "mempo_hybrid.json").write_text(json.dumps(settings))
        with pytest.raises(FileNotFoundError, match=r"There is no index at .*bm25"):
            HybridSearch.load(tmp_path)

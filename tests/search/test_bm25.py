import gzip
import json
import math
import os
import random
import stat
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mempo_trl.search import BM25Index, Document, SearchResult, read_corpus
from mempo_trl.search.bm25 import MAX_QUERY_TERMS


DOCUMENTS = [
    Document("bigelow", '"Kathryn Bigelow"\nAn American film director, born in San Carlos.'),
    Document("locker", '"The Hurt Locker"\nA 2008 film about a bomb squad, directed by Kathryn Bigelow.'),
    Document("zola", '"Émile Zola"\nA French novelist.'),
    Document("tokyo", '"東京"\n日本の首都。トヨタの本社はない。'),
    Document("beijing", '"北京"\n中华人民共和国的首都'),
    Document("bangkok", '"กรุงเทพมหานคร"\nเมืองหลวง'),
    Document("seoul", '"서울"\n대한민국의 수도'),
    Document("page", "Hurt_Locker_(film) AND OR NOT title:x http://example.org/a_b?c=d"),
    Document("long", "protein " + "methionyl" * 30),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return BM25Index.build(DOCUMENTS, tmp_path_factory.mktemp("bm25") / "index")


def write(path, documents):
    lines = [json.dumps({"id": document.id, "contents": document.contents}) + "\n" for document in documents]
    path.write_text("".join(lines))
    return path


def ids(index, query, k=3):
    (results,) = index.search([query], k)
    return [result.id for result in results]


class TestSearch:
    @pytest.mark.parametrize(
        ("query", "best"),
        [
            ("Kathryn Bigelow birthplace", "bigelow"),
            ("kathryn_bigelow born", "bigelow"),
            ("who directed THE HURT LOCKER?", "locker"),
            ("emile zola", "zola"),
            ("ÉMILE ZOLA", "zola"),
            ("E\u0301mile", "zola"),
            ("ｆｒｅｎｃｈ", "zola"),
            ("東京の首都", "tokyo"),
            ("ﾄﾖﾀ本社", "tokyo"),
            ("北京", "beijing"),
            ("กรุงเทพ", "bangkok"),
            ("서울", "seoul"),
            ("methionyl" * 30, "long"),
        ],
    )
    def test_finds(self, index, query, best):
        assert ids(index, query)[0] == best

    def test_result(self, index):
        (results,) = index.search(["zola"])
        (result,) = results
        assert isinstance(result, SearchResult)
        assert (result.id, result.title, result.text) == ("zola", "Émile Zola", "A French novelist.")
        assert result.contents == DOCUMENTS[2].contents
        assert isinstance(result.score, float)
        assert result.score > 0

    def test_many_queries(self, index):
        queries = ["zola", "", "bigelow", "zola", "nothing of the kind xyzzy"]
        results = index.search(queries, k=2)
        assert results == [index.search([query], k=2)[0] for query in queries]
        assert results[1] == []
        assert results[0] is not results[3]
        assert index.search([]) == []

    @pytest.mark.parametrize(
        "query", ["", " \n", "!?…", "。、「」", "_", "🎉", "\x00", "\ud800", '"" () [] {} ^ ~ * : + -']
    )
    def test_no_term(self, index, query):
        assert index.search([query]) == [[]]

    @pytest.mark.parametrize(
        "query",
        [
            '"zola',
            "zola AND bigelowx",
            "NOT zola",
            "-zola",
            "+zola +missing",
            "text:zola",
            "id:zola",
            "zola^2",
            "zola~1",
            "(zola",
            "zola]",
            "[a TO zola}",
            "/zola/",
            "zola\\",
            "zola\x00",
            "\ud800zola\udfff",
            "zola " + "x" * 10_000,
            "zola " + "x" * 100_000,
            "zola " + " ".join(f"w{i}" for i in range(10_000)),
        ],
    )
    def test_a_query_is_text(self, index, query):
        assert "zola" in ids(index, query)

    def test_no_wildcards(self, index):
        assert ids(index, "zol*") == ids(index, "z?la") == ids(index, "/z.la/") == []

    @settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(st.text(st.characters(exclude_categories=()) | st.sampled_from('":()[]{}^~*+-\\/ANDORT ')))
    def test_any_text(self, index, query):
        assert len(index.search([query], k=2)[0]) <= 2

    def test_only_the_first_distinct_terms_count(self, index):
        filler = [f"w{i}" for i in range(MAX_QUERY_TERMS)]
        assert ids(index, " ".join([*filler[1:], *filler[1:], "zola"])) == ["zola"]
        assert ids(index, " ".join([*filler, "zola"])) == []

    def test_a_repeated_term_counts_once(self, index):
        assert index.search(["zola zola bigelow"]) == index.search(["zola bigelow"])

    @pytest.mark.parametrize("k", [1, 2, 9, 10**12])
    def test_k(self, index, k):
        assert len(index.search(["a film in the 首都"], k)[0]) == min(k, 6)

    @pytest.mark.parametrize("k", [0, -1, 1.5, None])
    def test_wrong_k(self, index, k):
        with pytest.raises(ValueError, match="k must be a whole number of at least 1"):
            index.search(["zola"], k)

    @pytest.mark.parametrize("queries", [[3], [None], ["zola", ["zola"]]])
    def test_wrong_query(self, index, queries):
        with pytest.raises(TypeError, match="Every query must be a string"):
            index.search(queries)

    def test_single_string(self, index):
        with pytest.raises(TypeError, match="got the single string 'zola'"):
            index.search("zola")


class TestRanking:
    """Against an exhaustive BM25. Documents stay under 40 tokens, where the index knows lengths exactly."""

    @staticmethod
    def exhaustive_bm25(documents, query, k1=1.2, b=0.75):
        mean_length = sum(map(len, documents)) / len(documents)
        frequency = Counter(term for document in documents for term in set(document))
        scores = []
        for document in documents:
            counts, score = Counter(document), 0.0
            for term in set(query) & set(document):
                idf = math.log(1 + (len(documents) - frequency[term] + 0.5) / (frequency[term] + 0.5))
                normaliser = k1 * (1 - b + b * len(document) / mean_length)
                score += idf * counts[term] * (k1 + 1) / (counts[term] + normaliser)
            scores.append(score)
        return scores

    def test_equals_exhaustive_bm25(self, tmp_path):
        rng = random.Random(0)
        words = [f"word{i}" for i in range(80)]
        weights = [1 / (i + 1) for i in range(80)]
        documents = [rng.choices(words, weights, k=rng.randint(1, 39)) for _ in range(300)]
        index = BM25Index.build(
            [{"id": i, "contents": " ".join(d)} for i, d in enumerate(documents)], tmp_path / "index"
        )
        queries = [rng.choices([*words, "unknown"], k=rng.randint(1, 8)) for _ in range(100)]
        for query, results in zip(queries, index.search([" ".join(q) for q in queries], k=10), strict=True):
            scores = self.exhaustive_bm25(documents, query)
            ranked = [i for i in sorted(range(300), key=lambda i: (-float(f"{scores[i]:.4g}"), i)) if scores[i] > 0][
                :10
            ]
            found = [int(result.id) for result in results]
            assert [result.score for result in results] == pytest.approx([scores[i] for i in found], rel=1e-5)
            # The same scores at every rank; the documents may only differ where scores are that close.
            assert [scores[i] for i in found] == pytest.approx([scores[i] for i in ranked], rel=1e-3)
            assert len(found) == len(ranked) == len(set(found))

    def test_same_ten_of_2000_passages_as_exhaustive_bm25(self, tmp_path):
        rng = np.random.default_rng(0)
        chances = 1 / (np.arange(3_000) + 3.7)
        passages = [rng.choice(3_000, n, p=chances / chances.sum()) for n in rng.poisson(60, 2_000) + 1]
        corpus = [{"id": i, "contents": " ".join(f"w{word}" for word in words)} for i, words in enumerate(passages)]
        index = BM25Index.build(corpus, tmp_path / "index")
        counts = np.stack([np.bincount(words, minlength=3_000) for words in passages])
        lengths = counts.sum(axis=1)
        # From 40 on, a length is known by the four leading bits of what it has beyond 24, as in Lucene's SmallFloat.
        beyond = np.maximum(lengths - 24, 0)
        unit = 1 << np.maximum(np.floor(np.log2(np.maximum(beyond, 1))).astype(int) - 3, 0)
        quantised = np.where(lengths < 24, lengths, 24 + beyond // unit * unit)
        weights = np.log(1 + (2_000 - (counts > 0).sum(axis=0) + 0.5) / ((counts > 0).sum(axis=0) + 0.5))
        saturation = 1.2 * (1 - 0.75 + 0.75 * quantised / lengths.mean())
        queries = [rng.choice(passages[i], 6) for i in rng.choice(2_000, 100)] + [[i] for i in range(50)]
        for query, results in zip(
            queries, index.search([f"w{' w'.join(map(str, q))}" for q in queries], 10), strict=True
        ):
            frequencies = counts[:, np.unique(query)]
            scores = (weights[np.unique(query)] * frequencies * 2.2 / (frequencies + saturation[:, None])).sum(axis=1)
            rounded = np.array([float(f"{score:.6g}") for score in scores])
            best = np.lexsort((np.arange(2_000), -rounded))[:10]
            assert [int(result.id) for result in results] == [i for i in best if scores[i] > 0]
            assert [result.score for result in results] == pytest.approx(scores[best], rel=1e-5)

    def test_ties_are_in_corpus_order(self, tmp_path):
        rng = random.Random(0)
        lengths = [rng.choice([3, 5]) for _ in range(5_000)]
        corpus = [{"id": i, "contents": "same terms " + "x " * n} for i, n in enumerate(lengths)]
        index = BM25Index.build(corpus, tmp_path / "index")
        expected = sorted(range(5_000), key=lambda i: (lengths[i], i))
        for k in (1, 3, 100, 5_000):
            assert ids(index, "same terms", k) == [str(i) for i in expected[:k]]


class TestBuild:
    def test_from_a_file(self, tmp_path):
        lines = "".join(json.dumps({"id": d.id, "contents": d.contents}) + "\n" for d in DOCUMENTS)
        (tmp_path / "corpus.jsonl").write_text(lines)
        (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        for name in ("corpus.jsonl", "corpus.jsonl.gz"):
            index = BM25Index.build(str(tmp_path / name), str(tmp_path / "deep" / name))
            assert len(index) == len(DOCUMENTS)
            assert ids(index, "zola") == ["zola"]

    def test_documents_come_back_unchanged(self, tmp_path):
        contents = ['"ﬁ"\r\nＡ\x00\u2028 e\u0301 ', "lone \ud800 surrogate", "", "x" * 100_000]
        index = BM25Index.build([Document(f"\ud800{i}", f"common {c}") for i, c in enumerate(contents)], tmp_path / "i")
        found = {result.id: result.contents for result in index.search(["common"], k=9)[0]}
        assert found == {f"\ud800{i}": f"common {c}" for i, c in enumerate(contents)}

    def test_stem(self, tmp_path):
        plain = BM25Index.build(DOCUMENTS, tmp_path / "plain")
        stemmed = BM25Index.build(DOCUMENTS, tmp_path / "stemmed", stem="english")
        assert ids(plain, "directing novelists") == []
        assert set(ids(stemmed, "directing novelists")) == {"locker", "zola"}
        assert ids(BM25Index.load(tmp_path / "stemmed"), "novelists") == ["zola"]

    def test_stop_words(self, tmp_path):
        listed = BM25Index.build(DOCUMENTS, tmp_path / "listed", stop_words="english")
        assert ids(listed, "a the of") == []
        assert ids(listed, "the novelist") == ["zola"]
        own = BM25Index.build(DOCUMENTS, tmp_path / "own", stop_words=["NOVELIST", "首"], stem="english")
        assert ids(BM25Index.load(tmp_path / "own"), "novelist") == []
        assert ids(own, "french novelist") == ["zola"]
        assert ids(own, "首") == []
        assert set(ids(own, "首都")) == {"tokyo", "beijing"}

    def test_stop_words_and_stems_of_a_language_with_accents(self, tmp_path):
        corpus = [{"id": 1, "contents": "Die Bücher über Prag"}, {"id": 2, "contents": "Das Buch ueber Wien"}]
        index = BM25Index.build(corpus, tmp_path / "index", stem="german", stop_words="german")
        assert ids(index, "über die") == []
        assert ids(index, "Häuser Büchern") == ["1", "2"]

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"stem": "klingon"}, "stem must be one of arabic, .*, got 'klingon'"),
            ({"stop_words": "greek"}, "stop_words must be one of danish, .*, got 'greek'"),
            ({"stop_words": ["of the"]}, "must be one word, got 'of the'"),
            ({"stop_words": ["…"]}, "must be one word, got '…'"),
            ({"ngram": 0}, "`ngram=0` is not allowed: it must be a whole number, at least 1"),
            ({"store_text": False}, "must be one uncompressed .jsonl file"),
        ],
    )
    def test_wrong_options(self, tmp_path, options, reason):
        with pytest.raises(ValueError, match=reason):
            BM25Index.build(DOCUMENTS, tmp_path / "index", **options)
        assert list(tmp_path.iterdir()) == []

    def test_pairs_rank_better_than_characters(self, tmp_path):
        # The characters of the query, but not its word: 京東 is a company.
        corpus = [
            {"id": "company", "contents": "京東、京東、東の京"},
            {"id": "tokyo", "contents": "首都である東京の話"},
        ]
        pairs = BM25Index.build(corpus, tmp_path / "pairs")
        characters = BM25Index.build(corpus, tmp_path / "characters", ngram=1)
        assert ids(pairs, "東京") == ["tokyo"]
        assert ids(characters, "東京") == ["company", "tokyo"]
        assert set(ids(pairs, "京")) == {"company", "tokyo"}
        assert ids(BM25Index.load(tmp_path / "pairs"), "話") == ["tokyo"]
        assert ids(BM25Index.build(corpus, tmp_path / "triples", ngram=3), "首都で") == ["tokyo"]

    def test_marks_do_not_split_words(self, tmp_path):
        index = BM25Index.build([{"id": 1, "contents": "हिन्दी x̌y"}, {"id": 2, "contents": "हिन"}], tmp_path / "index")
        assert ids(index, "हिन्दी") == ids(index, "xy") == ["1"]

    def test_repeated_ids(self, tmp_path, caplog):
        corpus = [{"id": 1, "contents": "a"}, {"id": 2, "contents": "a"}, {"id": "1", "contents": "a b"}]
        index = BM25Index.build(corpus, tmp_path / "index")
        assert caplog.messages == ["Ids that another document before has: 1. Searches return all documents of an id."]
        assert ids(index, "a b") == ["1", "1", "2"]

    def test_leftovers_of_a_killed_build_are_removed(self, tmp_path):
        code = (
            "import os, sys\nfrom mempo_trl.search import BM25Index\n"
            "def corpus():\n    yield {'id': 1, 'contents': 'new'}\n    os.kill(os.getpid(), 9)\n"
            "BM25Index.build(corpus(), sys.argv[1], overwrite=True)"
        )
        path = tmp_path / "index"
        for existing in (False, True):
            assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == -9
            assert len(list(path.glob("data-*"))) == 1 + existing
            if existing:
                assert ids(BM25Index.load(path), "zola") == ["zola"]
            else:
                with pytest.raises(FileNotFoundError, match="There is no BM25 index"):
                    BM25Index.load(path)
            BM25Index.build(DOCUMENTS, path, overwrite=True)
            assert len(list(path.glob("data-*"))) == 1
            assert ids(BM25Index.load(path), "zola") == ["zola"]

    def test_one_at_a_time(self, tmp_path):
        def corpus():
            yield DOCUMENTS[0]
            with pytest.raises(BlockingIOError, match="Another process is building"):
                BM25Index.build(DOCUMENTS, tmp_path / "index")

        assert len(BM25Index.build(corpus(), tmp_path / "index")) == 1

    def test_a_corpus_that_changes_meanwhile(self, tmp_path):
        corpus = write(tmp_path / "corpus.jsonl", DOCUMENTS)
        reader = read_corpus(corpus)
        write(corpus, DOCUMENTS[:2])
        with pytest.raises(ValueError, match="has changed while it was read"):
            BM25Index.build(reader, tmp_path / "index")
        assert not (tmp_path / "index").exists()

    def test_refuses_to_replace(self, tmp_path):
        path = tmp_path / "index"
        BM25Index.build(DOCUMENTS, path)
        with pytest.raises(FileExistsError, match=r"There already is a BM25 index at .*; pass overwrite=True"):
            BM25Index.build(DOCUMENTS[:2], path)
        assert len(BM25Index.load(path)) == len(DOCUMENTS)

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_never_replaces_what_is_not_an_index(self, tmp_path, overwrite):
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "thesis.tex").write_text("precious")
        for path in (tmp_path / "folder", tmp_path / "folder" / "thesis.tex"):
            with pytest.raises(FileExistsError, match=r"exists and is not a BM25 index; choose another path"):
                BM25Index.build(DOCUMENTS, path, overwrite=overwrite)
        assert (tmp_path / "folder" / "thesis.tex").read_text() == "precious"

    def test_overwrite_leaves_open_indexes_alone(self, tmp_path):
        path = tmp_path / "index"
        old = BM25Index.build(DOCUMENTS, path)
        new = BM25Index.build(DOCUMENTS[:2], path, overwrite=True)
        assert len(new) == 2
        assert ids(new, "zola") == []
        assert ids(old, "zola") == ["zola"]
        assert [entry.name for entry in tmp_path.iterdir()] == ["index"]

    def test_who_is_refused_leaves_the_lock_to_its_holder(self, tmp_path):
        def corpus():
            yield from DOCUMENTS
            for _ in range(2):  # the second would find no lock if the first had removed it
                with pytest.raises(BlockingIOError, match="Another process is building"):
                    BM25Index.build(DOCUMENTS[:2], tmp_path / "index")

        assert len(BM25Index.build(corpus(), tmp_path / "index")) == len(DOCUMENTS)
        assert len(BM25Index.load(tmp_path / "index")) == len(DOCUMENTS)

    def test_into_an_empty_folder(self, tmp_path):
        (tmp_path / "index").mkdir()
        assert len(BM25Index.build(DOCUMENTS, tmp_path / "index")) == len(DOCUMENTS)

    def test_into_what_a_link_points_to(self, tmp_path):
        (tmp_path / "disk").mkdir()
        (tmp_path / "index").symlink_to(tmp_path / "disk")
        BM25Index.build(DOCUMENTS, tmp_path / "index")
        assert (tmp_path / "index").is_symlink()
        assert len(BM25Index.load(tmp_path / "disk")) == len(DOCUMENTS)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    @pytest.mark.parametrize("existing", [False, True])
    def test_an_interrupted_build_leaves_no_trace(self, tmp_path, error, existing):
        def corpus():
            yield from DOCUMENTS
            raise error

        if existing:
            BM25Index.build(DOCUMENTS, tmp_path / "index")
        with pytest.raises(error):
            BM25Index.build(corpus(), tmp_path / "index", overwrite=True)
        assert [entry.name for entry in tmp_path.iterdir()] == ["index"] * existing
        if existing:
            assert ids(BM25Index.load(tmp_path / "index"), "zola") == ["zola"]

    @pytest.mark.parametrize(
        ("corpus", "reason"),
        [
            ([], "The corpus holds no documents"),
            ([*DOCUMENTS, {"id": 1}], 'Document 10 of the corpus: .* "contents" is missing'),
            (["text"], "Document 1 of the corpus: .* got a str"),
        ],
    )
    def test_bad_corpus_leaves_the_previous_index(self, tmp_path, corpus, reason):
        BM25Index.build(DOCUMENTS, tmp_path / "index")
        with pytest.raises(ValueError, match=reason):
            BM25Index.build(corpus, tmp_path / "index", overwrite=True)
        assert len(BM25Index.load(tmp_path / "index")) == len(DOCUMENTS)
        assert [entry.name for entry in tmp_path.iterdir()] == ["index"]

    def test_bad_line(self, tmp_path):
        (tmp_path / "corpus.jsonl").write_text('{"id": 1, "contents": "a"}\n{"id": 2}\n')
        with pytest.raises(ValueError, match=r"corpus\.jsonl, line 2: "):
            BM25Index.build(tmp_path / "corpus.jsonl", tmp_path / "index")
        assert not (tmp_path / "index").exists()

    def test_missing_corpus(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no corpus file"):
            BM25Index.build(tmp_path / "corpus.jsonl", tmp_path / "new" / "index")
        assert not (tmp_path / "new").exists()

    def test_others_may_read_it(self, tmp_path):
        (tmp_path / "folder").mkdir()
        BM25Index.build(DOCUMENTS, tmp_path / "index")
        assert stat.S_IMODE((tmp_path / "index").stat().st_mode) == stat.S_IMODE((tmp_path / "folder").stat().st_mode)


class TestAdd:
    def test_equals_one_build(self, tmp_path):
        whole = BM25Index.build(DOCUMENTS, tmp_path / "whole", stem="english", stop_words=["a"])
        index = BM25Index.build(DOCUMENTS[:3], tmp_path / "index", stem="english", stop_words=["a"])
        index.add(DOCUMENTS[3:6])
        BM25Index.load(tmp_path / "index").add(write(tmp_path / "corpus.jsonl", DOCUMENTS[6:]))
        loaded = BM25Index.load(tmp_path / "index")
        queries = ["zola", "films directed", "首都", "a", "서울의 수도"]
        assert loaded.search(queries, 9) == whole.search(queries, 9)
        assert (len(index), len(loaded)) == (6, 9)
        assert len(list(index.path.glob("data-*"))) == 1

    def test_ties_are_in_the_order_of_addition(self, tmp_path):
        index = BM25Index.build([{"id": i, "contents": "same"} for i in range(50)], tmp_path / "index")
        index.add([{"id": i, "contents": "same"} for i in range(50, 100)])
        assert ids(index, "same", 100) == [str(i) for i in range(100)]

    def test_open_readers_keep_what_they_see(self, tmp_path):
        index = BM25Index.build(DOCUMENTS[:3], tmp_path / "index")
        reader = BM25Index.load(tmp_path / "index")
        assert reader.identity == index.identity
        index.add(DOCUMENTS[3:])
        assert ids(index, "서울") == ["seoul"]
        assert ids(reader, "서울") == []
        assert ids(reader, "zola") == ["zola"]
        assert reader.identity != index.identity == BM25Index.load(tmp_path / "index").identity

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_an_interruption_leaves_the_old_index(self, tmp_path, error):
        def corpus():
            yield from DOCUMENTS[3:]
            raise error

        index = BM25Index.build(DOCUMENTS[:3], tmp_path / "index")
        identity = index.identity
        with pytest.raises(error):
            index.add(corpus())
        assert len(index) == len(BM25Index.load(tmp_path / "index")) == 3
        assert BM25Index.load(tmp_path / "index").identity == index.identity == identity
        assert len(list(index.path.glob("data-*"))) == 1

    def test_the_same_corpus_again_is_refused(self, tmp_path):
        more = write(tmp_path / "more.jsonl", DOCUMENTS[3:])
        index = BM25Index.build(write(tmp_path / "corpus.jsonl", DOCUMENTS[:3]), tmp_path / "index")
        index.add(more)
        for name in ("corpus.jsonl", "more.jsonl"):
            with pytest.raises(ValueError, match=rf"{name} is in the BM25 index .*index already; added again"):
                index.add(tmp_path / name)
        assert len(index) == len(BM25Index.load(index.path)) == len(DOCUMENTS)
        write(more, DOCUMENTS[:2])
        index.add(more)
        assert len(index) == len(DOCUMENTS) + 2

    def test_nothing(self, tmp_path):
        index = BM25Index.build(DOCUMENTS, tmp_path / "index")
        with pytest.raises(ValueError, match="The corpus holds no documents"):
            index.add([])
        assert len(BM25Index.load(tmp_path / "index")) == len(DOCUMENTS)


class TestTextInTheCorpus:
    def test_same_results(self, tmp_path):
        corpus = write(tmp_path / "corpus.jsonl", DOCUMENTS)
        more = tmp_path / "more.jsonl"
        more.write_text('\n{"key": 1, "name": "Émile", "body": "more zola"}\n{"key": 2, "name": null, "body": "last"}')
        columns = {"id_column": "key", "title_column": "name", "text_column": "body"}
        stored = BM25Index.build(corpus, tmp_path / "stored")
        index = BM25Index.build(corpus, tmp_path / "index", store_text=False)
        for each in (stored, index):
            each.add(read_corpus(more, **columns))
        queries = ["zola", "首都", "last", "kathryn bigelow film"]
        assert index.search(queries, 9) == stored.search(queries, 9)
        assert BM25Index.load(tmp_path / "index").search(queries, 9) == stored.search(queries, 9)
        assert ids(index, "émile zola") == ["1", "zola"]
        with pytest.raises(ValueError, match=r"must be one uncompressed \.jsonl file"):
            index.add(DOCUMENTS)

    def test_the_corpus_changes(self, tmp_path):
        corpus = write(tmp_path / "corpus.jsonl", DOCUMENTS)
        index = BM25Index.build(corpus, tmp_path / "index", store_text=False)
        write(corpus, DOCUMENTS[::-1])
        os.utime(corpus, (1, 1))
        with pytest.raises(ValueError, match=r"reads its texts from .*corpus\.jsonl, which has changed since; build"):
            BM25Index.load(tmp_path / "index")
        corpus.write_text("x" * 10_000)
        with pytest.raises(ValueError, match=r"corpus\.jsonl has changed since it was indexed"):
            index.search(["zola"])

    def test_the_corpus_moves(self, tmp_path):
        corpus = write(tmp_path / "corpus.jsonl", DOCUMENTS)
        BM25Index.build(corpus, tmp_path / "index", store_text=False)
        moved = corpus.rename(tmp_path / "moved.jsonl")
        with pytest.raises(FileNotFoundError, match="which is not there; give its new place as `corpus`"):
            BM25Index.load(tmp_path / "index")
        assert ids(BM25Index.load(tmp_path / "index", corpus=moved), "zola") == ["zola"]


class TestLoad:
    def test_same_results(self, index):
        loaded = BM25Index.load(index.path)
        assert len(loaded) == len(index) == len(DOCUMENTS)
        assert loaded.search(["zola film"]) == index.search(["zola film"])

    def test_missing(self, tmp_path):
        for path in (tmp_path, tmp_path / "missing"):
            with pytest.raises(
                FileNotFoundError, match=r"There is no BM25 index at .*; make one with BM25Index\.build"
            ):
                BM25Index.load(path)

    @pytest.mark.parametrize(
        ("metadata", "reason"),
        [
            ("{", "is damaged"),
            ("[]", "is damaged"),
            ("{}", "is damaged"),
            ('{"format": 2, "documents": 9}', "is damaged"),
            ('{"format": 1, "documents": 9, "stem": false}', "has format 1, but this version .* reads format 2"),
        ],
    )
    def test_wrong_metadata(self, tmp_path, metadata, reason):
        BM25Index.build(DOCUMENTS, tmp_path / "index")
        (tmp_path / "index" / "mempo_bm25.json").write_text(metadata)
        with pytest.raises(ValueError, match=reason):
            BM25Index.load(tmp_path / "index")

    def test_documents_are_missing(self, tmp_path):
        BM25Index.build(DOCUMENTS, tmp_path / "index")
        file = tmp_path / "index" / "mempo_bm25.json"
        file.write_text(file.read_text().replace('"documents": 9', '"documents": 10', 1))
        with pytest.raises(ValueError, match="should hold 10 documents, but holds 9"):
            BM25Index.load(tmp_path / "index")

    @pytest.mark.parametrize("pattern", ["meta.json", "*.term", "*.store", "*.fast"])
    @pytest.mark.parametrize("content", [None, b"x"], ids=["missing", "cut"])
    def test_damaged(self, tmp_path, pattern, content):
        BM25Index.build(DOCUMENTS, tmp_path / "index")
        for file in (tmp_path / "index").glob(f"data-*/{pattern}"):
            # A file of its own in its place: whoever still has the old one mapped must not lose it (SIGBUS).
            file.unlink()
            if content is not None:
                file.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot be opened .*; build it again"):
            BM25Index.load(tmp_path / "index")

    def test_corpus(self, tmp_path):
        corpus = write(tmp_path / "corpus.jsonl", DOCUMENTS)
        path = tmp_path / "index"
        BM25Index.build(corpus, path)
        assert len(BM25Index.load(path, corpus=str(corpus))) == len(DOCUMENTS)
        moved = corpus.rename(tmp_path / "moved.jsonl")
        os.utime(moved, (1, 1))
        assert len(BM25Index.load(path, corpus=moved)) == len(DOCUMENTS)
        assert len(BM25Index.load(path, corpus=read_corpus(moved))) == len(DOCUMENTS)
        with pytest.raises(ValueError, match="or with other options"):
            BM25Index.load(path, corpus=read_corpus(moved, text_column="contents"))
        with pytest.raises(FileNotFoundError, match=r"no corpus file or folder .*corpus\.jsonl"):
            BM25Index.load(path, corpus=corpus)
        write(corpus, DOCUMENTS[:-1])
        with pytest.raises(ValueError, match=r"is not one of .*corpus\.jsonl as it is now"):
            BM25Index.load(path, corpus=corpus)
        index = BM25Index.load(path)
        index.add(corpus)
        assert len(BM25Index.load(path, corpus=corpus)) == len(BM25Index.load(path, corpus=moved)) == 17

    def test_a_change_in_the_middle_is_seen(self, tmp_path):
        corpus = write(tmp_path / "corpus.jsonl", [Document(str(i), f"text {i % 10} " * 100) for i in range(1000)])
        BM25Index.build(corpus, tmp_path / "index")
        lines = corpus.read_bytes().splitlines(keepends=True)
        lines[500] = lines[500].replace(b"text 0", b"text 1")
        corpus.write_bytes(b"".join(lines))
        os.utime(corpus, (1, 1))
        with pytest.raises(ValueError, match="as it is now"):
            BM25Index.load(tmp_path / "index", corpus=corpus)

    def test_corpus_of_an_index_of_no_file(self, tmp_path):
        BM25Index.build(DOCUMENTS, tmp_path / "index")
        with pytest.raises(ValueError, match="cannot be compared with"):
            BM25Index.load(tmp_path / "index", corpus=write(tmp_path / "corpus.jsonl", DOCUMENTS))


def test_imports_neither_torch_nor_tantivy_before_use():
    code = "import sys, mempo_trl.search; print([m for m in ('torch', 'tantivy', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_forked_processes_search_on(index):
    queries = ["kathryn bigelow", "émile zola", "東京", "bomb squad"] * 30
    expected = index.search(queries, 2)
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            os._exit(0 if all(index.search(queries, 2) == expected for _ in range(5)) else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4

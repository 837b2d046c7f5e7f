import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import faiss
import numpy as np
import pytest
from passages import DOCUMENTS, PARAPHRASES
from support import encoder

from mempo_trl.search import DenseIndex, Document, SearchResult, folders, open_index
from mempo_trl.search import dense as dense_module
from mempo_trl.search.dense import Encoder, Vectors, default_factory, default_prefixes, make_faiss, search_faiss
from mempo_trl.search.folders import building_folder


MODEL = encoder()


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return DenseIndex.build(DOCUMENTS, tmp_path_factory.mktemp("dense") / "index", MODEL)


@pytest.fixture(scope="module")
def encoder():
    return Encoder(MODEL)


@pytest.fixture(scope="module")
def asymmetric(tmp_path_factory):
    """The same model, with prompts in its files."""
    folder = tmp_path_factory.mktemp("models") / "asymmetric"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config_sentence_transformers.json").read_text())
    config["prompts"] = {"query": "to find: ", "passage": "found: "}
    config["default_prompt_name"] = "passage"
    config["similarity_fn_name"] = "dot"
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    return folder


def ids(index, query, k=3):
    (results,) = index.search([query], k)
    return [result.id for result in results]


def words(text):
    return set(re.findall(r"\w+", text.lower()))


class TestSearch:
    @pytest.mark.parametrize(("query", "best"), PARAPHRASES.items())
    def test_finds_paraphrases(self, index, query, best):
        contents = next(document.contents for document in DOCUMENTS if document.id == best)
        assert not words(query) & words(contents)
        assert ids(index, query)[0] == best

    def test_results(self, index):
        (results,) = index.search(["kitty"], 8)
        assert {Document(result.id, result.contents) for result in results} == set(DOCUMENTS)
        assert all(isinstance(result, SearchResult) for result in results)
        scores = [result.score for result in results]
        assert scores == sorted(scores, reverse=True)
        assert -1 <= scores[-1] < scores[0] <= 1

    def test_scores_are_cosines(self, index, encoder):
        (results,) = index.search(["kitty"], 8)
        query = encoder.queries(["kitty"])[0]
        vectors = encoder.passages([result.contents for result in results])
        cosines = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
        assert [result.score for result in results] == pytest.approx(cosines.tolist(), abs=1e-3)

    def test_many_queries(self, index):
        queries = [*PARAPHRASES, "", " \n", *PARAPHRASES, "\ud800", "x" * 10_000, "kitty \x00"]
        results = index.search(queries, k=2)
        assert [[result.id for result in found] for found in results] == [ids(index, query, 2) for query in queries]
        assert results[: len(PARAPHRASES)] == results[len(PARAPHRASES) + 2 : 2 * len(PARAPHRASES) + 2]
        assert results[len(PARAPHRASES)] == results[len(PARAPHRASES) + 1] == []
        assert index.search([]) == index.search([""])[1:] == []

    def test_from_many_threads(self, index):
        queries = list(PARAPHRASES)
        found = {}

        def search(number):
            found[number] = [ids(index, query, 1) for query in queries[number % 3 :]]

        threads = [threading.Thread(target=search, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = [[best] for best in PARAPHRASES.values()]
        assert found == {number: best[number % 3 :] for number in range(6)}

    @pytest.mark.parametrize("k", [1, 3, 8, 10**12])
    def test_k(self, index, k):
        assert len(index.search(["kitty"], k)[0]) == min(k, 8)

    @pytest.mark.parametrize("k", [0, -1, 1.5, None])
    def test_wrong_k(self, index, k):
        with pytest.raises(ValueError, match="k must be a whole number of at least 1"):
            index.search(["kitty"], k)

    @pytest.mark.parametrize("queries", [[3], [None], ["kitty", ["kitty"]]])
    def test_wrong_query(self, index, queries):
        with pytest.raises(TypeError, match="Every query must be a string"):
            index.search(queries)

    def test_single_string(self, index):
        with pytest.raises(TypeError, match="got the single string 'kitty'"):
            index.search("kitty")

    def test_equal_documents_are_in_corpus_order(self, tmp_path):
        # Different lengths around them, so that equal documents are encoded in different batches.
        corpus = [
            {"id": number, "contents": "the same text" if number % 3 else "something else " * (number % 7)}
            for number in range(200)
        ]
        index = DenseIndex.build(corpus, tmp_path / "index", MODEL, batch_size=8, shard_size=50)
        same = [str(number) for number in range(200) if number % 3]
        for k in (1, 5, 60, len(same)):
            assert ids(index, "the same text", k) == same[:k]


class TestPrefixes:
    def test_are_put_before_texts(self, tmp_path, encoder):
        index = DenseIndex.build(
            DOCUMENTS, tmp_path / "index", MODEL, query_prefix="query: ", passage_prefix="passage: "
        )
        plain = [encoder.passages([f"passage: {text}"])[0] for text in ("kitty", "sofa")]
        prefixed = index._encoder.passages(["kitty", "sofa"])
        np.testing.assert_allclose(prefixed, plain, atol=1e-5)
        np.testing.assert_allclose(index._encoder.queries(["kitty"]), encoder.queries(["query: kitty"]), atol=1e-5)
        assert np.abs(prefixed - encoder.passages(["kitty", "sofa"])).max() > 0.01
        # The stored vectors are those of the passages with their prefix, and the documents are without it.
        stored = index._index.reconstruct_n(0, len(index))
        expected = encoder.passages([f"passage: {document.contents}" for document in DOCUMENTS])
        np.testing.assert_allclose(stored, expected, atol=1e-3)
        assert {result.contents for result in index.search(["kitty"], 8)[0]} == {d.contents for d in DOCUMENTS}

    def test_are_saved(self, tmp_path):
        built = DenseIndex.build(
            DOCUMENTS, tmp_path / "index", MODEL, query_prefix="query: ", passage_prefix="passage: "
        )
        loaded = DenseIndex.load(tmp_path / "index")
        np.testing.assert_array_equal(loaded._encoder.queries(["kitty"]), built._encoder.queries(["kitty"]))
        assert loaded.search(list(PARAPHRASES)) == built.search(list(PARAPHRASES))

    def test_of_the_models_files(self, asymmetric, encoder):
        own = Encoder(asymmetric)
        assert (own.query_prefix, own.passage_prefix) == ("to find: ", "found: ")
        np.testing.assert_allclose(own.queries(["kitty"]), encoder.queries(["to find: kitty"]), atol=1e-5)
        np.testing.assert_allclose(own.passages(["kitty"]), encoder.passages(["found: kitty"]), atol=1e-5)

    def test_override_the_models_files(self, asymmetric, encoder):
        # Also by nothing: the model's default prompt must not come back.
        own = Encoder(asymmetric, query_prefix="", passage_prefix="")
        np.testing.assert_allclose(own.queries(["kitty"]), encoder.queries(["kitty"]), atol=1e-5)
        np.testing.assert_allclose(own.passages(["kitty"]), encoder.passages(["kitty"]), atol=1e-5)

    BGE = "Represent this sentence for searching relevant passages: "

    @pytest.mark.parametrize(
        ("name", "query", "passage"),
        [
            ("intfloat/e5-base-v2", "query: ", "passage: "),
            ("intfloat/multilingual-e5-large", "query: ", "passage: "),
            ("/data/models/my_e5_tuned", "query: ", "passage: "),
            ("/hub/models--intfloat--e5-base-v2/snapshots/0123abc", "query: ", "passage: "),
            ("intfloat/multilingual-e5-large-instruct", dense_module._INSTRUCTION, ""),
            ("intfloat/e5-mistral-7b-instruct", dense_module._INSTRUCTION, ""),
            ("BAAI/bge-base-en-v1.5", BGE, ""),
            ("BAAI/bge-small-en", BGE, ""),
            ("BAAI/bge-large-zh-v1.5", "为这个句子生成表示以用于检索相关文章：", ""),
            ("BAAI/bge-m3", "", ""),
            ("thenlper/gte-base", "", ""),
            ("Alibaba-NLP/gte-modernbert-base", "", ""),
            ("sentence-transformers/all-MiniLM-L6-v2", "", ""),
            ("/home/e5/all-MiniLM-L6-v2", "", ""),
            ("someone/pile5-base", "", ""),
        ],
    )
    def test_by_name(self, name, query, passage):
        assert default_prefixes(name, {"query": "", "document": ""}) == (query, passage)

    @pytest.mark.parametrize(
        ("prompts", "expected"),
        [
            ({"query": "q ", "document": "d "}, ("q ", "d ")),
            ({"query": "q ", "document": ""}, ("q ", "")),
            ({"query": None, "corpus": "c "}, ("", "c ")),
            ({"retrieval.query": "q ", "retrieval.passage": "p "}, ("q ", "p ")),
            ({"classification": "c "}, ("query: ", "passage: ")),
        ],
    )
    def test_prompts_go_before_the_name(self, prompts, expected):
        assert default_prefixes("intfloat/e5-base", prompts) == expected


class TestEncoder:
    def test_normalize(self, encoder, asymmetric):
        assert encoder.normalize
        assert not Encoder(asymmetric).normalize  # its files say "dot"
        assert not Encoder(MODEL, normalize=False).normalize
        assert np.linalg.norm(encoder.passages(["kitty"])) == pytest.approx(1)

    def test_max_length(self, encoder):
        short = Encoder(MODEL, max_length=6)
        # [CLS], four words, [SEP]
        np.testing.assert_allclose(
            short.passages(["one two three four five six seven"]), encoder.passages(["one two three four"]), atol=1e-5
        )
        # The model's own limit, 256.
        np.testing.assert_allclose(
            encoder.passages(["word " * 254 + "other " * 100]), encoder.passages(["word " * 254]), atol=1e-5
        )

    @pytest.mark.parametrize("max_length", [0, -1, 257, 1.5])
    def test_wrong_max_length(self, max_length):
        with pytest.raises(ValueError, match=r"max_length must be a whole number from 1 to 256, the limit of "):
            Encoder(MODEL, max_length=max_length)

    def test_dtype(self, encoder):
        half = Encoder(MODEL, dtype="bfloat16")
        assert half._model.dtype.itemsize == 2
        vectors = half.passages(["kitty"])
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(vectors, encoder.passages(["kitty"]), atol=0.02)

    def test_model_that_cannot_be_loaded(self, tmp_path):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text("{")
        for model in (tmp_path / "model", tmp_path / "missing", "no-such-owner/no-such-model"):
            with pytest.raises(ValueError, match=rf"The model {model} cannot be loaded \(.+\); give the name or the"):
                DenseIndex.build(DOCUMENTS, tmp_path / "new" / "index", model)
        assert not (tmp_path / "new").exists()


class TestKinds:
    """On vectors near a surface of few dimensions, as those of texts are."""

    @pytest.fixture(scope="class")
    def vectors(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("vectors")
        rng = np.random.default_rng(0)
        project = rng.standard_normal((12, 64))
        points = rng.standard_normal((20_000, 12)) @ project + 0.1 * rng.standard_normal((20_000, 64))
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        for number, shard in enumerate(np.split(points[:19_900].astype(np.float16), [7_000, 14_000])):
            np.save(folder / f"{number}.npy", shard)
        files = sorted(folder.glob("*.npy"))
        return Vectors(files), points[19_900:].astype(np.float32)

    @staticmethod
    def found(vectors, folder, factory, parameters):
        shards, queries = vectors
        folder.mkdir()
        dense_module._write_faiss(shards, folder, factory, parameters)
        return search_faiss(dense_module._read_faiss(folder), queries, 10)

    @pytest.fixture(scope="class")
    def exact(self, vectors, tmp_path_factory):
        return self.found(vectors, tmp_path_factory.mktemp("exact") / "index", "Flat", None)

    def test_vectors(self, vectors):
        shards, _ = vectors
        everything = np.concatenate(list(shards.blocks()))
        assert everything.shape == (len(shards), shards.dimension) == (19_900, 64)
        for numbers in ([0, 6_999, 7_000, 7_001, 13_999, 14_000, 19_899], [19_899], [7_000], range(100, 15_000, 7)):
            np.testing.assert_array_equal(shards.rows(np.array(numbers)), everything[list(numbers)])

    def test_flat_is_exact(self, vectors, exact):
        shards, queries = vectors
        scores = queries @ np.concatenate(list(shards.blocks())).T
        for of_query, hits in zip(scores, exact, strict=True):
            best = np.sort(of_query)[::-1][:10]
            assert [score for _, score in hits] == pytest.approx(best.tolist(), rel=1e-4)

    @pytest.mark.parametrize(
        ("factory", "parameters", "least"),
        [
            ("IVF256,Flat", "nprobe=32", 0.95),
            ("IVF256,SQfp16", "nprobe=32", 0.95),
            ("HNSW32", "efSearch=64", 0.95),
            ("PCA32,IVF64,Flat", "nprobe=32", 0.9),
        ],
    )
    def test_recall(self, vectors, exact, tmp_path, factory, parameters, least):
        approximate = self.found(vectors, tmp_path / "index", factory, parameters)
        assert self.recall(exact, approximate) >= least

    def test_saved_parameters_count(self, vectors, exact, tmp_path):
        few = self.found(vectors, tmp_path / "few", "IVF256,Flat", "nprobe=1")
        all_lists = self.found(vectors, tmp_path / "all", "IVF256,Flat", "nprobe=256")
        assert self.recall(exact, few) < 0.9
        assert self.recall(exact, all_lists) == 1

    def test_put_together_on_disk(self, vectors, tmp_path, monkeypatch):
        whole = self.found(vectors, tmp_path / "whole", "IVF64,SQfp16", "nprobe=8")
        monkeypatch.setattr(dense_module, "_PART_BYTES", 2_500 * 64 * 2)
        parts = self.found(vectors, tmp_path / "parts", "IVF64,SQfp16", "nprobe=8")
        assert parts == whole
        assert sorted(file.name for file in (tmp_path / "parts").iterdir()) == ["vectors.faiss", "vectors.ivfdata"]
        # Also when the folder has moved.
        (tmp_path / "parts").rename(tmp_path / "moved")
        assert search_faiss(dense_module._read_faiss(tmp_path / "moved"), vectors[1], 10) == whole

    @staticmethod
    def recall(exact, approximate):
        pairs = zip(exact, approximate, strict=True)
        return np.mean([len({n for n, _ in one} & {n for n, _ in other}) / len(one) for one, other in pairs])

    def test_equal_scores_at_the_end(self):
        index = make_faiss(4, "Flat")
        index.add(np.repeat(np.eye(4, dtype=np.float32), [3, 500, 5, 2], axis=0))
        queries = np.array([[0.5, 1, 0, 0], [0, 0, 0.5, 0]], dtype=np.float32)
        first, second = search_faiss(index, queries, 400)
        assert [number for number, _ in first] == list(range(3, 403))
        assert [number for number, _ in second] == [503, 504, 505, 506, 507, *range(395)]

    @pytest.mark.parametrize(
        ("documents", "factory", "parameters"),
        [
            (1, "Flat", None),
            (100_000, "Flat", None),
            (100_001, "IVF1024,SQfp16", "nprobe=32"),
            (1_000_000, "IVF4096,SQfp16", "nprobe=128"),
            (21_015_324, "IVF16384,SQfp16", "nprobe=512"),
        ],
    )
    def test_default(self, documents, factory, parameters):
        assert default_factory(documents) == (factory, parameters)
        assert default_factory(documents, "float32")[0] == factory.replace("SQfp16", "Flat")

    def test_a_large_corpus_gets_an_inverted_file(self, tmp_path, monkeypatch):
        monkeypatch.setattr(dense_module, "FLAT_DOCUMENTS", 50)
        corpus = [*DOCUMENTS, *({"id": number, "contents": f"filler {number}"} for number in range(200))]
        index = DenseIndex.build(corpus, tmp_path / "index", MODEL)
        assert index.metadata["factory"] == "IVF64,SQfp16"
        loaded = DenseIndex.load(tmp_path / "index", parameters="nprobe=64")
        assert [ids(loaded, query)[0] for query in PARAPHRASES] == list(PARAPHRASES.values())


class TestBuild:
    def test_from_a_file(self, tmp_path):
        lines = "".join(json.dumps({"id": d.id, "contents": d.contents}) + "\n" for d in DOCUMENTS)
        (tmp_path / "corpus.jsonl").write_text(lines)
        index = DenseIndex.build(str(tmp_path / "corpus.jsonl"), str(tmp_path / "deep" / "index"), str(MODEL))
        assert len(index) == len(DOCUMENTS)
        assert list(index.documents) == DOCUMENTS
        assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["index"]

    def test_shards_and_batches_make_no_difference(self, index, tmp_path):
        other = DenseIndex.build(
            iter(DOCUMENTS), tmp_path / "index", MODEL, shard_size=3, batch_size=2, embedding_dtype="float32"
        )
        for query in PARAPHRASES:
            ours, theirs = index.search([query], 3)[0], other.search([query], 3)[0]
            assert [result.id for result in ours] == [result.id for result in theirs]
            assert [r.score for r in ours] == pytest.approx([r.score for r in theirs], abs=1e-3)

    def test_identity(self, tmp_path):
        first = DenseIndex.build(DOCUMENTS, tmp_path / "index", MODEL)
        assert first.identity.startswith(f"{tmp_path / 'index'}#")
        assert DenseIndex.load(tmp_path / "index").identity == first.identity
        assert DenseIndex.build(DOCUMENTS[:2], tmp_path / "index", MODEL, overwrite=True).identity != first.identity
        # An index that would be the same again is not encoded again.
        same = DenseIndex.build(DOCUMENTS[:2], tmp_path / "index", MODEL, overwrite=True)
        assert same.identity == DenseIndex.load(tmp_path / "index").identity

    def test_refuses_to_replace(self, tmp_path):
        DenseIndex.build(DOCUMENTS, tmp_path / "index", MODEL)
        with pytest.raises(FileExistsError, match=r"There already is a dense index at .*; pass overwrite=True"):
            DenseIndex.build(DOCUMENTS[:2], tmp_path / "index", MODEL)
        assert len(DenseIndex.load(tmp_path / "index")) == len(DOCUMENTS)

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_never_replaces_what_is_not_an_index(self, tmp_path, overwrite):
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "thesis.tex").write_text("precious")
        for path in (tmp_path / "folder", tmp_path / "folder" / "thesis.tex"):
            with pytest.raises(FileExistsError, match=r"exists and is not a dense index; choose another path"):
                DenseIndex.build(DOCUMENTS, path, MODEL, overwrite=overwrite)
        assert (tmp_path / "folder" / "thesis.tex").read_text() == "precious"

    def test_overwrite_leaves_open_indexes_alone(self, tmp_path):
        old = DenseIndex.build(DOCUMENTS, tmp_path / "index", MODEL)
        new = DenseIndex.build(DOCUMENTS[1:], tmp_path / "index", MODEL, overwrite=True)
        query, best = next(iter(PARAPHRASES.items()))
        assert ids(old, query)[0] == best
        assert best not in ids(new, query, 8)
        assert [entry.name for entry in tmp_path.iterdir()] == ["index"]

    @pytest.mark.parametrize(
        ("corpus", "reason"),
        [
            ([], "The corpus holds no documents"),
            ([*DOCUMENTS, {"id": 1}], 'Document 9 of the corpus: .* "contents" is missing'),
        ],
    )
    def test_bad_corpus_leaves_the_previous_index(self, tmp_path, corpus, reason):
        DenseIndex.build(DOCUMENTS[:2], tmp_path / "index", MODEL)
        with pytest.raises(ValueError, match=reason):
            DenseIndex.build(corpus, tmp_path / "index", MODEL, overwrite=True)
        assert len(DenseIndex.load(tmp_path / "index")) == 2
        assert [entry.name for entry in tmp_path.iterdir()] == ["index"]

    def test_missing_corpus(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no corpus"):
            DenseIndex.build(tmp_path / "corpus.jsonl", tmp_path / "new" / "index", MODEL)
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"batch_size": 0}, "`batch_size=0` is not allowed"),
            ({"shard_size": 1.5}, "`shard_size=1.5` is not allowed"),
            ({"model_dtype": "int8"}, "model_dtype must be one of float32, float16, bfloat16; got 'int8'"),
            ({"embedding_dtype": "int8"}, "embedding_dtype must be one of float16, float32; got 'int8'"),
            ({"factory": "Tree"}, "factory must be a faiss factory string .* got 'Tree': could not parse"),
            ({"factory": "Flat", "parameters": "nprobe=4"}, "parameters must be faiss search parameters .* 'nprobe=4'"),
            ({"factory": "IVF2,Flat", "parameters": "nprobe=0"}, "nprobe must be at least 1 .* got 'nprobe=0'"),
            ({"factory": "IVF2,Flat", "parameters": "nprobe=-1"}, "nprobe must be at least 1 .* got 'nprobe=-1'"),
        ],
    )
    def test_wrong_options(self, tmp_path, options, reason):
        with pytest.raises(ValueError, match=reason):
            DenseIndex.build(DOCUMENTS, tmp_path / "index", MODEL, **options)
        assert list(tmp_path.iterdir()) == []

    def test_too_few_documents_to_train(self, tmp_path):
        with pytest.raises(ValueError, match="faiss cannot train the index on 8 vectors: Number of training points"):
            DenseIndex.build(DOCUMENTS, tmp_path / "index", MODEL, factory="IVF64,Flat")
        assert not (tmp_path / "index").exists()
        # What is encoded serves another kind.
        DenseIndex.build(DOCUMENTS, tmp_path / "index", MODEL, factory="IVF2,Flat")
        assert [entry.name for entry in tmp_path.iterdir()] == ["index"]

    def test_one_build_at_a_time(self, tmp_path):
        def corpus():
            yield from DOCUMENTS
            with pytest.raises(BlockingIOError, match="Another process is building the index"):
                DenseIndex.build(DOCUMENTS, tmp_path / "index", MODEL)

        assert len(DenseIndex.build(corpus(), tmp_path / "index", MODEL)) == len(DOCUMENTS)

    def test_an_index_that_came_meanwhile_is_not_replaced(self, tmp_path, index, monkeypatch):
        def load_model(*args, **kwargs):
            shutil.copytree(index.path, tmp_path / "index")
            return Encoder(*args, **kwargs)

        monkeypatch.setattr(dense_module, "Encoder", load_model)
        with pytest.raises(FileExistsError, match="There already is a dense index"):
            DenseIndex.build(DOCUMENTS[:2], tmp_path / "index", MODEL)
        monkeypatch.undo()
        assert [entry.name for entry in tmp_path.iterdir()] == ["index"]
        assert len(DenseIndex.load(tmp_path / "index")) == len(index)

    def test_parameters_are_checked_before_encoding(self, tmp_path, monkeypatch):
        monkeypatch.setattr(dense_module, "_encode", lambda *args: pytest.fail("Encoding began."))
        with pytest.raises(ValueError, match=r"parameters must be faiss search parameters .* got 'nprobe=3'"):
            DenseIndex.build(DOCUMENTS, tmp_path / "index", MODEL, parameters="nprobe=3")
        assert list(tmp_path.iterdir()) == []

    def test_parameters_that_no_index_has_are_refused_before_reading(self, tmp_path):
        def corpus():
            pytest.fail("The corpus was read.")
            yield

        with pytest.raises(ValueError, match=r"parameters must be faiss search parameters .* got 'nprobes=3'"):
            DenseIndex.build(corpus(), tmp_path / "index", MODEL, parameters="nprobes=3")

    @pytest.mark.parametrize("load", [DenseIndex.load, open_index])
    def test_loading_puts_back_what_a_killed_build_moved_away(self, tmp_path, index, load):
        shutil.copytree(index.path, tmp_path / ".index.replaced")
        assert len(load(tmp_path / "index")) == len(index)
        assert [entry.name for entry in tmp_path.iterdir()] == ["index"]

    def test_loading_waits_while_another_process_replaces_the_index(self, tmp_path, index, monkeypatch):
        shutil.copytree(index.path, tmp_path / "index")
        replaced = tmp_path / ".index.replaced"
        with building_folder(tmp_path / "index"):
            (tmp_path / "index").rename(replaced)
            monkeypatch.setattr(folders.time, "sleep", lambda seconds: replaced.rename(tmp_path / "index"))
            assert len(DenseIndex.load(tmp_path / "index")) == len(index)

    def test_what_cannot_be_put_back_is_named(self, tmp_path, index):
        shutil.copytree(index.path, tmp_path / ".index.replaced")
        (tmp_path / ".index.building").touch()  # as if nothing could be made there
        with pytest.raises(OSError, match=r"cannot be put back .*: rename .*\.index\.replaced to .*index"):
            DenseIndex.load(tmp_path / "index")

    @pytest.mark.parametrize("moved", [False, True])
    def test_killed_while_it_replaced_an_index(self, tmp_path, index, moved):
        shutil.copytree(index.path, tmp_path / ".index.replaced")
        if moved:
            shutil.copytree(index.path, tmp_path / "index")
        else:  # the old one is put back, and not replaced unasked
            with pytest.raises(FileExistsError, match="There already is a dense index"):
                DenseIndex.build(DOCUMENTS[:2], tmp_path / "index", MODEL)
            assert len(DenseIndex.load(tmp_path / "index")) == len(index)
        assert len(DenseIndex.build(DOCUMENTS[:2], tmp_path / "index", MODEL, overwrite=True)) == 2
        assert [entry.name for entry in tmp_path.iterdir()] == ["index"]


CORPUS = [{"id": number, "contents": f"passage {number}. " + "word " * 8} for number in range(320)]
SCRIPT = """
    import json, sys
    from mempo_trl.search import DenseIndex
    corpus = [json.loads(line) for line in sys.stdin]
    print("ready", flush=True)
    DenseIndex.build(corpus, sys.argv[1], sys.argv[2], shard_size=16, batch_size=16, device="cpu")
"""


class TestKilledBuild:
    @pytest.fixture(scope="class")
    def interrupted(self, tmp_path_factory):
        """What is left of a build whose process was killed after some shards."""
        folder = tmp_path_factory.mktemp("killed")
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder / "index"), str(MODEL)],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        process.stdin.write("".join(json.dumps(record) + "\n" for record in CORPUS))
        process.stdin.close()
        shards = folder / ".index.building" / "shards"
        while process.poll() is None and len(list(shards.glob("*.npy"))) < 3:
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        return folder

    @pytest.fixture
    def folder(self, interrupted, tmp_path):
        shutil.copytree(interrupted, tmp_path / "copy")
        return tmp_path / "copy"

    def test_nothing_half_built(self, interrupted):
        assert [entry.name for entry in interrupted.iterdir()] == [".index.building"]
        assert 3 <= len(list((interrupted / ".index.building" / "shards").glob("*.npy"))) < 20

    def test_goes_on(self, folder, caplog):
        shards = folder / ".index.building" / "shards"
        done = len(list(shards.glob("*.npy")))
        # Marked, to be known again: the vectors of the first two passages are swapped.
        first = np.load(shards / "000000.npy")
        first[[0, 1]] = first[[1, 0]]
        np.save(shards / "000000.npy", first)
        # As a machine leaves a file that fails while it writes.
        (shards / "000001.npy").write_bytes((shards / "000001.npy").read_bytes()[:1000])
        with caplog.at_level(logging.INFO, logger="mempo_trl"):
            index = DenseIndex.build(CORPUS, folder / "index", MODEL, shard_size=16)
        assert "Going on after 1 of 20 shards" in caplog.text
        assert f"Going on after {done - 2} of 20 shards" in caplog.text
        vectors = index._index.reconstruct_n(0, len(index))
        expected = index._encoder.passages([record["contents"] for record in CORPUS])
        expected[[0, 1]] = expected[[1, 0]]
        np.testing.assert_allclose(vectors, expected, atol=1e-3)
        assert [entry.name for entry in folder.iterdir()] == ["index"]

    @pytest.mark.parametrize(
        ("corpus", "options", "reason"),
        [
            (CORPUS[:50], {}, "documents, corpus"),
            (CORPUS[:50], {"passage_prefix": "prefix: "}, "passage_prefix, documents, corpus, the model's weights"),
            (CORPUS[:50], {"shard_size": 32}, "documents, corpus, shard_size"),
            (CORPUS[:50], {"embedding_dtype": "float32"}, "embedding_dtype, documents, corpus"),
        ],
    )
    def test_begins_anew(self, folder, caplog, corpus, options, reason):
        index = DenseIndex.build(corpus, folder / "index", MODEL, **{"shard_size": 16, **options})
        assert f"cannot be continued, because this differs: {reason}. Encoding begins anew." in caplog.text
        vectors = index._index.reconstruct_n(0, len(index))
        np.testing.assert_allclose(vectors, index._encoder.passages([r["contents"] for r in corpus]), atol=1e-3)
        assert [entry.name for entry in folder.iterdir()] == ["index"]

    def test_begins_anew_with_other_weights(self, folder, caplog):
        file = folder / ".index.building" / "shards" / "manifest.json"
        manifest = json.loads(file.read_text())
        manifest["probe"][0] += 0.05
        file.write_text(json.dumps(manifest))
        for shard in file.parent.glob("*.npy"):
            np.save(shard, np.zeros_like(np.load(shard)))
        index = DenseIndex.build(CORPUS, folder / "index", MODEL, shard_size=16)
        assert "because this differs: the model's weights. Encoding begins anew." in caplog.text
        assert np.linalg.norm(index._index.reconstruct_n(0, len(index)), axis=1).min() > 0.99


class TestLoad:
    def test_same_results(self, index):
        loaded = DenseIndex.load(index.path)
        assert len(loaded) == len(index) == len(DOCUMENTS)
        assert loaded.search(list(PARAPHRASES)) == index.search(list(PARAPHRASES))

    def test_from_another_process(self, index):
        code = (
            "import sys; from mempo_trl.search import DenseIndex; "
            "print(DenseIndex.load(sys.argv[1]).search([sys.argv[2]]))"
        )
        query = next(iter(PARAPHRASES))
        process = subprocess.run(
            [sys.executable, "-c", code, str(index.path), query], capture_output=True, text=True, check=True
        )
        assert process.stdout.strip() == str(index.search([query]))

    def test_missing(self, tmp_path):
        for path in (tmp_path, tmp_path / "missing"):
            with pytest.raises(
                FileNotFoundError, match=r"There is no dense index at .*; make one with DenseIndex\.build"
            ):
                DenseIndex.load(path)

    @pytest.fixture
    def copy(self, index, tmp_path):
        shutil.copytree(index.path, tmp_path / "index")
        return tmp_path / "index"

    @staticmethod
    def change(folder, **changes):
        file = folder / "mempo_dense.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"format": 99}, "has format 99, but this version of mempo_trl reads format 1"),
            ({"documents": 9}, "9 documents were indexed, but there are 8 texts and 8 vectors"),
            ({"dimension": 768}, "its vectors have 384 dimensions instead of 768"),
            ({"files": None}, "cannot be opened"),
            (
                {"query_prefix": "x", "probe": [1.0] + [0.0] * 383},
                "is not the one that the dense index .* was built with",
            ),
            ({"model": "/no/such/folder"}, "The model /no/such/folder cannot be loaded"),
        ],
    )
    def test_wrong_metadata(self, copy, changes, reason):
        self.change(copy, **changes)
        with pytest.raises(ValueError, match=reason):
            DenseIndex.load(copy)

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": 1}'])
    def test_damaged_metadata(self, copy, content):
        (copy / "mempo_dense.json").write_text(content)
        with pytest.raises(ValueError, match="is damaged"):
            DenseIndex.load(copy)

    @pytest.mark.parametrize("name", ["vectors.faiss", "documents.jsonl", "documents.offsets"])
    @pytest.mark.parametrize("content", [None, b"x", "noise"], ids=["missing", "cut", "noise"])
    def test_damaged(self, copy, name, content):
        size = (copy / name).stat().st_size
        (copy / name).unlink()
        if content is not None:
            # faiss and the offsets are checked; what a text is, nobody can tell.
            (copy / name).write_bytes(
                b"\xff" * (size if name != "documents.jsonl" else 3) if content == "noise" else content
            )
        with pytest.raises(ValueError, match=r"cannot be opened .*; build it again"):
            DenseIndex.load(copy)

    def test_model_of_other_dimension(self, copy):
        small = faiss.IndexFlatIP(16)
        small.add(np.eye(8, 16, dtype=np.float32))
        faiss.write_index(small, str(copy / "vectors.faiss"))
        files = {file.name: file.stat().st_size for file in copy.iterdir() if file.suffix != ".json"}
        self.change(copy, dimension=16, files=files)
        with pytest.raises(ValueError, match=r"has vectors of 16 dimensions, but those of the model .* have 384"):
            DenseIndex.load(copy)

    def test_model_that_has_moved(self, copy, tmp_path):
        self.change(copy, model="/no/such/folder")
        shutil.copytree(MODEL, tmp_path / "moved")
        loaded = DenseIndex.load(copy, model=tmp_path / "moved")
        assert [ids(loaded, query)[0] for query in PARAPHRASES] == list(PARAPHRASES.values())

"""Dense search: passages as vectors of a sentence encoder, found by faiss."""

import json
import logging
import math
import re
import shutil
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from mempo_trl.search import documents as stored
from mempo_trl.search.arguments import check_counts, distinct_queries
from mempo_trl.search.corpus import Corpus, SearchResult, documents_of, holds_nothing
from mempo_trl.search.folders import (
    building_folder,
    check_target,
    move_into_place,
    put_back,
    read_metadata,
    told_if_full,
    write_json,
)


try:
    import faiss
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import get_device_name
except ImportError as error:
    raise ImportError(
        f"Dense search needs faiss and sentence-transformers ({error}): pip install 'mempo_trl[dense]'"
    ) from error


logger = logging.getLogger(__name__)

METADATA = "mempo_dense.json"
# Up to here an exhaustive search takes milliseconds, and is exact.
FLAT_DOCUMENTS = 100_000

_FORMAT = 1
_KIND = "dense index"
_VECTORS = "vectors.faiss"
_LISTS = "vectors.ivfdata"
_MANIFEST = "manifest.json"
# An IVF index that is larger is put together on disk, from parts of about this size.
_PART_BYTES = 1 << 30
_TRAINING_POINTS = 50  # per list; faiss wants at least 39
_ROWS = 1 << 16  # vectors that are turned to fp32 at a time
# Scores differ beyond about this many digits with how queries and passages are batched.
_DIGITS = 5
_PROBE = "The same text gives the same vector only if the model and its settings are the same."
_MODEL_DTYPES = ("float32", "float16", "bfloat16")
_EMBEDDING_DTYPES = ("float16", "float32")

_QUERY_PROMPTS = ("query", "search_query", "retrieval.query", "web_search_query", "s2p_query")
_PASSAGE_PROMPTS = ("document", "passage", "corpus", "search_document", "retrieval.passage")
_INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
# For models whose files do not tell: what their model cards ask for. The first pattern that is found counts.
_PREFIXES = (
    (r"e5-mistral|e5\b.*-instruct", _INSTRUCTION, ""),
    (r"e5", "query: ", "passage: "),
    (r"bge-(small|base|large)-en", "Represent this sentence for searching relevant passages: ", ""),
    (r"bge-(small|base|large)-zh", "为这个句子生成表示以用于检索相关文章：", ""),
    # bge-m3 and gte (thenlper's, and Alibaba's but for gte-Qwen, whose files tell) want none.
)


class DenseIndex:
    """A dense index in a folder. Make one with `DenseIndex.build`, open it with `DenseIndex.load`.

    Every passage is a vector of a sentence encoder, and so is a query; a passage's score is the inner product of both,
    which is the cosine of their angle unless the index was built with `normalize=False`.
    """

    def __init__(
        self, path: Path, metadata: dict[str, Any], index: Any, documents: stored.StoredDocuments, encoder: "Encoder"
    ):
        self.path = path
        self.metadata = metadata
        self._index = index
        self._documents = documents
        self._encoder = encoder

    @classmethod
    def build(
        cls,
        corpus: Corpus,
        path: str | Path,
        model: str | Path,
        overwrite: bool = False,
        *,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        normalize: bool | None = None,
        max_length: int | None = None,
        factory: str | None = None,
        parameters: str | None = None,
        batch_size: int = 64,
        shard_size: int = 16_384,
        model_dtype: str = "float32",
        embedding_dtype: str = "float16",
        device: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> "DenseIndex":
        """Encode a corpus and index it into a folder.

        Everything is written to the folder `.<name>.building` beside `path` and moved into place when it is complete.
        A build that is interrupted or killed leaves the vectors there, and the same build, started again, goes on after
        the last whole shard. If the model, the corpus or what shapes the vectors has changed, it begins anew.

        The faiss index is, unless `factory` says otherwise, exhaustive ("Flat") for up to 100,000 documents. For N
        documents above that it is an inverted file of about 4 sqrt(N) lists, rounded to a power of two, of which a
        search visits one in 32, at least 16 (see `default_factory`).

        Memory does not grow with the corpus as long as the index is "Flat" for a small corpus or an IVF for a large
        one, but for the sample that trains the IVF; HNSW and other kinds that `factory` may ask for are held in memory
        while they are built. The disk holds up to three times the vectors meanwhile.

        Args:
            corpus: A corpus that `read_corpus` reads, or an iterable of documents or of mappings with "id" and
                "contents". It is streamed.
            path: The folder of the index. Its parents are created.
            model: The name of a sentence-transformers model, or its folder.
            overwrite: Replace a dense index that is already there, unless it is the very same one. Any other folder is
                never replaced.
            query_prefix: What goes before each query. By default what the model's files say (the prompts in
                `config_sentence_transformers.json`), else what models of that name want (e5: "query: "), else nothing.
            passage_prefix: What goes before each passage, likewise (e5: "passage: ").
            normalize: Whether vectors are scaled to length 1. By default yes, unless the model's files name the inner
                product as its similarity.
            max_length: Cuts queries and passages to so many tokens; by default, and at most, the model's own limit.
            factory: A faiss factory string, for example "IVF4096,PQ64" or "HNSW32". "Flat" is exact.
            parameters: faiss search parameters that are saved with the index, for example "nprobe=64" or
                "efSearch=128".
            batch_size: Passages that are encoded together.
            shard_size: Passages between two points from which a killed build can go on.
            model_dtype: In what the model computes: "float32", "float16" or "bfloat16". A CPU searches in float32.
            embedding_dtype: In what vectors are stored: "float16" or "float32".
            device: Where the model runs, for example "cpu" or "cuda:1"; by default on a GPU if there is one.
            revision: The model's version on the Hub.
            trust_remote_code: Let the model run code of its own.

        Returns:
            The index, opened.

        Raises:
            FileExistsError: If `path` exists, is not empty, and must not be overwritten.
            FileNotFoundError: If the corpus is a path without a file.
            ValueError: If the corpus is empty or malformed, the model cannot be loaded, or an option is wrong.
            BlockingIOError: If another process is building the same index.
        """
        path = Path(path).expanduser().resolve()
        check_target(path, METADATA, _KIND, overwrite)
        _check_options(batch_size, shard_size, model_dtype, embedding_dtype)
        documents = documents_of(corpus)
        encoder = Encoder(
            model,
            query_prefix=query_prefix,
            passage_prefix=passage_prefix,
            normalize=normalize,
            max_length=max_length,
            batch_size=batch_size,
            dtype=model_dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        settings: dict[str, Any] = {**encoder.settings, "embedding_dtype": embedding_dtype}
        # Wrong ones are told before hours of encoding. What an IVF has not, the default for few documents has neither.
        make_faiss(encoder.dimension, factory or default_factory(FLAT_DOCUMENTS + 1)[0], parameters)
        with told_if_full(path), building_folder(path) as building:
            complete, shards = building / "index", building / "shards"
            try:
                # Once more: another process may have finished meanwhile.
                check_target(path, METADATA, _KIND, overwrite)
                shutil.rmtree(complete, ignore_errors=True)
                complete.mkdir()
                progress = tqdm(documents, desc="Reading", unit=" documents", disable=None)
                count, digest = stored.write_documents(progress, complete)
                if not count:
                    raise ValueError(holds_nothing(documents))
                if factory is None:
                    factory, default_parameters = default_factory(count, embedding_dtype)
                    parameters = parameters or default_parameters
                make_faiss(encoder.dimension, factory, parameters)
                metadata = {
                    **settings,
                    "documents": count,
                    "corpus": digest,
                    "factory": factory,
                    "parameters": parameters,
                }
                if not _same_index(path, metadata, encoder):
                    _prepare_shards(
                        shards, {**settings, "documents": count, "corpus": digest, "shard_size": shard_size}
                    )
                    texts = stored.StoredDocuments(complete)
                    files = _encode(texts, encoder, shards, shard_size, np.dtype(embedding_dtype))
                    _write_faiss(Vectors(files), complete, factory, parameters)
                    metadata |= {
                        "format": _FORMAT,
                        "build": uuid.uuid4().hex,
                        "files": {file.name: file.stat().st_size for file in complete.iterdir()},
                    }
                    write_json(complete / METADATA, metadata)
                    move_into_place(complete, path)
                shutil.rmtree(shards, ignore_errors=True)
            finally:
                shutil.rmtree(complete, ignore_errors=True)
                # What a later build can go on from stays.
                if not any(shards.glob("*.npy")):
                    shutil.rmtree(building, ignore_errors=True)
        return cls._open(path, encoder)

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str | None = None,
        *,
        model: str | Path | None = None,
        parameters: str | None = None,
        batch_size: int = 64,
        trust_remote_code: bool = False,
    ) -> "DenseIndex":
        """Open an index, and load its model. Vectors and documents are memory-mapped: several processes share them.

        Args:
            path: The folder that `build` wrote.
            device: Where queries are encoded, for example "cpu" or "cuda:1"; by default on a GPU if there is one.
            model: Where the model is now, if its folder has moved since the index was built.
            parameters: faiss search parameters in place of the saved ones, for example "nprobe=128".
            batch_size: Queries that are encoded together.
            trust_remote_code: Let the model run code of its own.

        Raises:
            FileNotFoundError: If there is no index at `path`.
            ValueError: If it is damaged or was built with a format that this version does not read, or if the model
                cannot be loaded or is not the one that the passages were encoded with.
        """
        path = Path(path).expanduser().resolve()
        put_back(path)
        metadata = _read_metadata(path)
        device = device or get_device_name()
        try:
            settings = {
                "query_prefix": str(metadata["query_prefix"]),
                "passage_prefix": str(metadata["passage_prefix"]),
                "normalize": bool(metadata["normalize"]),
                "max_length": metadata["max_length"],
                "dtype": "float32" if device.startswith("cpu") else metadata["model_dtype"],
                "revision": metadata["revision"] if model is None else None,
            }
            name = metadata["model"] if model is None else model
        except KeyError as error:
            raise ValueError(f"{path / METADATA} is damaged ({error!r}); build the index again.") from error
        encoder = Encoder(name, **settings, batch_size=batch_size, device=device, trust_remote_code=trust_remote_code)
        return cls._open(path, encoder, parameters)

    @classmethod
    def _open(cls, path: Path, encoder: "Encoder", parameters: str | None = None) -> "DenseIndex":
        metadata = _read_metadata(path)
        try:
            for name, size in metadata["files"].items():
                if (path / name).stat().st_size != size:
                    raise ValueError(f"{name} has {(path / name).stat().st_size} bytes instead of {size}")
            documents = stored.StoredDocuments(path)
            index = _read_faiss(path)
            if not index.ntotal == len(documents) == metadata["documents"]:
                raise ValueError(
                    f"{metadata['documents']} documents were indexed, but there are {len(documents)} texts and "
                    f"{index.ntotal} vectors"
                )
            if index.d != metadata["dimension"]:
                raise ValueError(f"its vectors have {index.d} dimensions instead of {metadata['dimension']}")
            probe = metadata["probe"]
        except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
            raise ValueError(f"The dense index {path} cannot be opened ({error}); build it again.") from error
        if index.d != encoder.dimension:
            raise ValueError(
                f"The dense index {path} has vectors of {index.d} dimensions, but those of the model {encoder.name} "
                f"have {encoder.dimension}; give the model that the index was built with, {metadata['model']}."
            )
        if _similarity(probe, encoder.settings["probe"]) < 0.99:
            raise ValueError(
                f"The model {encoder.name} is not the one that the dense index {path} was built with: it gives other "
                "vectors. Give that model, or build the index again."
            )
        if parameters:
            _set_parameters(index, parameters)
        return cls(path, metadata, index, documents, encoder)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self._documents)

    @property
    def identity(self) -> str:
        """Names this very index: its path, and an id that is new with every build."""
        return f"{self.path}#{self.metadata['build']}"

    @property
    def documents(self) -> stored.StoredDocuments:
        """The documents, in the order of the corpus."""
        return self._documents

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[SearchResult]]:
        """Find the best documents for every query. Equal queries are encoded and searched once.

        Args:
            queries: The texts to search for.
            k: The number of documents per query, at least 1.

        Returns:
            For every query at most `k` results, best first; fewer if an approximate index finds no more. Scores are
            rounded to five significant digits, about the precision in which they are computed; documents with equal
            scores are in corpus order. A query of nothing but whitespace finds nothing.

        Raises:
            TypeError: If `queries` is not a list of strings.
            ValueError: If `k` is not a whole number of at least 1.
        """
        distinct = [query for query in distinct_queries(queries, k) if query.strip()]
        found: dict[str, list[SearchResult]] = {}
        if distinct:
            ranked = search_faiss(self._index, self._encoder.queries(distinct), k)
            found = {query: self._results(hits) for query, hits in zip(distinct, ranked, strict=True)}
        return [list(found.get(query, [])) for query in queries]

    def _results(self, hits: list[tuple[int, float]]) -> list[SearchResult]:
        documents = [(self._documents[number], score) for number, score in hits]
        return [SearchResult(document.id, document.contents, score) for document, score in documents]


class Encoder:
    """A sentence-transformers model, with what goes before queries and passages.

    The arguments are those of `DenseIndex.build`, `dtype` its `model_dtype`.

    Raises:
        ValueError: If the model cannot be loaded, or `max_length` is more than it takes.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        normalize: bool | None = None,
        max_length: int | None = None,
        batch_size: int = 64,
        dtype: str = "float32",
        device: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ):
        self.name = str(Path(model).expanduser().resolve()) if Path(model).expanduser().is_dir() else str(model)
        try:
            self._model = SentenceTransformer(
                self.name,
                device=device,
                revision=revision,
                trust_remote_code=trust_remote_code,
                model_kwargs={"dtype": dtype},
            )
        except Exception as error:  # anything, depending on what is wrong with which file
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ValueError(
                f"The model {self.name} cannot be loaded ({reason}); give the name or the folder of a "
                "sentence-transformers model."
            ) from error
        limit = self._model.max_seq_length
        if max_length is not None:
            if not isinstance(max_length, int) or max_length < 1 or (limit is not None and max_length > limit):
                raise ValueError(
                    f"max_length must be a whole number from 1 to {limit}, the limit of {self.name}; "
                    f"got {max_length!r}."
                )
            self._model.max_seq_length = max_length
        of_model = default_prefixes(self.name, self._model.prompts)
        self.query_prefix = of_model[0] if query_prefix is None else query_prefix
        self.passage_prefix = of_model[1] if passage_prefix is None else passage_prefix
        self.normalize = self._model.similarity_fn_name != "dot" if normalize is None else normalize
        self.batch_size = batch_size
        # Tokenizers keep their settings of padding and truncation in a state of their own.
        self._lock = threading.Lock()
        probe = self.passages([_PROBE])[0]
        self.dimension = len(probe)
        # What shapes the vectors, as it is saved.
        self.settings: dict[str, Any] = {
            "model": self.name,
            "revision": revision,
            "query_prefix": self.query_prefix,
            "passage_prefix": self.passage_prefix,
            "normalize": self.normalize,
            "max_length": max_length,
            "model_dtype": dtype,
            "dimension": self.dimension,
            "probe": [float(f"{value:.6g}") for value in probe],
        }

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Encode queries: an fp32 array of shape (texts, dimension)."""
        return self._encode(self._model.encode_query, texts, self.query_prefix)

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """Encode passages: an fp32 array of shape (texts, dimension)."""
        return self._encode(self._model.encode_document, texts, self.passage_prefix)

    def _encode(self, encode: Any, texts: Sequence[str], prefix: str) -> np.ndarray:
        # A lone surrogate, which JSON can spell, would stop the tokenizer.
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        with self._lock:
            vectors = encode(
                clean,
                prompt=prefix,
                batch_size=self.batch_size,
                normalize_embeddings=self.normalize,
                show_progress_bar=False,
                convert_to_tensor=True,
            )
        return vectors.float().cpu().numpy()


def default_prefixes(name: str, prompts: Mapping[str, str | None]) -> tuple[str, str]:
    """What a model wants before a query and before a passage.

    Args:
        name: Its name or folder.
        prompts: The prompts in its `config_sentence_transformers.json`. If there are any for queries or passages, they
            count, else the name: the e5, bge and gte families are known, of others it is taken that they want nothing.
    """
    of_files = [
        next((prompts[key] for key in keys if prompts.get(key)), None) for keys in (_QUERY_PROMPTS, _PASSAGE_PROMPTS)
    ]
    if any(of_files):
        return of_files[0] or "", of_files[1] or ""
    parts = Path(name).parts
    # The last part, unless it is a snapshot in the cache of the Hub.
    last = next((part for part in parts if part.startswith("models--")), parts[-1] if parts else "").lower()
    for pattern, query, passage in _PREFIXES:
        if re.search(rf"(?<![a-z0-9])({pattern})(?![a-z0-9])", last):
            return query, passage
    return "", ""


def default_factory(documents: int, embedding_dtype: str = "float16") -> tuple[str, str | None]:
    """The kind of faiss index for a number of documents, and its search parameters.

    Up to 100,000 an exhaustive search; above, an inverted file. faiss recommends 4 sqrt(N) to 16 sqrt(N) lists
    (https://github.com/facebookresearch/faiss/wiki/Guidelines-to-choose-an-index); here the power of two that is
    nearest to 4 sqrt(N), and a search visits one list in 32, at least 16.
    """
    if documents <= FLAT_DOCUMENTS:
        return "Flat", None
    lists = 2 ** round(math.log2(4 * math.sqrt(documents)))
    return f"IVF{lists},{'SQfp16' if embedding_dtype == 'float16' else 'Flat'}", f"nprobe={max(16, lists // 32)}"


def make_faiss(dimension: int, factory: str, parameters: str | None = None) -> Any:
    """An empty faiss index by inner product.

    Raises:
        ValueError: If faiss does not know the factory string or the parameters.
    """
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(
            f"factory must be a faiss factory string for vectors of {dimension} dimensions, got {factory!r}: "
            f"{_reason(error)}."
        ) from error
    if parameters:
        _set_parameters(index, parameters)
    return index


def train_faiss(index: Any, vectors: "Vectors") -> None:
    """Train an index on a sample of the vectors, if it needs training.

    Raises:
        ValueError: If there are too few vectors.
    """
    if index.is_trained:
        return
    ivf = faiss.try_extract_index_ivf(index)
    sample = min(len(vectors), max(_TRAINING_POINTS * (ivf.nlist if ivf else 0), 1 << 16))
    rows = np.random.default_rng(0).choice(len(vectors), sample, replace=False)
    try:
        index.train(vectors.rows(np.sort(rows)))
    except RuntimeError as error:
        raise ValueError(f"faiss cannot train the index on {sample} vectors: {_reason(error)}.") from error


def search_faiss(index: Any, queries: np.ndarray, k: int) -> list[list[tuple[int, float]]]:
    """The numbers and scores of the best vectors for every query; equal scores in the order of the numbers.

    Args:
        index: A faiss index by inner product.
        queries: fp32, of shape (queries, dimension).
        k: How many to find.
    """
    ranked: list[list[tuple[int, float]]] = [[] for _ in queries]
    open_queries = np.arange(len(queries))
    # faiss leaves open which of several equal scores are among the first k. All that tie with the k-th are fetched.
    limit = k + 1
    while len(open_queries):
        limit = min(limit, index.ntotal)
        scores, numbers = index.search(np.ascontiguousarray(queries[open_queries]), limit)
        undecided = []
        for query, of_query, found in zip(open_queries.tolist(), scores.tolist(), numbers.tolist(), strict=True):
            hits = [
                (number, float(f"{score:.{_DIGITS}g}"))
                for number, score in zip(found, of_query, strict=True)
                if number >= 0  # -1 where an approximate index found no more
            ]
            hits.sort(key=lambda hit: (-hit[1], hit[0]))
            ranked[query] = hits[:k]
            if len(hits) == limit < index.ntotal and hits[-1][1] == hits[k - 1][1]:
                undecided.append(query)
        open_queries = np.array(undecided, dtype=int)
        limit *= 8
    return ranked


class Vectors:
    """The vectors in several .npy files, as if they were one array; memory-mapped.

    Args:
        files: Arrays of one shape (vectors, dimension), but for the last, which may be shorter.
    """

    def __init__(self, files: Sequence[Path]):
        self._shards = [np.load(file, mmap_mode="r") for file in files]
        self._starts = np.cumsum([0, *(len(shard) for shard in self._shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def dimension(self) -> int:
        """The length of each vector."""
        return self._shards[0].shape[1]

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The vectors of some numbers, which are in order, in fp32."""
        bounds = np.searchsorted(numbers, self._starts)
        parts = [
            shard[numbers[first:last] - start].astype(np.float32)
            for shard, start, first, last in zip(self._shards, self._starts, bounds, bounds[1:], strict=False)
        ]
        return np.concatenate(parts)

    def blocks(self) -> Iterator[np.ndarray]:
        """All vectors in their order, some thousands at a time, in fp32."""
        for shard in self._shards:
            for start in range(0, len(shard), _ROWS):
                yield shard[start : start + _ROWS].astype(np.float32)


def _check_options(batch_size: int, shard_size: int, model_dtype: str, embedding_dtype: str) -> None:
    check_counts(batch_size=(batch_size, 1), shard_size=(shard_size, 1))
    for name, dtype, choices in (
        ("model_dtype", model_dtype, _MODEL_DTYPES),
        ("embedding_dtype", embedding_dtype, _EMBEDDING_DTYPES),
    ):
        if dtype not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}; got {dtype!r}.")


def _prepare_shards(folder: Path, manifest: dict[str, Any]) -> None:
    """Keep the shards of an interrupted build if they are of the same vectors, and remove them otherwise."""
    file = folder / _MANIFEST
    if file.is_file():
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
            changed = [key for key in manifest if key != "probe" and before[key] != manifest[key]]
            if _similarity(before["probe"], manifest["probe"]) < 0.9999:
                changed.append("the model's weights")
        except (ValueError, KeyError, TypeError):
            changed = ["damaged manifest"]
        if not changed:
            return
        logger.warning(
            "The interrupted build in %s cannot be continued, because this differs: %s. Encoding begins anew.",
            folder.parent,
            ", ".join(changed),
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_json(file, manifest)


def _encode(
    documents: stored.StoredDocuments, encoder: Encoder, folder: Path, shard_size: int, dtype: np.dtype
) -> list[Path]:
    """Encode what is not encoded yet, and return the files of all shards."""
    starts = range(0, len(documents), shard_size)
    files = [folder / f"{shard:06}.npy" for shard in range(len(starts))]
    with tqdm(total=len(documents), desc="Encoding", unit=" documents", disable=None) as progress:
        done = 0
        for start, file in zip(starts, files, strict=True):
            size = min(shard_size, len(documents) - start)
            if _is_whole(file, (size, encoder.dimension), dtype):
                done += 1
                progress.update(size)
                continue
            if done:
                logger.info("Going on after %d of %d shards that an interrupted build encoded.", done, len(files))
                done = 0
            vectors = np.empty((size, encoder.dimension), dtype)
            texts = [documents[number].contents for number in range(start, start + size)]
            # Passages of about one length are encoded together, so that little is padded.
            order = np.argsort([-len(text) for text in texts], kind="stable")
            step = 8 * encoder.batch_size
            for first in range(0, size, step):
                chosen = order[first : first + step]
                with np.errstate(over="ignore"):
                    vectors[chosen] = encoder.passages([texts[number] for number in chosen])
                progress.update(len(chosen))
            broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
            if len(broken):
                raise ValueError(
                    f"The model's vector of document {documents[start + int(broken[0])].id!r} is not finite in "
                    f"{dtype.name}; use model_dtype='float32' and embedding_dtype='float32'."
                )
            temporary = file.with_suffix(".tmp")
            with temporary.open("wb") as target:
                np.save(target, vectors)
            temporary.replace(file)
    return files


def _is_whole(file: Path, shape: tuple[int, int], dtype: np.dtype) -> bool:
    try:
        vectors = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return False
    return vectors.shape == shape and vectors.dtype == dtype


def _write_faiss(vectors: Vectors, folder: Path, factory: str, parameters: str | None) -> None:
    """Write the faiss index of all vectors into a folder."""
    index = make_faiss(vectors.dimension, factory, parameters)
    train_faiss(index, vectors)
    progress = tqdm(total=len(vectors), desc="Indexing", unit=" vectors", disable=None)
    parts: list[Path] = []
    # Others cannot be merged from parts without loss.
    is_ivf = isinstance(faiss.downcast_index(index), faiss.IndexIVF)
    part_size = max(1, _PART_BYTES // index.sa_code_size()) if is_ivf else len(vectors)
    added = 0
    with progress:
        for block in vectors.blocks():
            if is_ivf and index.ntotal and index.ntotal + len(block) > part_size:
                parts.append(_write_part(index, folder, len(parts)))
            index.add_with_ids(block, np.arange(added, added + len(block))) if is_ivf else index.add(block)
            added += len(block)
            progress.update(len(block))
    if parts:
        from faiss.contrib.ondisk import merge_ondisk

        parts.append(_write_part(index, folder, len(parts)))
        merge_ondisk(index, [str(part) for part in parts], str(folder / _LISTS))
    faiss.write_index(index, str(folder / _VECTORS))
    for part in parts:
        part.unlink()


def _write_part(index: Any, folder: Path, number: int) -> Path:
    file = folder / f"part-{number}.faiss"
    faiss.write_index(index, str(file))
    index.reset()
    return file


def _read_faiss(path: Path) -> Any:
    # The inverted lists of a large index are in a file of their own, which faiss maps by itself.
    large = (path / _LISTS).is_file()
    flags = faiss.IO_FLAG_ONDISK_SAME_DIR | faiss.IO_FLAG_READ_ONLY if large else faiss.IO_FLAG_MMAP_IFC
    return faiss.read_index(str(path / _VECTORS), flags)


def _set_parameters(index: Any, parameters: str) -> None:
    space: Any = faiss.ParameterSpace()  # its stubs know one of its overloads only
    try:
        space.set_index_parameters(index, parameters)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f'parameters must be faiss search parameters that the index has, such as "nprobe=64", got {parameters!r}: '
            f"{_reason(error)}."
        ) from error
    ivf = faiss.try_extract_index_ivf(index)
    if ivf and not 1 <= ivf.nprobe < 1 << 31:  # which fails at the first search
        raise ValueError(f"nprobe must be at least 1 among the parameters, got {parameters!r}.")


def _reason(error: Exception) -> str:
    """What faiss says, without the place in its source."""
    return re.sub(r"^Error in .*?:\d+: (Error: '.*?' failed: )?", "", str(error)).strip().rstrip(".")


def _read_metadata(path: Path) -> dict[str, Any]:
    return read_metadata(path, METADATA, _FORMAT, _KIND, "DenseIndex.build")


def _same_index(path: Path, metadata: dict[str, Any], encoder: Encoder) -> bool:
    """Whether the index at a path is already the one that a build would make."""
    try:
        before = _read_metadata(path)
        same = all(before[key] == value for key, value in metadata.items() if key != "probe")
        DenseIndex._open(path, encoder)
    except (OSError, ValueError, KeyError):
        return False
    return same and _similarity(before["probe"], metadata["probe"]) >= 0.9999


def _similarity(first: Sequence[float], second: Sequence[float]) -> float:
    """The cosine of the angle of two vectors; 0 for vectors of different lengths."""
    if len(first) != len(second):
        return 0.0
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))

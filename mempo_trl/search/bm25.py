"""BM25 over a corpus on disk: built once, then memory-mapped, so that it opens at once whatever its size."""

import json
import os
import shutil
import unicodedata
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tantivy
from tqdm.auto import tqdm

from mempo_trl.search.corpus import Document, SearchResult, parse_document, read_corpus


MAX_QUERY_TERMS = 256

_FORMAT = 1  # raise it whenever the analysis or the fields below change
_METADATA = "mempo_bm25.json"
_ANALYZER = "mempo"
# Shared by tantivy's threads. More memory makes fewer segments, hence less merging.
_WRITER_MEMORY = 1 << 29
# Scripts written without spaces become one token a character, all else one token a run of letters, marks and digits.
# "_" separates, because models like to write Page_Titles.
_SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}ー"
_TOKEN = rf"[{_SPACELESS}]|[\p{{Alphabetic}}\p{{M}}\p{{N}}--[{_SPACELESS}]]+"


class BM25Index:
    """A BM25 index in a folder. Make one with `BM25Index.build`, open it with `BM25Index.load`.

    Documents and queries are analysed alike: Unicode NFKC, split into words (Chinese, Japanese, Thai and other scripts
    without spaces: into characters), accents folded, lower case, and English stemming if the index was built with
    `stem=True`. A word is found however common and however long it is (up to tantivy's 65,530 bytes).

    Scores are those of BM25 with k1 = 1.2 and b = 0.75, where lengths above 40 tokens are quantised to one byte
    (Lucene's and tantivy's "field norm"):

        score(q, d) = sum over terms t of q:  ln(1 + (N - n_t + 0.5) / (n_t + 0.5)) * tf * (k1 + 1) / (tf + K_d)
        K_d         = k1 * (1 - b + b * length_d / mean length)
    """

    def __init__(self, path: Path, index: tantivy.Index, stem: bool):
        self.path = path
        self._schema = index.schema
        self._analyzer = _analyzer(stem)
        self._searcher = index.searcher()

    @classmethod
    def build(
        cls,
        corpus: str | Path | Iterable[Document | Mapping[str, Any]],
        path: str | Path,
        overwrite: bool = False,
        *,
        stem: bool = False,
    ) -> "BM25Index":
        """Index a corpus into a folder.

        The index is written to a temporary folder beside `path` and moved into place when it is complete: a build that
        is interrupted, or that meets a bad line, leaves what was there before.

        Args:
            corpus: A `.jsonl` or `.jsonl.gz` file (see `read_corpus`), or an iterable of documents or of mappings with
                "id" and "contents". It is streamed, never held in memory.
            path: The folder of the index. Its parents are created.
            overwrite: Replace an index that is already there. A folder that is not an index is never replaced.
            stem: Reduce English words to their stem, which finds "direct" for "directed" but confuses some names.

        Returns:
            The index, opened.

        Raises:
            FileExistsError: If `path` exists, is not empty, and must not be overwritten.
            FileNotFoundError: If the corpus is a path without a file.
            ValueError: If the corpus is empty or one of its documents is malformed.
        """
        path = Path(path).expanduser().resolve()
        _check_target(path, overwrite)
        documents = _documents(corpus)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.building-{uuid.uuid4().hex}")
        try:
            _write(documents, temporary, stem)
            _move_into_place(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return cls.load(path)

    @classmethod
    def load(cls, path: str | Path) -> "BM25Index":
        """Open an index. Nothing is read into memory but what searches touch, and several processes can share it.

        Args:
            path: The folder that `build` wrote.

        Raises:
            FileNotFoundError: If there is no index at `path`.
            ValueError: If it is damaged, or was built with a format that this version does not read.
        """
        path = Path(path).expanduser().resolve()
        metadata = _read_metadata(path)
        try:
            index = tantivy.Index.open(str(path))
            # An index never changes under its readers, so nothing needs to watch the folder for commits.
            index.config_reader(reload_policy="manual")
            loaded = cls(path, index, metadata["stem"])
        except (OSError, ValueError) as error:
            raise ValueError(f"The BM25 index {path} cannot be opened ({error}); build it again.") from error
        if len(loaded) != metadata["documents"]:
            raise ValueError(
                f"The BM25 index {path} should hold {metadata['documents']} documents, but holds {len(loaded)}; "
                "build it again."
            )
        return loaded

    def __len__(self) -> int:
        """The number of documents."""
        return self._searcher.num_docs

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[SearchResult]]:
        """Find the best documents for every query. Equal queries are searched once, different ones in parallel.

        A query is plain text: quotes, colons, brackets, operators and the like have no meaning. A document is found if
        it contains at least one of the query's terms. Each distinct term counts once, and only the first 256 distinct
        terms are used.

        Args:
            queries: The texts to search for.
            k: The number of documents per query, at least 1.

        Returns:
            For every query at most `k` results, best first. Scores are rounded to six significant digits, about the
            precision in which they are computed; documents with equal scores are in corpus order. A query without any
            term (empty, or punctuation only) finds nothing.

        Raises:
            TypeError: If `queries` is not a list of strings.
            ValueError: If `k` is not a whole number of at least 1.
        """
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be a whole number of at least 1, got {k!r}.")
        if isinstance(queries, str):
            raise TypeError(f"queries must be a list of strings, got the single string {queries!r}.")
        for query in queries:
            if not isinstance(query, str):
                raise TypeError(f"Every query must be a string, got {query!r}.")
        distinct = list(dict.fromkeys(queries))
        # tantivy releases the interpreter's lock while it searches.
        with ThreadPoolExecutor(max(1, min(len(distinct), os.cpu_count() or 1))) as pool:
            found = dict(zip(distinct, pool.map(lambda query: self._search(query, k), distinct), strict=True))
        return [list(found[query]) for query in queries]

    def _search(self, text: str, k: int) -> list[SearchResult]:
        terms = list(dict.fromkeys(self._analyzer.analyze(_normalize(text))))[:MAX_QUERY_TERMS]
        if not terms:
            return []
        query = tantivy.Query.boolean_query(
            [(tantivy.Occur.Should, tantivy.Query.term_query(self._schema, "text", term, "freq")) for term in terms]
        )
        hits = self._top_hits(query, k)
        positions = self._searcher.fast_field_values("position", [address for _, address in hits])
        ranked = sorted(zip(hits, positions, strict=True), key=lambda item: (-item[0][0], item[1]))
        return [self._result(score, address) for (score, address), _ in ranked[:k]]

    def _top_hits(self, query: tantivy.Query, k: int) -> list[tuple[float, tantivy.DocAddress]]:
        # tantivy breaks ties by its own storage order, which depends on how threads shared the work of the build. All
        # documents that tie with the k-th are fetched, so that the order of the corpus can decide.
        limit = k + 1
        while True:
            limit = min(limit, len(self))  # tantivy reserves memory for `limit` hits, found or not
            hits = self._searcher.search(query, limit, count=False).hits
            # Terms may be summed in any order: beyond six digits, equal scores differ.
            rounded = [(float(f"{score:.6g}"), address) for score, address in hits]
            if len(hits) < limit or limit == len(self) or rounded[-1][0] < rounded[k - 1][0]:
                return rounded
            limit *= 8

    def _result(self, score: float, address: tantivy.DocAddress) -> SearchResult:
        document = self._searcher.doc(address)
        return SearchResult(_decode(document["id"]), _decode(document["contents"]), score)


def _analyzer(stem: bool) -> tantivy.TextAnalyzer:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.regex(_TOKEN))
    builder = builder.filter(tantivy.Filter.lowercase()).filter(tantivy.Filter.ascii_fold())
    if stem:
        builder = builder.filter(tantivy.Filter.stemmer("english"))
    return builder.build()


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    # Stored as bytes, apart from the indexed text, so that a document comes back exactly as it was given.
    builder.add_bytes_field("id", stored=True)
    builder.add_bytes_field("contents", stored=True)
    builder.add_unsigned_field("position", fast=True)
    builder.add_text_field("text", tokenizer_name=_ANALYZER, index_option="freq")
    return builder.build()


def _normalize(text: str) -> str:
    # A lone surrogate, which JSON can spell and UTF-8 cannot, becomes "?".
    return unicodedata.normalize("NFKC", text).encode("utf-8", "replace").decode("utf-8")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode(values: list[bytes]) -> str:
    return values[0].decode("utf-8", "surrogatepass")  # tantivy's fields are lists


def _documents(corpus: str | Path | Iterable[Document | Mapping[str, Any]]) -> Iterator[Document]:
    if isinstance(corpus, str | Path):
        return read_corpus(corpus)
    return (parse_document(record, f"Document {number} of the corpus") for number, record in enumerate(corpus, start=1))


def _write(documents: Iterator[Document], folder: Path, stem: bool) -> None:
    folder.mkdir()
    index = tantivy.Index(_schema(), str(folder))
    index.register_tokenizer(_ANALYZER, _analyzer(stem))
    writer = index.writer(_WRITER_MEMORY)
    count = 0
    try:
        for document in tqdm(documents, desc="Indexing", unit=" documents", disable=None):
            entry = tantivy.Document()
            entry.add_bytes("id", _encode(document.id))
            entry.add_bytes("contents", _encode(document.contents))
            entry.add_unsigned("position", count)
            entry.add_text("text", _normalize(document.contents))
            writer.add_document(entry)
            count += 1
        if not count:
            raise ValueError("The corpus holds no documents.")
        writer.commit()
    finally:
        # Also after an error: until this returns, the writer's threads may still create files in the folder.
        writer.wait_merging_threads()
    metadata = {"format": _FORMAT, "documents": count, "stem": stem}
    (folder / _METADATA).write_text(json.dumps(metadata) + "\n", encoding="utf-8")


def _read_metadata(path: Path) -> dict[str, Any]:
    file = path / _METADATA
    if not file.is_file():
        raise FileNotFoundError(f"There is no BM25 index at {path}; make one with BM25Index.build.")
    try:
        metadata = json.loads(file.read_text(encoding="utf-8"))
        version = metadata["format"]
        if version == _FORMAT:
            return {"documents": int(metadata["documents"]), "stem": bool(metadata["stem"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error!r}); build the index again.") from error
    raise ValueError(
        f"The BM25 index {path} has format {version!r}, but this version of mempo_trl reads format {_FORMAT}; "
        "build the index again."
    )


def _check_target(path: Path, overwrite: bool) -> None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not (path / _METADATA).is_file():
        raise FileExistsError(f"{path} exists and is not a BM25 index; choose another path.")
    if not overwrite:
        raise FileExistsError(f"There already is a BM25 index at {path}; pass overwrite=True to replace it.")


def _move_into_place(temporary: Path, path: Path) -> None:
    if not path.exists():
        temporary.rename(path)
        return
    replaced = path.with_name(f".{path.name}.replaced-{uuid.uuid4().hex}")
    path.rename(replaced)
    try:
        temporary.rename(path)
    except OSError:
        replaced.rename(path)
        raise
    shutil.rmtree(replaced, ignore_errors=True)

"""BM25 over a corpus on disk: built once, then memory-mapped, so that it opens at once whatever its size."""

import json
import logging
import os
import shutil
import unicodedata
import uuid
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import regex
import tantivy
from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from mempo_trl.search.arguments import check_counts, distinct_queries
from mempo_trl.search.corpus import (
    SPACELESS,
    Columns,
    Corpus,
    CorpusReader,
    Document,
    SearchResult,
    documents_of,
    holds_nothing,
    is_same_corpus,
    parse_line,
)
from mempo_trl.search.folders import read_metadata, told_if_full
from mempo_trl.search.threads import map_in_threads


logger = logging.getLogger(__name__)

MAX_QUERY_TERMS = 256
STEMMERS = (
    *("arabic", "danish", "dutch", "english", "finnish", "french", "german", "greek", "hungarian", "italian"),
    *("norwegian", "portuguese", "romanian", "russian", "spanish", "swedish", "tamil", "turkish"),
)
STOP_WORDS = (
    *("danish", "dutch", "english", "finnish", "french", "german", "hungarian", "italian", "norwegian", "portuguese"),
    *("russian", "spanish", "swedish"),
)

_FORMAT = 2  # raise it whenever the analysis, the fields or the files below change
_METADATA = "mempo_bm25.json"
_LOCK = ".lock"
_DATA = "data-"
_ANALYZER = "mempo"
# Shared by tantivy's threads. More memory makes fewer segments, hence less merging.
_WRITER_MEMORY = 1 << 29
# Documents beyond the k best that are fetched to see who ties with the k-th: few searches need a second try.
_SPARE_HITS = 16
_SPACELESS = regex.compile(rf"(?V1)[[{SPACELESS}]&&[\p{{Alphabetic}}\p{{N}}]]+")
# tantivy's tokenizer would split a word at these. It is several times faster than its tokenizer for patterns.
_MARKS = regex.compile(r"(?V1)[\p{M}--\p{Alphabetic}]+")
_PREPARED = regex.compile(rf"(?V1)[[{SPACELESS}][\p{{M}}--\p{{Alphabetic}}]]")


@dataclass(frozen=True)
class _Source:
    """What an index knows of a corpus that it was made of."""

    documents: int
    fingerprint: dict[str, Any] | None = None  # of a corpus that a `CorpusReader` read
    file: str | None = None  # where the texts are, if the index does not hold them


@dataclass(frozen=True)
class _Metadata:
    """What stands beside the data. Whatever it names is complete: it is replaced last, and at once."""

    build: str
    documents: int = 0
    stem: str | None = None
    stop_words: str | list[str] | None = None
    ngram: int = 2
    store_text: bool = True
    sources: list[_Source] = field(default_factory=list)

    @property
    def folder(self) -> str:
        return _DATA + self.build


class _Analysis:
    """How texts and queries become terms: `analyzer` finds them in what `prepare` makes of the text."""

    def __init__(self, stem: str | None, stop_words: str | list[str] | None, ngram: int):
        builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).filter(tantivy.Filter.lowercase())
        if isinstance(stop_words, str):
            builder = builder.filter(tantivy.Filter.stopword(stop_words))
        elif stop_words:
            builder = builder.filter(tantivy.Filter.custom_stopword(stop_words))
        if stem is not None:
            builder = builder.filter(tantivy.Filter.stemmer(stem))
        # Stop words and stemmers of languages that have accents know them, so that accents are folded after these.
        # Otherwise they are folded beforehand, where a text has any: a filter would look at every word.
        self._fold = None
        if stem or stop_words:
            builder = builder.filter(tantivy.Filter.ascii_fold())
        else:
            whole = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.raw())
            self._fold = whole.filter(tantivy.Filter.ascii_fold()).build()
        self.analyzer = builder.build()
        self._ngram = ngram

    def prepare(self, text: str, query: bool = False) -> str:
        """The text in which the analyzer finds the terms."""
        if text.isascii():
            return text
        # A lone surrogate, which JSON can spell and UTF-8 cannot, becomes "?".
        text = unicodedata.normalize("NFKC", text).encode("utf-8", "replace").decode("utf-8")
        if self._fold is not None:
            (text,) = self._fold.analyze(text)
        if not _PREPARED.search(text):
            return text

        def cut(match: regex.Match) -> str:
            run = match[0]
            # All lengths in the index, so that single characters can be found; the longest only in queries.
            sizes = [min(self._ngram, len(run))] if query else range(1, self._ngram + 1)
            grams = [run[start : start + size] for size in sizes for start in range(len(run) - size + 1)]
            return f" {' '.join(grams)} "

        return _SPACELESS.sub(cut, _MARKS.sub("", text))


class _Opened:
    """An index as it was at one moment."""

    def __init__(self, path: Path, metadata: _Metadata, files: list[Path | None]):
        folder = path / metadata.folder
        index = tantivy.Index.open(str(folder))
        # Data never change under their readers, so nothing needs to watch the folder for commits.
        index.config_reader(reload_policy="manual")
        self.metadata = metadata
        self.schema = index.schema
        self.searcher = index.searcher()
        self.analysis = _Analysis(metadata.stem, metadata.stop_words, metadata.ngram)
        self._texts: list[BinaryIO | None] = [file.open("rb") if file is not None else None for file in files]
        self._ends = list(numpy.cumsum([source.documents for source in metadata.sources]))

    def search(self, text: str, k: int) -> list[SearchResult]:
        """The best `k` documents."""
        found = self.analysis.analyzer.analyze(self.analysis.prepare(text, query=True))
        terms = list(dict.fromkeys(found))[:MAX_QUERY_TERMS]
        if not terms:
            return []
        query = tantivy.Query.boolean_query(
            [(tantivy.Occur.Should, tantivy.Query.term_query(self.schema, "text", term, "freq")) for term in terms]
        )
        hits = self._top_hits(query, k)
        scores = [score for score, _ in hits]
        if len(set(scores)) < len(scores):
            positions = self._column("position", hits)
            hits = [
                hit for _, hit in sorted(zip(positions, hits, strict=True), key=lambda item: (-item[1][0], item[0]))
            ]
        hits = hits[:k]
        if self.metadata.store_text:
            return [self._stored(score, address) for score, address in hits]
        columns = [self._column(name, hits) for name in ("position", "offset", "length")]
        return [self._in_corpus(score, *place) for (score, _), *place in zip(hits, *columns, strict=True)]

    def _top_hits(self, query: tantivy.Query, k: int) -> list[tuple[float, tantivy.DocAddress]]:
        # tantivy breaks ties by its own storage order, which depends on how threads shared the work of the build. All
        # documents that tie with the k-th are fetched, so that the order of the corpus can decide.
        limit = k + _SPARE_HITS
        while True:
            limit = min(limit, self.metadata.documents)  # tantivy reserves memory for `limit` hits, found or not
            hits = self.searcher.search(query, limit, count=False).hits
            # Terms may be summed in any order: beyond six digits, equal scores differ.
            rounded = [(float(f"{score:.6g}"), address) for score, address in hits]
            if len(hits) <= k:
                return rounded
            worst = rounded[k - 1][0]
            if len(hits) < limit or limit == self.metadata.documents or rounded[-1][0] < worst:
                return [hit for hit in rounded if hit[0] >= worst]
            limit *= 8

    def _column(self, name: str, hits: list[tuple[float, tantivy.DocAddress]]) -> list[Any]:
        return self.searcher.fast_field_values(name, [address for _, address in hits])

    def _stored(self, score: float, address: tantivy.DocAddress) -> SearchResult:
        document = self.searcher.doc(address)
        return SearchResult(_decode(document["id"]), _decode(document["contents"]), score)

    def _in_corpus(self, score: float, position: int, offset: int, length: int) -> SearchResult:
        number = bisect_right(self._ends, position)
        source, file = self.metadata.sources[number], self._texts[number]
        assert file is not None and source.fingerprint is not None
        # Reading at a place, not from where others have left off: threads share the file.
        line = os.pread(file.fileno(), length, offset)
        try:
            document = parse_line(line, file.name, Columns(**source.fingerprint["options"]["columns"]))
        except ValueError as error:
            raise ValueError(f"{file.name} has changed since it was indexed; build the index again. {error}") from error
        return SearchResult(document.id, document.contents, score)


class BM25Index:
    """A BM25 index in a folder. Make one with `BM25Index.build`, open it with `BM25Index.load`.

    Documents and queries are analysed alike: Unicode NFKC, split into words, lower case, accents folded (marks that are
    no letters, such as the tones of Thai, are dropped). A word is found however common and however long it is (up to
    tantivy's 65,530 bytes), unless stop words were asked for.

    Chinese, Japanese, Thai and other scripts without spaces are indexed by their characters and pairs of characters
    (`ngram`). A query is searched for by its pairs, and by a character only where that stands alone. Pairs rank better
    than characters, and about as well as words (Nie et al., "On the use of words and n-grams for Chinese information
    retrieval", IRAL 2000), without a dictionary that would not know the names.

    Scores are those of BM25 with k1 = 1.2 and b = 0.75, where lengths above 40 tokens are quantised to one byte
    (Lucene's and tantivy's "field norm"):

        score(q, d) = sum over terms t of q:  ln(1 + (N - n_t + 0.5) / (n_t + 0.5)) * tf * (k1 + 1) / (tf + K_d)
        K_d         = k1 * (1 - b + b * length_d / mean length)

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path, opened: _Opened):
        self.path = path
        self._opened = opened

    @classmethod
    def build(
        cls,
        corpus: Corpus,
        path: str | Path,
        overwrite: bool = False,
        *,
        stem: str | None = None,
        stop_words: str | Iterable[str] | None = None,
        ngram: int = 2,
        store_text: bool = True,
    ) -> "BM25Index":
        """Index a corpus into a folder.

        The folder becomes an index when everything is written, in one step: a build that is interrupted, or that meets
        a bad line, leaves the index that was there before, or none. What a killed build leaves is removed by the next.

        Args:
            corpus: What `read_corpus` reads: a file, a folder or the name of a data set; or a reader that it returned,
                to set its options; or an iterable of documents or of mappings with "id" and "contents". It is streamed:
                only 8 bytes a document are held, to count ids that occur twice, of which a warning tells; searches
                return all documents of the same id.
            path: The folder of the index. Its parents are created.
            overwrite: Replace an index that is already there. A folder that is not an index is never replaced.
            stem: Reduce words of a language (`STEMMERS`) to their stem, which finds "direct" for "directed" but
                confuses some names.
            stop_words: Words to leave out of index and queries: a language (`STOP_WORDS`), or the words themselves. A
                query of stop words only finds nothing.
            ngram: How many characters of scripts without spaces make a term, at most; 1 for single characters.
            store_text: Keep the texts in the index, compressed. Otherwise they are read where they are, which has to be
                one uncompressed `.jsonl` file that does not change.

        Returns:
            The index, opened.

        Raises:
            FileExistsError: If `path` exists, is not empty, and must not be overwritten.
            FileNotFoundError: If the corpus is a path without a file.
            BlockingIOError: If another process is building at `path`.
            ValueError: If the corpus is empty or one of its documents is malformed, or an option does not fit.
        """
        path = Path(path).expanduser().resolve()
        _check_target(path, overwrite)
        options = check_options(stem=stem, stop_words=stop_words, ngram=ngram, store_text=store_text)
        metadata = _Metadata("", **options)
        documents = documents_of(corpus)
        with _exclusive(path), told_if_full(path):
            # Once more: another process may have finished meanwhile.
            _check_target(path, overwrite)
            return _write(path, documents, metadata)

    @classmethod
    def load(cls, path: str | Path, corpus: str | Path | CorpusReader | None = None) -> "BM25Index":
        """Open an index. Nothing is read into memory but what searches touch, and several processes can share it.

        Args:
            path: The folder that `build` wrote.
            corpus: What the index should be made of. If one corpus was indexed without its text, that is also where its
                texts are read, wherever it was before.

        Raises:
            FileNotFoundError: If there is no index at `path`, or its texts are not there.
            ValueError: If the index is damaged, or was built with a format that this version does not read; if it was
                made of another corpus than `corpus`; or if the corpus that holds its texts has changed.
        """
        path = Path(path).expanduser().resolve()
        while True:
            metadata = _read_metadata(path)
            files = _check_corpus(path, metadata, corpus)
            try:
                opened = _Opened(path, metadata, files)
            except (OSError, ValueError) as error:
                if _read_metadata(path).build != metadata.build:
                    continue  # replaced at this moment
                raise ValueError(f"The BM25 index {path} cannot be opened ({error}); build it again.") from error
            found = opened.searcher.num_docs
            if found != metadata.documents:
                raise ValueError(
                    f"The BM25 index {path} should hold {metadata.documents} documents, but holds {found}; "
                    "build it again."
                )
            return cls(path, opened)

    def add(self, corpus: Corpus) -> None:
        """Add documents to the index, with the options it was built with. They come after those that are there.

        Like `build`, this replaces the index on disk in one step. This object sees the new documents, others that are
        open keep what they have seen.

        Args:
            corpus: As `build` takes it. An id is not compared with those that are in the index already.

        Raises:
            FileNotFoundError: If the corpus is a path without a file.
            BlockingIOError: If another process is building or adding.
            ValueError: If the corpus is empty or in the index already (as after an addition that was killed when it was
                done), one of its documents is malformed, or an index that does not hold its texts is given anything
                but one uncompressed `.jsonl` file.
        """
        documents = documents_of(corpus)
        with _exclusive(self.path), told_if_full(self.path):
            # From what is there now: another process may have added something since this index was opened.
            metadata = _read_metadata(self.path)
            if isinstance(documents, CorpusReader) and _source_of(documents, metadata) is not None:
                raise ValueError(
                    f"{documents.source} is in the BM25 index {self.path} already; added again, its documents would be "
                    "found twice."
                )
            self._opened = _write(self.path, documents, metadata)._opened

    @property
    def identity(self) -> str:
        """Names the index and its contents: another one after every build and addition."""
        return f"{self.path}:{self._opened.metadata.build}"

    def __len__(self) -> int:
        """The number of documents."""
        return self._opened.metadata.documents

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
        distinct = distinct_queries(queries, k)
        opened = self._opened
        # tantivy releases the interpreter's lock while it searches.
        results = map_in_threads(lambda query: opened.search(query, k), distinct, os.cpu_count() or 1)
        found = dict(zip(distinct, results, strict=True))
        return [list(found[query]) for query in queries]


def _schema(store_text: bool) -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    if store_text:
        # Stored as bytes, apart from the indexed text, so that a document comes back exactly as it was given.
        builder.add_bytes_field("id", stored=True)
        builder.add_bytes_field("contents", stored=True)
    else:
        builder.add_unsigned_field("offset", fast=True)
        builder.add_unsigned_field("length", fast=True)
    builder.add_unsigned_field("position", fast=True)
    builder.add_text_field("text", tokenizer_name=_ANALYZER, index_option="freq")
    return builder.build()


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode(values: list[bytes]) -> str:
    return values[0].decode("utf-8", "surrogatepass")  # tantivy's fields are lists


def _stop_words(words: str | Iterable[str] | None) -> str | list[str] | None:
    if words is None or isinstance(words, str):
        return words
    terms = []
    analyzer = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).filter(tantivy.Filter.lowercase()).build()
    for word in words:
        found = analyzer.analyze(unicodedata.normalize("NFKC", word))
        if len(found) != 1:
            raise ValueError(f"Each of stop_words must be one word, got {word!r}.")
        terms += found
    return terms


def check_options(
    *,
    stem: str | None = None,
    stop_words: str | Iterable[str] | None = None,
    ngram: int = 2,
    store_text: bool = True,
) -> dict[str, Any]:
    """Check options of `BM25Index.build` before anything is read, and return them as an index keeps them.

    Raises:
        ValueError: If one does not fit.
    """
    if stem is not None and stem not in STEMMERS:
        raise ValueError(f"stem must be one of {', '.join(STEMMERS)}, got {stem!r}.")
    if isinstance(stop_words, str) and stop_words not in STOP_WORDS:
        raise ValueError(f"stop_words must be one of {', '.join(STOP_WORDS)}, or a list of words, got {stop_words!r}.")
    check_counts(ngram=(ngram, 1))
    return {"stem": stem, "stop_words": _stop_words(stop_words), "ngram": ngram, "store_text": store_text}


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Keep others from writing an index, and leave no folder that was made for nothing."""
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / _LOCK, mode=0o666)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise BlockingIOError(
            f"Another process is building the BM25 index {path} or adding to it; try again when it is done."
        ) from error
    try:
        yield
    finally:
        _remove_leftovers(path)
        # Only who holds the lock may remove it: without its file, others would take a lock of their own.
        if not (path / _METADATA).exists():
            (path / _LOCK).unlink(missing_ok=True)
            if made:
                with suppress(OSError):  # another process may have come meanwhile
                    path.rmdir()
        lock.release()


def _remove_leftovers(path: Path) -> None:
    """Remove the data that no metadata name: of replaced indexes, and of builds that were interrupted or killed."""
    current = _read_metadata(path).folder if (path / _METADATA).exists() else None
    for entry in path.glob(f"{_DATA}*"):
        if entry.name != current:
            shutil.rmtree(entry, ignore_errors=True)


def _write(path: Path, documents: Iterator[Document], metadata: _Metadata) -> BM25Index:
    """Write an index of what metadata name, if anything, and more documents; then put it in place."""
    reader = documents if isinstance(documents, CorpusReader) else None
    texts = None
    if not metadata.store_text:
        texts = reader.line_file if reader is not None else None
        if texts is None:
            raise ValueError(
                "With store_text=False the corpus must be one uncompressed .jsonl file, where its texts can be read."
            )
    build = uuid.uuid4().hex
    folder = path / (_DATA + build)
    folder.mkdir()
    if metadata.documents:
        _link_files(path / metadata.folder, folder)
    count = _index(documents, folder, metadata)
    source = _Source(
        count,
        reader.fingerprint() if reader is not None else None,
        str(texts.resolve()) if texts is not None else None,
    )
    metadata = replace(metadata, build=build, documents=metadata.documents + count, sources=[*metadata.sources, source])
    opened = _Opened(path, metadata, [Path(source.file) if source.file else None for source in metadata.sources])
    with (folder / _METADATA).open("w", encoding="utf-8") as file:
        json.dump({"format": _FORMAT, **asdict(metadata)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / _METADATA, path / _METADATA)
    return BM25Index(path, opened)


def _link_files(source: Path, target: Path) -> None:
    # tantivy never changes a file of data: it writes new ones, and removes from its own folder what it has merged.
    for file in source.iterdir():
        if file.suffix == ".lock":
            continue
        if file.suffix != ".json":  # which are small, and written anew
            try:
                os.link(file, target / file.name)
                continue
            except OSError:
                pass  # not every file system has links
        shutil.copy2(file, target / file.name)


def _index(documents: Iterator[Document], folder: Path, metadata: _Metadata) -> int:
    """Add documents to the data in a folder, and count them."""
    reader = documents if isinstance(documents, CorpusReader) else None
    index = tantivy.Index(_schema(metadata.store_text), str(folder))
    analysis = _Analysis(metadata.stem, metadata.stop_words, metadata.ngram)
    index.register_tokenizer(_ANALYZER, analysis.analyzer)
    writer = index.writer(_WRITER_MEMORY)
    hashes = array("q")
    try:
        for document in _with_progress(documents):
            entry = tantivy.Document()
            if metadata.store_text:
                entry.add_bytes("id", _encode(document.id))
                entry.add_bytes("contents", _encode(document.contents))
            else:
                assert reader is not None and reader.span is not None
                entry.add_unsigned("offset", reader.span[0])
                entry.add_unsigned("length", reader.span[1])
            entry.add_unsigned("position", metadata.documents + len(hashes))
            entry.add_text("text", analysis.prepare(document.contents))
            writer.add_document(entry)
            hashes.append(hash(document.id))
        if not hashes:
            raise ValueError(holds_nothing(documents))
        writer.commit()
    finally:
        # Also after an error: until this returns, the writer's threads may still create files in the folder.
        writer.wait_merging_threads()
    # Equal hashes of different ids are as good as impossible: 1 in 80,000 for 21 million documents.
    repeated = len(hashes) - len(numpy.unique(numpy.frombuffer(hashes, dtype=numpy.int64)))
    if repeated:
        logger.warning("Ids that another document before has: %d. Searches return all documents of an id.", repeated)
    return len(hashes)


def _with_progress(documents: Iterator[Document]) -> Iterator[Document]:
    """Show how far the corpus has been read."""
    if not isinstance(documents, CorpusReader):
        yield from tqdm(documents, desc="Indexing", unit=" documents", disable=None)
        return
    unit = {"unit": "B", "unit_divisor": 1024} if documents.unit == "B" else {"unit": f" {documents.unit}"}
    with tqdm(desc="Indexing", total=documents.total, unit_scale=True, disable=None, **unit) as bar:
        for number, document in enumerate(documents):
            yield document
            if number % 256 == 0:
                bar.update(documents.done - bar.n)
        bar.update(documents.done - bar.n)


def _check_corpus(path: Path, metadata: _Metadata, corpus: str | Path | CorpusReader | None) -> list[Path | None]:
    """Where the texts of each source are, if they are not in the index, having compared what can be compared."""
    given = None
    if corpus is not None:
        name = corpus.source if isinstance(corpus, CorpusReader) else corpus
        if not any(source.fingerprint for source in metadata.sources):
            raise ValueError(
                f"The BM25 index {path} was built of documents that no file held, so that it cannot be compared with "
                f"{name}; build it of {name}."
            )
        given = _source_of(corpus, metadata)
        if given is None:
            raise ValueError(
                f"The BM25 index {path} is not one of {name} as it is now: that has changed since, or it was built of "
                "another corpus or with other options. Build it again."
            )
    files: list[Path | None] = []
    for source in metadata.sources:
        if source.file is None or source.fingerprint is None:
            files.append(None)
            continue
        file = Path(source.file)
        if source is given:
            file = Path(name).expanduser().resolve()
        elif not file.is_file():
            raise FileNotFoundError(
                f"The BM25 index {path} reads its texts from {file}, which is not there; give its new place as "
                "`corpus`, or build the index again."
            )
        elif not is_same_corpus(file, source.fingerprint):
            raise ValueError(
                f"The BM25 index {path} reads its texts from {file}, which has changed since; build the index again."
            )
        files.append(file)
    return files


def _source_of(corpus: str | Path | CorpusReader, metadata: _Metadata) -> _Source | None:
    """What an index knows of a corpus, if it holds that."""
    for source in metadata.sources:
        if source.fingerprint is not None and is_same_corpus(corpus, source.fingerprint):
            return source
    return None


def _read_metadata(path: Path) -> _Metadata:
    values = read_metadata(path, _METADATA, _FORMAT, "BM25 index", "BM25Index.build or `mempo index`")
    try:
        del values["format"]
        sources = [_Source(**source) for source in values.pop("sources")]
        return _Metadata(**values, sources=sources)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / _METADATA} is damaged ({error!r}); build the index again.") from error


def _check_target(path: Path, overwrite: bool) -> None:
    if not path.exists():
        return
    if (path / _METADATA).is_file():
        if not overwrite:
            raise FileExistsError(f"There already is a BM25 index at {path}; pass overwrite=True to replace it.")
    # A build that was killed leaves nothing else.
    elif not path.is_dir() or not all(entry.name == _LOCK or entry.name.startswith(_DATA) for entry in path.iterdir()):
        raise FileExistsError(f"{path} exists and is not a BM25 index; choose another path.")

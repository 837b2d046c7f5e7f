"""Documents in the Search-R1 format, and a reader that streams a corpus of them from files, folders or the Hub."""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import regex


# Scripts written without spaces. The prolonged sound mark belongs to no script.
SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}ー"

_JSON_LINES = (".jsonl", ".jsonl.gz")
_TEXTS = (".txt", ".md")
_PARQUET = (".parquet",)
_EDGE = 1 << 16  # bytes at either end of a file that are compared whenever an index is opened
_HUB_NAME = regex.compile(r"\w[\w.-]*/\w[\w.-]*")
_HEADING = regex.compile(r" {0,3}#{1,6}\s+(.*?)(?:\s+#+)?\s*")
_FENCE = regex.compile(r" {0,3}(?:```|~~~)")
_WORD = regex.compile(rf"(?V1)[{SPACELESS}]|[^\s{SPACELESS}]+")


@dataclass(frozen=True)
class Document:
    """One passage of a corpus.

    Args:
        id: The passage's name within its corpus.
        contents: Title and text in the format of Search-R1: `"Title"`, in quotes, on the first line, then the text.
    """

    id: str
    contents: str

    @property
    def title(self) -> str:
        """The first line, without its quotes. Empty if the contents are a single line without quotes."""
        return self._split()[0]

    @property
    def text(self) -> str:
        """What follows the title."""
        return self._split()[1]

    def _split(self) -> tuple[str, str]:
        first, newline, rest = self.contents.partition("\n")
        first = first.strip()
        if len(first) >= 2 and first.startswith('"') and first.endswith('"'):
            return first[1:-1], rest
        return (first, rest) if newline else ("", self.contents)


@dataclass(frozen=True)
class SearchResult(Document):
    """A document that was found, with its score (higher is better; comparable within one query only)."""

    score: float


@dataclass(frozen=True)
class Columns:
    """Where the records of a corpus keep what makes a document.

    Args:
        id: The key or column of the id, a string or an integer.
        contents: That of title and text in one, as `Document.contents` has them. Not read if `text` is given.
        title: That of the title, if it stands apart. Only together with `text`.
        text: That of the text, if it stands apart from the title, or if there are no titles.
    """

    id: str = "id"
    contents: str = "contents"
    title: str | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        if self.title is not None and self.text is None:
            raise ValueError(f"The column {self.title!r} of the titles needs a column of the texts beside it.")

    @cached_property
    def names(self) -> list[str]:
        """The columns that are read."""
        content = (self.contents,) if self.text is None else (self.title, self.text)
        return [name for name in (self.id, *content) if name is not None]

    @property
    def expected(self) -> str:
        """What a record should look like, for messages."""
        return "expected {" + ", ".join(f'"{name}": …' for name in self.names) + "}"


class CorpusReader(Iterator[Document]):
    """A corpus that is being read. Made by `read_corpus`; iterates over the documents once.

    Attributes:
        source: What is read: a path, or the name of a data set.
        skipped: How many bad lines, rows or files have been skipped so far.
        done: How much has been read so far, in `unit`.
        total: How much there is to read, in `unit`; `None` if that is not known.
        unit: "B" (bytes) or "rows".
        span: Offset and length in bytes of the last document's line, if the corpus is one uncompressed `.jsonl` file;
            otherwise `None`.
    """

    def __init__(
        self,
        source: str,
        files: list[Path],
        documents: Callable[["CorpusReader"], Iterator[Document]],
        *,
        columns: Columns,
        skip_bad_lines: bool,
        total: int | None,
        unit: str,
        options: dict[str, Any],
    ):
        self.source = source
        self.columns = columns
        self.skipped = 0
        self.done = 0
        self.total = total
        self.unit = unit
        self.span: tuple[int, int] | None = None
        self._files = files
        self._skip_bad_lines = skip_bad_lines
        self._options = options
        self._status = [_status(file) for file in files]
        self._documents = documents(self)

    def __next__(self) -> Document:
        return next(self._documents)

    @property
    def line_file(self) -> Path | None:
        """The file whose lines `span` refers to, if there is one."""
        return self._files[0] if len(self._files) == 1 and self._files[0].suffix == ".jsonl" else None

    def bad(self, error: ValueError) -> None:
        """Count what is wrong with a line, row or file if such are to be skipped; otherwise raise it."""
        if not self._skip_bad_lines:
            raise error
        self.skipped += 1

    def fingerprint(self) -> dict[str, Any]:
        """What `is_same_corpus` needs to tell later whether a corpus is this one. Reads all of its files once more.

        Raises:
            ValueError: If a file has changed since the reader was made.
        """
        if self._status != [_status(file) for file in self._files]:
            raise ValueError(f"{self.source} has changed while it was read; begin again when nothing writes to it.")
        return {"source": self.source, "options": self._options, **_stamp(self._files), "digest": _digest(self._files)}


def read_corpus(
    source: str | Path,
    *,
    id_column: str = "id",
    contents_column: str = "contents",
    title_column: str | None = None,
    text_column: str | None = None,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    passage_words: int = 100,
    overlap_words: int = 0,
    skip_bad_lines: bool = False,
) -> CorpusReader:
    """Stream the documents of a corpus. Memory does not grow with it.

    Args:
        source: One of

            - a `.jsonl` or `.jsonl.gz` file in UTF-8 with one `{"id": …, "contents": "…"}` a line; integer ids become
              strings, other keys are ignored, and blank lines are skipped;
            - a `.parquet` file with such columns;
            - a `.txt` or `.md` file, which is cut into passages;
            - a folder of files of one of these kinds, read in the order of their paths, subfolders included; names
              that begin with a dot are left out;
            - the name of a data set on the Hub, `owner/name`, if there is no such path; it is streamed.
        id_column: The key or column of the ids.
        contents_column: The key or column of the contents, title and text in one.
        title_column: The key or column of the titles, where title and text stand apart.
        text_column: The key or column of the texts, which replaces `contents_column`.
        config: The configuration of the data set on the Hub.
        split: The split of the data set on the Hub.
        revision: The branch, tag or commit of the data set on the Hub.
        passage_words: The most words of a passage of a `.txt` or `.md` file. Passages end with a paragraph where they
            can: only a paragraph that is longer than this is cut. Characters of scripts without spaces (Chinese,
            Japanese, Thai, …) count as a word each. A passage's title is the first heading of the Markdown file, which
            is left out of the text, or the file's name without its ending; its id is the path within the folder, `#`,
            and its number from 1.
        overlap_words: How many words at the end of a passage are repeated at the beginning of the next.
        skip_bad_lines: Skip and count what is malformed (lines, rows, and lines of text files that are not UTF-8)
            instead of raising an error.

    Returns:
        An iterator over the documents. Files are opened when the first one is asked for.

    Raises:
        FileNotFoundError: If there is no such file, folder or data set.
        ValueError: If the arguments do not fit, or a folder holds no files or several kinds; while iterating, if a line
            or row is malformed (the message names it) or a file is damaged.
    """
    columns = Columns(id_column, contents_column, title_column, text_column)
    if passage_words < 1:
        raise ValueError(f"passage_words must be at least 1, got {passage_words}.")
    if not 0 <= overlap_words < passage_words:
        raise ValueError(f"overlap_words must be at least 0 and less than passage_words, got {overlap_words}.")
    path = Path(source).expanduser()
    if not path.exists():
        return _read_hub(source, columns, config, split, revision, skip_bad_lines)
    files, endings = _find_files(path)
    options: dict[str, Any] = {"columns": asdict(columns)}
    total: int | None = sum(file.stat().st_size for file in files)
    unit = "B"
    documents: Callable[[CorpusReader], Iterator[Document]]
    if endings == _JSON_LINES:
        documents = _read_lines
    elif endings == _PARQUET:
        total, unit, documents = _count_rows(files), "rows", _read_parquet
    else:
        options = {"passage_words": passage_words, "overlap_words": overlap_words}

        def documents(reader: CorpusReader) -> Iterator[Document]:
            return _read_texts(reader, files, path, passage_words, overlap_words)

    return CorpusReader(
        str(path),
        files,
        documents,
        columns=columns,
        skip_bad_lines=skip_bad_lines,
        total=total,
        unit=unit,
        options=options,
    )


Corpus = str | Path | CorpusReader | Iterable[Document | Mapping[str, Any]]


def documents_of(corpus: Corpus) -> Iterator[Document]:
    """The documents of whatever an index can be built of.

    Args:
        corpus: What `read_corpus` reads; or a reader that it returned; or documents, or mappings with "id" and
            "contents", one after the other.

    Returns:
        An iterator, a `CorpusReader` for what that reads.

    Raises:
        FileNotFoundError, ValueError: As `read_corpus` and `parse_document`.
    """
    if isinstance(corpus, CorpusReader):
        return corpus
    if isinstance(corpus, str | Path):
        return read_corpus(corpus)
    return (parse_document(record, f"Document {number} of the corpus") for number, record in enumerate(corpus, start=1))


def holds_nothing(documents: Iterable[Document]) -> str:
    """The sentence about a corpus without any document."""
    name = documents.source if isinstance(documents, CorpusReader) else "The corpus"
    return f"{name} holds no documents."


def is_same_corpus(source: str | Path | CorpusReader, fingerprint: Mapping[str, Any]) -> bool:
    """Whether a corpus is the one that was read when `CorpusReader.fingerprint` was made.

    Sizes, names within a folder, and the first and last 64 KiB of each file are compared, which is fast. Only where
    times of modification differ, everything is read and compared. A corpus may have moved. Of a data set on the Hub
    nothing but what it was asked for by is known, so that a new revision is not noticed.

    Args:
        source: A path or a name as `read_corpus` takes it, or a reader, whose columns and passages must be the same
            too.
        fingerprint: The fingerprint.

    Raises:
        FileNotFoundError: If the fingerprint is of files, and `source` is not there.
    """
    if isinstance(source, CorpusReader):
        if source._options != fingerprint["options"]:
            return False
        name, files = source.source, source._files
    else:
        name, path = str(source), Path(source).expanduser()
        if fingerprint["size"] and not path.exists():
            raise FileNotFoundError(f"There is no corpus file or folder {source}.")
        files = _find_files(path)[0] if path.exists() else []
    if not files or not fingerprint["size"]:
        return not files and name == fingerprint["source"]
    stamp = _stamp(files)
    if any(stamp[key] != fingerprint[key] for key in ("size", "edges")):
        return False
    return stamp["modified"] == fingerprint["modified"] or _digest(files) == fingerprint["digest"]


def parse_document(record: Any, where: str, columns: Columns = Columns()) -> Document:
    """Check one record of a corpus and make a `Document` of it.

    Args:
        record: A `Document`, or a mapping with an id (string or integer) and contents (string), or title and text.
        where: Names the record in error messages, for example "corpus.jsonl, line 3".
        columns: The keys of the mapping.

    Raises:
        ValueError: If the record is neither.
    """
    if isinstance(record, Document):
        return record
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}: {columns.expected}, got a {type(record).__name__}.")
    for key in columns.names:
        if key not in record:
            raise ValueError(f'{where}: {columns.expected}, but "{key}" is missing.')
    identifier = record[columns.id]
    if isinstance(identifier, bool) or not isinstance(identifier, str | int):
        raise ValueError(f'{where}: "{columns.id}" must be a string or an integer, got {identifier!r}.')
    for key in columns.names[1:]:
        # Titles alone may be missing.
        if not isinstance(record[key], str) and (key != columns.title or record[key] is not None):
            raise ValueError(f'{where}: "{key}" must be a string, got a {type(record[key]).__name__}.')
    if columns.text is None:
        return Document(str(identifier), record[columns.contents])
    title = record[columns.title] if columns.title is not None else None
    return Document(str(identifier), _contents(title or "", record[columns.text]))


def parse_line(line: bytes, where: str, columns: Columns = Columns()) -> Document:
    """Make a `Document` of one line of a `.jsonl` file.

    Raises:
        ValueError: If the line is not JSON in UTF-8, or no document.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of too many digits, too deep
        raise ValueError(f"{where}: {columns.expected}, but the line is not JSON in UTF-8: {error}.") from error
    return parse_document(record, where, columns)


def cut_into_passages(paragraphs: Iterable[str], words: int, overlap: int = 0) -> Iterator[str]:
    """Join short paragraphs, and cut long ones, to passages of at most so many words.

    Args:
        paragraphs: The paragraphs of one text.
        words: The most words of a passage. Characters of scripts without spaces count as a word each.
        overlap: How many words at the end of a passage the next one repeats; less than `words`.

    Returns:
        The passages. Only a paragraph of more than `words` words (less the overlap) is cut.
    """
    held: list[str] = []  # parts of the next passage, and what stands between them
    count = 0  # its words
    fresh = False  # whether it holds more than what it repeats

    def end_passage() -> str:
        nonlocal held, count, fresh
        passage = "".join(held)
        spans = [match.span() for match in _WORD.finditer(passage)]
        count = min(overlap, len(spans))
        held = [passage[spans[-count][0] :]] if count else []
        fresh = False
        return passage

    for paragraph in paragraphs:
        spans = [match.span() for match in _WORD.finditer(paragraph)]
        if fresh and count + len(spans) > words:
            yield end_passage()
        between = "\n\n"
        while spans:
            part, spans = spans[: words - count], spans[words - count :]
            held += [between] * bool(held) + [paragraph[part[0][0] : part[-1][1]]]
            count += len(part)
            fresh = True
            if spans:
                yield end_passage()
                between = paragraph[part[-1][1] : spans[0][0]]
    if fresh:
        yield end_passage()


def _contents(title: str, text: str) -> str:
    return f'"{title}"\n{text}'


def _find_files(path: Path) -> tuple[list[Path], tuple[str, ...]]:
    """The files of a corpus, and the endings of their kind."""
    kinds = (_JSON_LINES, _PARQUET, _TEXTS)
    files = sorted(_walk(path)) if path.is_dir() else [path]
    found = {kind: [file for file in files if file.name.endswith(kind)] for kind in kinds}
    present = [kind for kind in kinds if found[kind]]
    if not present and path.is_dir():
        raise ValueError(f"The folder {path} holds no .jsonl, .jsonl.gz, .parquet, .txt or .md files.")
    if not present:
        raise ValueError(
            f"A corpus is a .jsonl, .jsonl.gz, .parquet, .txt or .md file, a folder of such files, or the name of a "
            f"data set on the Hub, got {path}."
        )
    if len(present) > 1:
        names = ", ".join(str(found[kind][0].relative_to(path)) for kind in present)
        raise ValueError(f"The folder {path} holds files of several kinds ({names}); give one of them a folder.")
    return found[present[0]], present[0]


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _read_lines(reader: CorpusReader) -> Iterator[Document]:
    for path in reader._files:
        name, number, offset = str(path), 0, 0
        before = reader.done
        # Bytes, for two reasons: a line with broken UTF-8 can be named, and only "\n" ends a line.
        with path.open("rb") as file, cast(BinaryIO, gzip.open(file) if path.suffix == ".gz" else file) as lines:
            try:
                for number, line in enumerate(lines, start=1):
                    reader.span = (offset, len(line)) if lines is file else None
                    offset += len(line)
                    # What has been read of a compressed file is asked for seldom, for it costs a system call.
                    if lines is file:
                        reader.done = before + offset
                    elif number % 1024 == 0:
                        reader.done = before + file.tell()
                    if not line.strip():
                        continue
                    try:
                        document = parse_line(line, f"{name}, line {number}", reader.columns)
                    except ValueError as error:
                        reader.bad(error)
                        continue
                    yield document
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{path} is cut short or damaged after line {number}: {error}.") from error
        reader.done = before + path.stat().st_size


def _read_rows(reader: CorpusReader, rows: Iterable[Any], where: str) -> Iterator[Document]:
    for number, row in enumerate(rows, start=1):
        reader.done += 1
        try:
            document = parse_document(row, f"{where}, row {number}", reader.columns)
        except ValueError as error:
            reader.bad(error)
            continue
        yield document


def _count_rows(files: list[Path]) -> int:
    import pyarrow
    import pyarrow.parquet

    rows = 0
    for path in files:
        try:
            rows += pyarrow.parquet.read_metadata(path).num_rows
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} is no Parquet file, or damaged: {error}.") from error
    return rows


def _read_parquet(reader: CorpusReader) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet
    from datasets import load_dataset

    for path in reader._files:
        present = pyarrow.parquet.read_schema(path).names
        for name in reader.columns.names:
            if name not in present:
                raise ValueError(f'{path}: there is no column "{name}", only {", ".join(present)}.')
        try:
            rows = load_dataset(
                "parquet", data_files=str(path), split="train", streaming=True, columns=reader.columns.names
            )
            yield from _read_rows(reader, rows, str(path))
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path} is damaged: {error}.") from error


def _read_hub(
    source: str | Path, columns: Columns, config: str | None, split: str, revision: str | None, skip_bad_lines: bool
) -> CorpusReader:
    name = str(source)
    if isinstance(source, Path) or name.endswith(_JSON_LINES + _PARQUET + _TEXTS) or not _HUB_NAME.fullmatch(name):
        raise FileNotFoundError(f"There is no corpus file or folder {source}.")
    from datasets import load_dataset

    try:
        rows = load_dataset(name, config, split=split, revision=revision, streaming=True)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"There is no corpus file or folder {name}, and no data set of that name on the Hub: {error}"
        ) from error
    known = (rows.info.splits or {}).get(split)
    return CorpusReader(
        name,
        [],
        lambda reader: _read_rows(reader, rows.select_columns(columns.names), f"{name}, split {split}"),
        columns=columns,
        skip_bad_lines=skip_bad_lines,
        total=known.num_examples if known is not None else None,
        unit="rows",
        options={"config": config, "split": split, "revision": revision, "columns": asdict(columns)},
    )


def _read_texts(reader: CorpusReader, files: list[Path], root: Path, words: int, overlap: int) -> Iterator[Document]:
    for path in files:
        name = path.relative_to(root).as_posix() if path != root else path.name
        heading, line = _first_heading(path) if path.suffix == ".md" else (None, None)
        title = heading or path.stem
        passages = cut_into_passages(_paragraphs(reader, path, line), words, overlap)
        for number, passage in enumerate(passages, start=1):
            yield Document(f"{name}#{number}", _contents(title, passage))


def _paragraphs(reader: CorpusReader, path: Path, title_line: int | None) -> Iterator[str]:
    paragraph: list[str] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            reader.done += len(line)
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip("\r\n")
            except UnicodeDecodeError as error:
                reader.bad(ValueError(f"{path}, line {number}: the line is not text in UTF-8: {error}."))
                continue
            if text.strip() and number != title_line:
                paragraph.append(text)
            elif paragraph:
                yield "\n".join(paragraph)
                paragraph = []
    if paragraph:
        yield "\n".join(paragraph)


def _first_heading(path: Path) -> tuple[str | None, int | None]:
    """The first heading of a Markdown file, and the number of its line."""
    code = False
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if _FENCE.match(line):
                code = not code
            elif not code and (heading := _HEADING.fullmatch(line)) and heading[1]:
                return heading[1], number
    return None, None


def _status(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _stamp(files: list[Path]) -> dict[str, Any]:
    """What is quickly known of files: their size in bytes, the latest modification, and a hash of their edges."""
    size, modified = 0, 0
    edges = hashlib.blake2b(digest_size=16)
    for path in files:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            size += status.st_size
            modified = max(modified, status.st_mtime_ns)
            if len(files) > 1:
                edges.update(f"{path.name} {status.st_size}\n".encode("utf-8", "surrogateescape"))
            edges.update(file.read(_EDGE))
            if status.st_size > 2 * _EDGE:
                file.seek(-_EDGE, os.SEEK_END)
            edges.update(file.read(_EDGE))
    return {"size": size, "modified": modified, "edges": edges.hexdigest()}


def _digest(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()

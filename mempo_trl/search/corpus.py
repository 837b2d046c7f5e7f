"""Documents in the Search-R1 format, and a reader that streams a corpus of them."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast


_EXPECTED = 'expected {"id": …, "contents": "…"}'


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


def read_corpus(path: str | Path) -> Iterator[Document]:
    """Stream the documents of a corpus file, one line at a time.

    Args:
        path: A `.jsonl` or `.jsonl.gz` file in UTF-8 with one `{"id": …, "contents": "…"}` a line. Integer ids become
            strings, other keys are ignored, and blank lines are skipped.

    Returns:
        An iterator over the documents. The file is opened when the first one is asked for.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the name ends otherwise; while iterating, if a line is no such object or the file is damaged.
    """
    path = Path(path)
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"A corpus is a .jsonl or .jsonl.gz file, got {path}.")
    if not path.is_file():
        raise FileNotFoundError(f"There is no corpus file {path}.")
    return _read_lines(path)


def parse_document(record: Any, where: str) -> Document:
    """Check one record of a corpus and make a `Document` of it.

    Args:
        record: A `Document`, or a mapping with an "id" (string or integer) and "contents" (string).
        where: Names the record in error messages, for example "corpus.jsonl, line 3".

    Raises:
        ValueError: If the record is neither.
    """
    if isinstance(record, Document):
        return record
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}: {_EXPECTED}, got a {type(record).__name__}.")
    for key in ("id", "contents"):
        if key not in record:
            raise ValueError(f'{where}: {_EXPECTED}, but "{key}" is missing.')
    identifier, contents = record["id"], record["contents"]
    if isinstance(identifier, bool) or not isinstance(identifier, str | int):
        raise ValueError(f'{where}: "id" must be a string or an integer, got {identifier!r}.')
    if not isinstance(contents, str):
        raise ValueError(f'{where}: "contents" must be a string, got a {type(contents).__name__}.')
    return Document(str(identifier), contents)


def _read_lines(path: Path) -> Iterator[Document]:
    number = 0
    # Bytes, for two reasons: a line with broken UTF-8 can be named, and only "\n" ends a line.
    with cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(line, f"{path}, line {number}")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is cut short or damaged after line {number}: {error}.") from error


def _parse_line(line: bytes, where: str) -> Document:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: {_EXPECTED}, but the line is not JSON in UTF-8: {error}.") from error
    return parse_document(record, where)

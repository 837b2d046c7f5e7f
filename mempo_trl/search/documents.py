"""Documents on disk, read by their number through a memory map."""

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from mempo_trl.search.corpus import Document


_LINES = "documents.jsonl"
_OFFSETS = "documents.offsets"


def write_documents(documents: Iterable[Document], folder: Path) -> tuple[int, str]:
    """Write documents to a folder, one after the other; none is kept in memory.

    Args:
        documents: What to write.
        folder: An existing folder. It gets `documents.jsonl`, one JSON array `[id, contents]` a line, and
            `documents.offsets`, where each line begins and the last one ends, as little-endian 64-bit integers.

    Returns:
        The number of documents, and a digest of all their ids and contents in their order.
    """
    digest = hashlib.blake2b(digest_size=16)
    count = end = 0
    with (folder / _LINES).open("wb") as lines, (folder / _OFFSETS).open("wb") as offsets:
        offsets.write(end.to_bytes(8, "little"))
        for document in documents:
            line = json.dumps([document.id, document.contents], ensure_ascii=False) + "\n"
            # JSON can spell a lone surrogate, which UTF-8 proper cannot.
            encoded = line.encode("utf-8", "surrogatepass")
            digest.update(encoded)
            lines.write(encoded)
            count, end = count + 1, end + len(encoded)
            offsets.write(end.to_bytes(8, "little"))
    return count, digest.hexdigest()


class StoredDocuments:
    """The documents that `write_documents` wrote, by their number. Several processes and threads can share them.

    Args:
        folder: Where they are.

    Raises:
        OSError: If a file is missing.
        ValueError: If the files are damaged.
    """

    def __init__(self, folder: Path):
        self._offsets = np.memmap(folder / _OFFSETS, dtype="<i8", mode="r")
        with (folder / _LINES).open("rb") as lines:
            self._lines = mmap.mmap(lines.fileno(), 0, access=mmap.ACCESS_READ)
        if self._offsets[-1] != len(self._lines):
            raise ValueError(f"{folder / _LINES} has {len(self._lines)} bytes instead of {self._offsets[-1]}")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Document:
        if not 0 <= number < len(self):
            raise IndexError(f"There are {len(self)} documents, so no number {number}.")
        return Document(*json.loads(self._lines[self._offsets[number] : self._offsets[number + 1]]))

    def __iter__(self) -> Iterator[Document]:
        return (self[number] for number in range(len(self)))

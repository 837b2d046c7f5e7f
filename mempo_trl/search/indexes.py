"""Opening whatever index a folder holds."""

from pathlib import Path

from mempo_trl.search.tool import SearchBackend


def open_index(path: str | Path) -> SearchBackend:
    """Open an index, of whatever kind it is.

    Args:
        path: The folder of a `BM25Index`.

    Raises:
        FileNotFoundError: If there is no index at `path`.
        ValueError: If it is damaged, or of a version that cannot be read.
    """
    from mempo_trl.search.bm25 import BM25Index

    return BM25Index.load(path)

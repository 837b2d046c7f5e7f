"""Put the figures of docs/performance/*.json into the tables of docs/performance.md, and so for docs/search.

    python benchmarks/write_docs.py

A table stands between `<!-- name -->` and `<!-- end -->`; nothing else is touched. Without its files a table says that
it was not measured.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


DOCS = Path(__file__).resolve().parent.parent / "docs"


Report = dict[str, Any]


def results(*names: str, folder: str = "performance") -> list[Report]:
    """Reports of benchmarks; those that are not there are left out."""
    files = [DOCS / folder / f"{name}.json" for name in names]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def table(columns: dict[str, Callable[..., str]], rows: list[tuple]) -> str:
    """A table whose cells are made by its columns from the rows."""
    cells = [[make(*row) for make in columns.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(columns), ["---"] * len(columns), *cells])


def signed(reports: list[Report]) -> str:
    """Commands, machines and versions of what a table shows."""
    commands = "\n".join("    " + report["command"] for report in reports)
    abouts = {
        (f"Medians of {report['sizes']['runs']} runs; " if "sizes" in report else "")
        + f"{report['hardware']}; "
        + ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        + "."
        for report in reports
    }
    return commands + "\n\n" + "\n".join(sorted(abouts))


def memory_pass() -> tuple[list[Report], str]:
    reports = results("memory_pass_4", "memory_pass_10")
    columns: dict[str, Callable[[Report, str], str]] = {
        "turns": lambda report, name: str(report["sizes"]["turns"]),
        "against": lambda report, name: name,
        "its tokens": lambda report, name: f"{report['tokens'][name]:,}",
        "its seconds": lambda report, name: f"{report['seconds'][name]:.2f}",
        "packed, seconds": lambda report, name: f"{report['seconds']['packed']:.2f}",
        "times faster": lambda report, name: f"{report['speedup'][name]:.1f}",
        "times fewer tokens": lambda report, name: f"{report['token_ratio'][name]:.1f}",
    }
    return reports, table(columns, [(report, name) for report in reports for name in report["speedup"]])


def windowed_policy() -> tuple[list[Report], str]:
    reports = results("windowed_policy")

    def mebibytes(report: Report, name: str) -> float:
        return report["peak_bytes"][name] / 2**20

    def turns(name: str) -> int:
        return int(name.split()[1])

    columns: dict[str, Callable[[Report, str], str]] = {
        "turns": lambda report, name: str(turns(name)),
        "context": lambda report, name: name.split()[0],
        "tokens": lambda report, name: f"{report['tokens'][name]:,}",
        "seconds": lambda report, name: f"{report['seconds'][name]:.2f}",
        "ms per turn": lambda report, name: f"{1000 * report['seconds'][name] / turns(name):.0f}",
        "peak MiB": lambda report, name: f"{mebibytes(report, name):,.0f}",
        "MiB per turn": lambda report, name: f"{mebibytes(report, name) / turns(name):.0f}",
    }
    text = table(columns, [(report, name) for report in reports for name in report["seconds"]])
    for report in reports:
        least, most = min(report["sizes"]["turns"]), max(report["sizes"]["turns"])
        growth = [
            f"{name} context {seconds:.2f} in time and {report['peak_per_turn_ratio'][name]:.2f} in memory"
            for name, seconds in report["seconds_per_turn_ratio"].items()
        ]
        text += f"\n\nA turn at {most} turns against a turn at {least}:\n" + ";\n".join(growth) + "."
    return reports, text


def step_overhead() -> tuple[list[Report], str]:
    reports = results("step_overhead_demo", "step_overhead_smollm2")
    columns: dict[str, Callable[[Report], str]] = {
        "policy": lambda report: Path(report["sizes"]["model"] or "the demo's").name,
        "turns": lambda report: f"{report['turns']:.0f}",
        "step, seconds": lambda report: f"{report['seconds']['step_time']:.2f}",
        "generation": lambda report: f"{report['seconds']['time/generation']:.2f}",
        "tools": lambda report: f"{report['seconds']['time/tools']:.2f}",
        "memory pass": lambda report: f"{report['seconds']['time/memory']:.2f}",
        "its share": lambda report: f"{report['memory_share']:.1%}",
    }
    return reports, table(columns, [(report,) for report in reports])


def search_bm25() -> tuple[list[Report], str]:
    reports = results("bm25_100k", "bm25_1m", "bm25_5m", folder="search")

    def latency(report: Report, name: str) -> str:
        return f"{1000 * report['latency_seconds'][name]:.1f}"

    def column(make: Callable[[Report, str], str]) -> Callable[[Report, str], str]:
        return lambda report, name: make(report, name) if name in report["open_seconds"] else "–"

    def ratio(key: str) -> Callable[[Report, str], str]:
        return lambda report, name: f"{report[key][name]:.2f}" if name in report[key] else ""

    columns: dict[str, Callable[[Report, str], str]] = {
        "passages": lambda report, name: f"{report['sizes']['passages']:,}",
        "with": lambda report, name: name,
        "build, seconds": column(lambda report, name: f"{report['builds'][name]['seconds']:.0f}"),
        "peak GiB": column(lambda report, name: f"{report['builds'][name]['peak_bytes'] / 2**30:.1f}"),
        "of which no files": column(lambda report, name: f"{report['builds'][name]['peak_own_bytes'] / 2**30:.1f}"),
        "on disk, GiB": column(lambda report, name: f"{report['builds'][name]['disk_bytes'] / 2**30:.2f}"),
        "open, ms": column(lambda report, name: f"{1000 * report['open_seconds'][name]:.1f}"),
        "queries a second": column(lambda report, name: f"{report['queries_per_second'][name]:.0f}"),
        "one query, ms": column(latency),
        "processor, seconds": column(lambda report, name: f"{report['builds'][name]['processor_seconds']:.0f}"),
        "build ratio": column(ratio("build_ratio")),
        "batch ratio": column(ratio("batch_ratio")),
        "latency ratio": column(ratio("latency_ratio")),
    }
    text = table(columns, [(report, name) for report in reports for name in report["builds"]])
    failed = [
        f"{name} did not index {report['sizes']['passages']:,} passages: {build['failed']}"
        for report in reports
        for name, build in report["builds"].items()
        if "failed" in build
    ]
    grown = [estimate(*reports[-2:], passages=21_015_324)] if len(reports) > 1 else []
    return reports, "\n\n".join([text, *failed, *grown])


def estimate(small: Report, large: Report, passages: int) -> str:
    """What a larger index should take, if it goes on growing by the same power of the number of passages."""
    sizes = [report["sizes"]["passages"] for report in (small, large)]

    def grow(make: Callable[[Report], float]) -> tuple[float, float]:
        power = math.log(make(large) / make(small)) / math.log(sizes[1] / sizes[0])
        return make(large) * (passages / sizes[1]) ** power, power

    # Processor time, for what else runs on a machine stretches the other.
    seconds, build_power = grow(lambda report: report["builds"]["mempo_trl"]["processor_seconds"])
    disk, disk_power = grow(lambda report: report["builds"]["mempo_trl"]["disk_bytes"])
    rate, rate_power = grow(lambda report: report["queries_per_second"]["mempo_trl"])
    return (
        f"Going on as from {sizes[0]:,} to {sizes[1]:,}, {passages:,} passages (as many as wiki-18 has, of 100 words)\n"
        f"would take {seconds / 60:.0f} minutes of processor time to build (power {build_power:.2f}) and "
        f"{disk / 2**30:.1f} GiB on disk (power {disk_power:.2f}),\nand answer {rate:.1f} queries a second "
        f"(power {rate_power:.2f})."
    )


def search_server() -> tuple[list[Report], str]:
    reports = results("server", folder="search")

    def attacked(part: Report) -> str:
        return "; ".join(f"{name}: {', '.join(answers)}" for name, answers in part["attacks"].items())

    columns: dict[str, Callable[[str, Report], str]] = {
        "64 clients": lambda name, part: name,
        "seconds": lambda name, part: f"{part['seconds']:.0f}",
        "requests a second": lambda name, part: f"{part['requests_per_second']:,.0f}",
        "p50, ms": lambda name, part: f"{part['ms']['p50']:.0f}",
        "p99, ms": lambda name, part: f"{part['ms']['p99']:.0f}",
        "longest, ms": lambda name, part: f"{part['ms']['most']:.0f}",
        "errors": lambda name, part: str(part["errors"]),
        "memory at the start, middle and end, MiB": lambda name, part: ", ".join(
            f"{part['memory_bytes'][index] / 2**20:.0f}" for index in (0, len(part["memory_bytes"]) // 2, -1)
        ),
        "hostile clients were answered": lambda name, part: attacked(part),
    }
    return reports, table(columns, [item for report in reports for item in report["parts"].items()])


PAGES = {"performance": (memory_pass, windowed_policy, step_overhead), "search": (search_bm25, search_server)}


def main() -> None:
    for page, makers in PAGES.items():
        path = DOCS / f"{page}.md"
        text = path.read_text(encoding="utf-8")
        for make in makers:
            marker = re.compile(rf"(<!-- {make.__name__} -->\n).*?(<!-- end -->)", re.DOTALL)
            assert marker.search(text), f"{path} has no place for {make.__name__}"
            reports, measured = make()
            shown = f"{measured}\n\n{signed(reports)}" if reports else "Not measured."
            text = marker.sub(lambda match, shown=shown: f"{match[1]}\n{shown}\n\n{match[2]}", text)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

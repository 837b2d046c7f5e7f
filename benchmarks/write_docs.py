"""Put the figures of docs/performance/*.json into the tables of docs/performance.md.

    python benchmarks/write_docs.py

A table stands between `<!-- name -->` and `<!-- end -->`; nothing else is touched. Without its files a table says that
it was not measured.
"""

import json
import re
from pathlib import Path
from typing import Any


DOCS = Path(__file__).resolve().parent.parent / "docs"


def results(*names: str) -> list[dict[str, Any]]:
    """Reports of benchmarks; those that are not there are left out."""
    files = [DOCS / "performance" / f"{name}.json" for name in names]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def signed(reports: list[dict[str, Any]]) -> str:
    """Commands, machine and versions of what a table shows."""
    commands = "\n".join("    " + report["command"] for report in reports)
    versions = ", ".join(f"{name} {version}" for name, version in reports[0]["versions"].items())
    runs = min(report["sizes"]["runs"] for report in reports)
    return f"{commands}\n\nMedians of {runs} runs; {reports[0]['hardware']}; {versions}."


def memory_pass() -> str:
    reports = results("memory_pass_4", "memory_pass_10")
    rows = []
    for report in reports:
        for name in report["speedup"]:
            rows.append(
                [
                    str(report["sizes"]["turns"]),
                    name,
                    f"{report['tokens'][name]:,}",
                    f"{report['seconds'][name]:.2f}",
                    f"{report['seconds']['packed']:.2f}",
                    f"{report['speedup'][name]:.1f}",
                    f"{report['token_ratio'][name]:.1f}",
                ]
            )
    header = ["turns", "against", "its tokens", "its seconds", "packed, seconds", "times faster", "times fewer tokens"]
    return table(header, rows) + "\n\n" + signed(reports)


def windowed_policy() -> str:
    (report,) = results("windowed_policy")
    rows = []
    for name, seconds in report["seconds"].items():
        variant, turns = name.split()
        rows.append(
            [
                turns,
                variant,
                f"{report['tokens'][name]:,}",
                f"{seconds:.2f}",
                f"{1000 * seconds / int(turns):.0f}",
                f"{report['peak_bytes'][name] / 2**20:,.0f}",
                f"{report['peak_bytes'][name] / 2**20 / int(turns):.0f}",
            ]
        )
    header = ["turns", "context", "tokens", "seconds", "ms per turn", "peak MiB", "MiB per turn"]
    least, most = min(report["sizes"]["turns"]), max(report["sizes"]["turns"])
    growth = "; ".join(
        f"{name} context {report['seconds_per_turn_ratio'][name]:.2f} in time and "
        f"{report['peak_per_turn_ratio'][name]:.2f} in memory"
        for name in report["seconds_per_turn_ratio"]
    )
    growth = f"A turn at {most} turns against a turn at {least}: {growth}."
    return "\n\n".join([table(header, rows), growth, signed([report])])


def step_overhead() -> str:
    reports = results("step_overhead_demo", "step_overhead_smollm2")
    rows = []
    for report in reports:
        times = report["seconds"]
        rows.append(
            [
                "SmolLM2-135M" if report["sizes"]["model"] else "the demo's",
                f"{report['turns']:.0f}",
                f"{times['step_time']:.2f}",
                f"{times['time/generation']:.2f}",
                f"{times['time/tools']:.2f}",
                f"{times['time/memory']:.2f}",
                f"{report['memory_share']:.1%}",
            ]
        )
    header = ["policy", "turns", "step, seconds", "generation", "tools", "memory pass", "its share"]
    return table(header, rows) + "\n\n" + signed(reports)


def main() -> None:
    path = DOCS / "performance.md"
    text = path.read_text(encoding="utf-8")
    for make in (memory_pass, windowed_policy, step_overhead):
        marker = re.compile(rf"(<!-- {make.__name__} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert marker.search(text), f"{path} has no place for {make.__name__}"
        text = marker.sub(lambda match, make=make: f"{match[1]}\n{make()}\n\n{match[2]}", text)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""The whole way, from questions and documents to a judged agent, on the CPU and without a network.

    python examples/geography/run.py

Every step is one command, the one that a user would type. A run that was interrupted goes on where it was. It leaves
`report.md` in its folder, with the commands, the seconds that they took, and what they found.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
import trl
from world import SYSTEM_PROMPT, GeographyWorld

import mempo_trl


HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# glibc hands freed memory back to the system, and asking for it again costs more than the arithmetic at these sizes.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "100000000000", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
PORT = "PORT"  # stands for a port that is free, in commands
AGENT = {"context-turns": 1, "max-turns": 4, "max-turn-length": 96, "max-observation-length": 96}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs" / "geography")
    parser.add_argument("--model", type=Path, help="a checkpoint's folder; SmolLM2-135M-Instruct if not given")
    parser.add_argument("--cache-dir", type=Path, default=ROOT / ".cache" / "smollm2", help="where SmolLM2 is put")
    parser.add_argument("--train", type=int, default=240, help="questions to collect traces of, and to train on")
    parser.add_argument("--test", type=int, default=36, help="questions to evaluate on, about other countries")
    parser.add_argument("--failures", type=float, default=0.1, help="share of the turns in which the expert fails")
    parser.add_argument("--sft-steps", type=int, default=10, help="steps of fine-tuning, of 8 turns each")
    parser.add_argument("--mempo-steps", type=int, default=6, help="steps of MemPO, of 2 questions and 8 rollouts each")
    parser.add_argument(
        "--precision", choices=["auto", "bfloat16", "float32"], default="auto", help="of the forwards; auto: the faster"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@dataclass
class Done:
    """A step that was done.

    Attributes:
        title: what it does.
        commands: as one would type them.
        seconds: that it took.
        output: what it printed.
    """

    title: str
    commands: list[str]
    seconds: float
    output: str


class Walk:
    """Does one step after the other, and remembers which are done.

    Args:
        folder: of the run; what is remembered and what steps print is in its `logs`.
    """

    def __init__(self, folder: Path):
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.done: list[Done] = []

    def step(self, title: str, *commands: Sequence[object], beside: Sequence[object] | None = None) -> Done:
        """Run commands, unless an earlier run has.

        Args:
            title: what they do.
            commands: one after the other; `python` and `mempo` are those of this environment.
            beside: a command that runs meanwhile, and is ended then.

        Raises:
            RuntimeError: if one of them fails.
        """
        # Steps are remembered by title: not every run has the same.
        name = re.sub(r"\W+", "_", title.lower())
        memo = self.logs / f"{name}.json"
        if memo.exists():
            done = Done(**json.loads(memo.read_text(encoding="utf-8")))
            print(f"{title}: done before", flush=True)
        else:
            print(f"{title} …", flush=True)
            start, output, port = time.monotonic(), "", str(_free_port())
            with _running(beside, port, self.logs / f"{name}.beside.log"):
                for command in commands:
                    output += _run(command, port, self.logs / f"{name}.log")
            shown = [shlex.join(str(_short(part)) for part in command) for command in commands]
            done = Done(title, shown, time.monotonic() - start, output)
            memo.with_suffix(".part").write_text(json.dumps(asdict(done)), encoding="utf-8")
            memo.with_suffix(".part").replace(memo)
            print(f"{title}: {done.seconds:.0f} s", flush=True)
        self.done.append(done)
        return done


def _run(command: Sequence[object], port: str, log: Path) -> str:
    """What a command prints; its messages and progress bars go to the log."""
    with log.open("a", encoding="utf-8") as errors:
        done = subprocess.run(
            _arguments(command, port), stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment(), check=False
        )
    if done.returncode != 0:
        last = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RuntimeError(f"{shlex.join(map(str, command))} failed; the end of {log}:\n{last}")
    return done.stdout


@contextlib.contextmanager
def _running(command: Sequence[object] | None, port: str, log: Path) -> Iterator[None]:
    if command is None:
        yield
        return
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(_arguments(command, port), stdout=file, stderr=file, env=_environment())
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _arguments(command: Sequence[object], port: str) -> list[str]:
    program, *arguments = [str(part).replace(PORT, port) for part in command]
    own = {"python": [sys.executable], "mempo": [sys.executable, "-m", "mempo_trl.cli"]}
    return [*own.get(program, [program]), *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _short(part: object) -> object:
    """A path as one would type it in the project's folder."""
    return part.relative_to(ROOT) if isinstance(part, Path) and part.is_relative_to(ROOT) else part


def _options(options: dict[str, object]) -> list[object]:
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def write_world(folder: Path, train: int, test: int, seed: int) -> None:
    """Write documents, and questions in the form that FlashRAG gives them."""
    world = GeographyWorld(seed)
    files = {"corpus": world.documents}
    for split, number in (("train", train), ("test", test)):
        rows = [question.row() for question in world.questions(split, number)]
        files[split] = [
            {"id": row["id"], "question": row["question"], "golden_answers": row["answers"][0]} for row in rows
        ]
    for name, lines in files.items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def begin(folder: Path, arguments: dict[str, object]) -> None:
    """Make the folder of a run, or go on in it.

    Raises:
        ValueError: if it has a run with other arguments.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, text = folder / "arguments.json", json.dumps(arguments, default=str)
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise ValueError(f"{folder} has a run with other arguments: name another --output-dir, or remove it.")
    file.write_text(text, encoding="utf-8")


def walk_through(args: argparse.Namespace) -> list[Done]:
    """Do all steps."""
    out, walk = args.output_dir, Walk(args.output_dir)
    search = ["--search", out / "index", "--search-results", 1]
    questions = {split: out / "data" / f"{split}.parquet" for split in ("train", "test")}
    agent = {name.replace("-", "_"): value for name, value in AGENT.items()}
    write_world(out, args.train, args.test, args.seed)
    walk.step("Index the documents", ["mempo", "index", out / "corpus.jsonl", out / "index", "--overwrite"])
    walk.step(
        "Read the questions",
        *(
            ["mempo", "data", "convert", out / f"{split}.jsonl", file, "--overwrite"]
            for split, file in questions.items()
        ),
    )
    base = args.model or args.cache_dir
    if args.model is None:
        walk.step("Make a checkpoint of SmolLM2", ["python", ROOT / "benchmarks" / "get_smollm2.py", base])
    precision = args.precision
    if precision == "auto":
        precision = walk.step("Find the faster precision", ["python", HERE / "faster_precision.py"]).output.strip()
    # Weights are in float32: the small steps of training would be lost in rounding otherwise.
    training = {"dtype": "float32", "bf16": precision == "bfloat16", "use_cpu": True, "report_to": "none"}
    training |= {"gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "seed": args.seed}

    def evaluate(name: str, checkpoint: Path, *more: object) -> Path:
        run = out / "eval" / name
        options = {"out": run, "dtype": precision, "batch-size": 24, **AGENT}
        walk.step(
            f"Evaluate {name}", ["mempo", "eval", checkpoint, questions["test"], *search, *_options(options), *more]
        )
        return run

    before = evaluate("base", base, "--system-prompt", SYSTEM_PROMPT)
    collecting = {"endpoint": f"http://127.0.0.1:{PORT}/v1", "out": out / "traces", "system-prompt": SYSTEM_PROMPT}
    collecting |= {"sft-context-turns": AGENT["context-turns"], "max-turns": AGENT["max-turns"]}
    walk.step(
        "Collect traces from the expert",
        ["mempo", "collect", "expert", questions["train"], *search, *_options(collecting)],
        beside=["python", HERE / "expert_server.py", "--port", PORT, "--failures", args.failures],
    )
    options = {"model_name_or_path": base, "traces": out / "traces" / "sft.jsonl", "output_dir": out / "cold_start"}
    options |= {**agent, **training, "per_device_train_batch_size": 8, "max_steps": args.sft_steps}
    options |= {"learning_rate": 2e-4, "lr_scheduler_type": "cosine", "warmup_steps": 4}
    walk.step("Fine-tune on the traces", ["python", ROOT / "examples" / "sft_cold_start.py", *_options(options)])
    cold = evaluate("cold_start", out / "cold_start")

    options = {"model_name_or_path": out / "cold_start", "dataset_name": out / "data", "output_dir": out / "trained"}
    options |= {"search": out / "index", "search_results": 1, "system_prompt": SYSTEM_PROMPT, **agent, **training}
    options |= {"per_device_train_batch_size": 16, "num_generations": 8, "max_steps": args.mempo_steps}
    options |= {"learning_rate": 5e-6, "loss_type": "grpo", "memory_std_floor": 0.01, "temperature": 0.8}
    options |= {"max_tokens_per_forward": 4096}
    walk.step("Train with MemPO", ["python", ROOT / "examples" / "train_mempo.py", *_options(options)])
    after = evaluate("trained", out / "trained")
    for first, second in ((before, cold), (cold, after)):
        walk.step(f"Compare {first.name} with {second.name}", ["mempo", "eval", "--compare", first, second])
    return walk.done


def write_report(folder: Path, steps: list[Done], seconds: float) -> Path:
    """Write what was done and found."""
    evaluations = {
        run.name: json.loads((run / "summary.json").read_text(encoding="utf-8")) for run in (folder / "eval").iterdir()
    }
    lines = [
        "# From questions and documents to a judged agent",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, trl {trl.__version__}, mempo_trl {mempo_trl.__version__}; "
        f"{sum(step.seconds for step in steps):.0f} s in all steps, {seconds:.0f} s in this call.",
        "",
        "| model | exact match | F1 | tokens a question | peak tokens | well-formed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in ("base", "cold_start", "trained"):
        metrics = evaluations[name]["all"]["metrics"]
        shown = [f"{metrics[key]['mean']:.3f}" for key in ("exact_match", "f1")]
        shown += [f"{metrics[key]['mean']:.0f}" for key in ("total_tokens", "peak_tokens")]
        lines.append(f"| {name} | {' | '.join(shown)} | {metrics['well_formed']['mean']:.3f} |")
    for step in steps:
        lines += ["", f"## {step.title}", "", f"{step.seconds:.0f} s", "", "```sh", *step.commands, "```"]
        if step.output.strip():
            lines += ["", step.output.strip()]
    report = folder / "report.md"
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return report


def main() -> None:
    args = parse_arguments()
    begin(args.output_dir, {name: value for name, value in vars(args).items() if name != "output_dir"})
    start = time.monotonic()
    steps = walk_through(args)
    report = write_report(args.output_dir, steps, time.monotonic() - start)
    print(report.read_text(encoding="utf-8"))
    print(f"This is in {report}.")


if __name__ == "__main__":
    main()

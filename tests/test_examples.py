"""The examples run, with settings too small to learn anything."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer


EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("context_turns", [0, 1])
def test_relay(tmp_path, context_turns):
    options = {
        "output-dir": tmp_path / "demo",
        "cache-dir": tmp_path / "cache",
        "context-turns": context_turns,
        "cold-start-steps": 3,
        "steps": 1,
        "questions": 2,
        "generations": 2,
        "held-out": 4,
    }
    command = [sys.executable, str(EXAMPLES / "relay" / "train.py")]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    for run in ("fresh", "cached"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert ("Cold start" in done.stderr) == (run == "fresh")
    assert "exact match" in done.stdout
    assert ("fewer tokens" in done.stdout) == bool(context_turns)
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert {"em_before", "em_after", "seconds"} <= set(summary)
    logged = [json.loads(line) for line in (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()]
    assert any("memory/reward" in line for line in logged)
    step = next(line for line in logged if "step_time" in line)
    assert 0 < step["time/memory"] + step["time/generation"] < step["step_time"]
    assert step["tokens/total"] <= step["tokens/full_context"]
    assert context_turns or step["tokens/total"] == step["tokens/full_context"]
    assert (tmp_path / "demo" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    checkpoint = tmp_path / "demo" / "checkpoint"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert (
        tokenizer.decode(tokenizer("Find the employer of Alda Dun.")["input_ids"]) == "Find the employer of Alda Dun."
    )
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.vocab_size == len(tokenizer)

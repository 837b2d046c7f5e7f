"""A vLLM engine in the training process samples from the weights that were just trained, and says what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples" / "relay"))

from policy import ColdStart, build_tokenizer, train


WORKER = Path(__file__).with_name("colocate_worker.py")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A policy that has learned to search, in a checkpoint that does not know what ends its turns."""
    settings = ColdStart(steps=120, batch=32, worlds=2)
    assert settings.width / settings.heads == 32  # vLLM's smallest head
    tokenizer = build_tokenizer(settings.max_words)
    model = train(settings, tokenizer)
    folder = tmp_path_factory.mktemp("policy")
    tokenizer.eos_token = tokenizer.pad_token
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(checkpoint: Path, out: Path, options: dict) -> dict:
    done = subprocess.run(
        [sys.executable, str(WORKER), str(checkpoint), str(out), json.dumps(options)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((out / "seen.json").read_text())


@pytest.mark.parametrize(
    ("options", "dtype", "closeness"),
    [
        pytest.param({"context_turns": 1, "temperature": 0.7}, "float32", 1e-4, id="the last turn in sight"),
        pytest.param({"context_turns": None, "temperature": 1.3}, "float32", 1e-4, id="all turns in sight"),
        # What vLLM takes unless it is told otherwise.
        pytest.param({"context_turns": 1, "vllm_max_model_length": 90}, "bfloat16", 1e-2, id="little room"),
    ],
)
def test_sampler_and_trainer_agree(checkpoint, tmp_path, options, dtype, closeness):
    told = {} if dtype == "bfloat16" else {"dtype": dtype}
    seen = run(checkpoint, tmp_path, {**options, **told})
    assert seen["dtype"] == f"torch.{dtype}"
    assert seen["moved"] > 1e-3
    assert seen["prefix_caching"]
    assert len(seen["steps"]) == len(seen["logs"]) == 3
    for step, logs in zip(seen["steps"], seen["logs"], strict=True):
        assert max(step["turns"]) > 1
        assert step["ended"] > 0
        assert step["ran_on"] == 0  # no turn goes on after its end
        assert step["difference"]["now"] < closeness
        # TRL's own figure, of the log-probabilities that it trains with.
        assert logs["sampling/sampling_logp_difference/mean"] == pytest.approx(step["difference"]["now"], abs=1e-4)
        assert max(step["weights_behind"].values()) <= (0 if dtype == "float32" else 2**-8)
        # Later turns are read from the cache, but nothing that was cached for other weights.
        first, *later = step["calls"]
        assert first["cached"] == 0
        assert sum(call["cached"] for call in later) > 0
        assert all(call["longest"] <= seen["max_model_len"] and call["max_tokens"] <= 64 for call in [first, *later])
    # Not because nothing depends on the weights.
    last = seen["steps"][-1]["difference"]
    assert last["at_first"] > 10 * last["now"]
    if "vllm_max_model_length" in options:
        assert seen["max_model_len"] == options["vllm_max_model_length"]
        stops = [list(zip(step["turns"], step["stops"], strict=True)) for step in seen["steps"]]
        assert all((0, "max_context_length") in step for step in stops)
        assert any(turns > 0 and stop == "max_context_length" for step in stops for turns, stop in step)

"""An agent does the same whatever runs it: transformers, vLLM in the process, a vLLM server that takes ids or text."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from agent_runs import ROWS, RUNS, SYSTEM_PROMPT, VLLM_OPTIONS, open_tools, run
from relay_policy import longer_policy
from test_colocate import ENVIRONMENT
from transformers import AutoTokenizer

from mempo_trl.engines import open_engine
from mempo_trl.evaluation import evaluate
from mempo_trl.protocol import build_prompt


WORKER = Path(__file__).with_name("engines_worker.py")
PATIENCE = 300  # seconds after which what has not begun has failed


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def checkpoint(folder):
    """A policy that searches, remembers and answers. What its files recommend for chats would spoil all of that."""
    model, tokenizer, settings = longer_policy()
    assert settings.width / settings.heads == 32  # vLLM's smallest head
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    file = folder / "policy" / "generation_config.json"
    recommended = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.5}
    file.write_text(json.dumps({**json.loads(file.read_text()), **recommended}))
    return str(folder / "policy")


@pytest.fixture(scope="session")
def tools(folder):
    return open_tools(folder / "index")


@pytest.fixture(scope="session")
def expected(checkpoint, tools):
    """What transformers does, by run."""
    return {name: run(open_engine(checkpoint, tools, dtype="float32", **settings)) for name, settings in RUNS.items()}


@pytest.fixture(scope="session")
def in_process(checkpoint, tools, folder):
    """What vLLM does in a process of its own, by run."""
    done = subprocess.run(
        [sys.executable, str(WORKER), checkpoint, str(folder / "index"), str(folder)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="session")
def server(checkpoint, folder):
    """The base URL of a vLLM server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # What `vllm serve` runs; that command itself does not know its version in the package for CPUs.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint]
    command += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--max-model-len", str(VLLM_OPTIONS["max_model_len"]), "--dtype", "float32"]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its children can be told from others
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while not answers(f"http://127.0.0.1:{port}/health"):
            log_end = (folder / "server.log").read_text()[-3000:]
            assert process.poll() is None, log_end
            assert time.monotonic() < deadline, log_end
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url):
    try:
        return requests.get(url, timeout=5).ok
    except requests.ConnectionError:
        return False


def test_the_runs_are_what_they_are_meant_to_be(expected):
    last, every, cut = expected.values()
    assert [episode["stop_reason"] for episode in last["episodes"]].count("answer") >= 16
    assert sum(len(episode["steps"]) for episode in last["episodes"]) >= 3 * 16
    assert max(len(context) for context, _ in every["turns"]) > max(len(context) for context, _ in last["turns"])
    assert {episode["stop_reason"] for episode in cut["episodes"]} == {"max_turn_length"}


@pytest.mark.parametrize("name", RUNS)
def test_vllm_in_the_process(expected, in_process, name):
    assert in_process[name] == expected[name]


@pytest.mark.parametrize("name", RUNS)
def test_a_server_that_takes_token_ids(expected, server, checkpoint, tools, name):
    engine = open_engine("policy", tools, endpoint=server, tokenizer=checkpoint, **RUNS[name])
    assert engine.sampler.max_context_length == VLLM_OPTIONS["max_model_len"]
    assert run(engine) == expected[name]


@pytest.mark.parametrize("name", RUNS)
def test_a_server_that_takes_conversations(expected, server, checkpoint, tools, name):
    request = {"repetition_penalty": 1.0}
    engine = open_engine("policy", tools, endpoint=server, tool_role="tool", request=request, **RUNS[name])
    found = run(engine)["episodes"]
    # A server that is sent text encodes it anew: what a policy garbled may then be other ids than it had sampled.
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    changed = {
        tokenizer.decode(turn[:-1])
        for _, turn in expected[name]["turns"]
        if tokenizer.encode(tokenizer.decode(turn), add_special_tokens=False) != turn
    }
    same = [
        number
        for number, episode in enumerate(expected[name]["episodes"])
        if changed.isdisjoint(step["text"] for step in episode["steps"][:-1])
    ]
    assert len(same) >= 16
    assert [found[number] for number in same] == [expected[name]["episodes"][number] for number in same]


def test_a_context_that_is_too_long_ends_the_episode(server, checkpoint, tools):
    prompt = build_prompt("and " * 600, SYSTEM_PROMPT)
    for options in ({"tokenizer": checkpoint}, {"tool_role": "tool"}):
        engine = open_engine("policy", tools, endpoint=server, **options)
        (*_, episode) = engine.turns(prompt)
        assert (episode.stop_reason, episode.steps) == ("max_context_length", [])


def test_an_evaluation(expected, in_process, checkpoint, tools, folder):
    ours = evaluate(checkpoint, ROWS, tools, dtype="float32", progress=False, **RUNS["the last turn in sight"])
    theirs = json.loads((folder / "evaluation" / "summary.json").read_text())
    assert theirs == ours.summary

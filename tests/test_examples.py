"""The examples run, with settings too small to learn anything."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, TrlParser

from mempo_trl import MemPOConfig
from mempo_trl.rewards import f1_reward
from mempo_trl.search import HttpSearch


ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
RECIPES = sorted((EXAMPLES / "configs").glob("*.yaml"))


def load_script():
    spec = importlib.util.spec_from_file_location("train_mempo", EXAMPLES / "train_mempo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_mempo"] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


script = load_script()


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


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_read(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the arguments make their output directory
    parser = TrlParser((script.MemPOScriptArguments, MemPOConfig, ModelConfig))
    arguments, training, model = parser.parse_args_and_config(
        ["--config", str(recipe), "--learning_rate", "5e-7", "--use_cpu", "true"]
    )
    wanted = yaml.safe_load(recipe.read_text())
    assert model.model_name_or_path == wanted["model_name_or_path"]
    assert training.max_turns == wanted["max_turns"]
    assert training.learning_rate == 5e-7  # the command line overrides the file
    assert arguments.search == wanted["search"]
    if recipe.stem in ("qwen2.5_7b_zero3_vllm", "qwen2.5_7b_two_nodes"):
        rollouts = 8 * training.per_device_train_batch_size * training.gradient_accumulation_steps
        assert (rollouts // training.num_generations, training.num_generations) == (128, 16)


def run(*command):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_the_recipe_for_the_relay_world_trains_and_goes_on(tmp_path):
    run(
        *(EXAMPLES / "relay" / "prepare.py", "--output-dir", tmp_path, "--cache-dir", tmp_path / "cache"),
        *("--train", 16, "--test", 4, "--cold-start-steps", 3),
    )
    command = [
        *("-m", "accelerate.commands.launch", "--config_file", ROOT / "accelerate_configs" / "cpu.yaml"),
        *(EXAMPLES / "train_mempo.py", "--config", EXAMPLES / "configs" / "relay_cpu.yaml"),
        *("--model_name_or_path", tmp_path / "policy", "--dataset_name", tmp_path / "data"),
        *("--corpus", tmp_path / "corpus.jsonl", "--search", tmp_path / "index", "--output_dir", tmp_path / "run"),
        *("--per_device_train_batch_size", 4, "--num_generations", 2, "--save_steps", 1),
        *("--per_device_eval_batch_size", 4, "--use_peft", "true", "--lora_target_modules", "all-linear"),
        *("--resume_from_checkpoint", "last", "--search_cache", tmp_path / "cache.sqlite"),
    ]
    for steps in (1, 2):
        run(*command, "--max_steps", steps)
        assert (tmp_path / "run" / f"checkpoint-{steps}" / "adapter_model.safetensors").exists()
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "reward" in entry] == [1, 2]
    assert "eval_rewards/f1_reward/mean" in json.loads((tmp_path / "run" / "eval_results.json").read_text())
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()
    assert (tmp_path / "cache.sqlite").exists()


def test_the_relay_world_has_room_for_the_questions_it_is_asked_for(tmp_path):
    run(EXAMPLES / "relay" / "prepare.py", "--output-dir", tmp_path, "--data-only")
    assert len((tmp_path / "data" / "train.jsonl").read_text().splitlines()) == 128
    assert len((tmp_path / "data" / "test.jsonl").read_text().splitlines()) == 64


def test_questions(tmp_path):
    rows = {"question": ["a", "b"], "reward_model": [{"ground_truth": {"target": [["x"], ["y", "z"]]}}] * 2}
    for split in ("train", "dev"):
        Dataset.from_dict(rows).to_json(tmp_path / f"{split}.jsonl")
    arguments = script.MemPOScriptArguments(
        dataset_name=str(tmp_path),
        dataset_test_split="validation",  # as `datasets` calls a file named dev
        answers_column="reward_model.ground_truth.target",
        max_eval_samples=1,
    )
    train, test = script.load_questions(arguments, evaluates=True)
    assert train["answers"] == [[["x"], ["y", "z"]]] * 2
    assert len(test) == 1
    arguments.dataset_streaming = True
    train, test = script.load_questions(arguments, evaluates=True)
    assert [row["answers"] for row in train] == [[["x"], ["y", "z"]]] * 2
    assert len(list(test)) == 1
    with pytest.raises(ValueError, match=r"`dataset_test_split=test` is not a split of .*: train, validation"):
        script.load_questions(script.MemPOScriptArguments(dataset_name=str(tmp_path)), evaluates=True)
    arguments.answers_column, arguments.dataset_test_split = "reward_model.gold", "validation"
    with pytest.raises(ValueError, match=r"`answers_column=reward_model.gold`: there is no 'gold'"):
        list(script.load_questions(arguments, evaluates=False)[0])
    with pytest.raises(ValueError, match="`dataset_name` is missing"):
        script.load_questions(script.MemPOScriptArguments(), evaluates=False)


def test_search_and_rewards_by_name(tmp_path, monkeypatch):
    backend = script.open_search(script.MemPOScriptArguments(search="http://localhost:8000/retrieve", search_timeout=5))
    assert isinstance(backend, HttpSearch)
    assert (backend.url, backend.timeout) == ("http://localhost:8000/retrieve", 5)
    with pytest.raises(ValueError, match="`search` is missing"):
        script.open_search(script.MemPOScriptArguments())
    index = script.MemPOScriptArguments(search="~/index")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"does not exist. To build this index, give the documents as `corpus`"):
        script.open_search(index)
    index.corpus = "~/corpus.jsonl"
    with pytest.raises(ValueError, match=r"`corpus=.*corpus.jsonl` cannot be read"):
        script.open_search(index)
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "1", "contents": "text"}), encoding="utf-8")
    killed = "import os, sys; from mempo_trl.search import BM25Index; "
    killed += "BM25Index.build(iter(lambda: os._exit(9), 0), sys.argv[1])"
    assert subprocess.run([sys.executable, "-c", killed, str(tmp_path / "index")], check=False).returncode == 9
    assert (tmp_path / "index").exists()
    for _ in range(2):  # built, in spite of what a killed build has left, then found
        assert len(script.open_search(index)) == 1
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "1", "contents": "another"}), encoding="utf-8")
    with pytest.raises(ValueError, match="corpus"):
        script.open_search(index)
    index.corpus = None
    assert len(script.open_search(index)) == 1
    assert script.load_rewards(None) is None
    assert script.load_rewards(["f1_reward", "mempo_trl.rewards.f1_reward"]) == [f1_reward, f1_reward]
    with pytest.raises(ValueError, match=r"there is no function 'f2_reward' in mempo_trl.rewards"):
        script.load_rewards(["f2_reward"])
    with pytest.raises(ValueError, match=r"`reward_funcs`: 'nowhere.reward' cannot be imported"):
        script.load_rewards(["nowhere.reward"])


def test_the_checkpoint_to_resume(tmp_path):
    args = MemPOConfig(str(tmp_path / "run"), use_cpu=True, bf16=False, resume_from_checkpoint="last")
    assert script.checkpoint_to_resume(args) is None
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    for asked in ("last", "true", True):
        args.resume_from_checkpoint = asked
        assert script.checkpoint_to_resume(args) == str(tmp_path / "run" / "checkpoint-3")
    args.resume_from_checkpoint = "elsewhere"
    assert script.checkpoint_to_resume(args) == "elsewhere"

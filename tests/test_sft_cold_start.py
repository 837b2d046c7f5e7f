"""examples/sft_cold_start.py, on pairs that were collected."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from openai_stand_in import OpenAIStandIn
from scripted_agent import Play, answer, ask
from support import qwen_tokenizer, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from mempo_trl import MemoryAgent
from mempo_trl.agent_settings import AgentSettings
from mempo_trl.collecting import collect
from mempo_trl.data.sft import tokenize_pairs
from mempo_trl.engines import TokenEngine


ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "sft_cold_start.py"
TURNS = {
    "Who wrote Dune?": [ask("Dune"), ask("Frank", "Dune: Frank."), answer("Frank Herbert", "Dune: Frank Herbert.")],
    "Who wrote Emma?": [ask("Emma"), answer("Jane Austen", "Emma: Jane Austen. " * 400)],  # more than 1,024 tokens
}
QUESTIONS = [
    {"id": "d", "question": "Who wrote Dune?", "answers": ["Frank Herbert"]},
    {"id": "e", "question": "Who wrote Emma?", "answers": ["Jane Austen"]},
]


def search(query: str) -> str:
    """Search the corpus.

    Args:
        query: What to look for.
    """
    return f"All about {query}:\u2028line two,\x85line three."  # two characters that also end lines


def load_script():
    spec = importlib.util.spec_from_file_location("sft_cold_start", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["sft_cold_start"] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with a model, and with pairs that were collected."""
    folder = tmp_path_factory.mktemp("cold")
    tokenizer = qwen_tokenizer()
    tiny_llama(tokenizer, hidden_size=8, intermediate_size=16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with OpenAIStandIn(Play(TURNS)) as server:
        collection = collect(
            server.url, QUESTIONS, [search], folder / "traces", sft_context_turns=1, system_prompt="Search.",
            concurrency=1, progress=False,
        )  # fmt: skip
    assert collection.pairs == 5
    return folder


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


COMMON = ["--use_cpu", "--bf16", "false", "--report_to", "none", "--save_strategy", "no", "--dtype", "float32"]
COMMON += ["--per_device_train_batch_size", "5", "--max_steps", "1", "--learning_rate", "1e-2", "--context_turns", "1"]
COMMON += ["--logging_steps", "1", "--max_turns", "4", "--max_turn_length", "9", "--max_observation_length", "20"]
COMMON += ["--warmup_steps", "0", "--weight_decay", "0", "--gradient_checkpointing", "false"]


@pytest.mark.parametrize("adapters", [False, True])
def test_a_model_is_fine_tuned_on_what_was_collected(prepared, tmp_path, adapters):
    options = [*COMMON, "--model_name_or_path", prepared / "model", "--traces", prepared / "traces" / "sft.jsonl"]
    if adapters:
        options += ["--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--lora_r", "4"]
    done = run(*options, "--output_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr[-4000:]

    # The loss is that of the turns alone, without a context cut, in the ids that rollouts have.
    tokenizer = AutoTokenizer.from_pretrained(prepared / "model")
    model = AutoModelForCausalLM.from_pretrained(prepared / "model", dtype=torch.float32)
    settings = AgentSettings(max_observation_length=20)
    pairs = script.read_pairs(str(prepared / "traces" / "sft.jsonl"))
    assert len(pairs) == 5
    total, count = 0.0, 0
    rows = tokenize_pairs(pairs, tokenizer, settings)
    assert max(map(len, rows["input_ids"])) > 1024
    for row in rows:
        ids, scored = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"][1:]) != -100
        with torch.no_grad():
            logps = model(ids).logits[0, :-1].log_softmax(-1)
        total -= logps[scored].gather(1, ids[0, 1:][scored, None]).sum().item()
        count += int(scored.sum())
    logged = [json.loads(line.replace("'", '"')) for line in done.stdout.splitlines() if line.startswith("{'loss'")]
    assert float(logged[0]["loss"]) == pytest.approx(total / count, rel=2e-3)

    # What comes out is run as it was trained.
    written = AgentSettings.load(tmp_path / "out")
    assert (written.context_turns, written.max_turns, written.max_turn_length) == (1, 4, 9)
    assert (written.max_observation_length, written.system_prompt) == (20, "Search.")
    assert [tool["function"]["name"] for tool in written.tools] == ["search"]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() == adapters
    agent = MemoryAgent(str(tmp_path / "out"), [search], dtype="float32", device="cpu")
    trained = dict(agent.engine.sampler.model.named_parameters())
    moved = [name for name, weight in model.named_parameters() if name in trained and not trained[name].equal(weight)]
    assert bool(moved) != adapters
    if adapters:
        assert any(bool(weight.any()) for name, weight in trained.items() if "lora_B" in name)
    result = agent.run("Who wrote Dune?")
    assert result.turns and all(turn.completion_tokens <= 9 for turn in result.turns)

    # And its contexts are the ones that were trained on.
    texts = iter(TURNS["Who wrote Dune?"])
    contexts = []

    class Sampler:
        identity, threads, max_context_length, eos_token_ids = "script", 0, None, ()

        def __call__(self, asked, max_new_tokens, seeds):
            contexts.append(asked[0])
            return [[*tokenizer(next(texts), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]]

    written = written.replace(max_turn_length=99)
    engine = TokenEngine(agent.engine.tokenizer, Sampler(), [search], written, agent.engine.sampling)
    list(engine.turns(pairs[0]["prompt"]))
    assert [row["input_ids"][: row["labels"].count(-100)] for row in list(rows)[:3]] == contexts


def test_only_so_many_pairs(prepared):
    assert len(script.read_pairs(str(prepared / "traces" / "sft.jsonl"), 2)) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no pairs: collect some that are right first"),
        ("nonsense\n", "line 1 is no pair of prompt and completion"),
        ('{"prompt": [{"role": "user", "content": "q"}]}\n', "line 1 is no pair .*'completion'"),
        ('{"prompt": [], "completion": []}\n', "line 1 is no pair"),
        ('{"prompt": "q", "completion": "a"}\n', "line 1 is no pair"),
        ("[1]\n", "line 1 is no pair"),
        (None, r"`traces=.*pairs.jsonl` cannot be read: .*No such file"),
        (b"\xff\xfe\n", "cannot be read"),
    ],
)
def test_what_is_no_pair_is_named(tmp_path, content, message):
    file = tmp_path / "pairs.jsonl"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        script.read_pairs(str(file))

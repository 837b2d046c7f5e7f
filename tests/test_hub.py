"""Pushing to a stand-in for the Hub: what arrives there, and what happens when it does not."""

import dataclasses
import logging
import math
import pickle
import re
import threading

import huggingface_hub
import pytest
import torch
from datasets import Dataset
from hub_server import TOKEN, Hub, failing, garbage, hang_up, status
from huggingface_hub import ModelCard, constants
from support import SMOLLM2_TEMPLATE, Script, byte_tokenizer, one_step, search, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from mempo_trl import MemPOConfig, MemPOTrainer
from mempo_trl import hub as uploads
from mempo_trl.agent_settings import AgentSettings
from mempo_trl.hub import WAITS, PushError, without_tokens
from mempo_trl.protocol import DEFAULT_SYSTEM_PROMPT, build_prompt
from mempo_trl.search import BM25Index, make_search_tool


PLAIN = {"question": ["Where?"] * 4, "answers": [["Paris"]] * 4}
ANSWERS = [["<think>t</think><answer>Paris</answer>"], ["<think>t</think><answer>London</answer>"]]


@pytest.fixture
def hub(monkeypatch):
    with Hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # Of the two ways to the storage, the one that is plain HTTP.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        huggingface_hub.close_session()
        yield server
    huggingface_hub.close_session()


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """Every wait, ours and that of the Hub's client: none takes any time."""
    seconds = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


def build(tmp_path, **config):
    tokenizer = byte_tokenizer()
    options = {
        **one_step(tmp_path / "agent", 2),
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 1,
        "push_to_hub": True,
        "hub_model_id": "me/agent",
        "hub_strategy": "every_save",
        "hub_token": TOKEN,
        "per_device_eval_batch_size": 2,
        "max_turns": 2,
        "max_turn_length": 64,
        "max_observation_length": 64,
        "context_turns": 1,
    }
    tools = config.pop("tools", [search])
    others = {name: config.pop(name) for name in ("callbacks", "peft_config") if name in config}
    trainer = MemPOTrainer(
        config.pop("model", None) or tiny_llama(tokenizer),
        args=MemPOConfig(**{**options, **config}),
        train_dataset=Dataset.from_dict(PLAIN),
        eval_dataset=Dataset.from_dict(PLAIN),
        processing_class=tokenizer,
        tools=tools,
        **others,
    )
    trainer._generate_single_turn = lambda *args: Script(tokenizer, ANSWERS)(*args)  # noqa: PLW0108
    return trainer


def check_model(trainer, folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    for (name, ours), theirs in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == SMOLLM2_TEMPLATE
    assert tokenizer("a <mem>é</mem>")["input_ids"] == byte_tokenizer()("a <mem>é</mem>")["input_ids"]


@pytest.mark.parametrize("lfs", [True, False])
@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_what_was_trained_can_be_loaded_from_the_hub(tmp_path, hub, caplog, strategy, lfs):
    hub.lfs = lfs
    caplog.set_level(logging.DEBUG)
    trainer = build(tmp_path, hub_strategy=strategy)
    for name in ("half.safetensors.tmp", "_private", "model.safetensors.lock"):
        (trainer._hub.output_dir / name).write_text("unfinished")
    assert trainer.train().global_step == 2
    if strategy == "end":
        assert hub.commits == []
        trainer.save_model()
    files = hub.repos["me/agent"]
    pulled = hub.download("me/agent", tmp_path / "pulled")
    check_model(trainer, pulled)
    assert AgentSettings.load(pulled) == trainer._agent_settings()

    folders = {
        "end": [],
        "every_save": [],
        "checkpoint": ["last-checkpoint"],
        "all_checkpoints": ["checkpoint-1", "checkpoint-2"],
    }[strategy]
    assert sorted({path.split("/")[0] for path in files if "/" in path}) == folders
    for folder in folders:
        for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
            assert f"{folder}/{name}" in files
        assert AgentSettings.load(pulled / folder) == trainer._agent_settings()
    assert not {"half.safetensors.tmp", "_private", "model.safetensors.lock"} & set(files)
    assert not list(trainer._hub.output_dir.glob("_hub-*"))
    assert {"mempo", "trl"} <= set(ModelCard(files["README.md"].decode()).data.tags)
    # The training arguments are among the files.
    assert "training_args.bin" in files
    assert TOKEN.encode() not in hub.received
    assert not any(TOKEN.encode() in content for content in files.values())
    assert TOKEN not in caplog.text
    assert trainer.args.hub_token == TOKEN


def test_a_save_during_an_upload_is_pushed_at_the_end(tmp_path, hub, waits):
    training = threading.Event()

    class Release(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            training.set()

    # The first upload reads its files when the training is over and the first two checkpoints have been deleted.
    hub.fail = lambda request: "/validate-yaml" in request.path and not training.wait(60)
    trainer = build(tmp_path, callbacks=[Release()], max_steps=3, save_total_limit=1, hub_strategy="all_checkpoints")
    trainer.train()
    assert hub.commits == ["Training in progress, step 1", "Training in progress, step 3"]
    assert [n for n in (1, 2, 3) if f"checkpoint-{n}/model.safetensors" in hub.repos["me/agent"]] == [1, 3]
    check_model(trainer, hub.download("me/agent", tmp_path / "pulled"))
    assert waits == []


def test_checkpoints_that_were_not_pushed_come_with_the_next(tmp_path, hub, caplog):
    hub.fail = failing("/commit/", status(500), times=4)
    trainer = build(tmp_path, hub_strategy="all_checkpoints", hub_always_push=True)
    trainer.train()
    assert len(hub.commits) == 1
    assert {"checkpoint-1/optimizer.pt", "checkpoint-2/optimizer.pt"} <= set(hub.repos["me/agent"])
    assert len(warnings_of(caplog)) == 1


def test_what_trl_adds_to_a_checkpoint_is_pushed_too(tmp_path, hub):
    trainer = build(tmp_path, hub_strategy="checkpoint", use_adaptive_entropy=True, max_steps=1)
    trainer.train()
    assert "last-checkpoint/entropy_ctrl_state.json" in hub.repos["me/agent"]


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("mempo_trl") and r.levelno == logging.WARNING]


FAILURES = {
    "500": status(500),
    "503": status(503),
    "429": status(429),
    "garbage": garbage,
    "hangs up": hang_up,
}


@pytest.mark.parametrize("where", ["/commit/", "/validate-yaml"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_push_is_repeated_and_never_ends_the_training(tmp_path, hub, waits, caplog, where, failure):
    trainer = build(tmp_path, max_steps=1)
    hub.fail = failing(where, FAILURES[failure])
    assert trainer.train().global_step == 1
    (warning,) = warnings_of(caplog)
    assert "after 4 attempts" in warning
    assert str(trainer._hub.output_dir / "checkpoint-1") in warning
    assert waits == list(WAITS)
    assert hub.count(where) == 4
    assert not list(trainer._hub.output_dir.glob("_hub-*"))
    # The next save pushes again.
    hub.fail = None
    trainer.args.max_steps = 2
    trainer.train()
    assert len(warnings_of(caplog)) == 1
    assert "step 2" in hub.commits[-1]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_push_that_succeeds_in_the_end_is_silent(tmp_path, hub, waits, caplog, failure):
    trainer = build(tmp_path, max_steps=1)
    hub.fail = failing("/commit/", FAILURES[failure], times=2)
    trainer.train()
    assert warnings_of(caplog) == []
    assert waits == list(WAITS[:2])
    assert len(hub.commits) == 1


def test_requests_that_the_client_repeats_are_not_repeated_again(tmp_path, hub, waits):
    trainer = build(tmp_path, max_steps=1)
    hub.fail = failing("/preupload/", status(503))
    trainer.train()
    assert hub.count("/preupload/") == len(waits) + 1 == 6


def test_a_hub_that_falls_silent_is_given_up(tmp_path, hub, monkeypatch, caplog):
    silent = threading.Event()
    monkeypatch.setattr(uploads, "LONGEST_SILENCE", 0.5)
    trainer = build(tmp_path, max_steps=1)
    hub.fail = lambda request: "/commit/" in request.path and silent.wait(60)
    assert trainer.train().global_step == 1
    silent.set()
    assert "timed out" in warnings_of(caplog)[0]


def test_uploads_through_xet(tmp_path, hub, monkeypatch, waits, caplog):
    """The stand-in has no such storage, so that small files have to do."""
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.lfs = False
    trainer = build(tmp_path, max_steps=1)
    hub.fail = failing("/commit/", status(503), times=6)
    trainer.train()
    assert len(waits) == 5  # the client's
    assert len(warnings_of(caplog)) == 1
    trainer.push_to_hub()
    check_model(trainer, hub.download("me/agent", tmp_path / "pulled"))


@pytest.mark.parametrize(("asked", "waited"), [("60", [60, 60, 60]), ("4000", [])])
def test_the_hub_says_how_long_to_wait(tmp_path, hub, waits, asked, waited):
    trainer = build(tmp_path, max_steps=1)
    hub.fail = failing("/commit/", status(429, **{"Retry-After": asked}))
    trainer.train()
    assert waits == waited


@pytest.mark.parametrize("code", [400, 401, 403, 404])
def test_a_refusal_is_not_repeated(tmp_path, hub, waits, caplog, code):
    trainer = build(tmp_path, max_steps=1)
    hub.fail = failing("/commit/", status(code))
    trainer.train()
    assert waits == []
    assert len(warnings_of(caplog)) == 1


def test_a_disk_that_is_full_does_not_end_the_training(tmp_path, hub, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(uploads.shutil, "copytree", full)
    build(tmp_path, max_steps=1).train()
    assert "No space left" in warnings_of(caplog)[0]


# --- Pushing by hand ------------------------------------------------------------------------------------------------


def test_push_to_hub_raises_where_the_files_are(tmp_path, hub, waits):
    trainer = build(tmp_path, push_to_hub=False, save_strategy="no")
    hub.fail = failing("/commit/", status(500))
    with pytest.raises(PushError, match="after 4 attempts") as raised:
        trainer.push_to_hub()
    assert str(trainer._hub.output_dir) in str(raised.value)
    assert waits == list(WAITS)
    check_model(trainer, trainer._hub.output_dir)
    hub.fail = None
    assert trainer.push_to_hub("By hand", tags="extra").commit_url.startswith(hub.url)
    assert hub.commits == ["By hand"]
    assert {"extra", "mempo"} <= set(ModelCard(hub.repos["me/agent"]["README.md"].decode()).data.tags)


def test_push_to_hub_in_the_background(tmp_path, hub, caplog):
    trainer = build(tmp_path)
    hub.fail = failing("/commit/", status(500), times=4)
    with pytest.raises(PushError, match="on disk"):
        trainer.push_to_hub(blocking=False).result()
    assert len(warnings_of(caplog)) == 1
    assert trainer.push_to_hub(blocking=False).result().oid


def test_save_model_warns(tmp_path, hub, caplog):
    trainer = build(tmp_path, hub_strategy="end")
    hub.fail = failing("/commit/", garbage)
    trainer.save_model()
    assert "on disk" in warnings_of(caplog)[0]


# --- At the start ---------------------------------------------------------------------------------------------------


def test_a_refused_token_is_an_error_at_the_start(tmp_path, hub, waits):
    with pytest.raises(PushError, match=r"token was refused.*Check `hub_token`") as raised:
        build(tmp_path, hub_token="hf_wrong")
    error = raised.value
    while error is not None:  # the stand-in repeats the token
        assert "hf_wrong" not in str(error)
        error = error.__cause__
    assert waits == []


@pytest.mark.parametrize("failure", ["500", "garbage", "hangs up"])
def test_a_repository_that_could_not_be_created_is_created_later(tmp_path, hub, waits, caplog, failure):
    hub.fail = failing("/repos/create", FAILURES[failure], times=4)
    trainer = build(tmp_path, hub_model_id="agent", max_steps=1)
    assert "Training goes on" in warnings_of(caplog)[0]
    assert waits == list(WAITS)
    trainer.train()
    card = hub.repos["me/agent"]["README.md"].decode()
    assert 'MemoryAgent("me/agent"' in card


def test_a_hub_that_is_down(tmp_path, hub, waits, caplog):
    hub.__exit__()
    trainer = build(tmp_path, max_steps=1)
    assert trainer.train().global_step == 1
    assert len(warnings_of(caplog)) == 2
    assert all("cannot be reached" in warning for warning in warnings_of(caplog))
    assert waits == 2 * list(WAITS)


def test_offline_is_a_warning(tmp_path, hub, monkeypatch, caplog, waits):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert build(tmp_path, max_steps=1).train().global_step == 1
    assert len(warnings_of(caplog)) == 2
    assert waits == []


# --- The card -------------------------------------------------------------------------------------------------------


def code_of(card):
    return re.search(r"^(`{3,})python\n(.*?)^\1$", card.text, re.DOTALL | re.MULTILINE).group(2)


def test_the_card_says_how_the_agent_did_and_how_to_run_it(tmp_path, hub, monkeypatch, capsys):
    index = BM25Index.build([{"id": "1", "contents": '"Dune"\nA novel by Frank Herbert.'}], tmp_path / "index")
    trainer = build(tmp_path, tools=[make_search_tool(index)])
    trainer.train()
    metrics = trainer.evaluate()
    trainer.push_to_hub()
    card = ModelCard(hub.repos["me/agent"]["README.md"].decode())
    results = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert results["reward"] == metrics["eval_reward"] == 0.5
    assert results["turns/mean"] == 1.0
    assert results["tokens/total"] == pytest.approx(metrics["eval_tokens/total"])
    assert "@article{mempo2026" in card.text
    assert DEFAULT_SYSTEM_PROMPT in card.text
    assert '"name": "search"' in card.text
    assert "None](https" not in card.text
    for row in ("| `context_turns` | 1 ", "| `max_turns` | 2 ", "| `max_turn_length` | 64 tokens", "| reward | "):
        assert row in card.text

    monkeypatch.chdir(tmp_path)
    hub.download("me/agent", tmp_path / "pulled")
    code = code_of(card)
    assert 'MemoryAgent("me/agent"' in code
    names = {}
    exec(compile(code.replace('"me/agent"', '"pulled"'), "README.md", "exec"), names)
    # The agent is run as it was trained, and its prompt is that of the training, to the token, but for the question.
    engine = names["agent"].engine
    assert engine.settings == dataclasses.replace(trainer._agent_settings(), tools=engine.settings.tools)
    asked = trainer._tokenizer.decode(engine._opening(build_prompt("Who wrote Dune?", engine.settings.system_prompt)))
    trained = trainer._tokenizer.decode(trainer._trajectories[0].prompt_ids)
    assert asked == trained.replace("Where?", "Who wrote Dune?") != trained
    assert 1 <= names["turn"].completion_tokens <= 64
    assert capsys.readouterr().out.splitlines()[-1] == "None"


def test_the_card_of_a_model_that_is_not_pushed(tmp_path, monkeypatch):
    """No tools, no window, and a system prompt that looks like Markdown and like Python."""
    prompt = 'Say "hi\\n":\n````json\n{}\n````'
    trainer = build(tmp_path, push_to_hub=False, system_prompt=prompt, context_turns=None, tools=None)
    trainer.save_model()
    trainer.create_model_card("agent")
    card = ModelCard.load(tmp_path / "agent" / "README.md")
    assert "Nothing has been logged yet." in card.text
    assert "model-index" not in card.data.to_dict()
    assert f"`````text\n{prompt}\n`````" in card.text
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code_of(card), "README.md", "exec"), names)
    assert names["agent"].engine.settings.system_prompt == prompt
    assert names["agent"].engine.tools == []


def test_the_card_has_the_last_metrics_that_are_numbers(tmp_path):
    trainer = build(tmp_path, push_to_hub=False)
    trainer.state.log_history = [
        {"reward": 0.125, "eval_reward": 0.0},
        {"reward": 0.25, "memory/probability": 0.5, "memory/reward": math.nan, "rewards/f1_reward/mean": 0.75},
        {"eval_reward": 1.0, "eval_rewards/exact_match_reward/mean": 1.0, "eval_memory/probability": None},
        {"train_loss": 0.5},
    ]
    trainer.create_model_card("agent", dataset_name="me/questions")
    card = ModelCard.load(tmp_path / "agent" / "README.md")
    rows = re.findall(r"^\| ([\w/]+) \| ([\d.]*) \| ([\d.]*) \|$", card.text, re.MULTILINE)
    assert rows == [
        ("reward", "0.25", "1.0"),
        ("f1", "0.75", ""),
        ("memory/probability", "0.5", ""),
        ("exact_match", "", "1.0"),
    ]
    assert [(r.metric_type, r.metric_value, r.dataset_type) for r in card.data.eval_results] == [
        ("reward", 1.0, "me/questions"),
        ("exact_match", 1.0, "me/questions"),
    ]


def test_adapters(tmp_path, hub):
    peft = pytest.importorskip("peft")
    for part in (tiny_llama(byte_tokenizer()), byte_tokenizer()):
        part.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    trainer = build(tmp_path, model=str(tmp_path / "base"), peft_config=config)
    trainer.train()
    pulled = AutoModelForCausalLM.from_pretrained(hub.download("me/agent", tmp_path / "pulled"))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        ours = trainer.model.eval()(ids).logits
        torch.testing.assert_close(pulled.eval()(ids).logits, ours)


def test_training_arguments_are_pickled_without_tokens(tmp_path):
    init = {"token": TOKEN, "revision": "main"}
    args = MemPOConfig(str(tmp_path), use_cpu=True, bf16=False, hub_token=TOKEN, model_init_kwargs=init)
    with without_tokens(args):
        assert TOKEN.encode() not in pickle.dumps(args)
        assert args.model_init_kwargs == {"revision": "main"}
    assert args.hub_token == args.model_init_kwargs["token"] == TOKEN

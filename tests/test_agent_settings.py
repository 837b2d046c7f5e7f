"""What an agent was trained with goes with its checkpoints, and comes back with them."""

import dataclasses
import json
import warnings

import pytest
from datasets import Dataset
from openai_stand_in import ModelReply, OpenAIStandIn
from support import Script, byte_tokenizer, one_step, search, tiny_llama
from transformers.utils import get_json_schema

from mempo_trl import MemoryAgent, MemPOConfig, MemPOTrainer
from mempo_trl.agent_settings import AgentSettings
from mempo_trl.protocol import DEFAULT_SYSTEM_PROMPT, build_prompt


def look(page: int) -> str:
    """Look at a page.

    Args:
        page: Its number.
    """
    return f"page {page}"


def train(output_dir, tools=(search, look), rows=None, **config):
    tokenizer = byte_tokenizer()
    options = {
        **one_step(output_dir, 2),
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "context_turns": 2,
        "max_turns": 5,
        "max_turn_length": 9,
        "max_observation_length": 33,
        "temperature": 0.9,
        "system_prompt": "Search “well”.",
    }
    trainer = MemPOTrainer(
        tiny_llama(tokenizer),
        args=MemPOConfig(**{**options, **config}),
        train_dataset=Dataset.from_list(rows or [{"question": "Where?", "answers": ["Paris"]}] * 2),
        processing_class=tokenizer,
        tools=list(tools),
    )
    script = [["<think>t</think><answer>a</answer>"]] * 2
    trainer._generate_single_turn = lambda *args: Script(tokenizer, script)(*args)  # noqa: PLW0108
    trainer.train()
    return trainer


EXPECTED = {
    "max_turns": 5,
    "max_turn_length": 9,
    "max_observation_length": 33,
    "max_completion_length": 5 * (9 + 33),
    "context_turns": 2,
    "system_prompt": "Search “well”.",
    "temperature": 0.9,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a training with two checkpoints, whose model has been saved as well."""
    folder = tmp_path_factory.mktemp("trained")
    trainer = train(folder)
    trainer.save_model()
    trainer.save_model(str(folder / "elsewhere"))
    return folder


@pytest.mark.parametrize("part", ["checkpoint-1", "checkpoint-2", ".", "elsewhere"])
def test_every_checkpoint_says_how_it_is_run(trained, part):
    settings = AgentSettings.load(trained / part)
    assert {name: getattr(settings, name) for name in EXPECTED} == EXPECTED
    assert settings.tools == [get_json_schema(search), get_json_schema(look)]
    assert settings.eos_token_ids == [byte_tokenizer().eos_token_id]
    assert "“well”" in (trained / part / "agent.json").read_text(encoding="utf-8")  # people read it, too


def test_an_agent_takes_its_settings_from_the_checkpoint(trained):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agent = MemoryAgent(str(trained / "checkpoint-2"), [search, look], dtype="float32", device="cpu")
    assert agent.engine.settings == AgentSettings.load(trained / "checkpoint-2")
    loop = agent.engine._loop
    assert (loop.context_turns, loop.max_turns, loop.max_turn_length) == (2, 5, 9)
    assert (loop.max_completion_length, loop.eos_token_ids) == (5 * (9 + 33), [byte_tokenizer().eos_token_id])
    assert sorted(agent.engine._tools) == ["look", "search"]
    opening = agent.engine.tokenizer.decode(
        agent.engine._opening(build_prompt("Who?", agent.engine.settings.system_prompt))
    )
    assert "Search “well”." in opening and '"name": "look"' in opening
    answer = agent.run("Who?")
    assert 1 <= len(answer.turns) <= 5
    assert all(turn.completion_tokens <= 9 for turn in answer.turns)
    changed = MemoryAgent(str(trained), [search, look], dtype="float32", device="cpu", max_turns=3, system_prompt="")
    assert changed.engine.settings == dataclasses.replace(
        AgentSettings.load(trained), max_turns=3, system_prompt="", max_completion_length=None
    )


def test_the_system_prompt_of_conversations(tmp_path):
    """Of data with prompts of their own, it is what their first row says."""
    rows = [{"prompt": build_prompt("Where?", "Own."), "answers": ["Paris"]}] * 2
    train(tmp_path / "own", rows=rows, system_prompt=None, max_steps=1)
    assert AgentSettings.load(tmp_path / "own" / "checkpoint-1").system_prompt == "Own."
    rows = [{"prompt": build_prompt("Where?", ""), "answers": ["Paris"]}] * 2
    train(tmp_path / "none", rows=rows, system_prompt=None, max_steps=1)
    assert AgentSettings.load(tmp_path / "none" / "checkpoint-1").system_prompt == ""
    train(tmp_path / "default", system_prompt=None, max_steps=1)
    assert AgentSettings.load(tmp_path / "default" / "checkpoint-1").system_prompt == DEFAULT_SYSTEM_PROMPT


def other_parameters():
    def search(query_list: list[str]) -> str:
        """Search the corpus.

        Args:
            query_list: What to look for.

        Returns:
            Passages.
        """
        return ""

    return search


def other_description():
    def search(query: str) -> str:
        """Search the web.

        Args:
            query: What to look for.

        Returns:
            Passages.
        """
        return ""

    return search


def renamed():
    def find(query: str) -> str:
        """Search the corpus.

        Args:
            query: What to look for.

        Returns:
            Passages.
        """
        return ""

    return find


OTHER_TOOLS = {
    "parameters": (lambda: [other_parameters(), look], "'search' differs in its parameters"),
    "description": (lambda: [other_description(), look], "'search' differs in its description"),
    "name": (lambda: [renamed(), look], "'search' is missing, 'find' is a name that it does not know"),
    "one less": (lambda: [search], "'look' is missing"),
    "none": (lambda: None, "'search' is missing, 'look' is missing"),
}


@pytest.mark.parametrize("name", OTHER_TOOLS)
def test_other_tools_than_in_training_are_a_warning(trained, name):
    tools, difference = OTHER_TOOLS[name]
    with pytest.warns(UserWarning, match="The tools are not those") as warned:
        MemoryAgent(str(trained / "checkpoint-2"), tools(), dtype="float32", device="cpu")
    assert [str(warning.message) for warning in warned] == [
        f"The tools are not those that the agent was trained with: {difference}."
    ]


def test_it_is_one_warning_behind_a_server_too(trained):
    model, tokenizer = tiny_llama(byte_tokenizer()), byte_tokenizer()
    with OpenAIStandIn(ModelReply(model, tokenizer)) as server:
        with pytest.warns(UserWarning, match="'look' is missing") as warned:
            MemoryAgent("model", [search], endpoint=server.url, tokenizer=str(trained))
    assert len(warned) == 1


def test_where_no_tools_are_recorded_nothing_is_said(trained, tmp_path):
    for part in (tiny_llama(byte_tokenizer()), byte_tokenizer()):
        part.save_pretrained(tmp_path)
    for content in (None, AgentSettings(max_turns=2)):
        if content is not None:
            content.save(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            MemoryAgent(str(tmp_path), [search], dtype="float32", device="cpu")


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"max_turns": 3}', '{"format": 2}', '{"format": 1, "unknown": 3}', '{"format": 1, "max_turns": "3"}'],
)
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "agent.json").write_text(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}/agent.json cannot be read .*restore it, or remove it"):
        AgentSettings.load(tmp_path)


def test_what_is_saved_comes_back(tmp_path):
    settings = AgentSettings(eos_token_ids=[3], max_turns=2, chat_template_kwargs={"a": [1]}, tools=[{"b": "é"}])
    settings.save(tmp_path)
    assert AgentSettings.load(tmp_path) == settings
    assert json.loads((tmp_path / "agent.json").read_text(encoding="utf-8"))["format"] == 1

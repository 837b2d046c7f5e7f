"""Settings that cannot be trained with are refused when the configuration is made."""

import configparser
import dataclasses
import re
from importlib.metadata import version
from pathlib import Path

import pytest

import mempo_trl._compat
from mempo_trl import MemPOConfig


def make(path, **settings):
    return MemPOConfig(output_dir=str(path), use_cpu=True, bf16=False, **settings)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"context_turns": 0}, "context_turns=0.*at least 1"),
        ({"max_turns": 0}, "max_turns=0.*at least 1"),
        ({"max_turn_length": 0}, "max_turn_length=0"),
        ({"max_observation_length": -1}, "max_observation_length=-1"),
        ({"max_completion_length": 0}, "max_completion_length=0"),
        ({"max_malformed_turns": 0}, "max_malformed_turns=0"),
        ({"max_unavailable_turns": 0}, "max_unavailable_turns=0"),
        ({"tool_timeout": 0}, "tool_timeout=0"),
        ({"memory_coefficient": -0.1}, "memory_coefficient=-0.1.*0 or more"),
        ({"memory_coefficient": float("nan")}, "memory_coefficient=nan"),
        ({"memory_baseline": "full"}, "memory_baseline='full'.*'context', 'history', 'previous_memory', 'none'"),
        ({"memory_filter": "both"}, "memory_filter='both'.*'none', 'independent', 'joint', 'either'"),
        ({"memory_filter_threshold": 1.0}, "memory_filter_threshold=1.0"),
        ({"memory_scale": "rows"}, "memory_scale='rows'.*'group', 'turn', 'batch', 'none'"),
        ({"memory_std_floor": 0.0}, "memory_std_floor=0.0"),
        ({"max_turns": "3"}, "max_turns='3'"),
        ({"max_turns": 2.5}, "max_turns=2.5"),
        ({"max_turns": None}, "max_turns=None"),
        ({"max_tool_calling_iterations": -1}, "max_tool_calling_iterations=-1.*at least 0"),
        ({"tool_timeout": float("inf")}, "tool_timeout=inf"),
        ({"tool_timeout": "5"}, "tool_timeout='5'"),
        ({"memory_coefficient": "1"}, "memory_coefficient='1'"),
        ({"answer_preamble": None}, "answer_preamble=None"),
        ({"system_prompt": 5}, "system_prompt=5"),
        ({"prefix_tree_form": "dense"}, "prefix_tree_form='dense'"),
        ({"num_generations": 1}, "at least 2 generations"),
    ],
    ids=str,
)
def test_bad_settings(tmp_path, setting, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **setting)


def test_the_completion_holds_all_turns_by_default(tmp_path):
    config = make(tmp_path, max_turns=3, max_turn_length=10, max_observation_length=5)
    assert config.max_completion_length == 45
    assert make(tmp_path, max_completion_length=7).max_completion_length == 7


def test_the_floor_follows_the_precision(tmp_path):
    assert make(tmp_path).memory_std_floor == 1e-6
    half = MemPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=True)
    assert half.memory_std_floor == 1e-3
    assert make(tmp_path, memory_std_floor=0.1).memory_std_floor == 0.1


def test_every_setting_is_documented():
    from trl import GRPOConfig

    inherited = {field.name for field in dataclasses.fields(GRPOConfig)}
    own = [field for field in dataclasses.fields(MemPOConfig) if field.name not in inherited]
    assert len(own) >= 14
    for field in own:
        assert f"        {field.name} (`" in MemPOConfig.__doc__
        assert field.metadata["help"]


@pytest.mark.parametrize("installed", ["1.15.0", "1.17.0", "2.0.0"])
def test_another_trl_is_refused_in_a_sentence(monkeypatch, installed):
    monkeypatch.setattr(mempo_trl._compat, "version", lambda name: installed)
    with pytest.raises(ImportError, match=rf">=1.16,<1.17, but trl {re.escape(installed)} is installed"):
        mempo_trl._compat.check_trl_version()


def test_the_pin_is_the_same_everywhere():
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parent.parent / "setup.cfg")
    assert f"trl{mempo_trl._compat.TRL_VERSIONS}" in setup["options"]["install_requires"].split("\n")
    assert setup["metadata"]["version"] == mempo_trl.__version__ == version("mempo_trl")

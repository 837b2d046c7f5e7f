"""What docs/scaling.md shows is what the code gives."""

import re
import sys
from pathlib import Path

import pytest
from transformers import Qwen2Config


ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import write_scaling
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return write_scaling


def test_the_tables_are_up_to_date(script):
    text = script.PATH.read_text(encoding="utf-8")
    assert script.written(text) == text, "run `python benchmarks/write_scaling.py`"


def test_the_models_have_their_published_sizes(script):
    # Billions of parameters, as the model cards of Qwen2.5 give them.
    published = {"0.5B": 0.49, "1.5B": 1.54, "3B": 3.09, "7B": 7.61, "14B": 14.7, "32B": 32.5}
    for name, shape in script.shapes().items():
        assert shape.parameters / 1e9 == pytest.approx(published[name], rel=0.01), name


def test_the_page_says_what_the_table_was_made_with(script):
    text = script.PATH.read_text(encoding="utf-8")
    for shown in (
        f"{script.TOKENS:,} tokens",
        f"rank {script.RANK}",
        f"{script.GPUS} GPUs",
        f"{100 * script.SHARE:.0f} %",
    ):
        assert shown in text


def test_the_python_example_runs(script, monkeypatch, capsys):
    text = script.PATH.read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    config = Qwen2Config(num_hidden_layers=2, hidden_size=64, intermediate_size=128)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda name: config)
    exec(compile(example, "scaling.md", "exec"), {})
    assert "GiB" in capsys.readouterr().out


def test_the_launch_files_exist():
    named = re.findall(r"accelerate_configs/(\w+)\.yaml", (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8"))
    for name in {*named, "cpu", "multi_gpu", "zero2", "zero3", "zero3_offload", "fsdp2"} - {"X"}:
        assert (ROOT / "accelerate_configs" / f"{name}.yaml").exists(), name

"""What the README shows must run."""

import json
import re
from pathlib import Path

from support import SMOLLM2_TEMPLATE, byte_tokenizer, tiny_llama

from mempo_trl import MemPOConfig


README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contents = ['"Dune"\nA novel by Frank Herbert.', '"Emma"\nA novel by Jane Austen.']
    lines = [json.dumps({"id": n, "contents": text}) for n, text in enumerate(contents)]
    Path("corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")
    tokenizer = byte_tokenizer(SMOLLM2_TEMPLATE)
    for part in (tiny_llama(tokenizer), tokenizer):
        part.save_pretrained("model")
    example = re.search(r"## In Python\n\n```python\n(.*?)```", README, re.DOTALL).group(1)
    assert len(example.splitlines()) <= 25
    for shown, used in (
        ('"Qwen/Qwen2.5-1.5B-Instruct"', '"model"'),
        ("num_generations=8", 'num_generations=8, use_cpu=True, bf16=False, report_to="none", max_steps=1'),
        ("per_device_train_batch_size=8", "per_device_train_batch_size=8, max_turn_length=8"),
    ):
        assert shown in example
        example = example.replace(shown, used)
    exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "outputs" / "model.safetensors").exists()
    agent = re.search(r"## From your questions.*?```python\n(.*?)```", README, re.DOTALL).group(1)
    exec(compile(agent, "README.md", "exec"), {})  # what was trained is run, with the index that was built


def test_the_table_of_options_is_complete_and_right(tmp_path):
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", README, re.MULTILINE))
    config = MemPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    assert sorted(rows) == sorted(vars(MemPOConfig)["__annotations__"])
    for name, shown in rows.items():
        if name in ("max_completion_length", "system_prompt", "answer_preamble", "memory_std_floor"):
            continue
        value = getattr(config, name)
        written = shown.strip("`").strip('"')
        assert written == str(value) if not isinstance(value, float) else float(written) == value, name

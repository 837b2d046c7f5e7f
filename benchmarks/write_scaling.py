"""Put what `mempo_trl.memory_estimate` gives for the Qwen2.5 models into the tables of docs/scaling.md.

    python benchmarks/write_scaling.py

Needs no GPU, no weights and no network. A table stands between `<!-- name -->` and `<!-- end -->`; nothing else is
touched.
"""

import re
from typing import Any

from transformers import Qwen2Config
from write_docs import DOCS, table

from mempo_trl.memory_estimate import GIB, ModelShape, model_shape, training_memory


PATH = DOCS / "scaling.md"

# Hidden, intermediate, layers, heads, key heads, vocabulary; embeddings are tied up to 3B.
QWEN = {
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "3B": (2048, 11008, 36, 16, 2, 151936),
    "7B": (3584, 18944, 28, 28, 4, 152064),
    "14B": (5120, 13824, 48, 40, 8, 152064),
    "32B": (5120, 27648, 64, 40, 8, 152064),
}
TIED = ("0.5B", "1.5B", "3B")
GPUS, TOKENS, RANK = 8, 16384, 32
ENGINES: dict[str, dict[str, Any]] = {
    "LoRA, one GPU": {"engine": "ddp", "processes": 1, "lora_rank": RANK, "dtype": "bfloat16"},
    "DDP": {"engine": "ddp", "processes": GPUS},
    "ZeRO-2": {"engine": "zero2", "processes": GPUS},
    "ZeRO-3": {"engine": "zero3", "processes": GPUS},
    "ZeRO-3 offload": {"engine": "zero3", "processes": GPUS, "offload": True},
    "FSDP2": {"engine": "fsdp2", "processes": GPUS},
}
SIZES = (24, 40, 80, 141)  # GPUs as they are sold
SHARE = 0.9  # the rest is for what the estimate leaves out


def shapes() -> dict[str, ModelShape]:
    """The Qwen2.5 models."""
    return {
        name: model_shape(
            Qwen2Config(
                hidden_size=hidden,
                intermediate_size=intermediate,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=key_heads,
                vocab_size=vocabulary,
                tie_word_embeddings=name in TIED,
            )
        )
        for name, (hidden, intermediate, layers, heads, key_heads, vocabulary) in QWEN.items()
    }


def fit(peak: int) -> str:
    """GiB, and the smallest GPU that holds it."""
    holds = [size for size in SIZES if peak <= SHARE * size * GIB]
    return f"{peak / GIB:.1f} → {holds[0] if holds else '—'}"


def memory() -> str:
    """GiB on each GPU for each model and engine."""
    columns = {"model": lambda name, shape: name} | {
        engine: lambda name, shape, options=options: fit(training_memory(shape, tokens=TOKENS, **options).peak)
        for engine, options in ENGINES.items()
    }
    return table(columns, list(shapes().items()))


def other() -> str:
    """What else has to be known of each model, in GiB."""
    columns = {
        "model": lambda name, shape: name,
        "parameters": lambda name, shape: f"{shape.parameters:,}",
        "whole weights in bf16": lambda name, shape: f"{2 * shape.parameters / GIB:.1f}",
        "host memory of ZeRO-3 offload": lambda name, shape: (
            f"{GPUS * training_memory(shape, tokens=TOKENS, **ENGINES['ZeRO-3 offload']).host / GIB:.0f}"
        ),
        "reference model, ZeRO-3": lambda name, shape: (
            f"{training_memory(shape, tokens=TOKENS, reference=True, **ENGINES['ZeRO-3']).reference / GIB:.1f}"
        ),
        f"activations of {TOKENS:,} tokens": lambda name, shape: (
            f"{training_memory(shape, tokens=TOKENS, **ENGINES['ZeRO-3']).activations / GIB:.1f}"
        ),
        "the same without gradient checkpointing": lambda name, shape: f"{_without_checkpointing(shape) / GIB:.1f}",
    }
    return table(columns, list(shapes().items()))


def _without_checkpointing(shape: ModelShape) -> int:
    return training_memory(shape, tokens=TOKENS, gradient_checkpointing=False, **ENGINES["ZeRO-3"]).activations


def written(text: str) -> str:
    """The page with its tables as the function gives them now."""
    for make in (memory, other):
        marker = re.compile(rf"(<!-- {make.__name__} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert marker.search(text), f"{PATH} has no place for {make.__name__}"
        shown = make()
        text = marker.sub(lambda match, shown=shown: f"{match[1]}\n{shown}\n\n{match[2]}", text)
    return text


if __name__ == "__main__":
    PATH.write_text(written(PATH.read_text(encoding="utf-8")), encoding="utf-8")

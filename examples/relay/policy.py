"""A policy small enough to train on a laptop: its tokenizer, its model, and its cold start on expert traces.

The world of `mempo_trl.data.RelayWorld` has a closed vocabulary, so every word is one token and a Llama of half a
million parameters, trained from scratch, can follow the protocol after a few minutes of supervised fine-tuning. The
experts that it imitates lose facts, hence so does the policy: that is what reinforcement learning then mends.
"""

import hashlib
import json
import math
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from mempo_trl.chat_templates import ObservationRenderer
from mempo_trl.data import RelayWorld, expert_trace
from mempo_trl.data.relay import vocabulary
from mempo_trl.protocol import build_prompt
from mempo_trl.search import Document


# What an expert writes between its last memory and its answer.
ANSWER_PREAMBLE = "<think>answer</think><answer>"
SYSTEM_PROMPT = "search and remember"
MAX_OBSERVATION_LENGTH = 64

# ChatML as Qwen2.5 writes it, tool calls and tool results included. The tools' schemas are left out: this policy knows
# its one tool from its cold start, and short prompts make the demo fast.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CHAT_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = [f"<{slash}{name}>" for name in ("mem", "think", "tool_call", "answer", "tool_response") for slash in ("", "/")]
# Pieces of the protocol that never vary are one token each, which makes turns a third shorter.
PHRASES = ['{"name": "search", "arguments": {"query": "', '"}}', "Doc 1 (Title: ", ")\n"]
PHRASES += [" works for ", " lives in ", " was trained by "]


def build_tokenizer(max_words: int | None = None) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of the relay world, with single bytes for all other text: decoding inverts encoding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*PHRASES, *(form for word in vocabulary(max_words) for form in (word, f" {word}")), " ;", " 1", " (", "):"]
    words += [" of ", " for ", " in ", " by ", " up ", " elected ", ": ", ". ", " ; "]
    words += [" user", "user", "assistant", "system", "and", " and", "remember", " remember"]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = [to_bytes.pre_tokenize_str(word)[0][0] for word in words]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*alphabet, *tokens]))}

    # A BPE without merges: a word of the vocabulary is taken whole (`ignore_merges`), any other falls into its bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    phrases = "|".join(re.escape(phrase) for phrase in PHRASES)
    # The space before a two-word name belongs to what precedes it: wherever a name stands, it is the same two tokens.
    space = r"(?: (?=\p{Lu}\p{Ll}+ \p{Lu}))?"
    pattern = Regex(rf"{phrases}| ?\p{{L}}+{space}| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]{space}|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CHAT_TOKENS])
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class ColdStart:
    """Everything that determines a cold-started policy.

    Attributes:
        context_turns: earlier turns that a turn sees beside the prompt; `None` for all of them.
        objectives: people that a question asks for.
        memory_loss: share of the facts that the experts' memories lack.
        max_words: words that first and second names are made of.
        worlds, questions: expert traces come from that many worlds of so many questions.
        first_seed: seed of the first of these worlds.
        layers, width, heads: size of the model.
        steps, batch, learning_rate: of the supervised fine-tuning. A batch is counted in turns.
        seed: of everything that is random here.
    """

    context_turns: int | None = 1
    objectives: int = 2
    memory_loss: float = 0.5
    max_words: int = 24
    worlds: int = 12
    questions: int = 150
    first_seed: int = 8
    layers: int = 2
    width: int = 128
    heads: int = 4
    steps: int = 600
    batch: int = 64
    learning_rate: float = 3e-3
    seed: int = 0

    def world(self, seed: int, questions: int) -> RelayWorld:
        """A world of the kind that this policy knows."""
        return RelayWorld(seed, questions, self.objectives, hops=1, relations=["employer"], max_words=self.max_words)


def load_or_train(settings: ColdStart, cache: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Take the cold-started policy from the cache, or train it and put it there.

    Args:
        settings: what determines it. Anything else than the very same settings is trained anew.
        cache: folder of all cached policies.
    """
    source = Path(__file__).read_text(encoding="utf-8")
    key = json.dumps([asdict(settings), source, transformers.__version__, torch.__version__])
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:16]
    if (folder / "complete").exists():
        return LlamaForCausalLM.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = build_tokenizer(settings.max_words)
    model = train(settings, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "complete").touch()
    return model, tokenizer


def train(settings: ColdStart, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Fine-tune a fresh model on expert traces, with the loss on the policy's own tokens alone."""
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.width,
        intermediate_size=3 * settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.1,  # a small model that has to copy names learns faster from larger weights
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    turns = expert_turns(settings, tokenizer, rng)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / 50) * (0.03 + 0.485 * (1 + math.cos(math.pi * step / settings.steps))),
    )
    progress = tqdm(range(settings.steps), desc="Cold start", unit="step")
    for _ in progress:
        batch = rng.sample(turns, settings.batch)
        ids = pad_sequence([torch.tensor(context + turn) for context, turn in batch], True, tokenizer.pad_token_id)
        labels = pad_sequence([torch.tensor([-100] * len(context) + turn) for context, turn in batch], True, -100)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        scored = labels[:, 1:] != -100
        loss = F.cross_entropy(model.lm_head(hidden[scored]), labels[:, 1:][scored])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    return model


def expert_turns(
    settings: ColdStart, tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> list[tuple[list[int], list[int]]]:
    """Turns of expert traces as `(context, turn)` in token ids, put together as `MemPOTrainer` puts its rollouts."""
    renderer = ObservationRenderer(tokenizer, [tokenizer.eos_token_id], MAX_OBSERVATION_LENGTH)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    turns = []
    for seed in range(settings.first_seed, settings.first_seed + settings.worlds):
        world = settings.world(seed, settings.questions)
        documents = {d.title: d for d in (Document(**document) for document in world.documents)}

        def look_up(query: str, documents: dict[str, Document] = documents) -> str:
            # What BM25 search answers: the one document with that title. Building an index for it would take longer.
            return f"Doc 1 (Title: {query})\n{documents[query].text}"

        for question in world.questions:
            messages = build_prompt(question.question, SYSTEM_PROMPT)
            prompt = encode(str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)))
            seen: list[list[int]] = []
            for message in expert_trace(question, look_up, settings.memory_loss, rng):
                if message["role"] == "assistant":
                    turn = [*encode(message["content"]), tokenizer.eos_token_id]
                    window = seen if settings.context_turns is None else seen[-settings.context_turns :]
                    turns.append((prompt + [i for part in window for i in part], turn))
                else:
                    seen.append(turn + renderer.suffix_ids([message], turn))
            # How memories are judged: an answer from the question and the memory alone.
            memory, closed, rest = message["content"].partition("</mem>")
            turns.append((prompt + encode(memory + closed), [*encode(rest), tokenizer.eos_token_id]))
    return turns

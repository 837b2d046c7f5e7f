"""Configuration of `MemPOTrainer`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trl import GRPOConfig

from .memory_reward import DEFAULT_ANSWER_PREAMBLE
from .prefix_tree import Form


_A_YEAR = 365 * 24 * 3600

MemoryBaseline = Literal["context", "history", "previous_memory", "none"]
MemoryFilter = Literal["none", "independent", "joint", "either"]
MemoryScale = Literal["group", "turn", "batch", "none"]


@dataclass
class MemPOConfig(GRPOConfig):
    # docstyle-ignore
    r"""
    Configuration class for the [`MemPOTrainer`].

    This class includes only the parameters that are specific to MemPO training. For a full list of training arguments,
    see [`~transformers.TrainingArguments`] and [`~trl.GRPOConfig`]. Two defaults differ from theirs:
    `max_completion_length` and the meaning of `max_tool_calling_iterations`, see below.

    Parameters:
        > Parameters that control the rollout

        context_turns (`int`, *optional*):
            Number of earlier turns, with their observations, that a turn sees beside the prompt, in training as at
            inference: with `1` the memory is the only bridge from one turn to the next but one. `None` shows all of
            them.
        max_turns (`int`, *optional*, defaults to `16`):
            Turns in a rollout. `max_tool_calling_iterations=n`, if set, allows at most `n + 1` turns.
        max_turn_length (`int`, *optional*, defaults to `512`):
            Tokens sampled in one turn.
        max_observation_length (`int`, *optional*, defaults to `512`):
            Tokens of observation text in one turn, all tool results together. Longer results are cut and end in a
            visible mark.
        max_completion_length (`int`, *optional*):
            Tokens of all turns and observations of a rollout together. If not set,
            `max_turns * (max_turn_length + max_observation_length)`.
        tool_timeout (`float`, *optional*, defaults to `60.0`):
            Seconds that a tool call may take, before it is interrupted and answered with an error. `None` waits for
            ever.
        max_malformed_turns (`int`, *optional*):
            Turns in a row whose tool calls are all malformed, after which a rollout stops. `None` never stops for that.
        max_unavailable_turns (`int`, *optional*, defaults to `10`):
            Turns in a row, of all rollouts of a process together, in which none of a tool's calls reached it
            (`ConnectionError`, `TimeoutError`), after which training stops with an error, on every process. Until then
            the model reads that the tool is not available. `None` never stops for that.
        system_prompt (`str`, *optional*):
            System message of prompts made from a `question` column. `None` takes
            `mempo_trl.protocol.DEFAULT_SYSTEM_PROMPT`, an empty string makes no system message. A `prompt` column is
            used as it is.

        > Parameters that control the memory reward

        memory_coefficient (`float`, *optional*, defaults to `1.0`):
            Weight of the memory advantage A_M beside the outcome advantage, on the tokens of a memory. `0.0` computes
            no memory rewards at all: then the trainer is GRPO with MemPO's rollouts.
        memory_baseline (`str`, *optional*, defaults to `"context"`):
            What P(answer | memory) is compared with: `"context"`, what the policy saw before it wrote the memory;
            `"history"`, everything before the turn (the same if `context_turns` is `None`); `"previous_memory"`, the
            memory before, or the bare prompt before the first one; `"none"`, nothing.
        memory_filter (`str`, *optional*, defaults to `"none"`):
            Which tokens of the answer count. `"none"`: all (the paper). `"independent"`: on each side those with a
            probability over the threshold (the reference implementation; a memory that makes no token probable then
            scores 1). `"joint"`: those over it on both sides (a memory that lost the answer goes unpunished).
            `"either"`: those over it on at least one side.
        memory_filter_threshold (`float`, *optional*, defaults to `0.5`):
            Threshold of the filter, a probability.
        memory_scale (`str`, *optional*, defaults to `"group"`):
            What memory rewards are standardised over: `"group"`, all memories of a question; `"turn"`, those of a
            question in the same turn; `"batch"`, all; `"none"`, as `"group"` but only the mean is subtracted.
        memory_std_floor (`float`, *optional*):
            Pools of memory rewards with a standard deviation below it are noise and get no memory advantage. If not
            set, `1e-3` in half precision (`bf16`, which is TRL's default, or `fp16`) and `1e-6` in single precision.
        answer_preamble (`str`, *optional*):
            Text before the answer, when its probability is computed.

        > Parameters that control the packed forward

        prefix_tree_form (`str`, *optional*, defaults to `"auto"`):
            How sequences that share prefixes are run: `"packed"`, each distinct token once, with a mask; `"unrolled"`,
            one padded row each, which any model can do; `"auto"` packs if the model can.
        max_tokens_per_forward (`int`, *optional*):
            Tokens in one forward of memory scores, and of a windowed policy: rollouts that would exceed it are split.
            `None` scores the memories of a rollout in one forward, and a micro-batch of a windowed policy in one.
    """

    max_completion_length: int | None = field(
        default=None,
        metadata={"help": "Tokens of all turns and observations of a rollout together."},
    )

    context_turns: int | None = field(
        default=None,
        metadata={"help": "Earlier turns that a turn sees beside the prompt; all of them if not set."},
    )
    max_turns: int = field(default=16, metadata={"help": "Turns in a rollout."})
    max_turn_length: int = field(default=512, metadata={"help": "Tokens sampled in one turn."})
    max_observation_length: int = field(
        default=512, metadata={"help": "Tokens of observation text in one turn, all tool results together."}
    )
    tool_timeout: float | None = field(
        default=60.0, metadata={"help": "Seconds that a tool call may take; not set: no limit."}
    )
    max_malformed_turns: int | None = field(
        default=None,
        metadata={"help": "Turns in a row with malformed tool calls alone, after which a rollout stops."},
    )
    max_unavailable_turns: int | None = field(
        default=10,
        metadata={"help": "Turns in a row in which a tool could not be reached, after which training stops."},
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "System message of prompts made from a `question` column."}
    )

    memory_coefficient: float = field(default=1.0, metadata={"help": "Weight of the memory advantage."})
    memory_baseline: str = field(
        default="context",
        metadata={"help": "What a memory is compared with.", "choices": list(get_args(MemoryBaseline))},
    )
    memory_filter: str = field(
        default="none",
        metadata={"help": "Which tokens of the answer count.", "choices": list(get_args(MemoryFilter))},
    )
    memory_filter_threshold: float = field(default=0.5, metadata={"help": "Threshold of the filter, a probability."})
    memory_scale: str = field(
        default="group",
        metadata={"help": "What memory rewards are standardised over.", "choices": list(get_args(MemoryScale))},
    )
    memory_std_floor: float | None = field(
        default=None, metadata={"help": "Standard deviation under which a pool gets no memory advantage."}
    )
    answer_preamble: str = field(
        default=DEFAULT_ANSWER_PREAMBLE,
        metadata={"help": "Text before the answer, when its probability is computed."},
    )
    prefix_tree_form: str = field(
        default="auto",
        metadata={"help": "How sequences that share prefixes are run.", "choices": list(get_args(Form))},
    )
    max_tokens_per_forward: int | None = field(
        default=None, metadata={"help": "Tokens in one forward of memory scores, and of a windowed policy."}
    )

    def __post_init__(self):
        for name in ("max_turns", "max_turn_length", "max_observation_length"):
            _check(self, name, _is_count, "a whole number, at least 1")
        for name in (
            "context_turns",
            "max_completion_length",
            "max_malformed_turns",
            "max_unavailable_turns",
            "max_tokens_per_forward",
        ):
            _check(self, name, lambda value: value is None or _is_count(value), "a whole number, at least 1, or None")
        _check(
            self,
            "max_tool_calling_iterations",
            lambda value: value is None or value == 0 or _is_count(value),
            "a whole number, at least 0, or None",
        )
        _check(
            self,
            "tool_timeout",
            lambda seconds: seconds is None or 0 < seconds <= _A_YEAR,
            "a number of seconds, more than 0 and at most a year, or None for no limit",
        )
        _check(self, "memory_coefficient", lambda value: 0 <= value < math.inf, "0 or more, and finite")
        _check(self, "memory_filter_threshold", lambda value: 0 <= value < 1, "a probability, 0 <= p < 1")
        _check(self, "memory_std_floor", lambda value: value is None or 0 < value < math.inf, "more than 0, or None")
        _check(self, "answer_preamble", lambda value: isinstance(value, str), "text")
        _check(self, "system_prompt", lambda value: value is None or isinstance(value, str), "text, or None")
        for name, choices in (
            ("memory_baseline", get_args(MemoryBaseline)),
            ("memory_filter", get_args(MemoryFilter)),
            ("memory_scale", get_args(MemoryScale)),
            ("prefix_tree_form", get_args(Form)),
        ):
            _check(self, name, choices.__contains__, f"one of {', '.join(map(repr, choices))}")
        if self.max_completion_length is None:
            self.max_completion_length = self.max_turns * (self.max_turn_length + self.max_observation_length)
        super().__post_init__()
        if self.memory_std_floor is None:
            self.memory_std_floor = 1e-3 if self.bf16 or self.fp16 else 1e-6


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check(config: MemPOConfig, name: str, holds: Callable[[Any], bool], wanted: str) -> None:
    value = getattr(config, name)
    try:
        allowed = holds(value)
    except TypeError:
        allowed = False
    if not allowed:
        raise ValueError(f"`{name}={value!r}` is not allowed: it must be {wanted}.")

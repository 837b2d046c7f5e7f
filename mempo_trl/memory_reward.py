"""How much a memory tells: the probability of the right answer given the question and the memory alone.

    target   = preamble + gold + "\\n</answer>"
    P(x)     = exp(mean over the gold's tokens of log p(token | x, target so far))
    R_M      = P(prompt + turn up to </mem>) − P(baseline)

after MemPO, https://huggingface.co/papers/2603.00680.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .prefix_tree import Branch
from .protocol import MEMORY_TAGS, encode_piece, find_span
from .rollout import Trajectory


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DEFAULT_ANSWER_PREAMBLE = "\n<think>\nI have sufficient information to provide the final answers.\n</think>\n<answer>\n"
ANSWER_CLOSING = "\n</answer>"
ANSWER_SEPARATOR = " ; "


@dataclass(frozen=True)
class AnswerTarget:
    """The text whose probability judges a memory.

    Attributes:
        ids: token ids of preamble, gold and closing tag.
        gold_mask: True on the tokens of the gold.
    """

    ids: list[int]
    gold_mask: list[bool]

    def after(self, context: list[int]) -> Branch:
        """The target as the continuation of a context, its gold scored at temperature 1."""
        first = self.gold_mask.index(True)
        start, end = len(context) + first, len(context) + first + sum(self.gold_mask)
        return Branch(context + self.ids, start, end, unit_temperature=True)


@dataclass(frozen=True)
class MemoryBranches:
    """What scores the memory of one turn.

    Attributes:
        turn: index of the turn, from 0.
        span: first and one past the last token of the memory in the completion.
        memory: context that ends with the memory.
        baseline: context that the memory is compared with; `None` for the baseline "none".
    """

    turn: int
    span: tuple[int, int]
    memory: list[int]
    baseline: list[int] | None


def gold_answer(answers: list) -> str:
    """The first accepted answer of each objective, joined with " ; ".

    Args:
        answers: accepted answers of one objective, `list[str]`, or of several, `list[list[str]]`.
    """
    objectives = [answers] if isinstance(answers[0], str) else answers
    return ANSWER_SEPARATOR.join(accepted[0] for accepted in objectives)


def build_answer_target(
    tokenizer: "PreTrainedTokenizerBase", answers: list, preamble: str = DEFAULT_ANSWER_PREAMBLE
) -> AnswerTarget:
    """Encode the answer that a good memory makes probable.

    The gold's tokens are found by character offsets, so that neither the tokenizer nor the answer's last character
    shifts them: a token that straddles an end of the gold ("." and a newline are one token in Qwen's vocabulary) counts
    as the gold's.

    Args:
        tokenizer: the policy's tokenizer.
        answers: accepted answers of one objective, `list[str]`, or of several, `list[list[str]]`.
        preamble: text before the gold.

    Raises:
        ValueError: if the gold has no tokens.
    """
    gold = gold_answer(answers)
    text = preamble + gold + ANSWER_CLOSING
    start, end = len(preamble), len(preamble) + len(gold)
    ids, offsets = encode_piece(tokenizer, text)
    if offsets is not None:
        gold_mask = [first < end and last > start for first, last in offsets]
    else:
        # What is decoded before a token tells where it stands. It does not grow with each byte of a character.
        before = [str(tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False)) for n in range(len(ids) + 1)]
        gold_mask = [
            (before[n].startswith(preamble) or before[n + 1].startswith(preamble + gold[:1]))
            and not before[n].startswith(preamble + gold)
            for n in range(len(ids))
        ]
    if not any(gold_mask):
        raise ValueError(f"The answer {gold!r} has no tokens: remove it from the column `answers`.")
    # A token inside that covers no character, as a tokenizer may have for a piece of one, is the gold's too.
    first, last = gold_mask.index(True), len(gold_mask) - gold_mask[::-1].index(True)
    return AnswerTarget(ids, [first <= n < last for n in range(len(ids))])


def memory_branches(
    tokenizer: "PreTrainedTokenizerBase", trajectory: Trajectory, baseline: str = "context", room: int | None = None
) -> list[MemoryBranches]:
    """The sequences that score the memories of a rollout.

    A memory is scored in every turn but the first whose `<mem>` is closed. A turn that was cut inside `<mem>` has none.

    Args:
        tokenizer: the policy's tokenizer.
        trajectory: the rollout.
        baseline: `"context"`, what the policy saw before it wrote the memory; `"history"`, everything before the turn,
            whether the policy saw it or not; `"previous_memory"`, the latest memory of an earlier turn, or the bare
            prompt if there is none; `"none"`.
        room: tokens that a context may have, so that the target still fits into the model's context. A longer one loses
            what comes first after the prompt. `None` for no limit.
    """
    prompt = trajectory.prompt_ids

    def fit(context: list[int]) -> list[int]:
        if room is None or len(context) <= room:
            return context
        return (prompt + context[len(prompt) + len(context) - room :])[-room:]

    branches: list[MemoryBranches] = []
    previous = prompt
    for index, turn in enumerate(trajectory.turns):
        span = find_span(tokenizer, turn.ids, *MEMORY_TAGS)
        if span is None or turn.cut_inside(MEMORY_TAGS):
            continue
        start, end = span
        memory = prompt + turn.ids[:end]
        if index > 0:
            compared: list[int] | None = previous
            if baseline in ("context", "history"):
                see = trajectory.context_ids if baseline == "context" else trajectory.history_ids
                compared = see(index)
            elif baseline == "none":
                compared = None
            offset = trajectory.turn_start(index)
            branches.append(
                MemoryBranches(
                    index, (offset + start, offset + end), fit(memory), None if compared is None else fit(compared)
                )
            )
        previous = memory
    return branches


def filter_gold(
    logps_memory: torch.Tensor,
    logps_baseline: torch.Tensor | None,
    gold_mask: torch.Tensor,
    mode: str = "none",
    threshold: float = 0.5,
) -> torch.Tensor:
    """Choose the gold tokens that both sides are compared on.

    Args:
        logps_memory: log-probabilities of the target's tokens after the memory, shape (…, tokens).
        logps_baseline: the same after the baseline; `None` if there is none, then only the memory's side counts.
        gold_mask: True on the gold's tokens, shape (tokens,) or (…, tokens).
        mode: `"none"` keeps all; `"joint"` those with p > threshold on both sides; `"either"` on at least one.
            (`"independent"` is not a common choice: see `answer_probability`.)
        threshold: a probability.

    Returns:
        Boolean mask, shape (…, tokens).
    """
    gold_mask = gold_mask.bool().expand_as(logps_memory)
    if mode == "none":
        return gold_mask
    floor = torch.tensor(threshold, dtype=logps_memory.dtype, device=logps_memory.device).log()
    confident = logps_memory > floor
    if logps_baseline is not None:
        other = logps_baseline > floor
        confident = confident & other if mode == "joint" else confident | other
    return gold_mask & confident


def answer_probability(logps: torch.Tensor, gold_mask: torch.Tensor, threshold: float | None = None) -> torch.Tensor:
    """P = exp(mean of log p over the gold's tokens), the geometric mean of their probabilities.

    Args:
        logps: log-probabilities of the target's tokens, shape (…, tokens).
        gold_mask: True on the tokens that count, shape (tokens,) or (…, tokens).
        threshold: if given, the filter `"independent"`: this side keeps its own tokens with p > threshold, and
            P = exp(sum / (count + 1e-8)). Note its flaw: without any such token P = 1, more than any honest memory has.

    Returns:
        Shape (…); without a threshold NaN where no token counts.
    """
    kept = gold_mask.bool().expand_as(logps)
    if threshold is not None:
        kept = kept & (logps > torch.tensor(threshold, dtype=logps.dtype, device=logps.device).log())
    total = torch.where(kept, logps, 0.0).sum(-1)
    count = kept.sum(-1)
    if threshold is not None:
        return (total / (count + 1e-8)).exp()
    return torch.where(count > 0, (total / count.clamp(min=1)).exp(), torch.nan)


def memory_rewards(p_memory: torch.Tensor, p_baseline: torch.Tensor | None = None) -> torch.Tensor:
    """R_M = P(memory) − P(baseline), or P(memory) alone without a baseline.

    NaN, a memory with no token left to judge it by, stays NaN: it is worth 0 and gets no advantage.
    """
    return p_memory if p_baseline is None else p_memory - p_baseline


def score_memories(
    logps_memory: torch.Tensor,
    logps_baseline: torch.Tensor | None,
    gold_mask: torch.Tensor,
    mode: str = "none",
    threshold: float = 0.5,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """P of the memories and of their baselines under a filter.

    Args:
        logps_memory: log-probabilities of the target's tokens after each memory, shape (memories, tokens).
        logps_baseline: the same after each baseline, or `None`.
        gold_mask: True on the gold's tokens, shape (tokens,).
        mode: `"none"`, `"independent"`, `"joint"` or `"either"`.
        threshold: a probability, unused by `"none"`.

    Returns:
        P(memory) and P(baseline), shape (memories,) each, the latter `None` without a baseline.
    """
    own = threshold if mode == "independent" else None
    kept = gold_mask
    if mode != "independent":
        kept = filter_gold(logps_memory, logps_baseline, gold_mask, mode, threshold)
    p_baseline = None if logps_baseline is None else answer_probability(logps_baseline, kept, own)
    return answer_probability(logps_memory, kept, own), p_baseline

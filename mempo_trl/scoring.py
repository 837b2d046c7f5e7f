"""Log-probabilities of one continuation after several contexts, without gradients."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout and the like off in the body, and give every module its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def continuation_logps(
    model: torch.nn.Module, contexts: list[list[int]], continuation: list[int], pad_token_id: int, device: torch.device
) -> torch.Tensor:
    """Log-probabilities of a continuation after each context, at temperature 1, in a single forward.

    The logits are the model's own, not those of TRL's fused head, which are divided by the sampling temperature.

    Args:
        model: causal language model.
        contexts: token ids, none empty.
        continuation: token ids.
        pad_token_id: id to the left of shorter sequences, which nothing attends to.
        device: where the model takes its inputs.

    Returns:
        Shape (contexts, tokens of the continuation), float32.
    """
    sequences = [torch.tensor(context + continuation) for context in contexts]
    # Left padding puts all continuations into the same columns, so that only their logits need be made.
    input_ids = pad_sequence(sequences, batch_first=True, padding_value=pad_token_id, padding_side="left").to(device)
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=device).unsqueeze(1)
    columns = torch.arange(input_ids.size(1), device=device)
    attention_mask = (columns >= input_ids.size(1) - lengths).long()  # (contexts, columns)
    kwargs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    accepted = inspect.signature(model.forward).parameters
    kept = len(continuation) + 1  # a token's logits stand one column before it
    if "position_ids" in accepted:
        kwargs["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)
    if "logits_to_keep" in accepted:
        kwargs["logits_to_keep"] = kept
    logits = model(**kwargs).logits[:, -kept:-1].float()  # (contexts, tokens, vocabulary)
    targets = input_ids[:, -len(continuation) :].unsqueeze(-1)
    return logits.gather(-1, targets).squeeze(-1) - logits.logsumexp(-1)

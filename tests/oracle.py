"""MemPO's advantages, worked out plainly: one sequence at a time, without any of the package's code.

Everything is recomputed from the ids of the rollouts and the texts of the turns.
"""

import math
import statistics

import torch


PREAMBLE = "\n<think>\nI have sufficient information to provide the final answers.\n</think>\n<answer>\n"


def token_pieces_until(tokenizer, ids: list[int], tag: str, begin: int) -> int | None:
    """Number of ids after which the text decoded from `ids[begin:]` first holds `tag`, counted in all ids."""
    for end in range(begin + 1, len(ids) + 1):
        if tag in tokenizer.decode(ids[begin:end]):
            return end
    return None


def memory_span(tokenizer, ids: list[int]) -> tuple[int, int] | None:
    """First and one past the last id of the first closed `<mem>…</mem>`, found by decoding id after id."""
    opened = token_pieces_until(tokenizer, ids, "<mem>", 0)
    if opened is None:
        return None
    begin = opened - 1
    while "<mem>" not in tokenizer.decode(ids[begin:opened]):
        begin -= 1
    for end in range(opened, len(ids) + 1):
        text = tokenizer.decode(ids[begin:end])
        if "</mem>" in text[text.index("<mem>") + 5 :]:
            return begin, end
    return None


def gold_positions(tokenizer, gold: str) -> tuple[list[int], list[int]]:
    """The target's ids, and the positions of those that hold a character of the gold."""
    text = PREAMBLE + gold + "\n</answer>"
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    first, last = len(PREAMBLE), len(PREAMBLE) + len(gold) - 1
    positions = []
    for n, (start, end) in enumerate(encoding["offset_mapping"]):
        if any(first <= character <= last for character in range(start, end)):
            positions.append(n)
    return encoding["input_ids"], positions


def gold_logps(model, context: list[int], target: list[int], positions: list[int]) -> list[float]:
    """Log-probabilities of the gold's ids after a context, from one plain forward at temperature 1."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context + target])).logits[0]
    model.train(was_training)
    logps = torch.log_softmax(logits.float(), dim=-1)
    return [logps[len(context) + n - 1, target[n]].item() for n in positions]


def probability(logps: list[float]) -> float | None:
    return math.exp(sum(logps) / len(logps)) if logps else None


def compare(memory: list[float], baseline: list[float] | None, mode: str, threshold: float) -> float | None:
    """R_M of one memory; None if no token is left."""
    bar = math.log(threshold)
    if mode == "independent":
        own = [x for x in memory if x > bar]
        p = math.exp(sum(own) / (len(own) + 1e-8))
        if baseline is None:
            return p
        other = [x for x in baseline if x > bar]
        return p - math.exp(sum(other) / (len(other) + 1e-8))
    pairs = list(zip(memory, baseline if baseline is not None else memory, strict=True))
    if mode == "joint":
        pairs = [(m, b) for m, b in pairs if m > bar and b > bar]
    elif mode == "either":
        pairs = [(m, b) for m, b in pairs if m > bar or b > bar]
    if not pairs:
        return None
    p = probability([m for m, _ in pairs])
    return p if baseline is None else p - probability([b for _, b in pairs])


def oracle_advantages(
    model,
    tokenizer,
    rollouts: list[dict],
    outcome: list[float],
    group_size: int,
    baseline: str = "context",
    mode: str = "none",
    threshold: float = 0.5,
    scale: str = "group",
    coefficient: float = 1.0,
    context_turns: int | None = None,
) -> list[list[float]]:
    """Token-level advantages of a batch.

    Args:
        rollouts: for each `prompt` (ids), `turns` (ids of each turn), `observations` (ids after each turn but the
            last), `cut` (whether the last turn lacks an end-of-turn token), `gold` (text).
        outcome: A_T of each rollout.
    """
    rewards: dict[tuple[int, int], float | None] = {}
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for row, rollout in enumerate(rollouts):
        target, positions = gold_positions(tokenizer, rollout["gold"])
        context = list(rollout["prompt"])  # everything so far
        blocks: list[list[int]] = []  # turns with their observations
        latest = list(rollout["prompt"])
        for number, turn in enumerate(rollout["turns"]):
            span = memory_span(tokenizer, turn)
            text = tokenizer.decode(turn)
            cut = rollout["cut"] and number == len(rollout["turns"]) - 1
            if span is not None and cut and text.count("<mem>") > text.count("</mem>"):
                span = None
            if span is not None:
                alone = rollout["prompt"] + turn[: span[1]]
                if number > 0:
                    seen = blocks if context_turns is None else blocks[-context_turns:]
                    against = {
                        "context": rollout["prompt"] + [i for block in seen for i in block],
                        "history": context,
                        "previous_memory": latest,
                        "none": None,
                    }[baseline]
                    with_memory = gold_logps(model, alone, target, positions)
                    without = None if against is None else gold_logps(model, against, target, positions)
                    rewards[row, number] = compare(with_memory, without, mode, threshold)
                    offset = len(context) - len(rollout["prompt"])
                    spans[row, number] = (offset + span[0], offset + span[1])
                latest = alone
            context = context + turn
            if number < len(rollout["turns"]) - 1:
                context = context + rollout["observations"][number]
                blocks.append(turn + rollout["observations"][number])

    def pool_of(row: int, number: int):
        return {"group": row // group_size, "none": row // group_size, "turn": (row // group_size, number)}.get(
            scale, 0
        )

    advantages = {}
    for (row, number), reward in rewards.items():
        pool = [
            r for (other, turn), r in rewards.items() if pool_of(other, turn) == pool_of(row, number) and r is not None
        ]
        if reward is None or len(pool) < 2 or statistics.stdev(pool) < 1e-6:
            advantages[row, number] = 0.0
        else:
            centred = reward - statistics.fmean(pool)
            advantages[row, number] = centred if scale == "none" else centred / statistics.stdev(pool)

    result = []
    for row, rollout in enumerate(rollouts):
        length = sum(map(len, rollout["turns"])) + sum(map(len, rollout["observations"]))
        tokens = [outcome[row]] * length
        for (owner, number), (start, end) in spans.items():
            if owner == row:
                for n in range(start, end):
                    tokens[n] += coefficient * advantages[row, number]
        result.append(tokens)
    return result

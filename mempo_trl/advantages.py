"""Memory-level advantages: pooling over a question, scaling, and the sum with the outcome advantage per token."""

import torch


def memory_advantages(
    rewards: torch.Tensor, group_ids: torch.Tensor, scale: str = "group", std_floor: float = 1e-6
) -> torch.Tensor:
    """Standardise memory rewards over their pool: A_M = (R_M − mean) / std (MemPO, section on memory advantages).

    Args:
        rewards: R_M, shape (rows, turns); NaN where there is no memory to score.
        group_ids: the question of each row, shape (rows,), integers. Rows need not be sorted. In distributed training
            the rows of all processes, since a question may span several.
        scale: what is pooled. `"group"`: all memories of a question, every rollout and turn. `"turn"`: the memories of
            a question in the same turn. `"batch"`: all memories. `"none"`: as `"group"`, but not divided by the std.
        std_floor: pools with a standard deviation below it carry no information but noise and give 0.

    Returns:
        A_M, shape (rows, turns), 0 where there is no memory, where the pool has fewer than two values, and where its
        standard deviation (of the sample, as TRL's) is under the floor.

    Raises:
        ValueError: for an unknown `scale`.
    """
    rows, turns = rewards.shape
    device, dtype = rewards.device, rewards.dtype
    # Double precision, so that the mean of equal values is that value and their deviation 0; not every device has it.
    rewards = rewards.cpu().double()
    groups = group_ids.cpu().unsqueeze(1).expand(rows, turns)
    if scale in ("group", "none"):
        keys = groups
    elif scale == "turn":
        keys = groups * turns + torch.arange(turns)
    elif scale == "batch":
        keys = torch.zeros_like(groups)
    else:
        raise ValueError(f"Unknown `memory_scale` {scale!r}: choose 'group', 'turn', 'batch' or 'none'.")

    scored = ~rewards.isnan()
    values = rewards.nan_to_num(0.0)
    _, pools = keys.unique(return_inverse=True)  # (rows, turns), 0 … number of pools − 1

    def pool_sum(x: torch.Tensor) -> torch.Tensor:
        """Sum over each element's pool, at each element."""
        sums = x.new_zeros(int(pools.max()) + 1 if pools.numel() else 0)
        return sums.scatter_add(0, pools.flatten(), (x * scored).flatten())[pools]

    count = pool_sum(torch.ones_like(values))
    deviation = values - pool_sum(values) / count.clamp(min=1)
    std = (pool_sum(deviation**2) / (count - 1).clamp(min=1)).sqrt()
    advantages = deviation if scale == "none" else deviation / std.clamp(min=std_floor)
    informative = scored & (count > 1) & (std >= std_floor)
    return torch.where(informative, advantages, 0.0).to(device=device, dtype=dtype)


def token_advantages(
    outcome: torch.Tensor, memory: torch.Tensor, turn_ids: torch.Tensor, coefficient: float
) -> torch.Tensor:
    """A(token) = A_T + coefficient · A_M on the tokens of a memory, A_T elsewhere.

    Args:
        outcome: A_T, shape (rows,).
        memory: A_M, shape (rows, turns).
        turn_ids: for each completion token the turn whose memory it belongs to, −1 for every other token, shape
            (rows, tokens).
        coefficient: weight of A_M.

    Returns:
        Advantages, shape (rows, tokens).
    """
    of_token = memory.gather(1, turn_ids.clamp(min=0)) * (turn_ids >= 0)  # (rows, tokens)
    return outcome.unsqueeze(1) + coefficient * of_token

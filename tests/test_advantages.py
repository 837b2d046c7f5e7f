"""Pooling and scaling of memory rewards, with values worked out by hand."""

import math

import pytest
import torch

from mempo_trl.advantages import memory_advantages, token_advantages


NAN = math.nan


def advantages(rewards, groups, **kwargs):
    return memory_advantages(torch.tensor(rewards), torch.tensor(groups), **kwargs)


def test_worked_example_of_the_outcome():
    """Rewards 1, 0, 1, 1: mean 0.75, population std 0.43. TRL's, and ours, is the sample's, 0.5."""
    got = advantages([[1.0], [0.0], [1.0], [1.0]], [0, 0, 0, 0])
    torch.testing.assert_close(got, torch.tensor([[0.5], [-1.5], [0.5], [0.5]]))
    population = got * math.sqrt(4 / 3)
    torch.testing.assert_close(population[:2], torch.tensor([[0.58], [-1.73]]), atol=0.01, rtol=0)


# Two questions of two rollouts, up to three turns, the first never scored.
REWARDS = [[NAN, 0.1, 0.3], [NAN, 0.5, NAN], [NAN, -0.2, NAN], [NAN, 0.2, 0.6]]
GROUPS = [0, 0, 1, 1]


def test_a_question_is_a_pool():
    # 0.1, 0.3, 0.5: mean 0.3, std 0.2. −0.2, 0.2, 0.6: mean 0.2, std 0.4.
    expected = [[0, -1, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1]]
    torch.testing.assert_close(advantages(REWARDS, GROUPS), torch.tensor(expected).float())


def test_a_turn_is_a_pool():
    # Turn 2: 0.1, 0.5 and −0.2, 0.2, each ±1/√2. Turn 3: single values.
    root = math.sqrt(0.5)
    expected = [[0, -root, 0], [0, root, 0], [0, -root, 0], [0, root, 0]]
    torch.testing.assert_close(advantages(REWARDS, GROUPS, scale="turn"), torch.tensor(expected))


def test_the_batch_is_a_pool():
    values = torch.tensor([0.1, 0.3, 0.5, -0.2, 0.2, 0.6])
    z = ((values - values.mean()) / values.std()).tolist()
    expected = [[0, z[0], z[1]], [0, z[2], 0], [0, z[3], 0], [0, z[4], z[5]]]
    torch.testing.assert_close(advantages(REWARDS, GROUPS, scale="batch"), torch.tensor(expected))


def test_mean_only():
    expected = [[0, -0.2, 0], [0, 0.2, 0], [0, -0.4, 0], [0, 0, 0.4]]
    torch.testing.assert_close(advantages(REWARDS, GROUPS, scale="none"), torch.tensor(expected))


def test_rows_need_not_be_sorted():
    order = [2, 0, 3, 1]
    shuffled = advantages([REWARDS[i] for i in order], [GROUPS[i] for i in order])
    torch.testing.assert_close(shuffled, advantages(REWARDS, GROUPS)[order])


@pytest.mark.parametrize("scale", ["group", "turn", "batch", "none"])
@pytest.mark.parametrize(
    "rewards",
    [
        [[NAN, NAN], [NAN, NAN]],  # no memory
        [[NAN, 0.7], [NAN, NAN]],  # a single one
        [[NAN, 0.1], [NAN, 0.1]],  # all alike, and 0.1 is no binary fraction
        [[NAN, 0.1], [NAN, 0.1 + 1e-8]],  # alike but for noise
    ],
)
def test_pools_that_say_nothing_give_zero(rewards, scale):
    got = advantages(rewards, [0, 0], scale=scale)
    assert not got.any()
    assert got.isfinite().all()


def test_floor():
    rewards = [[0.0], [1e-3]]
    assert advantages(rewards, [0, 0]).abs().max() > 0.5
    assert not advantages(rewards, [0, 0], std_floor=1e-2).any()


def test_unknown_scale():
    with pytest.raises(ValueError, match=r"memory_scale.*'rows'"):
        advantages(REWARDS, GROUPS, scale="rows")


def test_only_the_tokens_of_a_memory_stand_out():
    outcome = torch.tensor([1.0, -1.0])
    memory = torch.tensor([[0.0, 2.0, 3.0], [0.0, 0.5, 0.0]])
    turn_ids = torch.tensor([[-1, 1, 1, -1, 2], [-1, -1, 1, -1, -1]])
    got = token_advantages(outcome, memory, turn_ids, coefficient=0.5)
    expected = [[1.0, 2.0, 2.0, 1.0, 2.5], [-1.0, -1.0, -0.75, -1.0, -1.0]]
    torch.testing.assert_close(got, torch.tensor(expected))

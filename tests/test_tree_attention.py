"""Attention computed piece by piece is attention with the dense mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mempo_trl import tree_attention
from mempo_trl.prefix_tree import Branch, PrefixTree
from mempo_trl.tree_attention import TreeMask


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(tree_attention, "CHUNK", 4)


def make_mask(trees):
    """The mask of several trees, padded to the largest."""
    packed = [PrefixTree([Branch(ids, 1) for ids in tree]) for tree in trees]
    tokens = max(map(len, packed))
    ends = [torch.cat([tree.ends, torch.arange(len(tree), tokens) + 1]) for tree in packed]
    return TreeMask(torch.stack(ends), tuple(map(len, packed)))


trees = st.lists(
    st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=14), min_size=1, max_size=6), min_size=1, max_size=3
)


@given(trees)
@settings(max_examples=100, deadline=None)
def test_random_trees(trees):
    mask = make_mask(trees)
    rows, _, tokens, _ = mask.shape
    generator = torch.Generator().manual_seed(0)
    inputs = [
        [torch.randn(rows, 2, tokens, 8, generator=generator.manual_seed(n), requires_grad=True) for n in range(3)]
        for _ in range(2)
    ]
    real = torch.zeros(rows, 1, tokens, 1)
    for row, length in enumerate(mask.lengths):
        real[row, :, :length] = 1
    weights = torch.randn(rows, 2, tokens, 8, generator=generator) * real
    got = scaled_dot_product_attention(*inputs[0], attn_mask=mask)
    wanted = scaled_dot_product_attention(*inputs[1], attn_mask=mask.dense())
    torch.testing.assert_close(got * real, wanted * real, atol=1e-5, rtol=1e-4)
    (got * weights).sum().backward()
    (wanted * weights).sum().backward()
    for mine, other in zip(*inputs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-5, rtol=1e-4)


def a_mask():
    return make_mask([[[1] * 6 + [2] * 6, [1] * 6 + [3] * 6, [1] * 3 + [4] * 6], [[1] * 5]])


def test_no_more_pairs_are_scored_than_chunks_see(monkeypatch):
    """Many branches from one trunk cost their number, not its square."""
    pairs = []
    real = scaled_dot_product_attention

    def count(query, key, *args, **kwargs):
        pairs.append(query.size(2) * key.size(2))
        return real(query, key, *args, **kwargs)

    monkeypatch.setattr(tree_attention, "scaled_dot_product_attention", count)
    work = []
    for branches in (8, 16, 32):
        mask = make_mask([[[0] * 8 + [branch] * 8 for branch in range(1, branches + 1)]])
        query = torch.zeros(1, 1, mask.size(2), 4)
        pairs.clear()
        torch.nn.functional.scaled_dot_product_attention(query, query, query, mask)
        work.append(sum(pairs))
    assert work[2] - work[1] == 2 * (work[1] - work[0])
    assert work[2] < mask.size(2) ** 2 / 10


def test_everything_else_sees_the_dense_mask():
    mask = a_mask()
    dense = mask.dense()
    assert mask.shape == dense.shape
    assert (mask.dtype, mask.device) == (dense.dtype, dense.device)
    assert torch.equal(mask[:, :, 2:5], dense[:, :, 2:5])
    assert torch.equal(~mask, ~dense)
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(dense, 0.0, -1.0))
    assert torch.equal(mask.detach().dense(), dense)
    assert "lengths=" in repr(mask)
    # Attention over other keys than the tree's tokens: here a cache of two tokens that everything sees.
    query, key = torch.randn(2, 2, dense.size(2), 8), torch.randn(2, 2, dense.size(2) + 2, 8)
    seen = torch.cat([torch.ones(2, 1, dense.size(2), 2, dtype=torch.bool), mask], dim=3)
    wide = torch.cat([torch.ones(2, 1, dense.size(2), 2, dtype=torch.bool), dense], dim=3)
    got, wanted = (scaled_dot_product_attention(query, key, key, m) for m in (seen, wide))
    assert torch.equal(got, wanted)


def test_grouped_heads_scale_and_autocast():
    mask = a_mask()
    query, key = torch.randn(2, 4, mask.size(2), 8), torch.randn(2, 2, mask.size(2), 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for options in ({"enable_gqa": True}, {"enable_gqa": True, "scale": 0.1}):
            got, wanted = (scaled_dot_product_attention(query, key, key, m, **options) for m in (mask, mask.dense()))
            assert got.dtype == torch.bfloat16
            length = mask.lengths[1]
            torch.testing.assert_close(got[0], wanted[0], atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(got[1, :, :length], wanted[1, :, :length], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_it_again(reentrant):
    mask = a_mask()
    gradients = []
    for run in (lambda f, *x: checkpoint(f, *x, use_reentrant=reentrant), lambda f, *x: f(*x)):
        query = torch.randn(2, 2, mask.size(2), 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
        run(lambda q, m: scaled_dot_product_attention(q, q, q, m), query, mask)[0].square().sum().backward()
        gradients.append(query.grad)
    torch.testing.assert_close(*gradients)

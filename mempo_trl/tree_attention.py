"""Attention over a packed prefix tree that skips what no token sees.

A dense mask over pairs of tokens costs the square of the tree, though a token sees nothing but its own path. Here the
queries are cut into chunks, and each chunk is given only the keys that one of its tokens sees, so that a tree of many
short branches costs what its paths cost. Models need not know: the mask is a tensor that answers
`scaled_dot_product_attention` itself, and turns into the dense mask under any other operation.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention


# Queries that share their keys. Larger chunks see more than they need, smaller ones are many calls.
CHUNK = 512


@dataclass(frozen=True)
class _Chunk:
    """Queries of a row, and the pieces of the row that hold their keys."""

    queries: slice
    pieces: list[int]
    mask: torch.Tensor  # (queries, keys)


class TreeMask(torch.Tensor):
    """The mask "token i sees token j iff j <= i < end[j]", shape (rows, 1, tokens, tokens), of which nothing is stored.

    Args:
        ends: one past the last token that sees a token, shape (rows, tokens), as in `PrefixTree`.
        lengths: tokens of each row without padding. What padding attends to is undefined.
    """

    ends: torch.Tensor
    lengths: tuple[int, ...]
    _plan: list[tuple[list[int], list[_Chunk]]] | None

    @staticmethod
    def __new__(cls, ends: torch.Tensor, lengths: Sequence[int]) -> "TreeMask":
        rows, tokens = ends.shape
        shape = (rows, 1, tokens, tokens)
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=ends.device)
        mask.ends, mask.lengths, mask._plan = ends, tuple(lengths), None
        return mask

    def __repr__(self, *, tensor_contents=None):
        return f"TreeMask(shape={tuple(self.shape)}, lengths={self.lengths}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is scaled_dot_product_attention:
                return _attend(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].ends, args[0].lengths)
        args, kwargs = torch.utils._pytree.tree_map_only(TreeMask, TreeMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def dense(self) -> torch.Tensor:
        """The same as an ordinary boolean tensor."""
        index = torch.arange(self.ends.size(1), device=self.ends.device)
        return ((index <= index[:, None]) & (index[:, None] < self.ends[:, None, :])).unsqueeze(1)

    def plan(self) -> list[tuple[list[int], list[_Chunk]]]:
        """For each row the lengths of the pieces that it is cut into, padding last, and the chunks of its queries."""
        if self._plan is None:
            self._plan = [self._plan_row(row, length) for row, length in enumerate(self.lengths)]
        return self._plan

    def _plan_row(self, row: int, length: int) -> tuple[list[int], list[_Chunk]]:
        ends = self.ends[row, :length].tolist()
        # A piece is a run of tokens that the same tokens see, no longer than a chunk.
        starts = [0]
        for token in range(1, length):
            if ends[token] != ends[token - 1] or token - starts[-1] == CHUNK:
                starts.append(token)
        stops = [*starts[1:], length]
        chunks: list[list[int]] = [[]]
        for piece, stop in enumerate(stops):
            if chunks[-1] and stop - starts[chunks[-1][0]] > CHUNK:
                chunks.append([])
            chunks[-1].append(piece)
        index = torch.arange(length, device=self.ends.device)
        planned = []
        for chunk in chunks:
            first, last = starts[chunk[0]], stops[chunk[-1]]
            seen = [piece for piece in range(chunk[-1] + 1) if ends[starts[piece]] > first]
            keys = torch.cat([index[starts[piece] : stops[piece]] for piece in seen])
            queries = index[first:last, None]
            mask = (keys <= queries) & (queries < self.ends[row, keys])
            planned.append(_Chunk(slice(first, last), seen, mask))
        pieces = [stop - start for start, stop in zip(starts, stops, strict=True)]
        return [*pieces, self.ends.size(1) - length], planned


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with a `TreeMask`; query, key and value are (rows, heads, tokens, channels)."""
    attend: Callable[..., torch.Tensor] = functools.partial(
        scaled_dot_product_attention, dropout_p=dropout_p, is_causal=is_causal, **kwargs
    )
    if not isinstance(attn_mask, TreeMask):
        return attend(query, key, value, attn_mask)
    shape = (attn_mask.size(0), attn_mask.size(2))
    if is_causal or any((part.size(0), part.size(2)) != shape for part in (query, key, value)):
        return attend(query, key, value, attn_mask.dense())
    rows = []
    for row, (pieces, chunks) in enumerate(attn_mask.plan()):
        # Cut once and join: then a backward writes what was joined, not a tensor of full length for each chunk.
        keys, values = (part[row : row + 1].split(pieces, dim=2) for part in (key, value))
        outputs = [
            attend(
                query[row : row + 1, :, chunk.queries],
                torch.cat([keys[piece] for piece in chunk.pieces], dim=2),
                torch.cat([values[piece] for piece in chunk.pieces], dim=2),
                chunk.mask,
            )
            for chunk in chunks
        ]
        first = outputs[0]
        outputs.append(first.new_zeros(1, first.size(1), pieces[-1], first.size(3)))
        rows.append(torch.cat(outputs, dim=2))
    return torch.cat(rows)

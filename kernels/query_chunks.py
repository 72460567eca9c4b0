"""Chunks of queries, where the scores or the mask of all of them would be large.

In: a call of attention. Out: which queries to take at a time, with the keys that any of them sees, and what
hides the rest. What a window costs then grows with the tokens, not with their square (Beltagy et al. 2020,
arXiv:2004.05150).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megacompile.kernels._triton import wide
from megacompile.kernels.attention import Rule
from megacompile.kernels.attention_choice import Features, Path

MOST_BYTES = 64 << 20  # of a chunk's scores
LEAST_QUERIES = 256  # so that products stay large


class Chunk(NamedTuple):
    """Queries of a call, and the keys that they may see."""

    queries: slice
    keys: slice

    def bias(self, q: Tensor, k: Tensor, bias: Tensor | None, rule: Rule) -> Tensor | None:
        """Return what is added to the chunk's scores, broadcastable to [B, H, queries, keys]: its part of
        ``bias``, and -inf where a query does not see a key. ``q`` and ``k`` are the whole call's."""
        if bias is not None:
            bias = _part(_part(bias, -2, self.queries, q.shape[2]), -1, self.keys, k.shape[2])
        key = torch.arange(self.keys.start, self.keys.stop, device=q.device)
        seen = self._band(key, k.shape[2] - q.shape[2], rule)
        if rule.bounds is not None:
            first, last = rule.bounds[:, :, self.queries].unsqueeze(-1)
            inside = (key >= first) & (key < last)
            seen = (inside if seen is None else inside & seen).unsqueeze(1)
        if seen is None:
            return bias
        return torch.where(seen, q.new_zeros(()) if bias is None else bias, -math.inf)

    def _band(self, key: Tensor, shift: int, rule: Rule) -> Tensor | None:
        """True where causal order and the window let a query look at a key; the last query is at the last
        key's place, ``shift`` beyond its own number."""
        if not rule.causal and rule.window <= 0:
            return None
        query = torch.arange(self.queries.start, self.queries.stop, device=key.device) + shift
        distance = query[:, None] - key
        if not rule.causal:
            return distance.abs() < rule.window
        seen = distance >= 0
        return seen & (distance < rule.window) if rule.window > 0 else seen


def chunks_of(q: Tensor, k: Tensor, has: Features, path: Path) -> list[Chunk]:
    """The chunks of a call that holds scores, or a mask of their size, on ``path``.

    One where they are small, and where they cannot be cut: dropout numbers the elements of all scores, and a
    trained bias has a gradient of their size.
    """
    length, rows = q.shape[2], q.shape[2]
    of_pair = q.shape[0] * (q.shape[1] if path == "plain" else 1) * wide(q.dtype).itemsize
    while rows > LEAST_QUERIES and of_pair * rows * _most_keys(rows, k, has) > MOST_BYTES:
        rows = max(LEAST_QUERIES, -(-rows // 2))
    if rows == length or has.dropout or has.bias_grad:
        return [Chunk(slice(0, length), slice(0, k.shape[2]))]
    queries = [slice(start, min(start + rows, length)) for start in range(0, length, rows)]
    return [Chunk(some, _keys(some, k.shape[2] - length, k.shape[2], has)) for some in queries]


def _most_keys(rows: int, k: Tensor, has: Features) -> int:
    """Return the most keys that so many neighbouring queries see together."""
    if has.bias or not has.window:
        return k.shape[2]
    return min(k.shape[2], rows + has.window * (1 if has.causal else 2))


def _keys(queries: slice, shift: int, length: int, has: Features) -> slice:
    """The keys that these queries see together; with a bias, which may lower them all alike, every key."""
    if has.bias:
        return slice(0, length)
    first = queries.start + shift - has.window + 1 if has.window else 0
    behind = queries.stop + shift
    last = behind if has.causal else behind + has.window - 1 if has.window else length
    last = min(max(last, 1), length)
    return slice(min(max(first, 0), last - 1), last)


def _part(bias: Tensor, dim: int, part: slice, whole: int) -> Tensor:
    """A part of a dimension, unless all share one entry."""
    return bias.narrow(dim, part.start, part.stop - part.start) if bias.shape[dim] == whole else bias

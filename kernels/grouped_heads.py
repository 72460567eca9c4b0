"""Heads of keys and values that several heads of queries share, as in grouped-query attention."""

from __future__ import annotations

from torch import Tensor


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Each of x's heads as often as it takes to have ``heads``."""
    batch, groups, length, dim = x.shape
    if groups == heads:
        return x
    each = x[:, :, None].expand(batch, groups, heads // groups, length, dim)
    return each.reshape(batch, heads, length, dim)


def sum_heads(x: Tensor, groups: int) -> Tensor:
    """The gradient of :func:`repeat_heads`."""
    batch, heads, length, dim = x.shape
    if heads == groups:
        return x.contiguous()
    return x.view(batch, groups, heads // groups, length, dim).sum(2)

"""Rows of tables on the host: what a batch looks up, and the gradient of what it looked up.

A table may be cut into pieces of rows, each a tensor [rows, width]; ``stops`` are the rows at which they end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def gather_rows(pieces: Sequence[Tensor], stops: Sequence[int], ids: Tensor) -> Tensor:
    """``table[ids]``, of ids' shape and a row; IndexError for an id that is no row of the table."""
    flat = ids.reshape(-1)
    outside = (flat < 0) | (flat >= stops[-1])
    if bool(outside.any()):
        raise IndexError(f"the id {int(flat[outside][0])} is not in a table of {stops[-1]} rows")
    out = torch.empty(len(flat), pieces[0].shape[1], dtype=pieces[0].dtype)
    for piece, (start, stop) in zip(pieces, itertools.pairwise((0, *stops)), strict=True):
        if len(pieces) == 1:
            torch.index_select(piece, 0, flat, out=out)
        else:
            (own,) = torch.where((flat >= start) & (flat < stop))
            out[own] = piece[flat[own] - start]
    return out.view(*ids.shape, -1)


def add_rows(
    pieces: Sequence[Tensor],
    fresh: Sequence[bool],
    stops: Sequence[int],
    ids: Tensor,
    grad: Tensor,
    padding: int,
) -> None:
    """Add the gradient of gathered rows to that of their table; pieces that are ``fresh`` are set instead.

    A row's contributions are summed in the order of ids and in ``grad``'s dtype, as eager PyTorch does in
    the gradient of the whole table; what it then adds up is the same but for the zeros of other rows.
    """
    rows, places = torch.unique(ids, return_inverse=True)
    (pad,) = torch.where(rows == padding)
    summed = torch.ops.aten.embedding_dense_backward(
        grad.flatten(0, -2), places.flatten(), len(rows), int(pad) if len(pad) else -1, False
    )
    for piece, new, (start, stop) in zip(pieces, fresh, itertools.pairwise((0, *stops)), strict=True):
        own = slice(*torch.searchsorted(rows, torch.tensor([start, stop])).tolist())
        if new:
            piece.zero_()
        piece.index_add_(0, rows[own] - start, summed[own].to(piece.dtype))

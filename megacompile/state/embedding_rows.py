"""Gather rows of tables on the host: what a batch looks up, and the gradient of what it looked up.

A table may be cut into pieces of rows, each a tensor [rows, width]; ``stops`` are the rows at which they
end. Both directions lie between one step's last update and the next one's first block, so that nothing
hides them: they run on all cores.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from megacompile.state.adam import backend, call_kernel

_ADDED = (torch.bfloat16, torch.float32)  # dtypes that the kernel adds


def gather_rows(pieces: Sequence[Tensor], stops: Sequence[int], ids: Tensor, out: Tensor) -> None:
    """Write ``table[ids]`` to ``out``, of ids' shape and a row; IndexError for an id that is no row."""
    flat, rows = ids.reshape(-1), out.view(-1, out.shape[-1])
    outside = (flat < 0) | (flat >= stops[-1])
    if bool(outside.any()):
        raise IndexError(f"the id {int(flat[outside][0])} is not in a table of {stops[-1]} rows")
    for piece, (start, stop) in zip(pieces, itertools.pairwise((0, *stops)), strict=True):
        places = None if len(pieces) == 1 else torch.where((flat >= start) & (flat < stop))[0]
        own = (flat if places is None else flat[places] - start).to(torch.int64).contiguous()
        if backend("rows") == "c" and piece.is_contiguous():
            size = piece.shape[1] * piece.itemsize
            threads = torch.get_num_threads()
            call_kernel("mc_take_rows", len(own), own, places, piece, rows, size, threads, kernel="rows")
        elif places is None:
            torch.index_select(piece, 0, own, out=rows)
        else:
            rows[places] = piece[own]


def add_rows(
    pieces: Sequence[Tensor],
    fresh: Sequence[bool],
    stops: Sequence[int],
    ids: Tensor,
    grad: Tensor,
    padding: int,
    named: Sequence[Tensor | None] | None = None,
    threads: int | None = None,
) -> None:
    """Add the gradient of gathered rows to that of their table; pieces that are ``fresh`` are set instead.

    A row's contributions are summed in the order of ids and in ``grad``'s dtype, as eager PyTorch does in
    the gradient of the whole table; what it then adds up is the same but for the zeros of other rows.
    ``named`` are of each piece the only rows that it has, ascending; None: it has all of its own.
    """
    grad = grad.flatten(0, -2).contiguous()
    ordered, order = torch.sort(ids.reshape(-1), stable=True)
    kept = ordered != padding
    rows, counts = torch.unique_consecutive(ordered[kept], return_counts=True)
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    order = order[kept]
    for number, (piece, new) in enumerate(zip(pieces, fresh, strict=True)):
        start, stop = (0, *stops)[number : number + 2]
        first, last = torch.searchsorted(rows, torch.tensor([start, stop], dtype=rows.dtype)).tolist()
        own = (rows[first:last] - start).to(torch.int64)
        only = named[number] if named is not None else None
        if only is not None:
            own = torch.searchsorted(only, own)
        compiled = backend("rows") == "c" and piece.is_contiguous() and {grad.dtype, piece.dtype} <= {*_ADDED}
        sets = compiled and new and len(own) == len(piece)
        if new and not sets:
            piece.zero_()
        if compiled:
            call_kernel(
                "mc_add_rows", len(own), own, ends[first : last + 1], order, grad,
                grad.dtype == torch.bfloat16, piece, piece.dtype == torch.bfloat16, sets, grad.shape[1],
                threads or torch.get_num_threads(), kernel="rows",
            )  # fmt: skip
        else:
            mine = order[ends[first] : ends[last]]
            places = torch.repeat_interleave(counts[first:last])
            summed = torch.ops.aten.embedding_dense_backward(grad[mine], places, len(own), -1, False)
            piece.index_add_(0, own, summed.to(piece.dtype))

"""The layout of a weight group's values in its flat arrays, whole or in shards, and the rows of tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import SQUARED, GroupLayout, Parameter, Slot
from megacompile.distributed.world import World
from megacompile.state.adam import backend, call_kernel

_SUMMED = 1 << 16  # elements of a partial sum of squares

# ------------------------------------------------------------------------------------------------------------
# Buckets: the flat tensors in which parameters of a weight group, or gradients, lie one after another.


def is_dense(x: Tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.numel() == 0 or span == x.numel()


def padding_of(group: GroupLayout) -> list[slice]:
    """Return where a bucket holds no parameter."""
    stops = [slot.offset + slot.parameter.numel for slot in group.slots]
    starts = [*(slot.offset for slot in group.slots[1:]), group.elements]
    return [slice(a, b) for a, b in zip(stops, starts, strict=True) if a < b]


def own_part(group: GroupLayout, slot: Slot, rank: int) -> tuple[slice, slice]:
    """Return what of a parameter's elements, in the bucket's order, a rank holds, and where in its shard."""
    shard, stop = group.shard(rank), slot.offset + slot.parameter.numel
    first, last = max(slot.offset, shard.start), min(stop, shard.stop)
    last = max(first, last)
    if first == last:
        return slice(0, 0), slice(0, 0)
    return slice(first - slot.offset, last - slot.offset), slice(first - shard.start, last - shard.start)


def owned(group: GroupLayout, rank: int) -> Iterator[tuple[int, Slot, int]]:
    """Return the slots of which a rank holds anything, with their numbers, and how many elements of each."""
    for index, slot in enumerate(group.slots):
        part = own_part(group, slot, rank)[0]
        if part.start < part.stop or group.ranks == 1:
            yield index, slot, part.stop - part.start


def rows_of(parameter: Parameter, whole: Tensor) -> Tensor:
    """Return what a parameter or piece holds of the whole parameter's tensor."""
    return whole[parameter.first_row :][: parameter.shape[0]] if parameter.whole else whole


def slot_view(flat: Tensor, slot: Slot) -> Tensor:
    """A parameter's view, in its own shape and strides, of a flat bucket."""
    return strided(flat, slot.offset, slot)


def strided(flat: Tensor, offset: int, slot: Slot) -> Tensor:
    """Return what begins at ``offset`` of a flat tensor, in a parameter's shape and strides."""
    start = flat.storage_offset() + offset
    return flat.as_strided(slot.parameter.shape, slot.parameter.stride, start)


def copy_elements(target: Tensor, source: Tensor, slot: Slot, start: int) -> None:
    """Elements of a tensor, from the ``start``-th on as its parameter lies in the bucket, to a flat one."""
    stride = slot.parameter.stride
    order = sorted(range(source.dim()), key=lambda d: -stride[d])
    _copy_rows(target, source.permute(order), start)


def _copy_rows(target: Tensor, source: Tensor, start: int) -> None:
    """Elements of a tensor, row by row, from the ``start``-th on: the rest of a row, rows, a part of one."""
    count = target.numel()
    if source.dim() < 2 or not count:
        target.copy_(source.reshape(-1)[start : start + count])
        return
    inner = source[0].numel()
    row, skipped = divmod(start, inner)
    last, rest = divmod(start + count, inner)
    if row == last:
        _copy_rows(target, source[row], skipped)
        return
    head = inner - skipped if skipped else 0
    if head:
        _copy_rows(target[:head], source[row], skipped)
        row += 1
    target[head : count - rest].view(last - row, *source.shape[1:]).copy_(source[row:last])
    if rest:
        _copy_rows(target[count - rest :], source[last], 0)


def sum_of_squares(flat: Tensor, threads: int | None = None) -> float:
    """Sum the squares of a flat tensor on the host in FP64: the same bits on any number of threads."""
    if backend() == "c" and flat.dtype in (torch.bfloat16, torch.float32):
        sums = torch.empty(-(-flat.numel() // _SUMMED), dtype=torch.float64)
        narrow, count = flat.dtype == torch.bfloat16, threads or torch.get_num_threads()
        call_kernel("mc_squares", flat.numel(), flat, narrow, sums, _SUMMED, count)
        return math.fsum(sums.tolist())
    return math.fsum(float(piece.double().square_().sum()) for piece in torch.split(flat, SQUARED))


def add_gradients(
    home: Tensor, slots: Sequence[Slot], parts: Sequence[tuple[int, Tensor]], fresh: Collection[int]
) -> None:
    """Land gradients of (slot, tensor) in a flat bucket: set those of the ``fresh`` slots, add the others."""
    for index, grad in parts:
        place = slot_view(home, slots[index])
        place.copy_(grad) if index in fresh else place.add_(grad)


# ------------------------------------------------------------------------------------------------------------
# Shards: how the ranks of a replica bring together what each holds of a parameter.
#
# In: a group's layout, this rank's flat arrays, the world. Out: whole parameters, on rank 0.


def collected(world: World, group: GroupLayout, slot: Slot, shard: Tensor) -> Tensor:
    """Return what all ranks hold of a parameter in one of a group's arrays, flat; elsewhere than on rank 0 an
    empty tensor on the meta device."""
    parts = [own_part(group, slot, rank)[1] for rank in range(world.ranks.shards)]
    counts = [part.stop - part.start for part in parts]
    mine, own = (
        torch.zeros(max(counts), dtype=shard.dtype),
        parts[world.ranks.shard],
    )  # shards may be on a device
    mine[: own.stop - own.start].copy_(shard[own])
    whole = world.gather(mine)
    if whole is None:
        return torch.empty(0, device="meta")
    return torch.cat([part[:n] for part, n in zip(whole.chunk(len(counts)), counts, strict=True)])


# ------------------------------------------------------------------------------------------------------------
# Rows of tables on the host: what a batch looks up, and the gradient of what it looked up.
#
# A table may be cut into pieces of rows, each a tensor [rows, width]; ``stops`` are the rows at which they
# end. Both directions lie between one step's last update and the next one's first block, so that nothing
# hides them: they run on all cores.


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
        if backend() == "c" and piece.is_contiguous():
            size = piece.shape[1] * piece.itemsize
            call_kernel("mc_take_rows", len(own), own, places, piece, rows, size, torch.get_num_threads())
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
) -> None:
    """Add the gradient of gathered rows to that of their table; pieces that are ``fresh`` are set instead.

    A row's contributions are summed in the order of ids and in ``grad``'s dtype, as eager PyTorch does in
    the gradient of the whole table; what it then adds up is the same but for the zeros of other rows.
    """
    grad = grad.flatten(0, -2).contiguous()
    ordered, order = torch.sort(ids.reshape(-1), stable=True)
    kept = ordered != padding
    rows, counts = torch.unique_consecutive(ordered[kept], return_counts=True)
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    order = order[kept]
    for piece, new, (start, stop) in zip(pieces, fresh, itertools.pairwise((0, *stops)), strict=True):
        first, last = torch.searchsorted(rows, torch.tensor([start, stop], dtype=rows.dtype)).tolist()
        own = (rows[first:last] - start).to(torch.int64)
        if new:
            piece.zero_()
        if backend() == "c" and piece.is_contiguous() and {grad.dtype, piece.dtype} <= {*_ADDED}:
            call_kernel(
                "mc_add_rows", len(own), own, ends[first : last + 1], order, grad,
                grad.dtype == torch.bfloat16, piece, piece.dtype == torch.bfloat16, grad.shape[1],
                torch.get_num_threads(),
            )  # fmt: skip
        else:
            mine = order[ends[first] : ends[last]]
            places = torch.repeat_interleave(counts[first:last])
            summed = torch.ops.aten.embedding_dense_backward(grad[mine], places, len(own), -1, False)
            piece.index_add_(0, own, summed.to(piece.dtype))

"""The layout of a weight group's values, or gradients, in its flat arrays: in a row, or in shards."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import SQUARED, GroupLayout, Parameter, Slot
from megacompile.distributed.world import World
from megacompile.state.adam import backend, call_kernel

_SUMMED = 1 << 16  # elements of a partial sum of squares


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

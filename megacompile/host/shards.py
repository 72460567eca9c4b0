"""Shards: what of a weight group's state is one rank's, and how all ranks bring theirs together.

In: a group's layout, this rank's flat arrays, the world. Out: whole parameters or arrays, on rank 0, or
values from there back in every rank's shard. All ranks call these together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megacompile.assemble.assembly import GroupLayout, Slot
from megacompile.host.formats import StateFormat, array_sizes
from megacompile.world.control import World


def own_part(group: GroupLayout, slot: Slot, rank: int) -> tuple[slice, slice]:
    """What of a parameter's elements, in the bucket's order, a rank holds, and where in its shard."""
    shard, stop = group.shard(rank), slot.offset + slot.parameter.numel
    first, last = max(slot.offset, shard.start), min(stop, shard.stop)
    last = max(first, last)
    if first == last:
        return slice(0, 0), slice(0, 0)
    return slice(first - slot.offset, last - slot.offset), slice(first - shard.start, last - shard.start)


def collected(world: World, group: GroupLayout, slot: Slot, shard: Tensor) -> Tensor:
    """What all ranks hold of a parameter in one of a group's arrays, flat; elsewhere than on rank 0 an empty
    tensor on the meta device."""
    parts = [own_part(group, slot, rank)[1] for rank in range(world.size)]
    counts = [part.stop - part.start for part in parts]
    mine, own = shard.new_zeros(max(counts)), parts[world.rank]
    mine[: own.stop - own.start].copy_(shard[own])
    whole = world.gather(mine)
    if whole is None:
        return torch.empty(0, device="meta")
    return torch.cat([part[:n] for part, n in zip(whole.chunk(len(counts)), counts, strict=True)])


@contextmanager
def whole_arrays(
    world: World, group: GroupLayout, form: StateFormat, shards: Mapping[str, Tensor], *, change: bool
) -> Iterator[dict[str, Tensor]]:
    """All ranks' shards of a group's arrays together, by name, on rank 0; the others are given none.

    With ``change`` they are zero, and what is written to them goes to the shards at the end.
    """
    sizes = [array_sizes(group, form, rank) for rank in range(world.size)]
    counts = {name: [size[name] for size in sizes] for name in shards}
    if not change:
        gathered = ((name, world.gather(shard)) for name, shard in shards.items())
        yield {name: _packed(whole, counts[name]) for name, whole in gathered if whole is not None}
        return
    first = world.rank == 0
    wholes = {name: shard.new_zeros(sum(counts[name])) for name, shard in shards.items() if first}
    yield wholes
    for name, shard in shards.items():
        whole = wholes.pop(name, None)
        world.scatter(shard, None if whole is None else _spread(whole, counts[name], shard.numel()))


def _packed(padded: Tensor, counts: Sequence[int]) -> Tensor:
    """The first so many entries of each of equally long parts, one after another."""
    length = padded.numel() // len(counts)
    if all(count == length for count in counts[:-1]):
        return padded[: sum(counts)]
    parts = zip(padded.view(len(counts), length), counts, strict=True)
    return torch.cat([part[:count] for part, count in parts])


def _spread(whole: Tensor, counts: Sequence[int], length: int) -> Tensor:
    """The inverse: so many entries in each of parts of one length."""
    if whole.numel() == length * len(counts):
        return whole
    padded, start = whole.new_zeros(len(counts), length), 0
    for part, count in zip(padded, counts, strict=True):
        part[:count].copy_(whole[start : start + count])
        start += count
    return padded.view(-1)

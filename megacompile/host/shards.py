"""Shards: how the ranks of a replica bring together what each holds of a parameter.

In: a group's layout, this rank's flat arrays, the world. Out: whole parameters, on rank 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacompile.assemble.assembly import GroupLayout, Slot
from megacompile.host.bucket import own_part
from megacompile.world.control import World


def collected(world: World, group: GroupLayout, slot: Slot, shard: Tensor) -> Tensor:
    """What all ranks hold of a parameter in one of a group's arrays, flat; elsewhere than on rank 0 an empty
    tensor on the meta device."""
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

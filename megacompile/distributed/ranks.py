"""Ranks: how many processes train together, and which of them this one is.

In: torch.distributed's default process group, or what ``torchrun`` says in the environment; a mesh, where the
weights are not sharded over all ranks. Out: :class:`Ranks`; of a process alone, one of one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from megacompile.errors import MegacompileError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others in a collective."""


@dataclass(frozen=True)
class Ranks:
    """This process's number of ``size``, of which ``local`` are on its machine.

    Each ``shards`` of them, in their order, share one copy of the weights and their state: a replica. With as
    many shards as ranks there is one. ``undecided``: that is so for want of a mesh, on several machines that
    have as many ranks each, in their order.
    """

    rank: int = 0
    size: int = 1
    local: int = 1
    shards: int = 1
    undecided: bool = False

    @property
    def shard(self) -> int:
        """The number of this rank's shard in its replica."""
        return self.rank % self.shards

    @property
    def replica(self) -> int:
        """The number of the replica that this rank belongs to."""
        return self.rank // self.shards

    @property
    def replicas(self) -> int:
        """The number of copies of the weights that all ranks hold together."""
        return self.size // self.shards


def find_ranks(mesh: DeviceMesh | None = None) -> Ranks:
    """The ranks of the default process group; where ``torchrun`` started this process and there is no group
    yet, one over gloo is made. ``mesh`` has a row for each replica; None: there is one.

    Raises :class:`MegacompileError` for a mesh that is not of all ranks in their order.
    """
    if not dist.is_available():
        return Ranks()
    started = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not dist.is_initialized() and started:
        _make_group()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()
    size = dist.get_world_size()
    local = min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    rank, shards = dist.get_rank(), size if mesh is None else _shards(mesh, size)
    in_order = size % local == 0 and rank % local == int(os.environ.get("LOCAL_RANK", rank % local))
    return Ranks(rank, size, local, shards, mesh is None and 1 < local < size and in_order)


def _shards(mesh: DeviceMesh, size: int) -> int:
    """Return the number of ranks that share a copy of the weights."""
    rows = mesh.mesh.tolist()
    if mesh.mesh.dim() != 2 or mesh.mesh.flatten().tolist() != [*range(size)]:
        raise MegacompileError(
            f"mesh={rows} is not of all {size} ranks in their order: give "
            f"init_device_mesh(device, (machines, {size} // machines)), a row for each machine."
        )
    if len(rows[0]) == 1:
        raise MegacompileError(
            f"mesh={rows} leaves each rank all of the weights: give rows of several ranks, which share them."
        )
    return len(rows[0])


def _make_group() -> None:
    """The default group over gloo. ``torchrun`` keeps one store over its restarts, in which gloo would find
    the addresses of processes that are gone: each attempt has keys of its own."""
    store, rank, size = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed = distributed_c10d.PrefixStore(f"megacompile/attempt {attempt}", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=TIMEOUT)

"""Ranks: how many processes train together, and which of them this one is.

In: torch.distributed's default process group, or what ``torchrun`` says in the environment. Out:
:class:`Ranks`; of a process alone, one of one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others in a collective."""


@dataclass(frozen=True)
class Ranks:
    """This process's number of ``size``, of which ``local`` are on its machine."""

    rank: int = 0
    size: int = 1
    local: int = 1


def find_ranks() -> Ranks:
    """The ranks of the default process group; where ``torchrun`` started this process and there is no group
    yet, one over gloo is made.
    """
    if not dist.is_available():
        return Ranks()
    started = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not dist.is_initialized() and started:
        _make_group()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()
    size = dist.get_world_size()
    return Ranks(dist.get_rank(), size, min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size))))


def _make_group() -> None:
    """The default group over gloo. ``torchrun`` keeps one store over its restarts, in which gloo would find
    the addresses of processes that are gone: each attempt has keys of its own."""
    store, rank, size = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed = distributed_c10d.PrefixStore(f"megacompile/attempt {attempt}", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=TIMEOUT)

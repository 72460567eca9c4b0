"""What a program was told of how to train, for all of its runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megacompile.host.formats import Form
from megacompile.room import Room
from megacompile.runtime.device import Device
from megacompile.world.control import World


@dataclass(frozen=True)
class Settings:
    """What :func:`megacompile.compile` was told of how to train; see there."""

    device: torch.device
    open_device: Callable[[], Device]
    measure_room: Callable[[], Room]
    host_budget_bytes: int
    max_grad_norm: float | None
    on_nonfinite: str | None
    seed: int
    max_seq_len: int | None
    optimizer_state: Form
    offload_dirs: tuple[str, ...]
    world: World

    @property
    def defers_updates(self) -> bool:
        """Whether updates wait for the end of the backward, in every mode."""
        return self.max_grad_norm is not None or self.on_nonfinite is not None

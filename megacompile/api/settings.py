"""The settings of all runs of a program: what it was told of how to train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megacompile.api.device_budget import DeviceRoom
from megacompile.distributed.world import World
from megacompile.runtime.device import Device
from megacompile.state.moment_formats import Form


@dataclass(frozen=True)
class Settings:
    """The settings of how to train that :func:`megacompile.compile` was given; see there."""

    device: torch.device
    open_device: Callable[[], Device]
    measure_room: Callable[[], DeviceRoom]
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
        """Return whether updates wait for the end of the backward, in every mode."""
        return self.max_grad_norm is not None or self.on_nonfinite is not None

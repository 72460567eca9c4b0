"""Host buffers: what steps keep on the host beside the state. Gradients on their way or waiting, and stashes.

They come out of the state's arena while it has room, which is sized so that it has; see
:func:`~megacompile.search.tiers.host_transient_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megacompile.host.arena import HostArena, padded
from megacompile.runtime.device import Device
from megacompile.step.bind import BoundStep
from megacompile.step.operations import Step, Token


class HostBuffers:
    """Buffers by use; each is made when it is first needed and stays."""

    def __init__(self, arena: HostArena, device: Device) -> None:
        self.gradients: dict[int, Tensor] = {}  # bytes, by weight group
        self._arena = arena
        self._device = device
        self._ring: list[Tensor] = []
        self._stashes: dict[Token, list[Tensor]] = {}

    def nbytes(self) -> dict[str, int]:
        """Host bytes by kind."""
        return {
            "gradients": sum(g.nbytes for g in self.gradients.values()),
            "ring": sum(r.nbytes for r in self._ring),
            "stashes": sum(t.nbytes for s in self._stashes.values() for t in s),
        } | self._device.host_bytes()

    def prepare(self, step: Step, finish: Callable[[], None]) -> None:
        """Make the ring as large as a step wants it, with nothing under way in a buffer that is replaced."""
        for i, nbytes in enumerate(step.ring):
            if i == len(self._ring) or self._ring[i].nbytes < nbytes:
                finish()
                self._ring[i : i + 1] = [self._empty(nbytes)]

    def gradient(self, bound: BoundStep, group: int, home: Token) -> Tensor:
        """Where a group's gradient lands, flat: in its dtype while it is passed on, or as it is kept."""
        layout = bound.assembly.groups[group]
        if home[0] == "ring":
            return self._ring[home[1]][: layout.nbytes].view(layout.dtype)
        dtype = layout.dtype if bound.kept.get(group) else torch.float32
        nbytes = dtype.itemsize * layout.elements
        if group not in self.gradients or self.gradients[group].nbytes < nbytes:
            self.gradients[group] = self._empty(nbytes)
        return self.gradients[group][:nbytes].view(dtype)

    def stash(self, home: Token, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host memory for what a block stashes: tensors of the same shapes, dtypes and, if dense, strides."""
        kept = self._stashes.get(home)
        if kept is None or [(t.shape, t.dtype) for t in kept] != [(t.shape, t.dtype) for t in tensors]:
            self._stashes[home] = kept = [self._like(t) for t in tensors]
        return kept

    def stashed(self, home: Token) -> list[Tensor]:
        """What was stashed there."""
        return self._stashes[home]

    def _empty(self, nbytes: int) -> Tensor:
        if padded(nbytes) <= self._arena.free_bytes:
            piece = self._arena.take((nbytes,), torch.uint8)
            self._device.own([piece])
            return piece
        return self._device.host_empty(nbytes)

    def _like(self, tensor: Tensor) -> Tensor:
        like = torch.empty_like(tensor, device="meta")
        flat = self._empty(like.untyped_storage().nbytes()).view(tensor.dtype)
        return flat.as_strided(like.shape, like.stride())

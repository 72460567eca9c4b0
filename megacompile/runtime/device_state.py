"""Weights, moments and gradients of the groups whose state a plan keeps on the device.

The runtime's operations on such groups all belong to the compute stream. What their memory takes is part of
the step's constant bytes; it is given back when a step wants it on the host again. Where ranks share a
group, what is here of it are this rank's shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import SQUARED, Slot
from megacompile.runtime.device import Device
from megacompile.schedule.op_table import PassingGrad, ResidentGrad, Token
from megacompile.schedule.step import Step
from megacompile.state.master_layout import own_part, slot_view, sum_of_squares
from megacompile.state.masters import HostState


class ResidentState:
    """Views of the weights that blocks read (of shards none), and buffers for gradients, by group."""

    def __init__(self, state: HostState, device: Device) -> None:
        self.state = state
        self.device = device.torch_device
        self._hold, self._counted = device.hold, device.counted
        self.weights: dict[int, list[Tensor]] = {}
        self.landed: dict[int, set[int]] = {}  # by group, parameters whose gradients wait
        self._gradients: dict[int, Tensor] = {}
        self._passing = torch.empty(0, dtype=torch.uint8)

    def in_place(self, step: Step) -> bool:
        """Return whether everything is where a step wants it; otherwise :meth:`move` must follow, at rest."""
        return set(self.weights) == set(step.resident)

    def vacate(self) -> None:
        """Bring everything back to the host, waiting gradients too, until a step wants it here."""
        for group in self.weights:
            self.state.move(group, torch.device("cpu"))
        self.weights.clear()
        self._gradients = {group: self._gradients[group].cpu() for group in self.landed}
        self._passing = torch.empty(0, dtype=torch.uint8)

    def move(self, step: Step) -> None:
        """Bring state to the device, or back to the host, as a step wants it."""
        gone = [group for group in self.weights if group not in step.resident]
        for group in gone:
            del self.weights[group]
            self._gradients.pop(group, None)
            self.state.move(group, torch.device("cpu"))
        for group in step.resident:
            if group not in self.weights:
                self.state.move(group, self.device)
                weights = self.state.arrays[group]["weights"]
                self._hold(weights)
                layout = self.state.groups[group]
                whole = layout.slots if layout.ranks == 1 else ()
                self.weights[group] = [slot_view(weights, s) for s in whole]

    def prepare(self, step: Step) -> None:
        """Buffers for the gradients of a step; those that it does not use are given back."""
        homes = (token for op in step.ops for token in op.writes)
        waiting = {home.group for home in homes if isinstance(home, ResidentGrad)} | set(self.landed)
        for group in set(self._gradients) - waiting:
            del self._gradients[group]
        for group in sorted(waiting):
            known, share = self._gradients.get(group), self.state.groups[group].share
            if known is None:
                known = torch.zeros(share, dtype=torch.float32, device=self.device)
            self._gradients[group] = known.to(self.device)
        passing = [
            op.group for op in step.ops if op.kind == "accumulate" and isinstance(op.writes[0], PassingGrad)
        ]
        nbytes = max((self.state.groups[g].nbytes for g in passing), default=0)
        if self._passing.nbytes != nbytes:
            self._passing = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def gradient(self, group: int, home: Token) -> Tensor:
        """A flat buffer: FP32 where the gradient waits, otherwise in the dtype that the group computes in."""
        layout = self.state.groups[group]
        if isinstance(home, PassingGrad):
            return self._passing[: layout.nbytes].view(layout.dtype)
        return self._gradients[group]

    def norms(self, group: int, slots: Sequence[Slot]) -> Tensor:
        """2-norms of the gradients of some parameters of a group, FP32, on the device."""
        if self.device.type == "cpu" and self.state.groups[group].dtype != torch.float32:
            # the same bits as of gradients that wait on the host
            return self.squares(group, slots).sqrt_().float()
        grad = self._gradients[group]
        return torch.stack(
            [torch.linalg.vector_norm(slot_view(grad, s), 2, dtype=torch.float32) for s in slots]
        )

    def squares(self, group: int, slots: Sequence[Slot]) -> Tensor:
        """Sums of squares of what is this rank's of the gradients of some parameters of a group, FP64, on the
        device."""
        layout, rank = self.state.groups[group], self.state.world.ranks.shard
        found = torch.zeros(len(slots), dtype=torch.float64, device=self.device)
        for index, slot in enumerate(slots):
            _, own = own_part(layout, slot, rank)
            if self.device.type == "cpu":
                found[index] = sum_of_squares(self._gradients[group][own])
                continue
            for piece in torch.split(self._gradients[group][own], SQUARED):
                with self._counted():
                    wide = piece.double()
                found[index].add_(wide.square_().sum())
                del wide
        return found

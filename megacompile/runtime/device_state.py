"""Memory of the device that lasts from step to step: state that a plan keeps there, sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import SQUARED, GroupLayout, Slot
from megacompile.distributed.world import World
from megacompile.runtime.device import Device
from megacompile.schedule.op_table import PassingGrad, ResidentGrad, Shard, Token
from megacompile.schedule.step import Step
from megacompile.state.master_layout import copy_elements, own_part, slot_view, sum_of_squares
from megacompile.state.masters import HostState

# ------------------------------------------------------------------------------------------------------------
# State: weights, moments and gradients of the groups that a plan keeps there.
#
# The runtime's operations on such groups all belong to the compute stream. What their memory takes is part of
# the step's constant bytes; it is given back when a step wants it on the host again. Where ranks share a
# group, what is here of it are this rank's shards.


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


# ------------------------------------------------------------------------------------------------------------
# Sums of the gradients of several ranks, and the device memory that these take.
#
# In:  a block's contribution to a weight group's gradient on every rank. Out: this rank's shard of their sum,
# in FP32, in a buffer from which it leaves for the host.
#
# Each rank sends every other its part of the gradient and adds up what it got, in the order of ranks: as many
# bytes as a library's reduction sends, and the same sum on every backend, which is that of one process to
# which the ranks' batches come as micro-batches. Where several replicas train, the sums of each go round them
# in the same way, a shard at a time, which adds them up in the order of replicas.


class Fabric:
    """Buffers for shards of sums, and the two that gradients are exchanged by, on one device."""

    def __init__(self, world: World, device: Device) -> None:
        self._world, self._device = world, device
        self._shards: list[Tensor] = []
        self._sent = self._received = torch.empty(0, dtype=torch.uint8)

    def prepare(self, step: Step, synchronize: Callable[[], None]) -> None:
        """Make the buffers as large as a step counts them, with nothing under way in those before."""
        if [s.nbytes for s in self._shards] == [*step.shards] and self._sent.nbytes == step.exchange_bytes:
            return
        synchronize()
        self._shards, self._sent, self._received = [], *(torch.empty(0, dtype=torch.uint8) for _ in range(2))
        self._shards = [self._empty(nbytes) for nbytes in step.shards]
        self._sent, self._received = (self._empty(step.exchange_bytes) for _ in range(2))

    def shard(self, layout: GroupLayout, place: Shard) -> Tensor:
        """Return this rank's shard of a group's summed gradient, FP32, flat."""
        return self._shards[place.slot][: 4 * layout.share].view(torch.float32)

    def reduce(self, layout: GroupLayout, parts: Sequence[tuple[int, Tensor]], place: Shard) -> None:
        """Sum the gradients of all ranks; ``parts`` are this one's, of (slot, tensor)."""
        size, share, total = self._world.ranks.shards, layout.share, self.shard(layout, place)
        most = self._sent.nbytes // (size * layout.dtype.itemsize)
        for start in range(0, share, most):
            count = min(most, share - start)
            sent, received = (
                buffer[: size * count * layout.dtype.itemsize].view(layout.dtype)
                for buffer in (self._sent, self._received)
            )
            for rank, part in enumerate(sent.chunk(size)):
                _pack(part, rank * share + start, layout, parts)
            self._world.all_to_all(received, sent)
            first, *others = received.chunk(size)
            summed = total[start : start + count].copy_(first)
            for other in others:
                summed.add_(other)

    def all_reduce(self, layout: GroupLayout, place: Shard) -> None:
        """Add up a shard of all replicas' sums, so that each has the same: of every piece a replica sums a
        part, in the order of replicas, and gives it to the others."""
        replicas, own = self._world.ranks.replicas, self._world.ranks.replica
        numel = -(-layout.share // replicas) * replicas  # what is beyond the shard nobody reads
        total = self._shards[place.slot].view(torch.float32)[:numel]
        for piece in torch.split(total, self._received.nbytes // (4 * replicas) * replicas):
            received = self._received[: piece.nbytes].view(torch.float32)
            self._world.all_to_all(received, piece, across=True)
            first, *others = received.chunk(replicas)
            summed = piece.chunk(replicas)[own].copy_(first)
            for other in others:
                summed.add_(other)
            self._world.all_gather(piece, across=True)

    def _empty(self, nbytes: int) -> Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)
        self._device.hold(buffer)
        return buffer


def _pack(target: Tensor, begin: int, layout: GroupLayout, parts: Sequence[tuple[int, Tensor]]) -> None:
    """A bucket's elements from ``begin`` on; what has no gradient is zero."""
    target.zero_()
    for index, gradient in parts:
        slot = layout.slots[index]
        first = max(begin, slot.offset)
        last = min(begin + target.numel(), slot.offset + slot.parameter.numel)
        if first < last:
            copy_elements(target[first - begin : last - begin], gradient, slot, first - slot.offset)

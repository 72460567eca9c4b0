"""Sum the gradients of several ranks, in device memory that is counted for that.

In:  a block's contribution to a weight group's gradient on every rank. Out: this rank's shard of their sum,
in FP32, in a buffer from which it leaves for the host.

Each rank sends every other its part of the gradient and adds up what it got, in the order of ranks: as many
bytes as a library's reduction sends. The sum is the same on every backend, and that of one process with the
ranks' batches as micro-batches. Where several replicas train, the sums of each go round them in the same way,
a shard at a time, which adds them up in the order of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import GroupLayout
from megacompile.distributed.world import World
from megacompile.runtime.device import Device
from megacompile.schedule.op_table import Shard
from megacompile.schedule.step import Step
from megacompile.state.master_layout import copy_elements


class Fabric:
    """Buffers for shards of sums, and the two that gradients are exchanged by, on one device."""

    def __init__(self, world: World, device: Device) -> None:
        self._world, self._device = world, device
        self._shards: list[Tensor] = []
        self._sent = self._received = torch.empty(0, dtype=torch.uint8)

    def prepare(self, step: Step, synchronize: Callable[[], None]) -> None:
        """Allocate the buffers as large as a step counts them, with nothing under way in those before."""
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

"""One run of a step: the operations that emitted code calls, and what this run alone knows.

Emitted code calls one method per operation, named and given as :data:`~megacompile.step.spec.SPECS` says.
Block functions go to :class:`~megacompile.runtime.blocks.Blocks`; copies, updates and waits to a
:class:`~megacompile.runtime.device.Device`. Nothing is decided here: what happens when
is written in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any, Literal

import torch

from megacompile.errors import ProgramError
from megacompile.host.rows import gather_rows
from megacompile.runtime.step_collectives import StepCollectives
from megacompile.step.operations import Event
from megacompile.step.spec import Offloaded, Stream, Token, Value, ValueGrad, typed


class StepRun(StepCollectives):
    """The operations of one emitted step, for one set of inputs."""

    def load(self, *, value: int, micro: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        self._device.wait(after)
        leaf = self._inputs.leaves[micro][self._bound.part.batch_values[value]]
        self._load(("load", value, micro), leaf, free)

    def gather(self, *, value: int, micro: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        self._device.wait(after)
        table, places = self._bound.part.rows[value], self._bound.assembly.places
        pieces = [self._held.state.weight(*places[piece]) for piece in table.pieces]
        try:
            rows = gather_rows(pieces, table.stops, table.find(self._inputs.leaves[micro]))
        except IndexError as error:
            raise ProgramError(f"The lookup in {table.pieces[0]} failed on this batch: {error}.") from error
        self._load(("gather", value, micro), rows, free)

    def _load(self, event: Event, host: torch.Tensor, free: Sequence[Token]) -> None:
        self._blocks.values[Value(*event[1:])] = self._device.load(host)
        self._device.reached(event)
        self._blocks.free(free)

    def copy_result(self, *, value: int, micro: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        self._device.wait(after)
        self.results.outputs[value, micro] = self._device.read(self._blocks.values[Value(value, micro)])
        self._device.reached(("copy_result", value, micro))
        self._blocks.free(free)

    def load_grad(self, *, value: int, micro: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        self._device.wait(after)
        if micro not in self._given:
            self._given[micro] = self._from_outside(micro)
        gradient = self._given[micro].pop(value).to(self._bound.part.values[value].dtype)
        self._blocks.values[ValueGrad(value, micro)] = self._device.load(gradient)
        self._device.reached(("load_grad", value, micro))
        self._blocks.free(free)

    def _from_outside(self, micro: int) -> dict[int, torch.Tensor]:
        """Gradients by the results of a micro-batch, which are on the host when the forward is over."""
        assert self._inputs.outside is not None
        self._device.await_reads()
        outputs = self.results.outputs
        of_this = {v: outputs.pop((v, m)) for v, m in list(outputs) if m == micro}
        loss, gradients = self._inputs.outside(micro, of_this)
        self.results.losses.append(loss)
        return gradients

    def prefetch(
        self, *, group: int, offset: int, slot: int | None = None, after: Sequence[Event] = ()
    ) -> None:
        device, source = self._device, self._held.state.streamed(group, slot)
        stream: Stream = "comm" if group in self._held.resident.weights else "h2d"
        layout = self._bound.assembly.groups[group]
        place = self._blocks.arrive(layout, offset)[layout.shard(self._held.world.ranks.shard)]
        device.submit(stream, ("prefetch", group), after, lambda: device.copy([place], [source]))

    def evict(self, *, group: int, after: Sequence[Event] = ()) -> None:
        self._device.wait(after)
        self._blocks.leave(group)
        self._device.reached(("evict", group))

    def free(self, tokens: Sequence[Token], *, after: Sequence[Event] = ()) -> None:
        self._free(("free", *tokens[0][1:]), tokens, after)

    def free_offloaded(
        self, *, block: int, micro: int, saved: Sequence[Token], after: Sequence[Event] = ()
    ) -> None:
        self._free(("free_offloaded", block, micro), saved, after)

    def _free(self, event: Event, tokens: Sequence[Token], after: Sequence[Event]) -> None:
        self._device.wait(after)
        self._blocks.free(tokens)
        self._device.reached(event)

    def _call(
        self, part: Literal["forward", "recompute", "backward"], *, block: int, micro: int, checkpoint: str,
        after: Sequence[Event] = (), free: Any = (),
    ) -> None:  # fmt: skip
        with self._computing((part, block, micro), after, free):
            self._blocks.call(part, block, micro, checkpoint)
            if part == "forward" and self._bound.loss_block == block:
                self._read_loss(micro)

    forward = partialmethod(_call, "forward")
    recompute = partialmethod(_call, "recompute")
    backward = partialmethod(_call, "backward")

    def offload(
        self, *, block: int, micro: int, saved: Sequence[Token], slot: int | None = None,
        after: Sequence[Event] = (),
    ) -> None:  # fmt: skip
        tensors = self._blocks.tensors(saved)
        kept = self._held.buffers.offload(Offloaded(block, micro), tensors, slot)
        device = self._device
        device.submit("d2h", ("offload", block, micro), after, lambda: device.copy(kept, tensors))

    def reload(
        self, *, block: int, micro: int, saved: Sequence[Token], slot: int | None = None,
        after: Sequence[Event] = (),
    ) -> None:  # fmt: skip
        kept = self._held.buffers.offloaded(Offloaded(block, micro), slot)
        device = self._device
        with device.counted():
            tensors = [torch.empty_like(t, device=device.torch_device) for t in kept]
        device.submit("h2d", ("reload", block, micro), after, lambda: device.copy(tensors, kept))
        self._blocks.put_back([typed(token) for token in saved], tensors)

    def write_offloaded(self, *, block: int, micro: int, slot: int, after: Sequence[Event] = ()) -> None:
        move = self._offload.storage.write
        self._move_offloaded("nvme_write", ("write_offloaded", block, micro), slot, after, move)

    def read_offloaded(self, *, block: int, micro: int, slot: int, after: Sequence[Event] = ()) -> None:
        move = self._offload.storage.read
        self._move_offloaded("nvme_read", ("read_offloaded", block, micro), slot, after, move)

    def _move_offloaded(
        self, stream: Stream, event: Event, slot: int, after: Sequence[Event],
        move: Callable[[str, torch.Tensor], None],
    ) -> None:  # fmt: skip
        region, buffer = self._held.buffers.spilled(Offloaded(*event[1:]), slot)
        self._device.submit(stream, event, after, lambda: move(region, buffer))

    def _read_loss(self, micro: int) -> None:
        (value,) = self._bound.part.results
        self.results.losses.append(self._device.read(self._blocks.values[Value(value, micro)]))
        if "backward" in self._bound.kinds:
            self._blocks.start_backward(value, micro)
        if self._device.immediate:
            self._check_loss()

"""One run of a step: the operations that emitted code calls, and what this run alone knows.

Emitted code calls one method per operation. Block functions go to
:class:`~megacompile.runtime.blocks.Blocks`; copies, updates and waits to a
:class:`~megacompile.runtime.device.Device`. Nothing is decided here: what happens when
is written in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megacompile.errors import ProgramError, StorageError
from megacompile.host.adam import AdamHyper
from megacompile.host.bucket import add_gradients, slot_view
from megacompile.host.offload import Offload
from megacompile.host.rows import add_rows, gather_rows
from megacompile.host.state import HostState
from megacompile.runtime.blocks import Blocks
from megacompile.runtime.device import Device, Tail
from megacompile.runtime.host_buffers import HostBuffers
from megacompile.runtime.progress import Progress
from megacompile.runtime.resident import ResidentState
from megacompile.runtime.step_io import NonFiniteError, StepInputs, StepResults
from megacompile.step.bind import BoundStep
from megacompile.step.operations import Event, Stream, Token


@dataclass
class Held:
    """What outlives a run. ``landed`` holds the groups with a gradient that waits on the host."""

    state: HostState
    device: Device
    resident: ResidentState
    buffers: HostBuffers
    blocks: Blocks
    progress: Progress = field(default_factory=Progress)
    landed: set[int] = field(default_factory=set)

    def guarded(self, run: Callable[[], None]) -> None:
        """A transfer to or from storage that fails leaves a group without its state."""
        try:
            run()
        except StorageError:
            self.progress.lost = True
            raise


class StepRun:
    """The operations of one emitted step, for one set of inputs; ``results`` fills as they run.

    ``pushed`` says whether any gradient of this run went to where gradients wait.
    """

    def __init__(self, held: Held, bound: BoundStep, inputs: StepInputs) -> None:
        self.results = StepResults(losses=[], takes_norm="clip_scale" in bound.kinds)
        self.pushed = False
        self._held, self._bound, self._inputs = held, bound, inputs
        self._device, self._blocks = held.device, held.blocks
        self._norms: dict[str, torch.Tensor] = {}
        self._scale = 1.0
        self._loss_checked = False

    @contextmanager
    def _computing(self, event: Event, after: Sequence[Event], free: Sequence[Token] = ()) -> Iterator[None]:
        """One timed operation of the compute stream."""
        self._device.wait(after)
        start = self._device.clock()
        yield
        self._blocks.free(free)
        self._device.reached(event)
        self._device.note(event, start)

    def load(self, *, value: int, micro: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        self._device.wait(after)
        self._load(value, micro, self._inputs.leaves[micro][self._bound.part.batch_values[value]])
        self._blocks.free(free)

    def gather(self, *, value: int, micro: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        self._device.wait(after)
        table, places = self._bound.part.rows[value], self._bound.assembly.places
        pieces = [self._held.state.weight(*places[piece]) for piece in table.pieces]
        try:
            rows = gather_rows(pieces, table.stops, table.find(self._inputs.leaves[micro]))
        except IndexError as error:
            raise ProgramError(f"The lookup in {table.pieces[0]} failed on this batch: {error}.") from error
        self._load(value, micro, rows)
        self._blocks.free(free)

    def _load(self, value: int, micro: int, host: torch.Tensor) -> None:
        self._blocks.values["x", value, micro] = self._device.load(host)
        self._device.reached(("load", value, micro))

    def prefetch(
        self, *, group: int, offset: int, slot: int | None = None, after: Sequence[Event] = ()
    ) -> None:
        device, source = self._device, self._held.state.streamed(group, slot)
        place = self._blocks.arrive(self._bound.assembly.groups[group], offset)
        device.submit("h2d", ("prefetch", group), after, lambda: device.copy([place], [source]))

    def evict(self, *, group: int, after: Sequence[Event] = ()) -> None:
        self._device.wait(after)
        self._blocks.leave(group)
        self._device.reached(("evict", group))

    def free(
        self, tokens: Sequence[Token], *, block: int = -1, micro: int = 0, after: Sequence[Event] = ()
    ) -> None:
        self._device.wait(after)
        self._blocks.free(tokens)
        self._device.reached(("free", block, micro) if block >= 0 else ("free", *tokens[0][1:]))

    def forward(
        self, *, block: int, micro: int, keep: str, after: Sequence[Event] = (), free: Any = ()
    ) -> None:
        with self._computing(("forward", block, micro), after, free):
            self._blocks.call("forward", block, micro, keep)
            if self._bound.loss_block == block:
                self._read_loss(micro)

    def recompute(
        self, *, block: int, micro: int, keep: str, after: Sequence[Event] = (), free: Any = ()
    ) -> None:
        with self._computing(("recompute", block, micro), after, free):
            self._blocks.call("recompute", block, micro, keep)

    def backward(
        self, *, block: int, micro: int, keep: str, after: Sequence[Event] = (), free: Any = ()
    ) -> None:
        with self._computing(("backward", block, micro), after, free):
            self._blocks.call("backward", block, micro, keep)

    def offload(
        self, *, block: int, micro: int, stash: Sequence[Token], slot: int | None = None,
        after: Sequence[Event] = (),
    ) -> None:  # fmt: skip
        tensors = self._blocks.tensors(stash)
        kept = self._held.buffers.stash(("stash", block, micro), tensors, slot)
        device = self._device
        device.submit("d2h", ("offload", block, micro), after, lambda: device.copy(kept, tensors))

    def reload(
        self, *, block: int, micro: int, stash: Sequence[Token], slot: int | None = None,
        after: Sequence[Event] = (),
    ) -> None:  # fmt: skip
        kept = self._held.buffers.stashed(("stash", block, micro), slot)
        device = self._device
        with device.counted():
            tensors = [torch.empty_like(t, device=device.torch_device) for t in kept]
        device.submit("h2d", ("reload", block, micro), after, lambda: device.copy(tensors, kept))
        self._blocks.put_back(stash, tensors)

    def write_stash(self, *, block: int, micro: int, slot: int, after: Sequence[Event] = ()) -> None:
        self._move_stash(
            "nvme_write", ("write_stash", block, micro), slot, after, self._offload.storage.write
        )

    def read_stash(self, *, block: int, micro: int, slot: int, after: Sequence[Event] = ()) -> None:
        self._move_stash("nvme_read", ("read_stash", block, micro), slot, after, self._offload.storage.read)

    def _move_stash(
        self, stream: Stream, event: Event, slot: int, after: Sequence[Event],
        move: Callable[[str, torch.Tensor], None],
    ) -> None:  # fmt: skip
        region, buffer = self._held.buffers.spilled(("stash", *event[1:]), slot)
        self._device.submit(stream, event, after, lambda: move(region, buffer))

    def push_grad(
        self, *, group: int, block: int, micro: int, to: Token, after: Sequence[Event] = ()
    ) -> None:
        parts: list[tuple[int, torch.Tensor]] = self._blocks.values["wg", group, block, micro]
        home = self._held.buffers.gradient(self._bound, group, to)
        fresh = to[0] == "ring" or group not in self._held.landed
        self._held.landed.add(group)
        self.pushed = True
        slots = self._bound.assembly.groups[group].slots

        def push() -> Tail | None:
            return self._device.push(home, slots, parts, fresh)

        self._device.submit("d2h", ("push_grad", group, block, micro), after, push)

    def push_rows(
        self, *, group: int, block: int, micro: int, to: Sequence[Token], after: Sequence[Event] = ()
    ) -> None:
        """Push the gradient of the rows that a block was given into those of the groups of their table."""
        part, assembly = self._bound.part, self._bound.assembly
        ((_, grad),) = self._blocks.values["wg", group, block, micro]
        (value,) = (i.value for i in part.blocks[block].inputs if i.value in part.rows)
        table = part.rows[value]
        ids = table.find(self._inputs.leaves[micro]).clone()  # the caller may fill the batch anew
        pieces, fresh = [], []
        for name, home in zip(table.pieces, to, strict=True):
            owner, slot = assembly.places[name]
            flat = self._held.buffers.gradient(self._bound, owner, home)
            pieces.append(slot_view(flat, assembly.groups[owner].slots[slot]))
            fresh.append(owner not in self._held.landed)
            self._held.landed.add(owner)
        self.pushed = True

        def use(landed: list[torch.Tensor]) -> None:
            add_rows(pieces, fresh, table.stops, ids, landed[0], table.padding)

        device = self._device
        device.submit("d2h", ("push_grad", group, block, micro), after, lambda: device.land([grad], use))

    def accumulate(
        self, *, group: int, block: int, micro: int, to: Token, free: Any, after: Sequence[Event] = ()
    ) -> None:
        landed, slots = self._held.resident.landed, self._bound.assembly.groups[group].slots
        fresh = to[0] == "dring" or group not in landed
        if to[0] == "dgrad":
            landed.add(group)
            self.pushed = True
        with self._computing(("accumulate", group, block, micro), after, free):
            parts = self._blocks.values["wg", group, block, micro]
            add_gradients(self._held.resident.gradient(group, to), slots, parts, fresh)
            del parts

    def norm(self, *, group: int, after: Sequence[Event] = ()) -> None:
        if group in self._held.resident.weights:
            with self._computing(("norm", group), after):
                taken = self._device.read(self._held.resident.norms(group))
                self._norms |= dict(zip(self._held.resident.names(group), taken, strict=True))
            return
        layout, norms = self._bound.assembly.groups[group], self._norms
        grad = self._held.buffers.gradient(self._bound, group, ("hgrad", group))

        def measure() -> None:
            for slot in layout.slots:
                view = slot_view(grad, slot)
                norms[slot.parameter.name] = torch.linalg.vector_norm(view, 2, dtype=torch.float32)

        self._device.submit("host", ("norm", group), after, measure)

    def clip_scale(self, *, after: Sequence[Event] = ()) -> None:
        inputs, results, norms = self._inputs, self.results, self._norms
        order = self._bound.norm_order

        def clip() -> None:
            present = [norms[n] for n in order if n in norms]
            total = torch.linalg.vector_norm(torch.stack(present), 2)
            results.skipped = not bool(torch.isfinite(total))
            self._scale = 1.0
            if inputs.max_grad_norm is not None:
                self._scale = float(torch.clamp(inputs.max_grad_norm / (total + 1e-6), max=1.0))
            results.grad_norm = total  # last: whoever sees it may read the rest

        self._device.submit("host", ("clip_scale",), after, clip)

    def read(self, *, group: int, part: str, slot: int, after: Sequence[Event] = ()) -> None:
        offload = self._offload
        move = offload.read_weights if part == "weights" else offload.read_state
        self._store_op("nvme_read", (f"read_{part}", group), after, lambda: move(group, slot))

    def write(self, *, group: int, slot: int, after: Sequence[Event] = ()) -> None:
        progress = self._held.progress.steps[self._device.step]
        offload, unwritten = self._offload, self._held.progress.unwritten

        def write() -> None:
            if group in unwritten:  # else the update was skipped
                offload.write_state(group, slot)
                unwritten.discard(group)
                progress.done += 1

        self._store_op("nvme_write", ("write", group), after, write)

    def _store_op(
        self, stream: Stream, event: Event, after: Sequence[Event], run: Callable[[], None]
    ) -> None:
        self._device.submit(stream, event, after, lambda: self._held.guarded(run))

    @property
    def _offload(self) -> Offload:
        assert self._held.state.offload is not None
        return self._held.state.offload

    def adam(self, *, group: int, grad: Token, slot: int | None = None, after: Sequence[Event] = ()) -> None:
        self._check_loss()
        if grad[0] in ("dgrad", "dring"):
            with self._computing(("adam", group), after):
                self._update_resident(group, grad)
            return
        home = self._held.buffers.gradient(self._bound, group, grad)
        self._held.landed.discard(group)
        progress = self._held.progress.steps[self._device.step]
        results, unwritten, state = self.results, self._held.progress.unwritten, self._held.state
        deferred = grad[0] == "hgrad" and "clip_scale" in self._bound.kinds

        def update() -> None:
            if deferred and results.skipped:
                progress.planned -= 1
                return
            progress.begun += 1
            state.update(
                group, home, self._hypers(group, deferred), threads=self._device.adam_threads, slot=slot
            )
            state.steps[group] += 1
            if slot is None:
                progress.done += 1
            else:
                unwritten.add(group)  # its write ends the update

        self._device.submit("host", ("adam", group), after, update)

    def _update_resident(self, group: int, grad: Token) -> None:
        """One update on the compute stream; what clip_scale found is known by now."""
        self._held.resident.landed.discard(group)
        progress = self._held.progress.steps[self._device.step]
        deferred = grad[0] == "dgrad" and "clip_scale" in self._bound.kinds
        if deferred and self.results.skipped:
            progress.planned -= 1
        else:
            progress.begun += 1
            gradient, hypers = self._held.resident.gradient(group, grad), self._hypers(group, deferred)
            self._device.update(self._held.state, group, gradient, hypers)
            self._held.state.steps[group] += 1
            progress.done += 1

    def _hypers(self, group: int, deferred: bool) -> list[AdamHyper]:
        """Hyper-parameters by param group, for the step that the group is about to take."""
        step, scale = self._held.state.steps[group] + 1, self._scale if deferred else 1.0
        return [replace(h, step=step, grad_scale=scale) for h in self._inputs.hypers]

    def _read_loss(self, micro: int) -> None:
        value = self._bound.part.loss
        self.results.losses.append(self._device.read(self._blocks.values["x", value, micro]))
        if "backward" in self._bound.kinds:
            self._blocks.start_backward(value, micro)
        if self._device.immediate:
            self._check_loss()

    def _check_loss(self) -> None:
        """Stop the step before anything is changed; where compute runs ahead, at its first update."""
        if not self._inputs.check_loss or self._loss_checked:
            return
        self._device.settle()
        self._loss_checked = True
        for loss in self.results.losses:
            if not bool(torch.isfinite(loss)):
                raise NonFiniteError(
                    f"The loss is {float(loss)}: the step was stopped before its backward, and no "
                    "parameter was changed."
                )

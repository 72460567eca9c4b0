"""The runtime: the operations that emitted steps call, on any backend.

Emitted code calls one method per operation. The runtime hands block functions to
:class:`~megacompile.runtime.blocks.Blocks`, and copies, updates and waits to a
:class:`~megacompile.runtime.device.Device`. It decides nothing: what happens when is written in the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from megacompile.errors import ProgramError, StorageError
from megacompile.host.adam import AdamHyper
from megacompile.host.offload import Offload
from megacompile.host.state import HostState, add_gradients, slot_view
from megacompile.runtime.blocks import Blocks
from megacompile.runtime.device import Device, Tail
from megacompile.runtime.host_buffers import HostBuffers
from megacompile.runtime.progress import Progress
from megacompile.runtime.resident import ResidentState
from megacompile.runtime.step_io import NonFiniteError, StepInputs, StepResults
from megacompile.runtime.workers import Trace
from megacompile.step.bind import BoundStep
from megacompile.step.operations import Event, Step, Stream, Token


class Runtime:
    """The operations of emitted steps and what they leave behind, for one compiled program set."""

    def __init__(self, state: HostState, device: Device) -> None:
        self.state = state
        self.device = device
        device.own([*state.traveling, state.arena.rest])
        self.resident = ResidentState(state, device)
        self.buffers = HostBuffers(state.arena, device)
        self.traces: deque[tuple[Step, Trace]] = deque(maxlen=2)  # of the last two runs: what ran when
        self.lost_gradients = False  # some that waited were dropped when a later micro-batch failed
        self._blocks = Blocks(device, self.resident)
        self._progress = Progress()
        self._landed: set[int] = set()  # groups with a gradient on the host
        self._pushed = False
        self._norms: dict[str, torch.Tensor] = {}
        self._scale = 1.0

    # ---- running a program -----------------------------------------------------------------------

    def run(self, program: BoundStep, inputs: StepInputs) -> StepResults:
        """Run one emitted step; device values never outlive it."""
        if self.state.offload is not None and self.state.offload.unsettled:
            self.finish()
            self._guarded(self.state.offload.begin)
        self._bound, self._inputs = program, inputs
        self._prepare(program)
        self._loss_checked = False
        trace: Trace = []
        self.traces.append((program.step, trace))
        self._results = StepResults(losses=[], takes_norm="clip_scale" in program.kinds)
        self._pushed = False
        try:
            with self.device.start(trace):
                self._progress.begin(self.device.step, program.updates)
                program.function(self)
        except BaseException as error:
            self._abandon(error)
            raise
        assert not self._blocks.values, f"left on the device: {list(self._blocks.values)}"
        return self._results

    @property
    def peak_bytes(self) -> int:
        """The most device bytes that any step so far held."""
        return self.device.peak_bytes

    def settle(self) -> None:
        """Return when the losses of all steps so far are there."""
        self.device.settle()

    def finish(self) -> None:
        """Wait for all transfers and updates that are under way."""
        self.device.drain()

    def close(self) -> None:
        """End the backend's threads."""
        self.device.close()

    def forget_faults(self) -> None:
        """The state was set anew: what earlier steps left undone no longer matters."""
        self._progress.clear()
        self.lost_gradients = False

    @property
    def torn(self) -> bool:
        """Whether, with nothing under way, some step updated a part of the weights only, or lost some."""
        return self._progress.torn

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for an update."""
        return bool(self._landed or self.resident.landed)

    def drop_gradients(self) -> None:
        """Forget the gradients that wait."""
        self.lost_gradients = False
        self._landed.clear()
        self.resident.landed.clear()

    def _prepare(self, program: BoundStep) -> None:
        if self.resident.settled(program.step):
            self.resident.prepare(program.step)
        else:
            self.finish()
            self._move(program)
        constants = self.device.prepare(program.step, program.constants)
        self._blocks.begin(program, self._inputs, constants)
        self.buffers.prepare(program.step, self.finish)

    def _move(self, program: BoundStep) -> None:
        """At rest: state to where a step wants it, and with it the FP32 gradients that wait for an update."""
        stays, landed = set(program.step.resident), self.resident.landed
        gone, coming = landed - stays, self._landed & stays
        carried = {group: self.resident.gradient(group, ("dgrad",)).cpu() for group in gone}
        self.resident.move(program.step)
        self.resident.landed = (landed - gone) | coming
        self._landed = (self._landed - coming) | gone
        self.resident.prepare(program.step)
        for group, gradient in carried.items():
            self.buffers.gradient(program, group, ("hgrad", group)).copy_(gradient)
        for group in coming:
            waiting = self.buffers.gradients[group][: 4 * program.assembly.groups[group].elements]
            self.resident.gradient(group, ("dgrad",)).copy_(waiting.view(torch.float32))

    def _abandon(self, error: BaseException) -> None:
        """After an exception: let the queues run dry and forget everything on the device.

        Gradients that wait on the host stay only if nothing of this step can be among them.
        """
        whole = isinstance(error, (ProgramError, NonFiniteError)) and not self._pushed
        try:
            self.device.drain()
        except BaseException:
            whole = False
            self.device.raise_failure()
        finally:
            self._blocks.clear()
            if not whole:
                lost = self.lost_gradients or self.has_gradients
                self.drop_gradients()
                self.lost_gradients = lost

    @contextmanager
    def _computing(self, event: Event, after: Sequence[Event], free: Sequence[Token] = ()) -> Iterator[None]:
        """One timed operation of the compute stream."""
        self.device.wait(after)
        start = self.device.clock()
        yield
        self._blocks.free(free)
        self.device.reached(event)
        self.device.note(event, start)

    # ---- operations ------------------------------------------------------------------------------

    def load(self, *, value: int, micro: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        leaf = self._inputs.leaves[micro][self._bound.part.batch_values[value]]
        self.device.wait(after)
        self._blocks.values["x", value, micro] = self.device.load(leaf)
        self._blocks.free(free)
        self.device.reached(("load", value, micro))

    def prefetch(
        self, *, group: int, offset: int, slot: int | None = None, after: Sequence[Event] = ()
    ) -> None:
        device, source = self.device, self.state.streamed(group, slot)
        place = self._blocks.arrive(self._bound.assembly.groups[group], offset)
        device.submit("h2d", ("prefetch", group), after, lambda: device.copy([place], [source]))

    def evict(self, *, group: int, after: Sequence[Event] = ()) -> None:
        self.device.wait(after)
        self._blocks.leave(group)
        self.device.reached(("evict", group))

    def free(
        self, tokens: Sequence[Token], *, block: int = -1, micro: int = 0, after: Sequence[Event] = ()
    ) -> None:
        self.device.wait(after)
        self._blocks.free(tokens)
        self.device.reached(("free", block, micro) if block >= 0 else ("free", *tokens[0][1:]))

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

    def offload(self, *, block: int, micro: int, stash: Sequence[Token], after: Sequence[Event] = ()) -> None:
        tensors = self._blocks.tensors(stash)
        kept = self.buffers.stash(("stash", block, micro), tensors)
        device = self.device
        device.submit("d2h", ("offload", block, micro), after, lambda: device.copy(kept, tensors))

    def reload(self, *, block: int, micro: int, stash: Sequence[Token], after: Sequence[Event] = ()) -> None:
        kept = self.buffers.stashed(("stash", block, micro))
        device = self.device
        with device.counted():
            tensors = [torch.empty_like(t, device=device.torch_device) for t in kept]
        device.submit("h2d", ("reload", block, micro), after, lambda: device.copy(tensors, kept))
        self._blocks.put_back(stash, tensors)

    def push_grad(
        self, *, group: int, block: int, micro: int, to: Token, after: Sequence[Event] = ()
    ) -> None:
        parts: list[tuple[int, torch.Tensor]] = self._blocks.values["wg", group, block, micro]
        home = self.buffers.gradient(self._bound, group, to)
        fresh = to[0] == "ring" or group not in self._landed
        self._landed.add(group)
        self._pushed = True
        slots = self._bound.assembly.groups[group].slots

        def push() -> Tail | None:
            return self.device.push(home, slots, parts, fresh)

        self.device.submit("d2h", ("push_grad", group, block, micro), after, push)

    def accumulate(
        self, *, group: int, block: int, micro: int, to: Token, free: Any, after: Sequence[Event] = ()
    ) -> None:
        landed, slots = self.resident.landed, self._bound.assembly.groups[group].slots
        fresh = to[0] == "dring" or group not in landed
        if to[0] == "dgrad":
            landed.add(group)
            self._pushed = True
        with self._computing(("accumulate", group, block, micro), after, free):
            parts = self._blocks.values["wg", group, block, micro]
            add_gradients(self.resident.gradient(group, to), slots, parts, fresh)
            del parts

    def norm(self, *, group: int, after: Sequence[Event] = ()) -> None:
        if group in self.resident.weights:
            with self._computing(("norm", group), after):
                taken = self.device.read(self.resident.norms(group))
                self._norms |= dict(zip(self.resident.names(group), taken, strict=True))
            return
        layout, norms = self._bound.assembly.groups[group], self._norms
        grad = self.buffers.gradient(self._bound, group, ("hgrad", group))

        def measure() -> None:
            for slot in layout.slots:
                view = slot_view(grad, slot)
                norms[slot.parameter.name] = torch.linalg.vector_norm(view, 2, dtype=torch.float32)

        self.device.submit("host", ("norm", group), after, measure)

    def clip_scale(self, *, after: Sequence[Event] = ()) -> None:
        inputs, results, norms = self._inputs, self._results, self._norms
        order = self._bound.norm_order

        def clip() -> None:
            present = [norms[n] for n in order if n in norms]
            total = torch.linalg.vector_norm(torch.stack(present), 2)
            results.skipped = not bool(torch.isfinite(total))
            self._scale = 1.0
            if inputs.max_grad_norm is not None:
                self._scale = float(torch.clamp(inputs.max_grad_norm / (total + 1e-6), max=1.0))
            results.grad_norm = total  # last: whoever sees it may read the rest

        self.device.submit("host", ("clip_scale",), after, clip)

    def read(self, *, group: int, part: str, slot: int, after: Sequence[Event] = ()) -> None:
        offload = self._offload
        move = offload.read_weights if part == "weights" else offload.read_state
        self._store_op("nvme_read", (f"read_{part}", group), after, lambda: move(group, slot))

    def write(self, *, group: int, slot: int, after: Sequence[Event] = ()) -> None:
        progress = self._progress.steps[self.device.step]
        offload, unwritten = self._offload, self._progress.unwritten

        def write() -> None:
            if group in unwritten:  # else the update was skipped
                offload.write_state(group, slot)
                unwritten.discard(group)
                progress.done += 1

        self._store_op("nvme_write", ("write", group), after, write)

    def _store_op(
        self, stream: Stream, event: Event, after: Sequence[Event], run: Callable[[], None]
    ) -> None:
        self.device.submit(stream, event, after, lambda: self._guarded(run))

    def _guarded(self, run: Callable[[], None]) -> None:
        """A transfer to or from storage that fails leaves a group without its state."""
        try:
            run()
        except StorageError:
            self._progress.lost = True
            raise

    @property
    def _offload(self) -> Offload:
        assert self.state.offload is not None
        return self.state.offload

    def adam(self, *, group: int, grad: Token, slot: int | None = None, after: Sequence[Event] = ()) -> None:
        self._check_loss()
        if grad[0] in ("dgrad", "dring"):
            with self._computing(("adam", group), after):
                self._update_resident(group, grad)
            return
        home = self.buffers.gradient(self._bound, group, grad)
        self._landed.discard(group)
        progress = self._progress.steps[self.device.step]
        inputs, results, unwritten = self._inputs, self._results, self._progress.unwritten
        self.state.steps[group] += 1
        deferred = grad[0] == "hgrad" and "clip_scale" in self._bound.kinds

        def update() -> None:
            if deferred and results.skipped:
                self.state.steps[group] -= 1
                progress.planned -= 1
                return
            progress.begun += 1
            scale = self._scale if deferred else 1.0
            hypers = [_scaled(h, scale) for h in inputs.hypers[group]]
            self.state.update(group, home, hypers, threads=self.device.adam_threads, slot=slot)
            if slot is None:
                progress.done += 1
            else:
                unwritten.add(group)  # its write ends the update

        self.device.submit("host", ("adam", group), after, update)

    def _update_resident(self, group: int, grad: Token) -> None:
        """One update on the compute stream; what clip_scale found is known by now."""
        self.resident.landed.discard(group)
        progress = self._progress.steps[self.device.step]
        deferred = grad[0] == "dgrad" and "clip_scale" in self._bound.kinds
        if deferred and self._results.skipped:
            progress.planned -= 1
        else:
            self.state.steps[group] += 1
            progress.begun += 1
            hypers = [_scaled(h, self._scale if deferred else 1.0) for h in self._inputs.hypers[group]]
            self.device.update(self.state, group, self.resident.gradient(group, grad), hypers)
            progress.done += 1

    # ---- the loss --------------------------------------------------------------------------------

    def _read_loss(self, micro: int) -> None:
        value = self._bound.part.loss
        self._results.losses.append(self.device.read(self._blocks.values["x", value, micro]))
        if "backward" in self._bound.kinds:
            self._blocks.start_backward(value, micro)
        if self.device.immediate:
            self._check_loss()

    def _check_loss(self) -> None:
        """Stop the step before anything is changed; where compute runs ahead, at its first update."""
        if not self._inputs.check_loss or self._loss_checked:
            return
        self.device.settle()
        self._loss_checked = True
        for loss in self._results.losses:
            if not bool(torch.isfinite(loss)):
                raise NonFiniteError(
                    f"The loss is {float(loss)}: the step was stopped before its backward, and no "
                    "parameter was changed."
                )


def _scaled(hyper: AdamHyper, scale: float) -> AdamHyper:
    return hyper if scale == 1.0 else replace(hyper, grad_scale=scale)

"""The runtime: the operations that emitted steps call, on any backend.

Emitted code calls one method per operation. The runtime keeps values by token, binds block functions
to them, and hands copies, updates and waits to a :class:`~megacompile.runtime.device.Device`. It decides
nothing: what happens when is written in the emitted step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megacompile.differentiate.joint import Ref
from megacompile.errors import BudgetExceededError, ProgramError, StorageError
from megacompile.host.adam import AdamHyper
from megacompile.host.arena import padded
from megacompile.host.offload import Offload
from megacompile.host.state import HostState, add_gradients, slot_view
from megacompile.plan.assemble import GroupLayout
from megacompile.runtime.device import Device, Tail
from megacompile.runtime.resident import ResidentState
from megacompile.runtime.step_io import NonFiniteError, StepInputs, StepResults
from megacompile.runtime.workers import Trace
from megacompile.step.bind import BoundCall, BoundStep
from megacompile.step.operations import Event, Step, Stream, Token


class Runtime:
    """The operations of emitted steps and the values between them, for one compiled program set."""

    def __init__(self, state: HostState, device: Device) -> None:
        self.state = state
        self.device = device
        device.own([*state.traveling, state.arena.rest])
        self.resident = ResidentState(state, device)
        self.traces: deque[tuple[Step, Trace]] = deque(maxlen=2)  # of the last two runs: what ran when
        self._bound: BoundStep = None  # type: ignore[assignment]
        self._updates: dict[int, list[int]] = {}  # step number -> [planned, begun, done] updates
        self._store: dict[Token, Any] = {}
        self._views: dict[tuple[int, int], tuple[Tensor, list[Tensor]]] = {}  # of slots, by their place
        self._resident: dict[int, list[Tensor]] = {}
        self._ring: list[Tensor] = []
        self._grads: dict[int, Tensor] = {}
        self._landed: set[int] = set()
        self._pushed = False
        self.lost_gradients = False  # some that waited were dropped when a later micro-batch failed
        self._norms: dict[str, Tensor] = {}
        self._scale = 1.0
        self._stash: dict[Token, list[Tensor]] = {}
        self._unwritten: set[int] = set()  # groups whose update waits in the window for its write
        self._lost = False  # whether storage failed

    # ---- running a program -----------------------------------------------------------------------

    def run(self, program: BoundStep, inputs: StepInputs) -> StepResults:
        """Run one emitted step; device values never outlive it."""
        if self._bound is not program:
            self._views.clear()  # of a slab that may go
        self._bound = program
        if self.state.offload is not None and self.state.offload.unsettled:
            self.finish()
            self._guarded(self.state.offload.begin)
        self._prepare(program.step)
        self._inputs = inputs
        self._updates = {k: v for k, v in self._updates.items() if v[2] < v[0]}
        self._loss_checked = False
        trace: Trace = []
        self.traces.append((program.step, trace))
        self._results = StepResults(losses=[], takes_norm="clip_scale" in program.kinds)
        self._pushed = False
        try:
            with self.device.start(trace):
                self._updates[self.device.step] = [program.updates, 0, 0]
                program.function(self)
        except BaseException as error:
            self._abandon(error)
            raise
        assert not self._store, f"left on the device: {list(self._store)}"
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
        self.device.close()

    def forget_faults(self) -> None:
        """The state was set anew: what earlier steps left undone no longer matters."""
        self._updates.clear()
        self._unwritten.clear()
        self._lost = False
        self.lost_gradients = False

    @property
    def torn(self) -> bool:
        """Whether, with nothing under way, some step updated a part of the weights only, or lost some."""
        return self._lost or any(
            begun > 0 and done < planned for planned, begun, done in self._updates.values()
        )

    def host_bytes(self) -> dict[str, int]:
        """Host bytes by kind beyond the state: kept gradients, ring, stashes."""
        return {
            "gradients": sum(g.nbytes for g in self._grads.values()),
            "ring": sum(r.nbytes for r in self._ring),
            "stashes": sum(t.nbytes for s in self._stash.values() for t in s),
        }

    @property
    def has_gradients(self) -> bool:
        return bool(self._landed or self.resident.landed)

    def drop_gradients(self) -> None:
        """Forget the gradients that wait on the host."""
        self.lost_gradients = False
        self._landed.clear()
        self.resident.landed.clear()

    def _prepare(self, step: Step) -> None:
        if not self.resident.settled(step):
            self.finish()
            self.resident.move(step)
        self.resident.prepare(step)
        self._constants = self.device.prepare(step, self._bound.constants)
        for i, nbytes in enumerate(step.ring):
            if i == len(self._ring) or self._ring[i].nbytes < nbytes:
                self.finish()
                self._ring[i : i + 1] = [self._host_empty(nbytes)]

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
            self._store.clear()
            self._resident.clear()
            if not whole:
                self.lost_gradients = self.lost_gradients or self.has_gradients
                self._landed.clear()
                self.resident.landed.clear()

    # ---- operations ------------------------------------------------------------------------------

    def load(self, *, value: int, micro: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        leaf = self._inputs.leaves[micro][self._bound.part.batch_values[value]]
        self.device.wait(after)
        self._store["x", value, micro] = self.device.load(leaf)
        self._free(free)
        self.device.reached(("load", value, micro))

    def prefetch(
        self, *, group: int, offset: int, slot: int | None = None, after: Sequence[Event] = ()
    ) -> None:
        layout = self._bound.assembly.groups[group]
        source = self.state.streamed(group, slot)
        place, self._resident[group] = self._slot(layout, offset)
        device = self.device
        device.submit("h2d", ("prefetch", group), after, lambda: device.copy([place], [source]))

    def evict(self, *, group: int, after: Sequence[Event] = ()) -> None:
        self.device.wait(after)
        del self._resident[group]
        self.device.reached(("evict", group))

    def free(
        self, tokens: Sequence[Token], *, block: int = -1, micro: int = 0, after: Sequence[Event] = ()
    ) -> None:
        self.device.wait(after)
        self._free(tokens)
        self.device.reached(("free", block, micro) if block >= 0 else ("free", *tokens[0][1:]))

    def forward(
        self, *, block: int, micro: int, keep: str, after: Sequence[Event] = (), free: Any = ()
    ) -> None:
        self.device.wait(after)
        call, start = self._bound.call(block, keep, "forward"), self.device.clock()
        self._store_results(call, micro, self._call(call, micro))
        if self._bound.loss_block == block:
            self._read_loss(micro)
        self._free(free)
        self.device.reached(("forward", block, micro))
        self.device.note(("forward", block, micro), start)

    def recompute(
        self, *, block: int, micro: int, keep: str, after: Sequence[Event] = (), free: Any = ()
    ) -> None:
        self.device.wait(after)
        call, start = self._bound.call(block, keep, "recompute"), self.device.clock()
        self._store_results(call, micro, self._call(call, micro))
        self._free(free)
        self.device.reached(("recompute", block, micro))
        self.device.note(("recompute", block, micro), start)

    def backward(
        self, *, block: int, micro: int, keep: str, after: Sequence[Event] = (), free: Any = ()
    ) -> None:
        self.device.wait(after)
        call, start = self._bound.call(block, keep, "backward"), self.device.clock()
        self._store_gradients(call, micro, self._call(call, micro))
        self._free(free)
        self.device.reached(("backward", block, micro))
        self.device.note(("backward", block, micro), start)

    def offload(self, *, block: int, micro: int, stash: Sequence[Token], after: Sequence[Event] = ()) -> None:
        tensors = [t for token in stash for t in _as_list(self._store[token])]
        home: Token = ("stash", block, micro)
        kept = self._stash.get(home)
        if kept is None or [(t.shape, t.dtype) for t in kept] != [(t.shape, t.dtype) for t in tensors]:
            self._stash[home] = kept = [self._host_like(t) for t in tensors]
        device = self.device
        device.submit("d2h", ("offload", block, micro), after, lambda: device.copy(kept, tensors))

    def reload(self, *, block: int, micro: int, stash: Sequence[Token], after: Sequence[Event] = ()) -> None:
        kept = self._stash["stash", block, micro]
        device = self.device
        with device.counted():
            tensors = [torch.empty_like(t, device=device.torch_device) for t in kept]
        device.submit("h2d", ("reload", block, micro), after, lambda: device.copy(tensors, kept))
        rest = list(tensors)
        for token in stash:
            if token[0] == "saved":
                self._store[token], rest = rest[: len(rest)], []
            else:
                self._store[token] = rest.pop(0)

    def push_grad(
        self, *, group: int, block: int, micro: int, to: Token, after: Sequence[Event] = ()
    ) -> None:
        parts: list[tuple[int, Tensor]] = self._store["wg", group, block, micro]
        home = self._gradient(group, to)
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
        self.device.wait(after)
        start = self.device.clock()
        landed, slots = self.resident.landed, self._bound.assembly.groups[group].slots
        fresh = to[0] == "dring" or group not in landed
        if to[0] == "dgrad":
            landed.add(group)
            self._pushed = True
        add_gradients(self.resident.gradient(group, to), slots, self._store["wg", group, block, micro], fresh)
        self._free(free)
        self.device.reached(("accumulate", group, block, micro))
        self.device.note(("accumulate", group, block, micro), start)

    def norm(self, *, group: int, after: Sequence[Event] = ()) -> None:
        if group in self.resident.weights:
            self.device.wait(after)
            start = self.device.clock()
            taken = self.device.read(self.resident.norms(group))
            self._norms |= dict(zip(self.resident.names(group), taken, strict=True))
            self.device.reached(("norm", group))
            self.device.note(("norm", group), start)
            return
        layout, norms = self._bound.assembly.groups[group], self._norms
        grad = self._gradient(group, ("hgrad", group))

        def measure() -> None:
            for slot in layout.slots:
                view = slot_view(grad, slot)
                norms[slot.parameter.name] = torch.linalg.vector_norm(view, 2, dtype=torch.float32)

        self.device.submit("host", ("norm", group), after, measure)

    def clip_scale(self, *, after: Sequence[Event] = ()) -> None:
        inputs, results, norms = self._inputs, self._results, self._norms
        order = [n for n in self._bound.parameter_order if n in self._bound.assembly.places]

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
        progress = self._updates[self.device.step]
        offload, unwritten = self._offload, self._unwritten

        def write() -> None:
            if group in unwritten:  # else the update was skipped
                offload.write_state(group, slot)
                unwritten.discard(group)
                progress[2] += 1

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
            self._lost = True
            raise

    @property
    def _offload(self) -> Offload:
        assert self.state.offload is not None
        return self.state.offload

    def adam(self, *, group: int, grad: Token, slot: int | None = None, after: Sequence[Event] = ()) -> None:
        self._check_loss()
        if grad[0] in ("dgrad", "dring"):
            self.device.wait(after)
            self._update_resident(group, grad)
            return
        home = self._gradient(group, grad)
        self._landed.discard(group)
        progress = self._updates[self.device.step]
        inputs, results, unwritten = self._inputs, self._results, self._unwritten
        self.state.steps[group] += 1
        deferred = grad[0] == "hgrad" and "clip_scale" in self._bound.kinds

        def update() -> None:
            if deferred and results.skipped:
                self.state.steps[group] -= 1
                progress[0] -= 1
                return
            progress[1] += 1
            scale = self._scale if deferred else 1.0
            hypers = [_scaled(h, scale) for h in inputs.hypers[group]]
            self.state.update(group, home, hypers, threads=self.device.adam_threads, slot=slot)
            if slot is None:
                progress[2] += 1
            else:
                unwritten.add(group)  # its write ends the update

        self.device.submit("host", ("adam", group), after, update)

    def _update_resident(self, group: int, grad: Token) -> None:
        """One update on the compute stream; what clip_scale found is known by now."""
        start = self.device.clock()
        self.resident.landed.discard(group)
        progress = self._updates[self.device.step]
        deferred = grad[0] == "dgrad" and "clip_scale" in self._bound.kinds
        if deferred and self._results.skipped:
            progress[0] -= 1
        else:
            self.state.steps[group] += 1
            progress[1] += 1
            hypers = [_scaled(h, self._scale if deferred else 1.0) for h in self._inputs.hypers[group]]
            self.device.update(self.state, group, self.resident.gradient(group, grad), hypers)
            progress[2] += 1
        self.device.reached(("adam", group))
        self.device.note(("adam", group), start)

    # ---- values ----------------------------------------------------------------------------------

    def _free(self, tokens: Sequence[Token]) -> None:
        for token in tokens:
            self._store.pop(token, None)

    def _call(self, call: BoundCall, micro: int) -> list[Any]:
        arguments = [self._argument(call, ref, micro) for ref in call.function.inputs]
        if any(kind == "saved" for kind, _ in call.function.inputs):
            self._store.pop(("saved", call.block.index, micro))
        try:
            with self.device.counted(), torch.no_grad():
                return call.run(arguments)
        except BudgetExceededError:
            raise
        except torch.OutOfMemoryError as error:
            raise BudgetExceededError(
                f"{call.function.name} of {call.block.name} asked for more than the budget leaves: please "
                f"report this schedule. ({str(error).split('. ')[0]})"
            ) from error
        except (RuntimeError, IndexError) as error:  # what an operator says of its arguments
            raise ProgramError(
                f"{call.function.name} of {call.block.name} failed on this batch: {error}"
            ) from error

    def _argument(self, call: BoundCall, ref: Ref, micro: int) -> Any:
        kind, i = ref
        if kind == "saved":
            return self._store["saved", call.block.index, micro][i]
        if kind == "out":
            return self._store["x", call.block.outputs[i], micro]
        if kind == "grad":
            return self._tangent(call.block.outputs[i], micro)
        item = call.block.inputs[i]
        if item.kind == "value":
            return self._store["x", item.value, micro]
        if item.kind == "weight":
            group, slot = self._bound.assembly.places[item.name]
            return (self._resident.get(group) or self.resident.weights[group])[slot]
        if item.kind == "buffer":
            return self._constants[item.name]
        return self.device.send(torch.tensor([self._inputs.seeds[micro], item.site]))

    def _tangent(self, value: int, micro: int) -> Tensor:
        info = self._bound.part.values[value]
        grad: Tensor | None = self._store.pop(("g", value, micro), None)
        if grad is None:
            with self.device.counted():
                return torch.zeros(info.shape, dtype=info.dtype, device=self.device.torch_device)
        return grad

    def _store_results(self, call: BoundCall, micro: int, results: list[Any]) -> None:
        saved = []
        for (kind, i), result in zip(call.function.outputs, results, strict=True):
            if kind == "saved":
                saved.append(result)
            else:
                self._store["x", call.block.outputs[i], micro] = result
        if saved:
            self._store["saved", call.block.index, micro] = saved

    def _store_gradients(self, call: BoundCall, micro: int, results: list[Any]) -> None:
        results.reverse()
        for _, i in call.function.outputs:
            grad = results.pop()
            item = call.block.inputs[i]
            if item.kind == "weight":
                group, slot = self._bound.assembly.places[item.name]
                key: Token = ("wg", group, call.block.index, micro)
                self._store.setdefault(key, []).append((slot, grad))
                continue
            token: Token = ("g", item.value, micro)
            earlier = self._store.pop(token, None)
            if earlier is not None:
                with self.device.counted():
                    grad = earlier + grad
            self._store[token] = grad
            del earlier, grad

    def _read_loss(self, micro: int) -> None:
        value = self._bound.part.loss
        loss = self._store["x", value, micro]
        self._results.losses.append(self.device.read(loss))
        if "backward" in self._bound.kinds:
            with self.device.counted():
                weight = self._inputs.loss_weights[micro]
                self._store["g", value, micro] = torch.full_like(loss, weight)
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

    def _slot(self, layout: GroupLayout, offset: int) -> tuple[Tensor, list[Tensor]]:
        """A group's bytes of the slab, whole and by parameter."""
        found = self._views.get((layout.index, offset))
        if found is None:
            place = self.device.slot(offset, layout.nbytes).view(layout.dtype)
            found = self._views[layout.index, offset] = (place, [slot_view(place, s) for s in layout.slots])
        return found

    def _host_empty(self, nbytes: int) -> Tensor:
        """Host memory for what steps need: out of the arena while it has some."""
        arena = self.state.arena
        if padded(nbytes) <= arena.free_bytes:
            piece = arena.take((nbytes,), torch.uint8)
            self.device.own([piece])
            return piece
        return self.device.host_empty(nbytes)

    def _gradient(self, group: int, home: Token) -> Tensor:
        layout = self._bound.assembly.groups[group]
        if home[0] == "ring":
            return self._ring[home[1]][: layout.nbytes].view(layout.dtype)
        dtype = layout.dtype if self._bound.kept.get(group) else torch.float32
        nbytes = dtype.itemsize * layout.elements
        if group not in self._grads or self._grads[group].nbytes < nbytes:
            self._grads[group] = self._host_empty(nbytes)
        return self._grads[group][:nbytes].view(dtype)

    def _host_like(self, tensor: Tensor) -> Tensor:
        """Host memory for a tensor of the same shape and, where it is dense, strides."""
        like = torch.empty_like(tensor, device="meta")
        flat = self._host_empty(like.untyped_storage().nbytes()).view(tensor.dtype)
        return flat.as_strided(like.shape, like.stride())


def _as_list(value: Any) -> list[Tensor]:
    return value if isinstance(value, list) else [value]


def _scaled(hyper: AdamHyper, scale: float) -> AdamHyper:
    return hyper if scale == 1.0 else replace(hyper, grad_scale=scale)

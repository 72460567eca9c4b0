"""The CPU backend: emulates an accelerator with ``hbm_budget`` bytes on ordinary memory.

Emitted code calls one method per operation. Compute runs in the calling thread; transfers are real
copies and updates real passes over host memory on worker threads. Weights live in one slab; every
tensor that blocks create is counted by a meter that refuses to exceed the budget. The runtime decides
nothing: what happens when is written in the emitted step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megacompile.assemble import Assembly
from megacompile.differentiate import BlockFunction, DifferentiatedTemplate, load_functions
from megacompile.errors import BudgetExceededError, ProgramError
from megacompile.host_adam import AdamHyper
from megacompile.joint import Ref
from megacompile.meter import StorageMeter
from megacompile.partition import Block, Partition
from megacompile.state import HostState, slot_view
from megacompile.step import Event, Step, Token
from megacompile.workers import Streams, Trace

Getter = Callable[[int], Any]


@dataclass
class StepInputs:
    """What one run of a step is given: tensor leaves, seeds and loss weights per micro-batch."""

    leaves: list[list[Tensor]]
    seeds: list[int]
    loss_weights: list[float]
    hypers: list[list[AdamHyper]] = field(default_factory=list)  # by weight group, by param group
    max_grad_norm: float | None = None
    check_loss: bool = False


@dataclass
class StepResults:
    """What a run gives: losses per micro-batch, and the norm once clip_scale has run, if it will."""

    losses: list[Tensor]
    takes_norm: bool = False
    grad_norm: Tensor | None = None
    skipped: bool = False


class NonFiniteError(FloatingPointError):
    """The loss or the gradient is not finite; the message says what state is left."""


class CpuRuntime:
    """Device memory, streams and the operations of emitted steps, for one compiled program set."""

    def __init__(self, state: HostState, budget_bytes: int, host_threads: int | None = None) -> None:
        self.state = state
        self.budget_bytes = budget_bytes
        cores = torch.get_num_threads()
        # one thread each for copies; norms take as many as eager does, to round as eager does
        self.streams = Streams({"h2d": 1, "d2h": 1, "host": cores})
        self._adam_threads = max(1, cores // 2)  # the rest computes at the same time
        self.peak_bytes = 0
        self.traces: deque[tuple[Step, Trace]] = deque(maxlen=2)  # of the last two runs: what ran when
        self._updates: dict[int, list[int]] = {}  # step number -> [planned, begun, done] updates
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._meter = StorageMeter()
        self._store: dict[Token, Any] = {}
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self._resident: dict[int, list[Tensor]] = {}
        self._ring: list[Tensor] = []
        self._grads: dict[int, Tensor] = {}
        self._landed: set[int] = set()
        self._norms: dict[str, Tensor] = {}
        self._scale = 1.0
        self._stash: dict[Token, list[Tensor]] = {}

    # ---- binding and running a program -----------------------------------------------------------

    def run(self, program: BoundStep, inputs: StepInputs) -> StepResults:
        """Run one emitted step; device values never outlive it."""
        self._bound = program
        self._prepare(program.step)
        self._inputs = inputs
        self.streams.step += 1
        self.streams.trace = []
        self.traces.append((program.step, self.streams.trace))
        planned = sum(op.kind == "adam" for op in program.step.ops)
        self._updates = {k: v for k, v in self._updates.items() if v[2] < v[0]}
        self._updates[self.streams.step] = [planned, 0, 0]
        self._results = StepResults(losses=[], takes_norm="clip_scale" in program.kinds)
        self._meter.peak = self._meter.live
        try:
            program.function(self)
        except BaseException:
            self._abandon()
            raise
        fixed = self._slab.nbytes + program.step.constant_bytes
        self.peak_bytes = max(self.peak_bytes, fixed + self._meter.peak)
        assert not self._store, f"left on the device: {list(self._store)}"
        return self._results

    def finish(self) -> None:
        """Wait for all transfers and updates that are under way."""
        self.streams.drain()

    def close(self) -> None:
        self.streams.close()

    def forget_faults(self) -> None:
        """The state was set anew: what earlier steps left undone no longer matters."""
        self._updates.clear()

    @property
    def torn(self) -> bool:
        """Whether, with nothing under way, some step updated a part of the weights only."""
        return any(begun > 0 and done < planned for planned, begun, done in self._updates.values())

    def host_bytes(self) -> dict[str, int]:
        """Host bytes by kind beyond the state: kept gradients, ring, stashes."""
        return {
            "gradients": sum(g.nbytes for g in self._grads.values()),
            "ring": sum(r.nbytes for r in self._ring),
            "stashes": sum(t.nbytes for s in self._stash.values() for t in s),
        }

    @property
    def has_gradients(self) -> bool:
        return bool(self._landed)

    def _prepare(self, step: Step) -> None:
        if self._slab.nbytes < step.slab_bytes or len(step.ring) > len(self._ring):
            self.finish()
        if self._slab.nbytes != step.slab_bytes and step.slab_bytes:
            self.finish()
            self._slab = torch.empty(0, dtype=torch.uint8)
            self._slab = torch.empty(step.slab_bytes, dtype=torch.uint8)
            self._meter.ignore(self._slab)
            self._views.clear()
        for i, nbytes in enumerate(step.ring):
            if i == len(self._ring) or self._ring[i].nbytes < nbytes:
                self.finish()
                self._ring[i : i + 1] = [torch.empty(nbytes, dtype=torch.uint8)]
        for constant in self._bound.constants.values():
            self._meter.ignore(constant)
        self._meter.limit = self.budget_bytes - step.slab_bytes - step.constant_bytes

    def _abandon(self) -> None:
        """After an exception: let the queues run dry and forget everything on the device."""
        try:
            self.streams.drain()
        except BaseException:
            self.streams.raise_failure()
        finally:
            self._store.clear()
            self._resident.clear()
            self._landed.clear()

    # ---- operations ------------------------------------------------------------------------------

    def load(self, *, value: int, micro: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        leaf = self._inputs.leaves[micro][self._bound.part.batch_values[value]]
        with self._meter:
            self._store["x", value, micro] = leaf.clone(memory_format=torch.contiguous_format)
        self._free(free)

    def prefetch(self, *, group: int, offset: int, after: Sequence[Event] = ()) -> None:
        layout = self._bound.assembly.groups[group]
        place = self._slab[offset : offset + layout.nbytes].view(layout.dtype)
        source = self.state.weights[group]
        self.streams.submit("h2d", ("prefetch", group), after, lambda: _copy(place, source))
        key = (group, offset)
        if key not in self._views:
            self._views[key] = [slot_view(place, slot) for slot in layout.slots]
        self._resident[group] = self._views[key]

    def evict(self, *, group: int, after: Sequence[Event] = ()) -> None:
        self.streams.wait(after)
        del self._resident[group]
        self.streams.reached(("evict", group))

    def free(self, tokens: Sequence[Token], *, after: Sequence[Event] = (), **_: Any) -> None:
        self.streams.wait(after)
        self._free(tokens)

    def forward(
        self, *, block: int, micro: int, keep: str, after: Sequence[Event] = (), free: Any = ()
    ) -> None:
        self.streams.wait(after)
        call, start = self._bound.call(block, keep, "forward"), time.perf_counter()
        self._store_results(call, micro, self._call(call, micro))
        if self._bound.loss_block == block:
            self._read_loss(micro)
        self._free(free)
        self.streams.reached(("forward", block, micro))
        self.streams.note(("forward", block, micro), start)

    def recompute(
        self, *, block: int, micro: int, keep: str, after: Sequence[Event] = (), free: Any = ()
    ) -> None:
        self.streams.wait(after)
        call, start = self._bound.call(block, keep, "recompute"), time.perf_counter()
        self._store_results(call, micro, self._call(call, micro))
        self._free(free)
        self.streams.note(("recompute", block, micro), start)

    def backward(
        self, *, block: int, micro: int, keep: str, after: Sequence[Event] = (), free: Any = ()
    ) -> None:
        self.streams.wait(after)
        call, start = self._bound.call(block, keep, "backward"), time.perf_counter()
        self._store_gradients(call, micro, self._call(call, micro))
        self._free(free)
        self.streams.reached(("backward", block, micro))
        self.streams.note(("backward", block, micro), start)

    def offload(self, *, block: int, micro: int, stash: Sequence[Token], after: Sequence[Event] = ()) -> None:
        tensors = [t for token in stash for t in _as_list(self._store[token])]
        home: Token = ("stash", block, micro)
        kept = self._stash.get(home)
        if kept is None or [(t.shape, t.dtype) for t in kept] != [(t.shape, t.dtype) for t in tensors]:
            self._stash[home] = kept = [torch.empty_like(t) for t in tensors]
        self.streams.submit("d2h", ("offload", block, micro), after, lambda: _copy_all(kept, tensors))

    def reload(self, *, block: int, micro: int, stash: Sequence[Token], after: Sequence[Event] = ()) -> None:
        kept = self._stash["stash", block, micro]
        with self._meter:
            tensors = [torch.empty_like(t) for t in kept]
        self.streams.submit("h2d", ("reload", block, micro), after, lambda: _copy_all(tensors, kept))
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
        slots = self._bound.assembly.groups[group].slots

        def push() -> None:
            covered = fresh and len(parts) < len(slots)
            if covered:
                home.zero_()
            for index, grad in parts:
                place = slot_view(home, slots[index])
                place.copy_(grad) if fresh else place.add_(grad)

        self.streams.submit("d2h", ("push_grad", group, block, micro), after, push)

    def norm(self, *, group: int, after: Sequence[Event] = ()) -> None:
        grad, layout, norms = self._grads[group], self._bound.assembly.groups[group], self._norms

        def measure() -> None:
            for slot in layout.slots:
                view = slot_view(grad, slot)
                norms[slot.parameter.name] = torch.linalg.vector_norm(view, 2, dtype=torch.float32)

        self.streams.submit("host", ("norm", group), after, measure)

    def clip_scale(self, *, after: Sequence[Event] = ()) -> None:
        inputs, results, norms = self._inputs, self._results, self._norms
        order = [n for n in self._bound.parameter_order if n in self._bound.assembly.places]

        def clip() -> None:
            present = [norms[n] for n in order if n in norms]
            total = torch.linalg.vector_norm(torch.stack(present), 2)
            results.grad_norm = total
            results.skipped = not bool(torch.isfinite(total))
            self._scale = 1.0
            if inputs.max_grad_norm is not None:
                self._scale = float(torch.clamp(inputs.max_grad_norm / (total + 1e-6), max=1.0))

        self.streams.submit("host", ("clip_scale",), after, clip)

    def adam(self, *, group: int, grad: Token, after: Sequence[Event] = ()) -> None:
        home = self._gradient(group, grad)
        self._landed.discard(group)
        progress = self._updates[self.streams.step]
        inputs, results = self._inputs, self._results
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
            self.state.update(group, home, hypers, threads=self._adam_threads)
            progress[2] += 1

        self.streams.submit("host", ("adam", group), after, update)

    # ---- values ----------------------------------------------------------------------------------

    def _free(self, tokens: Sequence[Token]) -> None:
        for token in tokens:
            self._store.pop(token, None)

    def _call(self, call: BoundCall, micro: int) -> list[Any]:
        arguments = [self._argument(call, ref, micro) for ref in call.function.inputs]
        if any(kind == "saved" for kind, _ in call.function.inputs):
            self._store.pop(("saved", call.block.index, micro))
        try:
            with self._meter, torch.no_grad():
                return call.run(arguments)
        except BudgetExceededError:
            raise
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
            return self._resident[group][slot]
        if item.kind == "buffer":
            return self._bound.constants[item.name]
        seed = torch.tensor([self._inputs.seeds[micro], item.site])
        self._meter.ignore(seed)  # counted with the constants
        return seed

    def _tangent(self, value: int, micro: int) -> Tensor:
        info = self._bound.part.values[value]
        grad: Tensor | None = self._store.pop(("g", value, micro), None)
        if grad is None:
            with self._meter:
                return torch.zeros(info.shape, dtype=info.dtype)
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
                with self._meter:
                    grad = earlier + grad
            self._store[token] = grad
            del earlier, grad

    def _read_loss(self, micro: int) -> None:
        value = self._bound.part.loss
        loss = self._store["x", value, micro].clone()
        self._results.losses.append(loss)
        if "backward" in self._bound.kinds:
            seed = torch.tensor(self._inputs.loss_weights[micro], dtype=loss.dtype)
            self._meter.track(seed)
            self._store["g", value, micro] = seed
        if self._inputs.check_loss and not bool(torch.isfinite(loss)):
            raise NonFiniteError(
                f"The loss is {float(loss)}: the step was stopped before its backward, and no "
                "parameter was changed."
            )

    def _gradient(self, group: int, home: Token) -> Tensor:
        layout = self._bound.assembly.groups[group]
        if home[0] == "ring":
            return self._ring[home[1]][: layout.nbytes].view(layout.dtype)
        if group not in self._grads:
            self._grads[group] = torch.empty(layout.elements, dtype=torch.float32)
        return self._grads[group]


@dataclass(frozen=True)
class BoundCall:
    """One function of one block, ready to be called."""

    block: Block
    function: BlockFunction
    run: Callable[[list[Any]], list[Any]]


class BoundStep:
    """An emitted step with the functions, layouts and constants that its operations refer to."""

    def __init__(
        self,
        step: Step,
        source: str,
        part: Partition,
        templates: Sequence[DifferentiatedTemplate],
        assembly: Assembly,
        constants: dict[str, Tensor],
        parameter_order: Sequence[str],
    ) -> None:
        namespace: dict[str, Any] = {}
        exec(compile(source, "<megacompile step>", "exec"), namespace)
        self.function: Callable[[CpuRuntime], None] = namespace["step"]
        self.step = step
        self.part = part
        self.assembly = assembly
        self.constants = constants
        self.parameter_order = tuple(parameter_order)
        self.kinds = frozenset(op.kind for op in step.ops)
        self.loss_block = part.values[part.loss].producer
        self._templates = templates
        self._calls: dict[tuple[int, str, str], BoundCall] = {}
        self._functions: dict[str, Callable[[list[Any]], list[Any]]] = {}
        for template in templates:
            for function in template.functions():
                self._functions.update(load_functions(function.source, torch.device("cpu")))

    def call(self, block: int, keep: str, part: str) -> BoundCall:
        """The bound function for one operation; made once per block and kind."""
        key = (block, keep, part)
        found = self._calls.get(key)
        if found is None:
            bound = self.part.blocks[block]
            option = self._templates[bound.template].options[keep]  # type: ignore[index]
            function: BlockFunction | None = getattr(option, part)
            assert function is not None
            found = BoundCall(bound, function, self._functions[function.name])
            self._calls[key] = found
        return found


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _as_list(value: Any) -> list[Tensor]:
    return value if isinstance(value, list) else [value]


def _scaled(hyper: AdamHyper, scale: float) -> AdamHyper:
    from dataclasses import replace

    return hyper if scale == 1.0 else replace(hyper, grad_scale=scale)

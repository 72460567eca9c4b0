"""Gradients and state in one run of a step: pushes, norms, the clipping coefficient, updates, NVMe.

:class:`~megacompile.runtime.step_run.StepRun` adds what blocks read and write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from megacompile.errors import StorageError
from megacompile.host.adam import AdamHyper
from megacompile.host.bucket import add_gradients, own_part, slot_view, sum_of_squares
from megacompile.host.foreign import GroupSettings
from megacompile.host.offload import Offload
from megacompile.host.rows import add_rows
from megacompile.host.state import HostState
from megacompile.runtime.blocks import Blocks
from megacompile.runtime.device import Device, OnComplete
from megacompile.runtime.fabric import Fabric
from megacompile.runtime.host_buffers import HostBuffers
from megacompile.runtime.progress import Progress
from megacompile.runtime.resident import ResidentState
from megacompile.runtime.step_io import StepInputs, StepResults
from megacompile.step.bind import BoundStep
from megacompile.step.operations import Event
from megacompile.step.spec import (
    HostGrad,
    PassingGrad,
    ResidentGrad,
    Stream,
    Token,
    WeightGrad,
    typed,
)
from megacompile.world.control import World


@dataclass
class Held:
    """What outlives a run. ``landed`` holds, by group, the parameters whose gradients wait on the host,
    ``gathered`` what the runs gave whose gradients wait."""

    state: HostState
    device: Device
    resident: ResidentState
    buffers: HostBuffers
    blocks: Blocks
    fabric: Fabric
    progress: Progress = field(default_factory=Progress)
    landed: dict[int, set[int]] = field(default_factory=dict)
    gathered: list[StepResults] = field(default_factory=list)

    @property
    def world(self) -> World:
        """The ranks that the state is shared by."""
        return self.state.world

    def guarded(self, run: Callable[[], None]) -> None:
        """A transfer to or from storage that fails leaves a group without its state."""
        try:
            run()
        except StorageError:
            self.progress.lost = True
            raise


class StepUpdates:
    """The operations of an emitted step on gradients and state; ``results`` fills as they run.

    ``pushed`` says whether any gradient of this run went to where gradients wait.
    """

    def __init__(self, held: Held, bound: BoundStep, inputs: StepInputs) -> None:
        self.results = StepResults(takes_norm="clip_scale" in bound.kinds)
        self.pushed = False
        self._held, self._bound, self._inputs = held, bound, inputs
        self._device, self._blocks = held.device, held.blocks
        self._norms: dict[str, torch.Tensor] = {}
        self._squares: dict[str, float | torch.Tensor] = {}  # of what is this rank's of each gradient
        self._scale = 1.0
        self._loss_checked = False
        self._given: dict[int, dict[int, torch.Tensor]] = {}  # by micro-batch, gradients by results
        self._summed: dict[tuple[int, int, int], list[int]] = {}  # what gradients shards are of

    @contextmanager
    def _computing(self, event: Event, after: Sequence[Event], free: Sequence[Token] = ()) -> Iterator[None]:
        """One timed operation of the compute stream."""
        self._device.wait(after)
        start = self._device.clock()
        yield
        self._blocks.free(free)
        self._device.reached(event)
        self._device.note(event, start)

    def push_grad(
        self, *, group: int, block: int, micro: int, to: Token, after: Sequence[Event] = ()
    ) -> None:
        parts: list[tuple[int, torch.Tensor]] = self._blocks.values[WeightGrad(group, block, micro)]
        home = self._held.buffers.gradient(self._bound, group, typed(to))
        fresh = self._land(self._held.landed, group, (slot for slot, _ in parts))
        slots = self._bound.assembly.groups[group].slots

        def push() -> OnComplete | None:
            return self._device.push(home, slots, parts, fresh)

        self._device.submit("d2h", ("push_grad", group, block, micro), after, push)

    def _land(self, landed: dict[int, set[int]], group: int, slots: Iterable[int]) -> set[int]:
        """Note gradients of some parameters of a group; those of which none waited before."""
        waiting = landed.setdefault(group, set())
        fresh = set(slots) - waiting
        waiting |= fresh
        self.pushed = True
        return fresh

    def push_rows(
        self, *, group: int, block: int, micro: int, to: Sequence[Token], after: Sequence[Event] = ()
    ) -> None:
        """Push the gradient of the rows that a block was given into those of the groups of their table."""
        part, assembly = self._bound.part, self._bound.assembly
        ((_, grad),) = self._blocks.values[WeightGrad(group, block, micro)]
        (value,) = (i.value for i in part.blocks[block].inputs if i.value in part.rows)
        table = part.rows[value]
        ids = table.find(self._inputs.leaves[micro]).clone()  # the caller may fill the batch anew
        pieces, fresh = [], []
        for name, home in zip(table.pieces, to, strict=True):
            owner, slot = assembly.places[name]
            flat = self._held.buffers.gradient(self._bound, owner, typed(home))
            pieces.append(slot_view(flat, assembly.groups[owner].slots[slot]))
            fresh.append(bool(self._land(self._held.landed, owner, [slot])))

        def use(landed: list[torch.Tensor]) -> None:
            add_rows(pieces, fresh, table.stops, ids, landed[0], table.padding)

        device = self._device
        device.submit("d2h", ("push_rows", group, block, micro), after, lambda: device.land([grad], use))

    def accumulate(
        self, *, group: int, block: int, micro: int, to: Token, free: Any = (), after: Sequence[Event] = ()
    ) -> None:
        landed, slots = self._held.resident.landed, self._bound.assembly.groups[group].slots
        home = typed(to)
        with self._computing(("accumulate", group, block, micro), after, free):
            parts = self._blocks.values[WeightGrad(group, block, micro)]
            fresh = self._land(landed, group, (slot for slot, _ in parts))
            add_gradients(self._held.resident.gradient(group, home), slots, parts, fresh)
            del parts

    def norm(self, *, group: int, after: Sequence[Event] = ()) -> None:
        resident, shared = self._held.resident, self._held.world.size > 1
        layout, norms, squares = self._bound.assembly.groups[group], self._norms, self._squares
        on_device = group in resident.weights
        landed = (resident if on_device else self._held).landed[group]
        slots = [layout.slots[index] for index in sorted(landed)]
        if on_device:
            with self._computing(("norm", group), after):
                measure_there = resident.squares if shared else resident.norms
                known: dict[str, Any] = squares if shared else norms
                taken = self._device.read(measure_there(group, slots))
                known |= dict(zip((slot.parameter.name for slot in slots), taken, strict=True))
            return
        rank = self._held.world.ranks.shard
        grad = self._held.buffers.gradient(self._bound, group, HostGrad(group))

        def measure() -> None:
            for slot in slots:
                if shared:
                    squares[slot.parameter.name] = sum_of_squares(grad[own_part(layout, slot, rank)[1]])
                    continue
                view = slot_view(grad, slot)
                norms[slot.parameter.name] = torch.linalg.vector_norm(view, 2, dtype=torch.float32)

        self._device.submit("host", ("norm", group), after, measure)

    def clip_scale(self, *, after: Sequence[Event] = ()) -> None:
        inputs, results, norms = self._inputs, self.results, self._norms
        order, squares, world = self._bound.norm_order, self._squares, self._held.world
        runs = [*self._held.gathered, results] if inputs.losses_count else []
        if runs:
            self._device.await_reads()

        def clip() -> None:
            if squares:  # on every rank in one order
                norms.update(_norms_of_all({n: float(squares[n]) for n in order if n in squares}, world))
            present = [norms[n] for n in order if n in norms]
            total = torch.linalg.vector_norm(torch.stack(present), 2)
            results.skipped = not bool(torch.isfinite(total))
            bad = [n for n in order if n in norms and not torch.isfinite(norms[n])]
            if bad and not results.origin:  # the backward came to the last ones first
                which = f"{len(bad)} of {len(norms)} gradients are not finite"
                results.origin = f" {which}, the last of them in the model that of {bad[-1]}."
            results.judge(loss for run in runs for loss in run.losses)  # of several ranks, all ranks'
            self._scale = 1.0
            if inputs.max_grad_norm is not None:
                self._scale = float(torch.clamp(inputs.max_grad_norm / (total + 1e-6), max=1.0))
            results.grad_norm = total  # last: whoever sees it may read the rest

        self._device.submit("host", ("clip_scale",), after, clip)

    def read_weights(self, *, group: int, slot: int, after: Sequence[Event] = ()) -> None:
        self._move_state("nvme_read", ("read_weights", group), after, self._offload.read_weights, slot)

    def read_state(self, *, group: int, slot: int, after: Sequence[Event] = ()) -> None:
        self._move_state("nvme_read", ("read_state", group), after, self._offload.read_state, slot)

    def write(self, *, group: int, slot: int, after: Sequence[Event] = ()) -> None:
        progress = self._held.progress.steps[self._device.step]
        offload, unwritten = self._offload, self._held.progress.unwritten

        def write(group: int, slot: int) -> None:
            if group in unwritten:  # else the update was skipped
                offload.write_state(group, slot)
                unwritten.discard(group)
                progress.done += 1

        self._move_state("nvme_write", ("write", group), after, write, slot)

    def _move_state(
        self,
        stream: Stream,
        event: Event,
        after: Sequence[Event],
        move: Callable[[int, int], None],
        slot: int,
    ) -> None:
        held, group = self._held, event[1]
        self._device.submit(stream, event, after, lambda: held.guarded(lambda: move(group, slot)))

    @property
    def _offload(self) -> Offload:
        assert self._held.state.offload is not None
        return self._held.state.offload

    def adam(self, *, group: int, grad: Token, slot: int | None = None, after: Sequence[Event] = ()) -> None:
        self._check_loss()
        place = typed(grad)
        if isinstance(place, ResidentGrad | PassingGrad):
            with self._computing(("adam", group), after):
                self._update_resident(group, place)
            return
        home = self._held.buffers.gradient(self._bound, group, place)
        slots = self._held.landed.pop(group)
        progress = self._held.progress.steps[self._device.step]
        unwritten, state = self._held.progress.unwritten, self._held.state
        deferred = isinstance(place, HostGrad) and "clip_scale" in self._bound.kinds

        def update() -> None:
            if self._leaves_out(group, home, slots, deferred):
                progress.planned -= 1
                return
            progress.begun += 1
            hypers, threads = self._hypers(deferred), self._device.adam_threads
            state.update(group, home, hypers, slots, threads=threads, slot=slot)
            if slot is None:
                progress.done += 1
            else:
                unwritten.add(group)  # its write ends the update

        self._device.submit("host", ("adam", group), after, update)

    def _update_resident(self, group: int, place: ResidentGrad | PassingGrad) -> None:
        """One update on the compute stream; what agree and clip_scale found is known by now."""
        slots = self._held.resident.landed.pop(group)
        progress = self._held.progress.steps[self._device.step]
        deferred = isinstance(place, ResidentGrad) and "clip_scale" in self._bound.kinds
        gradient = self._held.resident.gradient(group, place)
        if self._leaves_out(group, gradient, slots, deferred):
            progress.planned -= 1
        else:
            progress.begun += 1
            hypers = cast("list[AdamHyper]", self._hypers(deferred))  # others' groups are never here
            self._device.update(self._held.state, group, gradient, hypers, slots)
            progress.done += 1

    def _leaves_out(
        self, group: int, gradient: torch.Tensor, landed: Collection[int], deferred: bool
    ) -> bool:
        """Return whether a group's update is not made; if a loss alone is why, note whether its gradient, of
        the parameters that it landed for, is finite."""
        results, layout = self.results, self._bound.assembly.groups[group]
        if results.stopped_by is not None and not deferred and results.finite:
            rank = self._held.world.ranks.shard
            places = (own_part(layout, layout.slots[slot], rank)[1] for slot in landed)
            parts = (gradient[place] for place in places if place.start < place.stop)
            largest = (float(torch.linalg.vector_norm(part, math.inf)) for part in parts)  # without copies
            results.finite = all(map(math.isfinite, largest))
        return results.stopped_by is not None or (deferred and results.skipped)

    def _hypers(self, deferred: bool) -> list[AdamHyper] | list[GroupSettings]:
        """Hyper-parameters by param group, for gradients that were clipped or were not."""
        scale = self._scale if deferred else 1.0
        return [replace(h, grad_scale=scale) for h in self._inputs.hypers]  # type: ignore[return-value]

    def _check_loss(self) -> None:
        """Judge the losses before anything is changed; where compute runs ahead, at the first update. Of
        several ranks none does so before it knows the losses of all."""
        if not self._inputs.check_loss or self._loss_checked or self._held.world.size > 1:
            return
        self._device.await_reads()
        self._loss_checked = True
        self.results.judge(self.results.losses)
        if self.results.stopped_by is not None:
            self.results.origin = self._blocks.origin()


def _norms_of_all(squares: dict[str, float], world: World) -> dict[str, torch.Tensor]:
    """The norm of each gradient from the squares of the first replica's ranks, which are those of all
    replicas, added in their order and rounded to FP32."""
    heard = world.all_numbers(list(squares.values()))[: world.ranks.shards]
    totals = [sum(of_ranks) for of_ranks in zip(*heard, strict=True)]
    return {
        name: torch.tensor(math.sqrt(x), dtype=torch.float32) for name, x in zip(squares, totals, strict=True)
    }

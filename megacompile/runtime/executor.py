"""The runtime: runs emitted steps, one after another, over one state on one device.

:class:`Runtime` is what lies between runs: state and waiting gradients where the next step wants them, and
what is left after a fault. :class:`StepRun` is one run: the operations that emitted code calls.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partialmethod
from typing import Any, Literal, cast

import torch

from megacompile.distributed.world import World
from megacompile.errors import DeviceFullError, ProgramError, StorageError
from megacompile.runtime.block_calls import Blocks
from megacompile.runtime.bound_step import BoundStep
from megacompile.runtime.device import Device, OnComplete
from megacompile.runtime.device_state import ResidentState
from megacompile.runtime.gradient_reduction import Fabric
from megacompile.runtime.host_buffers import HostBuffers
from megacompile.runtime.step_results import NonFiniteError, StepInputs, StepResults
from megacompile.runtime.thread_streams import Trace
from megacompile.schedule.op_table import (
    Direction,
    HostGrad,
    Offloaded,
    PassingGrad,
    ResidentGrad,
    Shard,
    Stream,
    Token,
    Update,
    Value,
    ValueGrad,
    WeightGrad,
    typed,
)
from megacompile.schedule.step import Event, Step
from megacompile.state import muon
from megacompile.state.adam import AdamHyper
from megacompile.state.embedding_rows import add_rows, gather_rows
from megacompile.state.master_layout import add_gradients, own_part, slot_view, strided, sum_of_squares
from megacompile.state.masters import HostState
from megacompile.state.nvme_offload import Offload
from megacompile.state.param_group import GroupSettings
from megacompile.state.row_updates import RowUpdate
from megacompile.state.torch_optimizer import TorchOptimizer


class Runtime:
    """Runs steps, and keeps what they leave behind, for one compiled program set.

    ``traces`` says of the last two runs what ran when. ``lost_gradients`` says that some that waited were
    dropped when a later micro-batch failed.
    """

    def __init__(self, state: HostState, device: Device) -> None:
        self.state = state
        self.device = device
        device.host.own([*state.traveling, state.arena.rest])
        self.resident = ResidentState(state, device)
        self.buffers = HostBuffers(state.arena, device.host, state.offload.storage if state.offload else None)
        self.traces: deque[tuple[Step, Trace]] = deque(maxlen=2)
        self.lost_gradients = False
        fabric = Fabric(state.world, device)
        self._held = Held(state, device, self.resident, self.buffers, Blocks(device, self.resident), fabric)
        state.world.tell_failures(device.streams.fail)
        self._end = weakref.finalize(self, _end, self._held)
        self._end.atexit = False

    def run(self, program: BoundStep, inputs: StepInputs) -> StepResults:
        """Run one emitted step; device values never outlive it.

        Where updates do not wait for the norm and the loss is not finite, the gradients are looked at in the
        place of the updates. Only where all are finite, as those of a mean over nothing, is the step run
        again, with them. Buffers of the model that it changes change when it is over.
        """
        results = self._run(program, inputs)
        if inputs.check_loss and self._stopped(results):
            results = self._run(program, replace(inputs, check_loss=False))
        if program.changed:
            with self.device.computing():
                self.device.store(program.constants[name] for name in sorted(program.changed))
        return results

    def _run(self, program: BoundStep, inputs: StepInputs) -> StepResults:
        held, offload = self._held, self.state.offload
        if offload is not None and offload.needs_write_back:
            self.synchronize()
            held.guarded(offload.begin)
        trace: Trace = []
        self.traces.append((program.step, trace))
        run = StepRun(held, program, inputs)
        with self.device.computing():
            try:
                self._prepare(program, inputs)
                with self.device.start(trace):
                    held.progress.begin(self.device.streams.step, program.updates)
                    program.function(run)
                    self._await_collectives(program.step)
                    if inputs.check_loss and self.state.world.size > 1:
                        self.device.streams.wait([("agree",)])
            except BaseException as error:
                self._abandon(error, pushed=run.pushed)
                raise
        assert not held.blocks.values, f"left on the device: {list(held.blocks.values)}"
        if program.updates:
            held.gathered.clear()
        elif "backward" in program.kinds:
            held.gathered.append(run.results)
        return run.results

    @property
    def peak_bytes(self) -> int:
        """The most device bytes that any step so far held."""
        return self.device.peak_bytes

    def await_losses(self) -> None:
        """Return when the losses of all steps so far are there."""
        self.device.await_reads()
        if self.state.world.size > 1:
            self.device.streams.wait([("agree",)])

    def await_norm(self) -> None:
        """Return when the norm of the last gradient that updates waited for is known."""
        self.device.streams.wait([("clip_scale",)])

    def synchronize(self) -> None:
        """Wait for all transfers and updates that are under way."""
        self.device.streams.synchronize()

    def vacate(self) -> None:
        """Give all memory of the device back, for others, until the next step."""
        self.synchronize()
        self.resident.vacate()
        self.device.vacate()

    def close(self) -> None:
        """End the backend's threads."""
        self._end.detach()
        _close(self._held)

    def forget_faults(self) -> None:
        """The state was set anew: what earlier steps left undone no longer matters."""
        self._held.progress.clear()
        self.lost_gradients = False

    @property
    def inconsistent(self) -> bool:
        """Return whether, with nothing under way, some step updated a part of the weights only, or lost
        some."""
        return self._held.progress.inconsistent

    @property
    def landed(self) -> tuple[int, ...]:
        """The weight groups whose gradients wait for an update."""
        return tuple(sorted({*self._held.landed, *self.resident.landed}))

    @property
    def has_gradients(self) -> bool:
        """Return whether gradients wait for an update."""
        return bool(self.landed)

    def drop_gradients(self) -> None:
        """Forget the gradients that wait."""
        self.lost_gradients = False
        self._held.landed.clear()
        self._held.gathered.clear()
        self.resident.landed.clear()

    def _await_collectives(self, step: Step) -> None:
        """Another program of this process may run next: on no rank may its collectives come before these."""
        last = next((op.event for op in reversed(step.ops) if op.stream == "comm"), None)
        if last is not None and not self.device.immediate:
            self.device.streams.wait([last])  # until it is issued

    def _stopped(self, results: StepResults) -> bool:
        """Return whether a loss kept the updates of a step, on all ranks, from being made; raise
        :class:`NonFiniteError` where some gradient is not finite either."""
        if results.stopped_by is None:
            return False
        world = self.state.world
        self.synchronize()
        if all(rank["finite"] for rank in world.hear(lambda: {"finite": results.finite})):
            return True
        losses = ", ".join(f"{float(loss)}" for loss in results.losses)
        which, where = ("losses of the ranks are", " on any of them") if world.size > 1 else ("loss is", "")
        raise world.agreed(
            NonFiniteError(
                f"The {which} {losses}, and not all gradients are finite: no parameter was changed{where}."
                f"{results.origin}"
            )
        )

    def _prepare(self, program: BoundStep, inputs: StepInputs) -> None:
        if self.resident.in_place(program.step):
            self.resident.prepare(program.step)
        else:
            self.synchronize()
            self._move(program)
        constants = self.device.prepare(program.step, program.constants, program.changed)
        self._held.blocks.begin(program, inputs, constants)
        self.buffers.prepare(program.step, self.synchronize)
        self._held.fabric.prepare(program.step, self.synchronize)

    def _move(self, program: BoundStep) -> None:
        """At rest: state to where a step wants it, and with it the FP32 gradients that wait for an update."""
        held = self._held
        stays, landed = set(program.step.resident), self.resident.landed
        gone, coming = landed.keys() - stays, held.landed.keys() & stays
        carried = {group: self.resident.gradient(group, ResidentGrad(group)).cpu() for group in gone}
        self.resident.move(program.step)
        for group in coming:
            landed[group] = held.landed.pop(group)
        for group in gone:
            held.landed[group] = landed.pop(group)
        self.resident.prepare(program.step)
        for group, gradient in carried.items():
            self.buffers.gradient(program, group, HostGrad(group)).copy_(gradient)
        for group in coming:
            waiting = self.buffers.gradients[group][: 4 * program.assembly.groups[group].share]
            self.resident.gradient(group, ResidentGrad(group)).copy_(waiting.view(torch.float32))

    def _abandon(self, error: BaseException, *, pushed: bool) -> None:
        """After an exception: let the queues run dry and forget everything on the device.

        Gradients that wait on the host stay only if nothing of this step can be among them.
        """
        whole = isinstance(error, (ProgramError, NonFiniteError, DeviceFullError)) and not pushed
        try:
            self.device.streams.synchronize()
        except BaseException:
            whole = False
            self.device.streams.raise_failure()
        finally:
            self._held.blocks.clear()
            if not whole:
                lost = self.lost_gradients or self.has_gradients
                self.drop_gradients()
                self.lost_gradients = lost


def _end(held: Held) -> None:
    """Close the device of a runtime that was dropped, before its memory goes.

    One of the threads that shall end may have dropped it: another one waits for them, the process for that.
    """
    if not sys.is_finalizing():  # then nothing runs any more
        threading.Thread(target=_close, args=(held,)).start()


def _close(held: Held) -> None:
    held.device.close()
    held.world.disconnect()


@dataclass
class StepProgress:
    """Updates of one step: those that it will make, those begun, those done."""

    planned: int
    begun: int = 0
    done: int = 0


@dataclass
class UpdateProgress:
    """Updates of all steps that are not over, and what storage lost.

    After a fault they tell whether the state is inconsistent.
    """

    steps: dict[int, StepProgress] = field(default_factory=dict)
    unwritten: set[int] = field(default_factory=set)  # groups whose update waits in the window for its write
    lost: bool = False  # whether storage failed

    @property
    def inconsistent(self) -> bool:
        """Return whether, with nothing under way, some step updated a part of the weights only, or lost
        some."""
        return self.lost or any(s.begun > 0 and s.done < s.planned for s in self.steps.values())

    def begin(self, step: int, planned: int) -> None:
        """Note a step that will make so many updates, and forget those that are over."""
        self.steps = {k: s for k, s in self.steps.items() if s.done < s.planned}
        self.steps[step] = StepProgress(planned)

    def clear(self) -> None:
        """The state was set anew: what earlier steps left undone no longer matters."""
        self.steps.clear()
        self.unwritten.clear()
        self.lost = False


@dataclass
class Held:
    """The objects that outlive a run. ``landed`` holds, by group, the parameters whose gradients wait on the
    host, ``gathered`` what the runs gave whose gradients wait, ``row_updates`` by group those of the last
    run's tables."""

    state: HostState
    device: Device
    resident: ResidentState
    buffers: HostBuffers
    blocks: Blocks
    fabric: Fabric
    progress: UpdateProgress = field(default_factory=UpdateProgress)
    landed: dict[int, set[int]] = field(default_factory=dict)
    gathered: list[StepResults] = field(default_factory=list)
    row_updates: dict[int, RowUpdate] = field(default_factory=dict)

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


def _norms_of_all(squares: dict[str, float], world: World) -> dict[str, torch.Tensor]:
    """The norm of each gradient from the squares of the first replica's ranks, which are those of all
    replicas, added in their order and rounded to FP32."""
    heard = world.all_numbers(list(squares.values()))[: world.ranks.shards]
    totals = [sum(of_ranks) for of_ranks in zip(*heard, strict=True)]
    return {
        name: torch.tensor(math.sqrt(x), dtype=torch.float32) for name, x in zip(squares, totals, strict=True)
    }


class StepRun:
    """The operations of one emitted step, for one set of inputs.

    Emitted code calls one method per operation, named and given as
    :data:`~megacompile.schedule.op_table.SPECS` says. Block functions go to
    :class:`~megacompile.runtime.block_calls.Blocks`; copies, updates and waits to a
    :class:`~megacompile.runtime.device.Device` and its streams. Nothing is decided here: what happens when is
    written in the step.
    """

    def __init__(self, held: Held, bound: BoundStep, inputs: StepInputs) -> None:
        self.results = StepResults(takes_norm="clip_scale" in bound.kinds)
        self.pushed = False
        self._held, self._bound, self._inputs = held, bound, inputs
        self._device, self._blocks, self._streams = held.device, held.blocks, held.device.streams
        self._norms: dict[str, torch.Tensor] = {}
        self._squares: dict[str, float | torch.Tensor] = {}  # of what is this rank's of each gradient
        self._scale = 1.0
        self._loss_checked = False
        self._left_out: set[int] = set()  # groups whose momentum was left as it is, as their update is to be
        self._given: dict[int, dict[int, torch.Tensor]] = {}  # by micro-batch, gradients by results
        self._summed: dict[tuple[int, int, int], list[int]] = {}  # what gradients shards are of
        self._found: dict[tuple[int, int], torch.Tensor] = {}  # ids that rows are looked up by
        self._row_updates: dict[int, RowUpdate] = {}  # by group, those of its tables
        self._earlier, held.row_updates = held.row_updates, self._row_updates

    def load(self, *, value: int, micro: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        self._streams.wait(after)
        leaf = self._inputs.leaves[micro][self._bound.part.batch_values[value]]
        self._loaded(("load", value, micro), self._device.load(leaf), free)

    def gather(self, *, value: int, micro: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        self._streams.wait(after)
        table, places = self._bound.part.rows[value], self._bound.assembly.places
        pieces = [self._held.state.weight(*places[piece]) for piece in table.pieces]
        ids = self._ids(value, micro)

        def fill(out: torch.Tensor) -> None:
            for piece, start, stop in zip(table.pieces, (0, *table.stops), table.stops, strict=False):
                group, slot = places[piece]
                if group in self._earlier:  # the step before may not have updated all of these rows yet
                    own = ids[(ids >= start) & (ids < stop)] - start
                    self._earlier[group].catch_up(slot, own, self._device.adam_threads)
            gather_rows(pieces, table.stops, ids, out)

        shape, dtype = (*ids.shape, pieces[0].shape[1]), pieces[0].dtype
        try:
            rows = self._device.load_filled(shape, dtype, fill)
        except IndexError as error:
            raise ProgramError(f"The lookup in {table.pieces[0]} failed on this batch: {error}.") from error
        self._loaded(("gather", value, micro), rows, free)

    def _ids(self, value: int, micro: int) -> torch.Tensor:
        """The ids by which a micro-batch looks rows up; the caller may fill the batch anew."""
        if (value, micro) not in self._found:
            ids = self._bound.part.rows[value].find(self._inputs.leaves[micro])
            self._found[value, micro] = ids.to(torch.int64, copy=True)
        return self._found[value, micro]

    def _rows(self, group: int) -> RowUpdate:
        """The update of a group's tables, of which the rows that this step names are updated apart."""
        if group in self._row_updates:
            return self._row_updates[group]
        named: dict[int, list[torch.Tensor]] = {}
        for value in self._bound.lookups(group):
            table = self._bound.part.rows[value]
            ids = torch.cat([self._ids(value, m).flatten() for m in range(len(self._inputs.leaves))])
            ids = ids[ids != table.padding]
            for piece, start, stop in zip(table.pieces, (0, *table.stops), table.stops, strict=False):
                owner, slot = self._bound.assembly.places[piece]
                if owner == group:
                    named.setdefault(slot, []).append(ids[(ids >= start) & (ids < stop)] - start)
        rows = {slot: torch.unique(torch.cat(found)) for slot, found in named.items()}
        self._row_updates[group] = RowUpdate(self._held.state, group, rows)
        return self._row_updates[group]

    def _gradients(self, group: int, flat: torch.Tensor, slots: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return by slot where the elements of its gradient that this rank has lie in the group's buffer."""
        if group in self._bound.rows:
            return self._rows(group).gradients(flat)
        layout, rank = self._bound.assembly.groups[group], self._held.world.ranks.shard
        return {index: flat[own_part(layout, layout.slots[index], rank)[1]] for index in slots}

    def _loaded(self, event: Event, leaf: torch.Tensor, free: Sequence[Token]) -> None:
        self._blocks.values[Value(*event[1:])] = leaf
        self._streams.reached(event)
        self._blocks.free(free)

    def copy_result(self, *, value: int, micro: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        self._streams.wait(after)
        self.results.outputs[value, micro] = self._device.read(self._blocks.values[Value(value, micro)])
        self._streams.reached(("copy_result", value, micro))
        self._blocks.free(free)

    def load_grad(self, *, value: int, micro: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        self._streams.wait(after)
        if micro not in self._given:
            self._given[micro] = self._from_outside(micro)
        gradient = self._given[micro].pop(value).to(self._bound.part.values[value].dtype)
        self._blocks.values[ValueGrad(value, micro)] = self._device.load(gradient)
        self._streams.reached(("load_grad", value, micro))
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
        self._streams.submit(stream, ("prefetch", group), after, lambda: device.copy([place], [source]))

    def evict(self, *, group: int, after: Sequence[Event] = ()) -> None:
        self._streams.wait(after)
        self._blocks.leave(group)
        self._streams.reached(("evict", group))

    def free(self, tokens: Sequence[Token], *, after: Sequence[Event] = ()) -> None:
        self._free(("free", *tokens[0][1:]), tokens, after)

    def free_offloaded(
        self, *, block: int, micro: int, saved: Sequence[Token], after: Sequence[Event] = ()
    ) -> None:
        self._free(("free_offloaded", block, micro), saved, after)

    def _free(self, event: Event, tokens: Sequence[Token], after: Sequence[Event]) -> None:
        self._streams.wait(after)
        self._blocks.free(tokens)
        self._streams.reached(event)

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
        self._streams.submit("d2h", ("offload", block, micro), after, lambda: device.copy(kept, tensors))

    def reload(
        self, *, block: int, micro: int, saved: Sequence[Token], slot: int | None = None,
        after: Sequence[Event] = (),
    ) -> None:  # fmt: skip
        kept = self._held.buffers.offloaded(Offloaded(block, micro), slot)
        device = self._device
        with device.counted():
            tensors = [torch.empty_like(t, device=device.torch_device) for t in kept]
        self._streams.submit("h2d", ("reload", block, micro), after, lambda: device.copy(tensors, kept))
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
        self._streams.submit(stream, event, after, lambda: move(region, buffer))

    def _read_loss(self, micro: int) -> None:
        (value,) = self._bound.part.results
        self.results.losses.append(self._device.read(self._blocks.values[Value(value, micro)]))
        if "backward" in self._bound.kinds:
            self._blocks.start_backward(value, micro)
        if self._device.immediate:
            self._check_loss()

    def all_gather(self, *, group: int, after: Sequence[Event] = ()) -> None:
        place, world = self._blocks.slot_of(group), self._held.world
        self._streams.submit("comm", ("all_gather", group), after, lambda: world.all_gather(place))

    def reduce(self, *, group: int, block: int, micro: int, to: Token, after: Sequence[Event] = ()) -> None:
        parts: list[tuple[int, torch.Tensor]] = self._blocks.values[WeightGrad(group, block, micro)]
        layout, fabric, place = self._bound.assembly.groups[group], self._held.fabric, typed(to)
        assert isinstance(place, Shard)
        self._summed[group, block, micro] = [slot for slot, _ in parts]
        event = ("reduce", group, block, micro)
        self._streams.submit("comm", event, after, lambda: fabric.reduce(layout, parts, place))

    def all_reduce(
        self, *, group: int, block: int, micro: int, shard: Token, after: Sequence[Event] = ()
    ) -> None:
        layout, fabric, place = self._bound.assembly.groups[group], self._held.fabric, typed(shard)
        assert isinstance(place, Shard)
        event = ("all_reduce", group, block, micro)
        self._streams.submit("comm", event, after, lambda: fabric.all_reduce(layout, place))

    def push_shard(
        self, *, group: int, block: int, micro: int, shard: Token, to: Token, after: Sequence[Event] = ()
    ) -> None:
        source, landed = self._shard(group, shard), self._held.landed
        home = self._held.buffers.gradient(self._bound, group, typed(to))
        fresh = group not in landed
        self._land(landed, group, self._summed.pop((group, block, micro)))

        def use(landed: list[torch.Tensor]) -> None:
            home.copy_(landed[0]) if fresh else home.add_(landed[0])

        device = self._device
        event = ("push_shard", group, block, micro)
        self._streams.submit("d2h", event, after, lambda: device.land([source], use))

    def add_shard(
        self, *, group: int, block: int, micro: int, shard: Token, to: Token, after: Sequence[Event] = ()
    ) -> None:
        source, resident = self._shard(group, shard), self._held.resident
        home, landed = resident.gradient(group, typed(to)), resident.landed
        fresh = group not in landed
        self._land(landed, group, self._summed.pop((group, block, micro)))

        def add() -> None:
            home.copy_(source) if fresh else home.add_(source)

        self._streams.submit("comm", ("add_shard", group, block, micro), after, add)

    def _shard(self, group: int, shard: Token) -> torch.Tensor:
        """The sum that this rank owns of the group's gradients."""
        place = typed(shard)
        assert isinstance(place, Shard)
        return self._held.fabric.shard(self._bound.assembly.groups[group], place)

    def agree(self, *, after: Sequence[Event] = ()) -> None:
        results, world = self.results, self._held.world
        own = list(results.losses)

        def listen() -> None:
            heard = world.all_numbers([float(loss) for loss in own])
            everyone = [numbers[m] for m in range(len(own)) for numbers in heard]
            results.take_losses([torch.tensor(x, dtype=own[0].dtype) for x in everyone])
            if self._inputs.check_loss:
                results.judge(results.losses)

        self._streams.submit("host", ("agree",), after, listen)

    @contextmanager
    def _computing(self, event: Event, after: Sequence[Event], free: Sequence[Token] = ()) -> Iterator[None]:
        """One timed operation of the compute stream."""
        self._streams.wait(after)
        start = self._streams.clock()
        yield
        self._blocks.free(free)
        self._streams.reached(event)
        self._streams.note(event, start)

    def push_grad(
        self, *, group: int, block: int, micro: int, to: Token, after: Sequence[Event] = ()
    ) -> None:
        parts: list[tuple[int, torch.Tensor]] = self._blocks.values[WeightGrad(group, block, micro)]
        home = self._held.buffers.gradient(self._bound, group, typed(to))
        fresh = self._land(self._held.landed, group, (slot for slot, _ in parts))
        slots = self._bound.assembly.groups[group].slots

        def push() -> OnComplete | None:
            return self._device.push(home, slots, parts, fresh)

        self._streams.submit("d2h", ("push_grad", group, block, micro), after, push)

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
        value, device = self._bound.rows_of(block), self._device
        table, ids = part.rows[value], self._ids(value, micro)
        pieces: list[torch.Tensor] = []
        named: list[torch.Tensor | None] = []
        fresh = []
        for name, home in zip(table.pieces, to, strict=True):
            owner, slot = assembly.places[name]
            flat = self._held.buffers.gradient(self._bound, owner, typed(home))
            if owner in self._bound.rows:
                rows = self._rows(owner)
                pieces.append(rows.gradients(flat)[slot])
                named.append(rows.named[slot])
            else:
                pieces.append(slot_view(flat, assembly.groups[owner].slots[slot]))
                named.append(None)
            fresh.append(bool(self._land(self._held.landed, owner, [slot])))

        def use(landed: list[torch.Tensor]) -> None:
            threads = device.adam_threads
            add_rows(pieces, fresh, table.stops, ids, landed[0], table.padding, named, threads)

        self._streams.submit(
            "d2h", ("push_rows", group, block, micro), after, lambda: device.land([grad], use)
        )

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
        landed = sorted((resident if on_device else self._held).landed[group])
        if on_device:
            slots = [layout.slots[index] for index in landed]
            with self._computing(("norm", group), after):
                measure_there = resident.squares if shared else resident.norms
                known: dict[str, Any] = squares if shared else norms
                taken = self._device.read(measure_there(group, slots))
                known |= dict(zip((slot.parameter.name for slot in slots), taken, strict=True))
            return
        grad = self._held.buffers.gradient(self._bound, group, HostGrad(group))
        parts, threads = self._gradients(group, grad, landed), self._device.adam_threads

        def measure() -> None:
            for index in landed:
                slot = layout.slots[index]
                name = slot.parameter.name
                if not shared and layout.dtype == torch.float32:  # the bits of clip_grad_norm_
                    norms[name] = torch.linalg.vector_norm(slot_view(grad, slot), 2)
                    continue
                total = sum_of_squares(parts[index].view(-1), threads)
                if shared:
                    squares[name] = total
                else:
                    norms[name] = torch.tensor(math.sqrt(total), dtype=torch.float32)

        self._streams.submit("host", ("norm", group), after, measure)

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
            bad = [n for n in order if n in norms and not torch.isfinite(norms[n])]
            origin = ""
            if bad:  # the backward came to the last ones first
                which = f"{len(bad)} of {len(norms)} gradients are not finite"
                origin = f" {which}, the last of them in the model that of {bad[-1]}."
            results.judge(loss for run in runs for loss in run.losses)  # of several ranks, all ranks'
            self._scale = 1.0
            if inputs.max_grad_norm is not None:
                self._scale = float(torch.clamp(inputs.max_grad_norm / (total + 1e-6), max=1.0))
            results.take_norm(total, origin)

        self._streams.submit("host", ("clip_scale",), after, clip)

    def read_weights(self, *, group: int, slot: int, after: Sequence[Event] = ()) -> None:
        self._move_state("nvme_read", ("read_weights", group), after, self._offload.read_weights, slot)

    def read_state(self, *, group: int, slot: int, after: Sequence[Event] = ()) -> None:
        self._move_state("nvme_read", ("read_state", group), after, self._offload.read_state, slot)

    def write(self, *, group: int, slot: int, after: Sequence[Event] = ()) -> None:
        progress = self._held.progress.steps[self._streams.step]
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
        self._streams.submit(stream, event, after, lambda: held.guarded(lambda: move(group, slot)))

    @property
    def _offload(self) -> Offload:
        assert self._held.state.offload is not None
        return self._held.state.offload

    def momentum(
        self, *, group: int, grad: Token, slot: int | None = None, after: Sequence[Event] = ()
    ) -> None:
        self._check_loss()
        place = typed(grad)
        home = self._held.buffers.gradient(self._bound, group, place)
        slots, state = frozenset(self._held.landed[group]), self._held.state
        progress = self._held.progress.steps[self._streams.step]
        deferred = isinstance(place, HostGrad) and "clip_scale" in self._bound.kinds

        def take() -> None:
            if self._leaves_out(group, home, slots, deferred):
                self._left_out.add(group)
                return
            progress.begun += 1
            settings = cast("list[GroupSettings]", self._hypers(deferred))
            threads = self._device.adam_threads
            state.add_momentum(group, home, settings, slots, threads=threads, slot=slot)

        self._streams.submit("host", ("momentum", group), after, take)

    def load_update(self, *, group: int, grad: Token, after: Sequence[Event] = ()) -> None:
        sources = self._updates_in(group, grad)
        device = self._device
        with device.counted():
            targets = [torch.empty_like(s, device=device.torch_device) for s in sources]
        self._streams.submit("h2d", ("load_update", group), after, lambda: device.copy(targets, sources))
        self._blocks.values[Update(group)] = targets

    def orthogonalize(self, *, group: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        layout, hypers = self._bound.assembly.groups[group], self._inputs.hypers
        with self._computing(("orthogonalize", group), after, free):
            updates = self._blocks.values.pop(Update(group))
            factors = self._blocks.values[Direction(group)] = []
            for index in reversed(self._matrices(group)):
                slot = layout.slots[index]
                settings = cast("GroupSettings", hypers[slot.parameter.param_group]).values
                with self._device.products(), self._device.counted():
                    factors.insert(0, muon.orthogonalize([strided(updates.pop(), 0, slot)], settings))

    def push_update(self, *, group: int, to: Token, after: Sequence[Event] = ()) -> None:
        device, targets = self._device, self._updates_in(group, to)
        factors = self._blocks.values[Direction(group)]
        self._streams.submit("d2h", ("push_update", group), after, lambda: device.copy(targets, factors))

    def free_update(self, *, group: int, after: Sequence[Event] = (), free: Any = ()) -> None:
        self._free(("free_update", group), free, after)

    def _matrices(self, group: int) -> list[int]:
        """The slots of a group whose gradients came and whose updates this rank makes orthogonal."""
        form, rank = self._held.state.form, self._held.world.ranks.shard
        assert isinstance(form, TorchOptimizer)
        landed = self._held.landed[group]
        return [i for i in form.matrices(self._bound.assembly.groups[group], rank) if i in landed]

    def _updates_in(self, group: int, home: Token) -> list[torch.Tensor]:
        """Return where the updates of these lie in the buffer of the group's gradient, each flat."""
        layout, rank = self._bound.assembly.groups[group], self._held.world.ranks.shard
        grad = self._held.buffers.gradient(self._bound, group, typed(home))
        parts = (own_part(layout, layout.slots[i], rank)[1] for i in self._matrices(group))
        return [muon.updates_in(grad[part]) for part in parts]

    def adam(self, *, group: int, grad: Token, slot: int | None = None, after: Sequence[Event] = ()) -> None:
        self._check_loss()
        place = typed(grad)
        if isinstance(place, ResidentGrad | PassingGrad):
            with self._computing(("adam", group), after):
                self._update_resident(group, place)
            return
        home = self._held.buffers.gradient(self._bound, group, place)
        slots = self._held.landed.pop(group)
        progress = self._held.progress.steps[self._streams.step]
        unwritten, state = self._held.progress.unwritten, self._held.state
        deferred = isinstance(place, HostGrad) and "clip_scale" in self._bound.kinds
        rows = self._rows(group) if group in self._bound.rows else None

        begun = self._bound.assembly.work.groups[group].matrices is not None  # by its momentum

        def update() -> None:
            left_out = group in self._left_out if begun else self._leaves_out(group, home, slots, deferred)
            if left_out:
                progress.planned -= 1
                return
            progress.begun += not begun
            hypers, threads = self._hypers(deferred), self._device.adam_threads
            if rows is not None:
                rows.update_named(home, cast("list[AdamHyper]", hypers), threads)
            else:
                state.update(group, home, hypers, slots, threads=threads, slot=slot)
            if slot is None:
                progress.done += 1
            else:
                unwritten.add(group)  # its write ends the update

        self._streams.submit("host", ("adam", group), after, update)

    def adam_rest(self, *, group: int, after: Sequence[Event] = ()) -> None:
        self._check_loss()
        rows, results, threads = self._rows(group), self.results, self._device.adam_threads
        progress = self._held.progress.steps[self._streams.step]
        deferred = "clip_scale" in self._bound.kinds

        def update() -> None:
            if results.stopped_by is not None or (deferred and results.skipped):
                progress.planned -= 1
                return
            progress.begun += 1
            rows.update_rest(cast("list[AdamHyper]", self._hypers(deferred)), threads)
            progress.done += 1

        self._streams.submit("host", ("adam_rest", group), after, update)

    def _update_resident(self, group: int, place: ResidentGrad | PassingGrad) -> None:
        """One update on the compute stream; what agree and clip_scale found is known by now."""
        slots = self._held.resident.landed.pop(group)
        progress = self._held.progress.steps[self._streams.step]
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
        results = self.results
        if results.stopped_by is not None and not deferred and results.finite:
            parts = (part for part in self._gradients(group, gradient, landed).values() if part.numel())
            largest = (float(torch.linalg.vector_norm(part, math.inf)) for part in parts)  # without copies
            results.take_gradient(finite=all(map(math.isfinite, largest)))
        return results.stopped_by is not None or (deferred and results.skipped)

    def _hypers(self, deferred: bool) -> list[AdamHyper] | list[GroupSettings]:
        """Hyper-parameters by param group, for gradients that were clipped or were not."""
        scale = self._scale if deferred else 1.0
        return [replace(h, grad_scale=scale) for h in self._inputs.hypers]  # type: ignore[return-value]

    def _check_loss(self) -> None:
        """Judge the losses before anything is changed; where compute runs ahead, at the first update. No rank
        does so before it knows the losses of all."""
        if not self._inputs.check_loss or self._loss_checked or self._held.world.size > 1:
            return
        self._device.await_reads()
        self._loss_checked = True
        self.results.judge(self.results.losses)
        if self.results.stopped_by is not None:
            self.results.take_origin(self._blocks.origin())

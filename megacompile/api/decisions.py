"""The state of a compile: what was decided so far, and the programs that were planned by it.

Invariant: a value. Planning gives another one (:meth:`~megacompile.api.pipeline.Compiler.schedule`), and to
go back is to keep the one before. The one that counts is held by the session alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from megacompile.api.device_budget import DeviceRoom
from megacompile.api.frontend import LAID_OUT_ANEW, Compiled, Division, StateLayout
from megacompile.capture.batch import Batch, BatchKey
from megacompile.distributed.ranks import Ranks
from megacompile.graph.tile_cuts import Cuts
from megacompile.planner.plan_evaluator import Planned
from megacompile.schedule.plan import Mode
from megacompile.schedule.verify import Proof
from megacompile.state.host_budget import host_states, storage_window
from megacompile.state.nvme_offload import StatePlacement

ProgramKey = tuple[BatchKey, Mode]
"""The key of a batch, and a mode."""
_COMPILE_SECONDS, _BLOCK_SECONDS = 0.5, 0.05  # of a program, and of each block beside


@dataclass(frozen=True, eq=False)
class Scheduled:
    """One program: a kind of batch in one mode, planned, proven and printed."""

    compiled: Compiled
    mode: Mode
    planned: Planned
    proof: Proof
    title: str
    source: str


@dataclass(frozen=True, eq=False)
class Decisions:
    """The facts that all later programs of a model follow, and the ``programs`` so far, in their order.

    ``room`` is the part of the device's budget that plans are made within; ``layout``, the weight groups and
    the ranks that share them. ``cuts`` says how far weights are cut, None until the first program decides it;
    ``placement``, where the state of each group is; ``resident``, the groups whose state is on the device.
    ``planned`` counts all programs, those that were forgotten too.
    """

    room: DeviceRoom
    layout: StateLayout = LAID_OUT_ANEW
    cuts: Cuts | None = None
    placement: StatePlacement | None = None
    resident: tuple[int, ...] | None = None
    programs: Mapping[ProgramKey, Scheduled] = field(default_factory=dict)
    planned: int = 0

    @property
    def division(self) -> Division:
        """The parts that all programs are compiled in; chunks of sequences are chosen for each."""
        return Division(self.cuts or {}, layout=self.layout)

    def program(self, batch: Batch, mode: Mode) -> Scheduled:
        """Return a program that was planned."""
        return self.programs[batch.key, mode]

    def number(self, batch: Batch, mode: Mode) -> int:
        """Return the number of a program, in the order in which they were planned; -1: none of them."""
        return next((i for i, key in enumerate(self.programs) if key == (batch.key, mode)), -1)

    @property
    def keys(self) -> set[BatchKey]:
        """The keys of the batches that have programs."""
        return {key for key, _ in self.programs}

    def knows(self, batch: Batch) -> bool:
        """Return whether this kind of batch has a program."""
        return batch.key in self.keys

    def seconds(self, batch: Batch) -> tuple[float, float]:
        """Return the predicted seconds of a step of this kind of batch, which has a program, and the least
        seconds that compiling another one takes."""
        found = next(s for (key, _), s in self.programs.items() if key == batch.key)
        return found.planned.seconds, _COMPILE_SECONDS + _BLOCK_SECONDS * len(found.planned.plan.blocks)

    @property
    def training(self) -> list[Scheduled]:
        """The programs that compute gradients, in their order."""
        return [s for s in self.programs.values() if s.mode.computes_gradients]

    def on_mesh(self, ranks: Ranks) -> Decisions:
        """Lay weight groups out for the ranks that share them, and plan for each one's part of a machine."""
        layout = replace(self.layout, groups=(), ranks=ranks.shards, replicas=ranks.replicas)
        return replace(self, layout=layout)

    def within(self, room: DeviceRoom) -> Decisions:
        """Plan all further programs within other room."""
        return replace(self, room=room)

    def only(self, wanted: Callable[[Scheduled], bool]) -> Decisions:
        """Keep these of the programs; how weights are cut and where state is stays decided."""
        return replace(self, programs={key: one for key, one in self.programs.items() if wanted(one)})

    def with_program(self, batch: Batch, scheduled: Scheduled) -> Decisions:
        """Add a program. The first one decides how far weights are cut; the first that trains, which state is
        on the device."""
        resident = self.resident
        if resident is None and scheduled.mode.computes_gradients:
            resident = scheduled.planned.step.resident
        return replace(
            self,
            cuts=scheduled.compiled.tiled.cuts if self.cuts is None else self.cuts,
            resident=resident,
            programs={**self.programs, (batch.key, scheduled.mode): scheduled},
            planned=self.planned + 1,
        )

    def laid_out(self, scheduled: Scheduled) -> Decisions:
        """Plan all further programs for the state as this one has it."""
        plan = scheduled.planned.plan
        return replace(
            self,
            layout=replace(self.layout, groups=scheduled.compiled.assembly.groups),
            placement=StatePlacement(host_states(plan), storage_window(plan)),
        )

    def anew(self, room: DeviceRoom, cuts: Cuts | None = None) -> Decisions:
        """Begin again within this room, before any program has run; ``cuts``: decided already."""
        return Decisions(room, replace(self.layout, groups=()), cuts)

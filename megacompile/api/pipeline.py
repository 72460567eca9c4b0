"""The pipeline from the plan on: plan -> prove -> emit, for the kinds of batches of one model.

The stages before the plan are those of :class:`~megacompile.api.frontend.Frontend`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from megacompile.api.device_budget import DeviceRoom
from megacompile.api.frontend import LAID_OUT_ANEW, Compiled, Frontend, StateLayout
from megacompile.blocks.weight_groups import Parameter, cut_parameters
from megacompile.capture.batch import Batch
from megacompile.distributed.ranks import Ranks
from megacompile.distributed.world import World
from megacompile.errors import MegacompileError
from megacompile.garbage_collection import without_garbage_collection
from megacompile.graph.tile_cuts import Cuts
from megacompile.hardware.machine import Machine, nominal_cpu, this_cpu
from megacompile.hardware.measured_step import Measured
from megacompile.hardware.step_requests import step_requests
from megacompile.planner.baselines import Planner
from megacompile.planner.nvme_placement import Tiers
from megacompile.planner.plan_evaluator import Planned
from megacompile.planner.plan_on_pages import plan_on_pages
from megacompile.planner.plan_program import PlanTerms, first_that_fits, plan_program
from megacompile.planner.search import follow
from megacompile.planner.tiling import TilingCandidate
from megacompile.planner.too_small import TooSmall, fitting
from megacompile.printable import printable
from megacompile.report.dump import write_dump
from megacompile.report.schedule import Schedule
from megacompile.schedule.emit import emit_step
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.verify import Proof, verify
from megacompile.state.host_budget import host_states, storage_window
from megacompile.state.nvme_offload import StatePlacement
from megacompile.units import format_bytes

_LOG = logging.getLogger("megacompile.compiler")  # trainers show what it tells
_COMPILE_SECONDS, _BLOCK_SECONDS = 0.5, 0.05  # of a program, and of each block beside
_FIRST_DECIDES = (
    "How far weights are cut was decided by the first batch: give megacompile.compile max_seq_len, or the "
    "largest batch as example_batch, and they may be cut further."
)


@dataclass(frozen=True)
class Scheduled:
    """One program: a kind of batch in one mode, planned, proven and printed."""

    compiled: Compiled
    mode: Mode
    planned: Planned
    proof: Proof
    title: str
    source: str


def prove(compiled: Compiled, mode: Mode, planned: Planned, title: str, budget_bytes: int) -> Scheduled:
    """The program of a plan, its step proven safe in every order that the streams allow."""
    work = compiled.assembly.work
    proof = verify(planned.step, work, mode=mode, budget_bytes=budget_bytes)
    return Scheduled(compiled, mode, planned, proof, title, emit_step(planned.step, work, title=title))


@dataclass(frozen=True)
class Decisions:
    """Facts that all programs of a model share, as the first of them decided it.

    ``cuts`` says how far weights are cut, None until then; ``placement``, where the state of each group is;
    ``resident``, the groups whose state is on the device.
    """

    layout: StateLayout = LAID_OUT_ANEW
    cuts: Cuts | None = None
    placement: StatePlacement | None = None
    resident: tuple[int, ...] | None = None


class Compiler:
    """Compiles programs over one model's parameters for the ``room`` that a budget gives, by what the first
    of them ``decided``. Of the ranks of a ``world`` the first plans, and the others follow.
    """

    def __init__(
        self,
        frontend: Frontend,
        room: DeviceRoom,
        *,
        machine: Machine | None = None,
        dump: Path | None = None,
        tiers: Tiers | None = None,
        planner: Planner | None = None,
        device_state: bool = False,
        world: World | None = None,
    ) -> None:
        self.frontend = frontend
        self._world = world or World()
        self.room = room
        self.decided = Decisions(_of_mesh(self._world.ranks))
        self._tiers = tiers
        self._machine = machine
        self._planner = planner
        self._dump = dump
        self._device_state = device_state
        self._dumped = 0
        self._scheduled: dict[tuple[Any, ...], Scheduled] = {}

    @property
    def budget_bytes(self) -> int:
        """Device bytes of a plan."""
        return self.room.budget_bytes

    @property
    def machine(self) -> Machine:
        """The machine that is planned for; a nominal CPU, so that plans do not change with its load."""
        return self._share_of(self._machine or nominal_cpu(self.frontend.compute_dtype))

    @property
    def measured_machine(self) -> Machine:
        """The machine that times are predicted for."""
        return self._share_of(self._machine or this_cpu(self.frontend.compute_dtype))

    def take_mesh(self, ranks: Ranks) -> None:
        """Lay weight groups out for the ranks that share them, and plan for what each has of a machine."""
        self.decided = replace(self.decided, layout=_of_mesh(ranks))

    def _share_of(self, machine: Machine) -> Machine:
        layout = self.decided.layout
        return machine.shared_by(self._world.local, layout.ranks, layout.replicas)

    @property
    def keys(self) -> set[tuple[Any, ...]]:
        """The keys of the batches that programs were compiled for."""
        return {key for key, _ in self._scheduled}

    def knows(self, batch: Batch) -> bool:
        """Return whether a program for this kind of batch was compiled before."""
        return batch.key in self.keys

    def number(self, batch: Batch, mode: Mode) -> int:
        """Return the number of this program among those that were compiled, in their order; -1: none of
        them."""
        return next((i for i, key in enumerate(self._scheduled) if key == (batch.key, mode)), -1)

    def seconds(self, batch: Batch) -> tuple[float, float]:
        """Return what a step of this kind of batch is predicted to take, of a program that was compiled for
        it, and what compiling another is sure to."""
        found = next(s for (key, _), s in self._scheduled.items() if key == batch.key)
        return found.planned.seconds, _COMPILE_SECONDS + _BLOCK_SECONDS * len(found.planned.plan.blocks)

    @property
    def programs(self) -> int:
        """The number of programs that were compiled and are not forgotten."""
        return len(self._scheduled)

    @property
    def training(self) -> list[Scheduled]:
        """The programs that compute gradients, in the order of their compilation."""
        return [s for (_, mode), s in self._scheduled.items() if mode.kind in ("train", "accumulate")]

    def forget(self) -> None:
        """Forget all programs and captures; how weights are cut and where state is stays decided."""
        self._scheduled.clear()
        self.frontend.forget()

    def take_room(self, room: DeviceRoom) -> None:
        """Plan within other room from now on."""
        self.room = room

    def keep(self, wanted: Callable[[Scheduled], bool]) -> None:
        """Forget all programs but these, such as those that were planned within other room and never ran."""
        self._scheduled = {key: known for key, known in self._scheduled.items() if wanted(known)}

    def go_back(self, room: DeviceRoom, programs: int) -> None:
        """Forget all but the first programs, to plan within this room again."""
        self.take_room(room)
        self._scheduled = dict(islice(self._scheduled.items(), programs))

    def plan_within(self, room: DeviceRoom, scheduled: Scheduled) -> None:
        """Forget a program, to plan it again within other room."""
        self.take_room(room)
        self.keep(lambda known: known is not scheduled)

    def begin_again(self, room: DeviceRoom, cuts: Cuts | None = None) -> None:
        """Forget all programs and what the first one decided, before any has run; ``cuts`` decides how far
        weights are cut."""
        self.room, self._dumped = room, 0
        self.decided = Decisions(replace(self.decided.layout, groups=()), cuts)
        self._scheduled.clear()

    def lay_out(self, scheduled: Scheduled) -> None:
        """Plan all further programs for the state as this one has it."""
        plan = scheduled.planned.plan
        self.decided = replace(
            self.decided,
            layout=replace(self.decided.layout, groups=scheduled.compiled.assembly.groups),
            placement=StatePlacement(host_states(plan), storage_window(plan)),
        )

    @property
    def pieces(self) -> Mapping[str, Parameter]:
        """The parameters with those that are cut replaced by their pieces."""
        return cut_parameters(self.frontend.parameters, self.decided.cuts or {})

    def compile(self, batch: Batch, *, evaluate: bool) -> Compiled:
        """One kind of batch, through all stages before the plan, cut as chosen."""
        cuts, layout = self.decided.cuts or {}, self.decided.layout
        return self.frontend.build(batch, cuts, evaluate=evaluate, layout=layout)

    def schedule(self, batch: Batch, mode: Mode) -> Scheduled:
        """Plan, prove and print one program; made once per key and mode."""
        key = (batch.key, mode)
        if key in self._scheduled:
            return self._scheduled[key]
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in batch.tensors)
        _LOG.info("compiling a program to %s: a batch of %s", mode.kind, shapes)
        start = time.perf_counter()
        with without_garbage_collection():
            compiled, planned = self._together(batch, mode)
            if self.decided.resident is None and mode.kind in ("train", "accumulate"):
                self.decided = replace(self.decided, resident=planned.step.resident)
            name, work = printable(type(self.frontend.model).__name__), compiled.assembly.work
            title = (
                f"{mode.kind} step of {name}: {work.parameters / 1e6:.1f} M parameters, "
                f"budget {format_bytes(self.budget_bytes)}, peak {format_bytes(planned.peak_bytes)}. "
                f"{self._world.chosen}"
            ).rstrip()
            scheduled = prove(compiled, mode, planned, title, self.budget_bytes)
        self._scheduled[key] = scheduled
        _LOG.info("compiled a program to %s in %.1f s", mode.kind, time.perf_counter() - start)
        if self._dump is not None:
            folder = mode.kind if not self._dumped else f"{mode.kind}-{self._dumped + 1}"
            self._dumped += 1
            write_dump(self._dump / folder, scheduled, self.schedule_of(scheduled, self.machine))
        return scheduled

    def schedule_of(
        self, scheduled: Scheduled, machine: Machine, measured: Measured | None = None
    ) -> Schedule:
        """A program as something to look at, with times predicted for ``machine``."""
        return Schedule(
            scheduled.title, scheduled.compiled.assembly.work, scheduled.planned.plan, scheduled.mode,
            machine, self.budget_bytes, measured=measured,
        )  # fmt: skip

    def _together(self, batch: Batch, mode: Mode) -> tuple[Compiled, Planned]:
        """Plan on rank 0; the plan, how far weights are cut and the predicted time are the same on all."""
        if self._world.size == 1:
            return self._within(batch, mode)
        found: list[tuple[Compiled, Planned]] = []

        def decide() -> bytes:
            compiled, planned = self._within(batch, mode)
            found.append((compiled, planned))
            assert self.decided.cuts is not None
            decided = {
                "cuts": [[n, list(c)] for n, c in self.decided.cuts.items()],
                "plan": planned.plan.to_json(),
                "workload": compiled.assembly.work.digest,
                "seconds": planned.seconds,
            }
            return json.dumps(decided).encode()

        decided = json.loads(self._world.from_first(decide))
        if found:
            return found[0]
        cuts = {name: tuple(rows) for name, rows in decided["cuts"]}
        self.decided = replace(self.decided, cuts=cuts)
        compiled, plan = (
            self.compile(batch, evaluate=mode.kind == "evaluate"),
            Plan.from_json(decided["plan"]),
        )
        if decided["workload"] != compiled.assembly.work.digest:
            raise MegacompileError(
                "The model or the batch is not that of rank 0: make the same model on every rank."
            )
        planned = fitting(follow(plan, compiled.assembly.work, mode, self.machine, self.budget_bytes))
        timeline = replace(planned.timeline, step_seconds=decided["seconds"])  # padding goes by it on all
        return compiled, replace(planned, timeline=timeline)

    def _within(self, batch: Batch, mode: Mode) -> tuple[Compiled, Planned]:
        """Plan, on rank 0; of the first batch, that decides how far weights are cut."""
        found = self.plan(batch, mode)
        compiled, planned = fitting(self.room.with_reserved(found) if isinstance(found, TooSmall) else found)
        if self.decided.cuts is None:
            self.decided = replace(self.decided, cuts=compiled.tiled.cuts)
        return compiled, planned

    def plan(self, batch: Batch, mode: Mode) -> tuple[Compiled, Planned] | TooSmall:
        """A plan that also fits as the device's allocator lays it; nothing is decided by it."""
        lacking_bytes = self.room.lacking_bytes
        if lacking_bytes is None:
            return self._plan(batch, mode, self.budget_bytes)

        def lacking(found: tuple[Compiled, Planned], budget: int) -> int:
            compiled, step = found[0], found[1].step
            requests = step_requests(step, compiled.part, compiled.templates, compiled.assembly)
            return lacking_bytes(budget + self.room.loose_bytes, step, requests)

        return plan_on_pages(lambda budget: self._plan(batch, mode, budget), lacking, self.budget_bytes)

    def _plan(self, batch: Batch, mode: Mode, budget: int) -> tuple[Compiled, Planned] | TooSmall:
        """Plan a kind of batch; of the first one, also how far weights are cut."""
        evaluate, terms = mode.kind == "evaluate", self._terms(mode, budget)
        cuts, layout = self.decided.cuts, self.decided.layout
        chunks = self.frontend.chunks(batch, cuts or {}, evaluate=evaluate, layout=layout)

        def plan(chunk: int, most: int) -> tuple[Compiled, Planned] | TooSmall:
            if cuts is None:
                tilings = self.frontend.tilings(batch, evaluate=evaluate, chunk=chunk, layout=layout)
                gathers = bool(self.frontend.tables(batch, evaluate=evaluate))
                return plan_program(tilings, mode, terms, gathers=gathers, most=most)
            compiled = self.frontend.build(batch, cuts, evaluate=evaluate, chunk=chunk, layout=layout)
            return plan_program([TilingCandidate(0, lambda: compiled)], mode, terms, most=most)

        found = first_that_fits(chunks, budget, plan)
        if isinstance(found, TooSmall):
            found = found.saying(*self.ways_out(batch, evaluate=evaluate), *self._finer(batch, evaluate))
        return found

    def ways_out(self, batch: Batch, *, evaluate: bool) -> Iterator[str]:
        """Yield what else may help where a program does not fit the budget."""
        cuts, layout = self.decided.cuts, self.decided.layout
        if why := self.frontend.why_whole(batch, cuts or {}, evaluate=evaluate, layout=layout):
            yield why
        if cuts is not None and batch.outputs is not None:
            compiled = self.compile(batch, evaluate=evaluate)
            sizes = [compiled.part.values[v].nbytes for v in compiled.part.results]
            names = [name or "the output" for name in compiled.captured.structure.names]
            largest = sorted(zip(sizes, names, strict=True), reverse=True)[:3]
            results = ", ".join(f"{name} of {format_bytes(nbytes)}" for nbytes, name in largest)
            yield f"What is predicted is computed there ({results}): give predict outputs= that return less."

    def _finer(self, batch: Batch, evaluate: bool) -> Iterator[str]:
        """Yield that another first batch might have had weights cut further, if so."""
        cuts = self.decided.cuts
        if cuts is None or self._planner is not None:
            return
        if list(self.frontend.tiling_candidates(batch, evaluate=evaluate))[-1] != cuts:
            yield _FIRST_DECIDES

    def _terms(self, mode: Mode, budget: int) -> PlanTerms:
        residents = self._may_reside(mode)
        placement = self.decided.placement
        return PlanTerms(self.machine, budget, self._tiers, placement, residents, self._planner)

    def _may_reside(self, mode: Mode) -> tuple[int, ...] | None:
        """Groups whose state may be on the device: any for the first program that trains, later its own."""
        if not self._device_state:
            return ()
        if self.decided.resident is None:
            return None if mode.kind in ("train", "accumulate") else ()
        return self.decided.resident


def _of_mesh(ranks: Ranks) -> StateLayout:
    return StateLayout(ranks=ranks.shards, replicas=ranks.replicas)

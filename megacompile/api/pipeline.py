"""The pipeline from the plan on: plan -> prove -> emit, for the kinds of batches of one model.

The stages before the plan are those of :class:`~megacompile.api.frontend.Frontend`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from megacompile.api.decisions import Decisions, Scheduled
from megacompile.api.frontend import Compiled, Division, Frontend
from megacompile.blocks.weight_groups import Parameter, cut_parameters
from megacompile.capture.batch import Batch
from megacompile.distributed.world import World
from megacompile.errors import MegacompileError
from megacompile.garbage_collection import without_garbage_collection
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
from megacompile.schedule.verify import verify
from megacompile.units import format_bytes

_LOG = logging.getLogger("megacompile.compiler")  # trainers show what it tells
_FIRST_DECIDES = (
    "How far weights are cut was decided by the first batch: give megacompile.compile max_seq_len, or the "
    "largest batch as example_batch, and they may be cut further."
)


def prove(compiled: Compiled, mode: Mode, planned: Planned, title: str, budget_bytes: int) -> Scheduled:
    """The program of a plan, its step proven safe in every order that the streams allow."""
    work = compiled.assembly.work
    proof = verify(planned.step, work, mode=mode, budget_bytes=budget_bytes)
    return Scheduled(compiled, mode, planned, proof, title, emit_step(planned.step, work, title=title))


class Compiler:
    """Compiles programs over one model's parameters, each by what was ``decided`` so far.

    It has no state of its own: :class:`~megacompile.api.decisions.Decisions` go in, and others come out. The
    first rank of a ``world`` plans, and the others follow.
    """

    def __init__(
        self,
        frontend: Frontend,
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
        self._tiers = tiers
        self._machine = machine
        self._planner = planner
        self._dump = dump
        self._device_state = device_state

    def machine(self, decided: Decisions) -> Machine:
        """The machine that is planned for; a nominal CPU, so that plans do not change with its load."""
        return self._share_of(self._machine or nominal_cpu(self.frontend.compute_dtype), decided)

    def measured_machine(self, decided: Decisions) -> Machine:
        """The machine that times are predicted for."""
        return self._share_of(self._machine or this_cpu(self.frontend.compute_dtype), decided)

    def _share_of(self, machine: Machine, decided: Decisions) -> Machine:
        return machine.shared_by(self._world.local, decided.layout.ranks, decided.layout.replicas)

    def pieces(self, decided: Decisions) -> Mapping[str, Parameter]:
        """The parameters with those that are cut replaced by their pieces."""
        return cut_parameters(self.frontend.parameters, decided.cuts or {})

    def schedule(self, decided: Decisions, batch: Batch, mode: Mode) -> Decisions | TooSmall:
        """Plan, prove and print one program, and return the decisions with it; those that were given, where
        they have it."""
        if (batch.key, mode) in decided.programs:
            return decided
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in batch.tensors)
        _LOG.info("compiling a program to %s: a batch of %s", mode.kind, shapes)
        start = time.perf_counter()
        budget_bytes = decided.room.budget_bytes
        with without_garbage_collection():
            found = self._together(decided, batch, mode)
            if isinstance(found, TooSmall):
                return found
            compiled, planned = found
            name, work = printable(type(self.frontend.model).__name__), compiled.assembly.work
            title = (
                f"{mode.kind} step of {name}: {work.parameters / 1e6:.1f} M parameters, "
                f"budget {format_bytes(budget_bytes)}, peak {format_bytes(planned.peak_bytes)}. "
                f"{self._world.chosen}"
            ).rstrip()
            scheduled = prove(compiled, mode, planned, title, budget_bytes)
        decided = decided.with_program(batch, scheduled)
        _LOG.info("compiled a program to %s in %.1f s", mode.kind, time.perf_counter() - start)
        if self._dump is not None:
            folder = mode.kind if decided.planned == 1 else f"{mode.kind}-{decided.planned}"
            schedule = self.schedule_of(decided, scheduled, self.machine(decided))
            write_dump(self._dump / folder, scheduled, schedule)
        return decided

    def schedule_of(
        self, decided: Decisions, scheduled: Scheduled, machine: Machine, measured: Measured | None = None
    ) -> Schedule:
        """A program as something to look at, with times predicted for ``machine``."""
        return Schedule(
            scheduled.title, scheduled.compiled.assembly.work, scheduled.planned.plan, scheduled.mode,
            machine, decided.room.budget_bytes, measured=measured,
        )  # fmt: skip

    def _together(self, decided: Decisions, batch: Batch, mode: Mode) -> tuple[Compiled, Planned] | TooSmall:
        """Plan on rank 0; the plan, the division and the predicted time are the same on all."""
        if self._world.size == 1:
            return self._within(decided, batch, mode)
        found: list[tuple[Compiled, Planned] | TooSmall] = []

        def decide() -> bytes:
            here = self._within(decided, batch, mode)
            found.append(here)
            if isinstance(here, TooSmall):
                return json.dumps({"why": here.why, "least": here.least_bytes}).encode()
            compiled, planned = here
            cuts = compiled.tiled.cuts if decided.cuts is None else decided.cuts
            said = {
                "cuts": [[n, list(c)] for n, c in cuts.items()],
                "chunk": compiled.chunk,
                "plan": planned.plan.to_json(),
                "workload": compiled.assembly.work.digest,
                "seconds": planned.seconds,
            }
            return json.dumps(said).encode()

        said = json.loads(self._world.from_first(decide))
        if found:
            return found[0]
        if "why" in said:
            return TooSmall(f"Rank 0: {said['why']}", said["least"])
        cuts = {name: tuple(rows) for name, rows in said["cuts"]}
        division = Division(cuts, said["chunk"], decided.layout)
        compiled = self.frontend.build(batch, division)
        work = compiled.assembly.work
        if said["workload"] != work.digest:
            raise MegacompileError(
                "The model or the batch is not that of rank 0: make the same model on every rank."
            )
        plan, machine = Plan.from_json(said["plan"]), self.machine(decided)
        planned = fitting(follow(plan, work, mode, machine, decided.room.budget_bytes))
        timeline = replace(planned.timeline, step_seconds=said["seconds"])  # padding goes by it on all
        return compiled, replace(planned, timeline=timeline)

    def _within(self, decided: Decisions, batch: Batch, mode: Mode) -> tuple[Compiled, Planned] | TooSmall:
        """Plan, on rank 0."""
        found = self.plan(decided, batch, mode)
        return decided.room.with_reserved(found) if isinstance(found, TooSmall) else found

    def plan(self, decided: Decisions, batch: Batch, mode: Mode) -> tuple[Compiled, Planned] | TooSmall:
        """A plan that also fits as the device's allocator lays it."""
        room = decided.room
        lacking_bytes = room.lacking_bytes
        if lacking_bytes is None:
            return self._plan(decided, batch, mode, room.budget_bytes)

        def lacking(found: tuple[Compiled, Planned], budget: int) -> int:
            compiled, step = found[0], found[1].step
            requests = step_requests(step, compiled.part, compiled.templates, compiled.assembly)
            return lacking_bytes(budget + room.loose_bytes, step, requests)

        return plan_on_pages(
            lambda budget: self._plan(decided, batch, mode, budget), lacking, room.budget_bytes
        )

    def _plan(
        self, decided: Decisions, batch: Batch, mode: Mode, budget: int
    ) -> tuple[Compiled, Planned] | TooSmall:
        """Plan a kind of batch; the first one also chooses how far weights are cut."""
        terms = self._terms(decided, mode, budget)
        chunks = self.frontend.chunks(batch, decided.division)

        def plan(chunk: int, most: int) -> tuple[Compiled, Planned] | TooSmall:
            division = replace(decided.division, chunk=chunk)
            if decided.cuts is None:
                tilings = self.frontend.tilings(batch, division)
                gathers = bool(self.frontend.tables(batch))
                return plan_program(tilings, mode, terms, gathers=gathers, most=most)
            compiled = self.frontend.build(batch, division)
            return plan_program([TilingCandidate(0, lambda: compiled)], mode, terms, most=most)

        found = first_that_fits(chunks, budget, plan)
        if isinstance(found, TooSmall):
            ways = [*self.ways_out(decided, batch), *self._finer(decided, batch)]
            found = found.saying(*ways)
        return found

    def ways_out(self, decided: Decisions, batch: Batch) -> Iterator[str]:
        """Yield what else may help where a program does not fit the budget."""
        if why := self.frontend.why_whole(batch, decided.division):
            yield why
        if decided.cuts is not None and batch.outputs is not None:
            compiled = self.frontend.build(batch, decided.division)
            sizes = [compiled.part.values[v].nbytes for v in compiled.part.results]
            names = [name or "the output" for name in compiled.captured.structure.names]
            largest = sorted(zip(sizes, names, strict=True), reverse=True)[:3]
            results = ", ".join(f"{name} of {format_bytes(nbytes)}" for nbytes, name in largest)
            yield f"What is predicted is computed there ({results}): give predict outputs= that return less."

    def _finer(self, decided: Decisions, batch: Batch) -> Iterator[str]:
        """Yield that another first batch might have had weights cut further, if so."""
        cuts = decided.cuts
        if cuts is None or self._planner is not None:
            return
        if list(self.frontend.tiling_candidates(batch))[-1] != cuts:
            yield _FIRST_DECIDES

    def _terms(self, decided: Decisions, mode: Mode, budget: int) -> PlanTerms:
        residents, machine = self._may_reside(decided, mode), self.machine(decided)
        return PlanTerms(machine, budget, self._tiers, decided.placement, residents, self._planner)

    def _may_reside(self, decided: Decisions, mode: Mode) -> tuple[int, ...] | None:
        """Groups whose state may be on the device: any for the first program that trains, later its own."""
        if not self._device_state:
            return ()
        if decided.resident is None:
            return None if mode.computes_gradients else ()
        return decided.resident

"""The stages from the plan on: plan -> prove -> emit, for the kinds of batches of one model."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacompile.assemble.assembly import Parameter, cut_parameters
from megacompile.assemble.plan import Mode, Plan
from megacompile.capture.batch import Batch
from megacompile.errors import BudgetError, MegacompileError
from megacompile.frontend import Compiled, Frontend
from megacompile.host.offload import Placement
from megacompile.machine.measured import Measured
from megacompile.machine.rates import Machine, nominal_cpu, this_cpu
from megacompile.plan.baselines import Planner
from megacompile.plan.candidates import Planned
from megacompile.plan.on_pages import plan_on_pages
from megacompile.plan.plan_program import Terms, first_that_fits, plan_program
from megacompile.plan.planner import follow
from megacompile.plan.tiers import Tiers
from megacompile.plan.tiling import TilingCandidate
from megacompile.room import Room
from megacompile.schedule.dump import write_dump
from megacompile.schedule.schedule import Schedule
from megacompile.step.emit import emit_step
from megacompile.step.requests import step_requests
from megacompile.step.verify import Proof, verify
from megacompile.tile.rewrite import Cuts
from megacompile.units import format_bytes
from megacompile.world.control import World
from megacompile.world.ranks import Ranks

_LOG = logging.getLogger(__name__)  # trainers show what it tells
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


class Compiler:
    """Compiles programs over one model's parameters for the ``room`` that a budget gives. Of the ranks of a
    ``world`` the first plans, and the others follow.

    ``cuts`` says how far weights are cut once the first program decided it; ``placement``, where the state
    is once it is allocated.
    """

    def __init__(
        self,
        frontend: Frontend,
        room: Room,
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
        self.placement: Placement | None = None
        self.cuts: Cuts | None = None
        self._tiers = tiers
        self._machine = machine
        self._planner = planner
        self._dump = dump
        self._device_state = device_state
        self._resident: tuple[int, ...] | None = None
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
        self.frontend.ranks, self.frontend.replicas = ranks.shards, ranks.replicas

    def _share_of(self, machine: Machine) -> Machine:
        return machine.shared_by(self._world.local, self.frontend.ranks, self.frontend.replicas)

    @property
    def keys(self) -> set[tuple[Any, ...]]:
        """The keys of the batches that programs were compiled for."""
        return {key for key, _ in self._scheduled}

    def knows(self, batch: Batch) -> bool:
        """Whether a program for this kind of batch was compiled before."""
        return batch.key in self.keys

    def number(self, batch: Batch, mode: Mode) -> int:
        """Which of the programs that were compiled this is, in their order; -1: none of them."""
        return next((i for i, key in enumerate(self._scheduled) if key == (batch.key, mode)), -1)

    @property
    def programs(self) -> int:
        """How many programs were compiled and are not forgotten."""
        return len(self._scheduled)

    @property
    def training(self) -> list[Scheduled]:
        """The programs that compute gradients, in the order of their compilation."""
        return [s for (_, mode), s in self._scheduled.items() if mode.kind in ("train", "accumulate")]

    def forget(self) -> None:
        """Forget all programs and captures; how weights are cut and where state is stays decided."""
        self._scheduled.clear()
        self.frontend.forget()

    def plan_within(self, room: Room, scheduled: Scheduled) -> None:
        """Forget a program, to plan it again within other room."""
        self.room = room
        self._scheduled = {key: known for key, known in self._scheduled.items() if known is not scheduled}

    def begin_again(self, room: Room) -> None:
        """Forget all programs and what the first one decided, before any has run."""
        self.room, self.cuts, self._resident, self._dumped = room, None, None, 0
        self._scheduled.clear()

    @property
    def pieces(self) -> Mapping[str, Parameter]:
        """The parameters with those that are cut replaced by their pieces."""
        return cut_parameters(self.frontend.parameters, self.cuts or {})

    def compile(self, batch: Batch, *, evaluate: bool) -> Compiled:
        """One kind of batch, through all stages before the plan, cut as chosen."""
        return self.frontend.build(batch, self.cuts or {}, evaluate=evaluate)

    def schedule(self, batch: Batch, mode: Mode) -> Scheduled:
        """Plan, prove and print one program; made once per key and mode."""
        key = (batch.key, mode)
        found = self._scheduled.get(key)
        if found is not None:
            return found
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in batch.tensors)
        _LOG.info("compiling a program to %s: a batch of %s", mode.kind, shapes)
        start = time.perf_counter()
        compiled, planned = self._together(batch, mode)
        if self._resident is None and mode.kind in ("train", "accumulate"):
            self._resident = planned.step.resident
        name, work = type(self.frontend.model).__name__, compiled.assembly.work
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
        """Plan on rank 0; the plan and how far weights are cut are the same on all."""
        if self._world.size == 1:
            return self._within(batch, mode)
        found: list[tuple[Compiled, Planned]] = []

        def decide() -> bytes:
            compiled, planned = self._within(batch, mode)
            found.append((compiled, planned))
            assert self.cuts is not None
            decided = {
                "cuts": [[n, list(c)] for n, c in self.cuts.items()],
                "plan": planned.plan.to_json(),
                "workload": compiled.assembly.work.digest,
            }
            return json.dumps(decided).encode()

        decided = json.loads(self._world.from_first(decide))
        if found:
            return found[0]
        self.cuts = {name: tuple(cuts) for name, cuts in decided["cuts"]}
        compiled, plan = (
            self.compile(batch, evaluate=mode.kind == "evaluate"),
            Plan.from_json(decided["plan"]),
        )
        if decided["workload"] != compiled.assembly.work.digest:
            raise MegacompileError(
                "The model or the batch is not that of rank 0: make the same model on every rank."
            )
        return compiled, follow(plan, compiled.assembly.work, mode, self.machine, self.budget_bytes)

    def _within(self, batch: Batch, mode: Mode) -> tuple[Compiled, Planned]:
        """Plan, on rank 0; of the first batch, that decides how far weights are cut."""
        with self.room.naming_reserved():
            compiled, planned = self.plan(batch, mode)
        if self.cuts is None:
            self.cuts = compiled.tiled.cuts
        return compiled, planned

    def plan(self, batch: Batch, mode: Mode) -> tuple[Compiled, Planned]:
        """A plan that also fits as the device's allocator lays it; nothing is decided by it."""
        lacking_bytes = self.room.lacking_bytes
        if lacking_bytes is None:
            return self._plan(batch, mode, self.budget_bytes)

        def lacking(found: tuple[Compiled, Planned], budget: int) -> int:
            compiled, step = found[0], found[1].step
            requests = step_requests(step, compiled.part, compiled.templates, compiled.assembly)
            return lacking_bytes(budget + self.room.loose_bytes, step, requests)

        return plan_on_pages(lambda budget: self._plan(batch, mode, budget), lacking, self.budget_bytes)

    def _plan(self, batch: Batch, mode: Mode, budget: int) -> tuple[Compiled, Planned]:
        """Plan a kind of batch; of the first one, also how far weights are cut."""
        evaluate, terms = mode.kind == "evaluate", self._terms(mode, budget)
        chunks = self.frontend.chunks(batch, self.cuts or {}, evaluate=evaluate)
        cuts = self.cuts

        def plan(chunk: int, most: int) -> tuple[Compiled, Planned]:
            if cuts is None:
                tilings = self.frontend.tilings(batch, evaluate=evaluate, chunk=chunk)
                gathers = bool(self.frontend.tables(batch, evaluate=evaluate))
                return plan_program(tilings, mode, terms, gathers=gathers, most=most)
            compiled = self.frontend.build(batch, cuts, evaluate=evaluate, chunk=chunk)
            return plan_program([TilingCandidate(0, lambda: compiled)], mode, terms, most=most)

        try:
            return first_that_fits(chunks, budget, plan)
        except BudgetError as error:
            ways = " ".join(self._ways_out(batch, evaluate))
            raise BudgetError(f"{error} {ways}".rstrip(), least_bytes=error.least_bytes) from error

    def _ways_out(self, batch: Batch, evaluate: bool) -> Iterator[str]:
        """What else may help where a program does not fit the budget."""
        if why := self.frontend.why_whole(batch, self.cuts or {}, evaluate=evaluate):
            yield why
        if self.cuts is None:
            return
        if batch.outputs is not None:
            compiled = self.compile(batch, evaluate=evaluate)
            sizes = [compiled.part.values[v].nbytes for v in compiled.part.results]
            names = [name or "the output" for name in compiled.captured.structure.names]
            largest = sorted(zip(sizes, names, strict=True), reverse=True)[:3]
            results = ", ".join(f"{name} of {format_bytes(nbytes)}" for nbytes, name in largest)
            yield f"What is predicted is computed there ({results}): give predict outputs= that return less."
        finest = list(self.frontend.tiling_candidates(batch, evaluate=evaluate))[-1]
        if self._planner is None and finest != self.cuts:
            yield _FIRST_DECIDES

    def _terms(self, mode: Mode, budget: int) -> Terms:
        residents = self._may_reside(mode)
        return Terms(self.machine, budget, self._tiers, self.placement, residents, self._planner)

    def _may_reside(self, mode: Mode) -> tuple[int, ...] | None:
        """Groups whose state may be on the device: any for the first program that trains, later its own."""
        if not self._device_state:
            return ()
        if self._resident is None:
            return None if mode.kind in ("train", "accumulate") else ()
        return self._resident

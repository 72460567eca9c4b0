"""The stages from the plan on: plan -> prove -> emit, for the kinds of batches of one model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacompile.capture.batch import Batch
from megacompile.errors import BudgetError
from megacompile.frontend import Compiled, Frontend
from megacompile.host.formats import state_bytes
from megacompile.host.offload import Placement
from megacompile.machine.measured import Measured
from megacompile.machine.rates import Machine, nominal_cpu, this_cpu
from megacompile.plan.assemble import Assembly, Parameter, cut_parameters
from megacompile.plan.plan import Mode
from megacompile.schedule.dump import write_dump
from megacompile.schedule.schedule import Schedule
from megacompile.search.candidates import Planned
from megacompile.search.planner import follow, search
from megacompile.search.policies import Policy
from megacompile.search.residency import not_gathered, reside, trained_groups
from megacompile.search.tiers import Drive, Tiers
from megacompile.search.tile_choice import choose
from megacompile.step.emit import emit_step
from megacompile.step.verify import Proof, verify
from megacompile.tile.rewrite import Cuts
from megacompile.units import format_bytes

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


class Compiler:
    """Compiles programs over one model's parameters for one budget.

    ``cuts`` says how far weights are cut once the first program decided it; ``placement``, where the state
    is once it is laid out.
    """

    def __init__(
        self,
        frontend: Frontend,
        budget_bytes: int,
        *,
        machine: Machine | None = None,
        dump: Path | None = None,
        tiers: Tiers | None = None,
        policy: Policy | None = None,
        device_state: bool = False,
    ) -> None:
        self.frontend = frontend
        self.budget_bytes = budget_bytes
        self.placement: Placement | None = None
        self.cuts: Cuts | None = None
        self._tiers = tiers
        self._machine = machine
        self._policy = policy
        self._dump = dump
        self._device_state = device_state
        self._resident: tuple[int, ...] | None = None
        self._dumped = 0
        self._scheduled: dict[tuple[Any, ...], Scheduled] = {}

    @property
    def machine(self) -> Machine:
        """The machine that is planned for; a nominal CPU, so that plans do not change with its load."""
        return self._machine or nominal_cpu(self.frontend.compute_dtype)

    @property
    def measured_machine(self) -> Machine:
        """The machine that times are predicted for."""
        return self._machine or this_cpu(self.frontend.compute_dtype)

    def knows(self, batch: Batch) -> bool:
        """Whether a program for this kind of batch was compiled before."""
        return any(key == batch.key for key, _ in self._scheduled)

    @property
    def programs(self) -> int:
        """How many programs were compiled and are not forgotten."""
        return len(self._scheduled)

    def forget(self) -> None:
        """Forget all programs and captures; how weights are cut and where state is stays decided."""
        self._scheduled.clear()
        self.frontend.forget()

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
        compiled, planned = self._plan(batch, mode)
        work = compiled.assembly.work
        chosen = self._policy is not None and mode.kind in ("train", "accumulate")  # as given, and no more
        if not chosen and not any(group.state.startswith("nvme") for group in planned.plan.groups):
            planned = reside(planned, work, mode, self.machine, self.budget_bytes, self._may_reside(mode))
        if self._resident is None and mode.kind in ("train", "accumulate"):
            self._resident = planned.step.resident
        proof = verify(planned.step, work, budget_bytes=self.budget_bytes)
        name = type(self.frontend.model).__name__
        title = (
            f"{mode.kind} step of {name}: {work.parameters / 1e6:.1f} M parameters, "
            f"budget {format_bytes(self.budget_bytes)}, peak {format_bytes(planned.peak_bytes)}."
        )
        scheduled = Scheduled(
            compiled, mode, planned, proof, title, emit_step(planned.step, work, title=title)
        )
        self._scheduled[key] = scheduled
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

    def _plan(self, batch: Batch, mode: Mode) -> tuple[Compiled, Planned]:
        """Plan a kind of batch; the first one also decides how far weights are cut."""
        evaluate = mode.kind == "evaluate"

        def plan(compiled: Compiled) -> Planned:
            return self._find(compiled.assembly, mode)

        if self.cuts is not None:
            compiled = self.compile(batch, evaluate=evaluate)
            try:
                return compiled, plan(compiled)
            except BudgetError as error:
                finest = list(self.frontend.ladder(batch, evaluate=evaluate))[-1]
                if self._policy is not None or finest == self.cuts:
                    raise
                raise BudgetError(f"{error} {_FIRST_DECIDES}", least_bytes=error.least_bytes) from error
        rungs = self.frontend.rungs(batch, evaluate=evaluate)
        gathers = bool(self.frontend.tables(batch, evaluate=evaluate))
        compiled, planned = choose(
            rungs, mode, self.budget_bytes, plan, gathers=gathers, resides=self._places_state(mode)
        )
        self.cuts = compiled.tiled.cuts
        return compiled, planned

    def _find(self, assembly: Assembly, mode: Mode) -> Planned:
        """By the policy, if there is one, for steps that train; else by the search, within host bytes."""
        work, machine, budget, drive = assembly.work, self.machine, self.budget_bytes, self._drive(assembly)
        if self._policy is not None and mode.kind in ("train", "accumulate"):
            return follow(self._policy(work, mode, machine, budget), work, mode, machine, budget, drive=drive)
        host = None
        if self._tiers is not None and not self._tiers.stored:
            state = sum(state_bytes(assembly.groups, self._tiers.form).values())
            host = max(0, self._tiers.host_budget_bytes - state)
        resident = not_gathered(work, self._may_reside(mode) or ())
        if resident:  # state that need not move between programs, if its place can be spared
            with contextlib.suppress(BudgetError):
                room = host if drive is None else drive.room
                return search(work, mode, machine, budget, host_budget=room, resident=resident)
        residents = trained_groups(work) if self._places_state(mode) else ()
        return search(work, mode, machine, budget, host_budget=host, drive=drive, residents=residents)

    def _drive(self, assembly: Assembly) -> Drive | None:
        """Where state may live beside RAM, as long as that is not decided; then where it does."""
        if self._tiers is None or not self._tiers.stored:
            return None
        if self.placement is None:
            return Drive.of(assembly.groups, self._tiers)
        return Drive.fixed(assembly.groups, self._tiers, self.placement.states, self.placement.window)

    def _may_reside(self, mode: Mode) -> tuple[int, ...] | None:
        """Groups whose state may be on the device: any for the first program that trains, later its own."""
        if not self._device_state:
            return ()
        if self._resident is None:
            return None if mode.kind in ("train", "accumulate") else ()
        return self._resident

    def _places_state(self, mode: Mode) -> bool:
        """Whether the search chooses the groups whose state is on the device."""
        stored = self._tiers is not None and self._tiers.stored
        free = self._policy is None and self._may_reside(mode) is None
        return mode.kind == "train" and free and not stored

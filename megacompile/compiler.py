"""The pipeline: capture -> fuse -> tile -> partition -> differentiate -> plan -> ... -> emit.

:class:`Compiler` runs the stages for one kind of batch at a time and keeps what does not change
between kinds: the form of each parameter and the layout of the weight groups.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.capture.batch import Batch
from megacompile.capture.captured import Captured
from megacompile.capture.forms import parameter_forms
from megacompile.capture.graph import capture
from megacompile.capture.loss import LossFn
from megacompile.differentiate.options import DifferentiatedTemplate, differentiate
from megacompile.errors import BudgetError, CaptureError, MegacompileError
from megacompile.fuse.placement import fuse, read_switches
from megacompile.fuse.report import Fusions
from megacompile.host.formats import state_bytes
from megacompile.host.offload import Placement
from megacompile.host.optimizer import param_group_of
from megacompile.machine.measured import Measured
from megacompile.machine.rates import Machine, nominal_cpu, this_cpu
from megacompile.partition.blocks import Partition, Template, partition
from megacompile.plan.assemble import Assembly, GroupLayout, Parameter, assemble, cut_parameters
from megacompile.plan.plan import Mode
from megacompile.schedule.dump import write_dump
from megacompile.schedule.schedule import Schedule
from megacompile.search.candidates import Planned
from megacompile.search.planner import follow, search
from megacompile.search.policies import Policy
from megacompile.search.residency import reside, trained_groups, with_state
from megacompile.search.tiers import Drive, Tiers
from megacompile.search.tile_choice import choose, ladder
from megacompile.step.emit import emit_step
from megacompile.step.verify import Proof, verify
from megacompile.tile.cuts import families, tables
from megacompile.tile.rewrite import Cuts, Tiled, tile
from megacompile.units import format_bytes

_FIRST_DECIDES = (
    "How far weights are cut was decided by the first batch: give megacompile.compile max_seq_len, or the "
    "largest batch as example_batch, and they may be cut further."
)
_TRACING = threading.RLock()  # torch traces one model at a time, over state of the whole process


@dataclass(frozen=True)
class Front:
    """One kind of batch, through the stages before weights are cut."""

    captured: Captured
    fused: Captured
    fusions: Fusions


@dataclass(frozen=True)
class Compiled(Front):
    """One kind of batch, through all stages that do not depend on the plan."""

    tiled: Tiled
    part: Partition
    templates: tuple[DifferentiatedTemplate, ...]
    assembly: Assembly


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
    """Compiles programs over one model's parameters for one budget."""

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer | None,
        compute_dtype: torch.dtype,
        budget_bytes: int,
        loss_fn: LossFn | None = None,
        machine: Machine | None = None,
        dump: Path | None = None,
        kernels: Mapping[str, bool] | bool | None = None,
        tiers: Tiers | None = None,
        policy: Policy | None = None,
        device_state: bool = False,
        inductor: torch.device | None = None,
    ) -> None:
        self.model = model
        self.tiers = tiers
        self.placement: Placement | None = None  # of the state, once it is laid out
        self.budget_bytes = budget_bytes
        self.parameters = _describe(model, optimizer, compute_dtype)
        self.layouts: tuple[GroupLayout, ...] = ()
        self.cuts: Cuts | None = None  # not decided yet
        self._compute_dtype = compute_dtype
        self._forms = {n: (p.dtype, p.stride) for n, p in self.parameters.items()}
        # what no optimizer holds is not updated, so it needs no gradient
        held = {n for n, p in self.parameters.items() if optimizer is None or p.param_group >= 0}
        self._trained = held & {n for n, p in model.named_parameters() if p.requires_grad}
        self.loss_fn = loss_fn
        self._machine = machine
        self._policy = policy
        self._dump = dump
        self._kernels = read_switches(kernels)
        self._device_state = device_state
        self._inductor = inductor
        self._resident: tuple[int, ...] | None = None
        self._dumped = 0
        self._fronts: dict[tuple[Any, ...], Front] = {}
        self._compiled: dict[tuple[Any, ...], Compiled] = {}
        self._differentiated: dict[tuple[str, str], DifferentiatedTemplate] = {}
        self._scheduled: dict[tuple[Any, ...], Scheduled] = {}

    @property
    def machine(self) -> Machine:
        """The machine that is planned for; a nominal CPU, so that plans do not change with its load."""
        return self._machine or nominal_cpu(self._compute_dtype)

    @property
    def measured_machine(self) -> Machine:
        """The machine that times are predicted for."""
        return self._machine or this_cpu(self._compute_dtype)

    def knows(self, batch: Batch) -> bool:
        """Whether a program for this kind of batch was compiled before."""
        return any(key == batch.key for key, _ in self._scheduled)

    @property
    def pieces(self) -> Mapping[str, Parameter]:
        """The parameters with those that are cut replaced by their pieces."""
        return cut_parameters(self.parameters, self.cuts or {})

    def compile(self, batch: Batch, *, evaluate: bool) -> Compiled:
        """Capture, partition and differentiate one kind of batch, cut as chosen; made once per key."""
        return self.build(batch, self.cuts or {}, evaluate=evaluate)

    def rungs(self, batch: Batch, *, evaluate: bool) -> Iterator[Compiled]:
        """One kind of batch with nothing cut, then with ever smaller pieces; each made when asked for."""
        for cuts in self._ladder(batch, evaluate):
            yield self.build(batch, cuts, evaluate=evaluate)

    def _ladder(self, batch: Batch, evaluate: bool) -> Iterator[Cuts]:
        whole = self.tables(batch, evaluate=evaluate)
        with _TRACING:
            found = families(self._front(batch, evaluate).fused, gather=bool(whole))
        return ladder(found, whole)

    def _finest(self, batch: Batch, evaluate: bool) -> Cuts:
        return list(self._ladder(batch, evaluate))[-1]

    def captured(self, batch: Batch, *, evaluate: bool) -> Captured:
        """The graph of one kind of batch; the stages after it use the same."""
        with _TRACING:
            return self._front(batch, evaluate).captured

    def tables(self, batch: Batch, *, evaluate: bool) -> Cuts:
        """Tables of which the host may gather the rows that this batch looks up."""
        if not self._in_ram:
            return {}
        with _TRACING:
            return tables(self._front(batch, evaluate).fused)

    @property
    def _in_ram(self) -> bool:
        """Whether all weights are sure to be in RAM, where the host can look them up."""
        return self.tiers is None or not self.tiers.stored

    def _front(self, batch: Batch, evaluate: bool) -> Front:
        """The stages before anything is cut."""
        if batch.key not in self._fronts:
            captured = capture(
                self.model,
                batch.args,
                batch.kwargs,
                forms=self._forms,
                trained=self._trained,
                loss_fn=self.loss_fn,
                evaluate=evaluate,
            )
            self._fronts[batch.key] = Front(captured, *fuse(captured, self._kernels))
        return self._fronts[batch.key]

    def build(self, batch: Batch, cuts: Cuts, *, evaluate: bool) -> Compiled:
        """One kind of batch with its weights cut in this way; made once."""
        with _TRACING:
            return self._build(batch, cuts, evaluate)

    def _build(self, batch: Batch, cuts: Cuts, evaluate: bool) -> Compiled:
        key = (batch.key, tuple(cuts.items()))
        if key in self._compiled:
            return self._compiled[key]
        front = self._front(batch, evaluate)
        try:
            tiled = tile(front.fused, cuts, gather=self._in_ram)
            part = partition(tiled.captured)
            templates = tuple(self._differentiate(t, front.fused.fake_mode) for t in part.templates)
        except MegacompileError:
            raise
        except RuntimeError as error:  # what an operator says about its arguments
            reason = str(error).strip().splitlines()[0]
            raise CaptureError(f"{type(self.model).__name__} cannot run on this batch: {reason}") from error
        constants = sum(b.nbytes for b in self.constants(tiled.captured).values())
        parameters = cut_parameters(self.parameters, cuts)
        assembly = assemble(part, templates, parameters, constants, self.layouts)
        assembly = with_state(assembly, self.tiers.form if self.tiers is not None else "fp32")
        self._check_places(assembly, part)
        compiled = Compiled(front.captured, front.fused, front.fusions, tiled, part, templates, assembly)
        self._compiled[key] = compiled
        return compiled

    def _differentiate(self, template: Template, mode: FakeTensorMode) -> DifferentiatedTemplate:
        """Templates of the same name and computation, in programs cut differently, are made once."""
        key = (template.digest, template.name)
        if key not in self._differentiated:
            self._differentiated[key] = differentiate(template, mode, self._inductor)
        return replace(self._differentiated[key], index=template.index)

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
        title = (
            f"{mode.kind} step of {type(self.model).__name__}: {work.parameters / 1e6:.1f} M parameters, "
            f"budget {format_bytes(self.budget_bytes)}, peak {format_bytes(planned.peak_bytes)}."
        )
        scheduled = Scheduled(
            compiled, mode, planned, proof, title, emit_step(planned.step, work, title=title)
        )
        self._scheduled[key] = scheduled
        if self._dump is not None:
            name = mode.kind if not self._dumped else f"{mode.kind}-{self._dumped + 1}"
            self._dumped += 1
            write_dump(self._dump / name, scheduled, self.schedule_of(scheduled, self.machine))
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
                if self._policy is not None or self._finest(batch, evaluate) == self.cuts:
                    raise
                raise BudgetError(f"{error} {_FIRST_DECIDES}", least_bytes=error.least_bytes) from error
        rungs = self.rungs(batch, evaluate=evaluate)
        gathers = bool(self.tables(batch, evaluate=evaluate))
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
        if self.tiers is not None and not self.tiers.stored:
            state = sum(state_bytes(assembly.groups, self.tiers.form).values())
            host = max(0, self.tiers.host_budget_bytes - state)
        resident = self._may_reside(mode)
        if resident:  # state that need not move between programs, if its place can be spared
            with contextlib.suppress(BudgetError):
                room = host if drive is None else drive.room
                return search(work, mode, machine, budget, host_budget=room, resident=resident)
        residents = trained_groups(work) if self._places_state(mode) else ()
        return search(work, mode, machine, budget, host_budget=host, drive=drive, residents=residents)

    def _drive(self, assembly: Assembly) -> Drive | None:
        """Where state may live beside RAM, as long as that is not decided; then where it does."""
        if self.tiers is None or not self.tiers.stored:
            return None
        if self.placement is None:
            return Drive.of(assembly.groups, self.tiers)
        return Drive.fixed(assembly.groups, self.tiers, self.placement.states, self.placement.window)

    def _may_reside(self, mode: Mode) -> tuple[int, ...] | None:
        """Groups whose state may be on the device: any for the first program that trains, later its own."""
        if not self._device_state:
            return ()
        if self._resident is None:
            return None if mode.kind in ("train", "accumulate") else ()
        return self._resident

    def _places_state(self, mode: Mode) -> bool:
        """Whether the search chooses the groups whose state is on the device."""
        return (
            self._in_ram and mode.kind == "train" and self._policy is None and self._may_reside(mode) is None
        )

    def constants(self, captured: Captured) -> dict[str, Tensor]:
        """Buffers and constants that the graph reads, by the names its blocks use."""
        buffers = dict(self.model.named_buffers())
        named = {name: buffers[name] for name in captured.buffers.values()}
        return named | captured.constants

    def _check_places(self, assembly: Assembly, part: Partition) -> None:
        looked_up = {p for rows in part.rows.values() for p in rows.pieces}
        unknown = looked_up.union(*(b.weights for b in part.blocks)) - set(assembly.places)
        if unknown:
            raise MegacompileError(
                f"This batch uses the parameter {sorted(unknown)[0]}, which the first one did not: "
                "give compile an example_batch that uses every parameter."
            )
        given = {group for block in assembly.work.blocks for group, _ in block.grad_groups}
        untrained = [g for g in assembly.groups if g.index in given and not g.trainable]
        if untrained:
            raise MegacompileError(
                f"This batch trains the parameter {untrained[0].slots[0].parameter.name}, for which the "
                "first one had no gradient: give compile an example_batch that trains every parameter."
            )


def _describe(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, compute_dtype: torch.dtype
) -> Mapping[str, Parameter]:
    owners = param_group_of(optimizer) if optimizer is not None else {}
    forms = parameter_forms(model, compute_dtype)
    return {
        name: Parameter(name, tuple(p.shape), forms[name][1], forms[name][0], owners.get(id(p), -1))
        for name, p in model.named_parameters()
    }

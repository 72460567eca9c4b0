"""A question about a training step, and its answer: what was asked, planned, predicted.

In: what :class:`~megacompile.cli.estimator.Study` found. Out: figures of it. Bytes are ints, times
seconds.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property

from megacompile.api.frontend import Compiled
from megacompile.capture.padded_length import reach
from megacompile.cli.models import Model
from megacompile.errors import MegacompileError
from megacompile.hardware.catalog import Dtype, MachineProfile
from megacompile.kernels._triton import Gpu
from megacompile.passes import lower_memory
from megacompile.planner.lower_bound import Bound, lower_bound
from megacompile.planner.min_feasible_budget import small_plans
from megacompile.planner.nvme_placement import Tiers
from megacompile.planner.plan_evaluator import Planned
from megacompile.planner.plan_program import PlanTerms
from megacompile.printable import printable
from megacompile.report.schedule import Schedule
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Step, peak_bytes
from megacompile.schedule.workload import Workload
from megacompile.state.host_budget import HostBytes, host_bytes, step_bytes
from megacompile.state.moment_formats import Form

Kind = tuple[int, int, bool, Gpu | None, int, int]
"""Sequences, tokens of each, whether the state may go to NVMe, the GPU, how many share the
state, how many replicas of it train."""


@dataclass(frozen=True)
class Question:
    """The question: ``batch`` sequences of ``seq`` tokens, ``micro_batches`` times per step, on each of
    ``gpus`` cards in each of ``nodes`` machines, which share the state, or have it ``replicated`` in each.
    Host bytes and those of drives are a machine's. Several cards need links between them in ``profile``.
    ``optimizer_state`` is how moments are kept, or what another optimizer keeps."""

    profile: MachineProfile
    batch: int
    seq: int
    hbm_budget: int
    micro_batches: int = 1
    dtype: Dtype = "bf16"
    host_budget: int | None = None
    nvme_budget: int | None = None
    gpus: int = 1
    nodes: int = 1
    replicated: bool = False
    optimizer_state: Form = "fp32"

    def __post_init__(self) -> None:
        if self.ranks > 1 and self.profile.machine.fabric_bandwidth is None:
            raise MegacompileError(
                f"{self.profile.name} has no fast links between cards: "
                "give --fabric GB/s, what yours send each other."
            )

    @property
    def ranks(self) -> int:
        """Cards of all machines."""
        return self.gpus * self.nodes

    @property
    def replicas(self) -> int:
        """Copies of the state in all."""
        return self.nodes if self.replicated else 1

    @property
    def tokens(self) -> int:
        """The tokens of one step, on all cards."""
        return self.batch * self.seq * self.micro_batches * self.ranks

    @property
    def kind(self) -> Kind:
        """Return what a capture depends on."""
        stored, machine = self.nvme_budget is not None, self.profile.machine
        gpu = Gpu(machine.processors, machine.chip or 80) if machine.processors else None
        return self.batch, self.seq, stored, gpu, self.ranks // self.replicas, self.replicas

    @property
    def terms(self) -> PlanTerms:
        """Return what a plan has to keep to; that of one card, with its share of the host."""
        machine, tiers = self.profile.rates(self.dtype), None
        if self.host_budget is not None:
            limit = sys.maxsize if self.nvme_budget is None else self.nvme_budget // self.gpus
            tiers = Tiers(
                self.optimizer_state, self.host_budget // self.gpus, self.nvme_budget is not None, limit
            )
        if self.ranks > 1:
            machine = machine.shared_by(self.gpus, self.ranks // self.replicas, self.replicas)
        residents = None if self.optimizer_state == "fp32" else ()  # codes are the host's, as compile has it
        return PlanTerms(machine, self.hbm_budget, tiers, residents=residents)

    def mode(self, clip: bool) -> Mode:
        return Mode("train", self.micro_batches, deferred=clip)


@dataclass(frozen=True)
class Prediction:
    """One planned step, with or without clipping, over weights cut as ``compiled`` has them.

    ``model_flops`` are those of each card.
    """

    question: Question
    mode: Mode
    compiled: Compiled
    planned: Planned
    model_flops: float

    @property
    def work(self) -> Workload:
        return self.compiled.assembly.work

    @property
    def seconds(self) -> float:
        return self.planned.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.question.tokens / self.seconds

    @property
    def model_flops_per_second(self) -> float:
        return self.model_flops / self.seconds

    @property
    def mfu(self) -> float:
        return self.model_flops_per_second / self.question.profile.peak(self.question.dtype)

    @cached_property
    def bound(self) -> Bound:
        machine = self.question.terms.machine
        return lower_bound(self.work, self.mode, machine, self.planned.step, model_flops=self.model_flops)

    @cached_property
    def host(self) -> HostBytes:
        q, planned = self.question, self.planned
        alone = host_bytes(self.compiled.assembly, q.optimizer_state, planned.plan, planned.step)
        return alone.of_ranks(q.gpus)

    @cached_property
    def least_host(self) -> int:
        """The fewest host bytes of a step over weights cut so."""
        return min(self.host.total, least_host(self.compiled, self.question, self.mode).total)

    def schedule(self, model: Model) -> Schedule:
        """The step as something to look at."""
        q, title = self.question, f"train step of {printable(model.name)}."
        machine = q.terms.machine
        return Schedule(
            title, self.work, self.planned.plan, self.mode, machine, q.hbm_budget, tokens=q.tokens
        )


@dataclass(frozen=True)
class LeastBudgets:
    """The least device bytes of any plan, the step that reaches it, and the least host bytes by mode."""

    step: Step
    device_bytes: int
    hosts: dict[bool, HostBytes]


@dataclass(frozen=True)
class Answer:
    """``predictions``, by whether gradients are clipped, lack what was not asked for or does not fit.

    ``least`` is of the cuts of ``compiled``: the first that fit, of all tried the least where none does.
    """

    question: Question
    model: Model
    compiled: Compiled
    least: LeastBudgets
    predictions: dict[bool, Prediction]
    missed_flops: float

    @property
    def work(self) -> Workload:
        return self.compiled.assembly.work

    def prediction(self, clip: bool) -> Prediction | None:
        return self.predictions.get(clip)

    def fits_device(self) -> bool:
        return bool(self.predictions)

    def host(self, clip: bool) -> HostBytes:
        """Host bytes of the step as planned, or the least where nothing was planned."""
        planned = self.prediction(clip)
        return planned.host if planned else self.least.hosts[clip]

    def least_host(self, clip: bool) -> int:
        """The least host budget that is enough."""
        planned, least = self.prediction(clip), self.least.hosts[clip].total
        if planned is None:
            return least
        cut_alike = planned.compiled.tiled.cuts == self.compiled.tiled.cuts
        if cut_alike and planned.compiled.chunk == self.compiled.chunk:
            return min(planned.host.total, least)
        return planned.least_host

    def hosts(self) -> dict[str, HostBytes]:
        """Host bytes streamed, clipped, and accumulated over several calls, where gradients are summed in
        FP32, which one clipped micro-batch in bf16 need not be."""
        trained = sum(g.elements for g in self.compiled.assembly.groups if g.trainable)
        clipped = self.host(True)
        q = self.question
        accumulated = replace(clipped, gradients=4 * trained * q.replicas // q.nodes)
        return {"streamed": self.host(False), "clipped": clipped, "accumulated": accumulated}

    def fits_host(self, clip: bool) -> bool:
        budget = self.question.host_budget
        return budget is None or self.host(clip).total <= budget

    def fits(self, clip: bool) -> bool:
        """Return whether the machine has room; of the model's own length says :meth:`too_long`."""
        return self.fits_device() and self.fits_host(clip)

    def too_long(self) -> int | None:
        """Return the positions that the model is for, if the question's sequences have more."""
        limit = reach(self.model.module)
        return limit if limit is not None and self.question.seq > limit else None


def least_host(compiled: Compiled, question: Question, mode: Mode) -> HostBytes:
    """Return the fewest host bytes of the plans of small peak that fit the device, or of the smallest if none
    fits, with all state on NVMe if it may go there."""
    work, budget = compiled.assembly.work, question.hbm_budget
    plans = (_stored(found.plan, question) for found in small_plans(work, mode))
    plan, step = min(
        ((plan, lower_memory(work, plan, mode)) for plan in plans),
        key=lambda lowered: (max(0, peak_bytes(lowered[1]) - budget), step_bytes(lowered[1], work)),
    )
    return host_bytes(compiled.assembly, question.optimizer_state, plan, step).of_ranks(question.gpus)


def _stored(plan: Plan, question: Question) -> Plan:
    if question.nvme_budget is None:
        return plan
    groups = tuple(replace(group, state="nvme-all") for group in plan.groups)
    return replace(plan, groups=groups, window=1)

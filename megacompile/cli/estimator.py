"""Will it fit, and how fast: from a model, a machine and budgets to an answer."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from megacompile.api.frontend import Compiled
from megacompile.bench.kernel_bench import OPERATIONS, inputs_of, operation_of
from megacompile.blocks.costs import Calls, KernelCall, flops, moved
from megacompile.capture.batch import read_batch
from megacompile.capture.padding import reach
from megacompile.cli.models import Model, optimizer_of
from megacompile.cli.repeat_layers import Repeated
from megacompile.errors import BudgetError, MegacompileError
from megacompile.hardware.catalog import Dtype, MachineProfile
from megacompile.hardware.kernel_ceilings import kernel_seconds
from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import attention_delay, duration, traffic_seconds
from megacompile.kernels._triton import Gpu
from megacompile.kernels.registry import CALLED, Shape
from megacompile.passes import lower_memory
from megacompile.planner.device_state_fill import with_state
from megacompile.planner.lower_bound import Bound, lower_bound
from megacompile.planner.min_feasible_budget import least, small_plans
from megacompile.planner.nvme_placement import Tiers
from megacompile.planner.plan_evaluator import Planned
from megacompile.planner.plan_program import Known, PlanTerms, first_that_fits, plan_program
from megacompile.planner.tiling import TilingCandidate, tried
from megacompile.printable import printable
from megacompile.report.dump import step_calls
from megacompile.report.schedule import Schedule
from megacompile.schedule.op_table import COMPUTES, STREAMS, Stream
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Step, peak_bytes
from megacompile.schedule.workload import BlockWork, Call, KernelWork, Workload
from megacompile.state.host_budget import HostBytes, host_bytes, step_bytes
from megacompile.state.moment_formats import Form
from megacompile.state.torch_optimizer import Foreign

# ------------------------------------------------------------------------------------------------------------
# FLOPs of a workload: those that a graph could not count, and functions of all blocks changed alike.


def complete_flops(work: Workload, forward_flops: float) -> tuple[Workload, float]:
    """The workload with FLOPs that its graph could not count, and the share that was missing.

    Products in a grouped kernel (mixture of experts) may have no FLOP formula; what is missing against
    the closed form is spread over the blocks that have FLOPs, in proportion.
    """
    forward = sum((b.policy("none").forward.flops for b in work.blocks), 0)
    missed = 1 - forward / forward_flops
    if missed < 0.02 or not forward:
        return work, 0.0
    factor = 1 / (1 - missed)
    return map_calls(work, lambda call, _: replace(call, flops=round(call.flops * factor))), missed


def map_calls(work: Workload, change: Callable[[Call, int], Call]) -> Workload:
    """The workload with each function changed; ``change`` is told the bytes of weights' gradients in it."""

    def block(given: BlockWork) -> BlockWork:
        grads = sum(nbytes for _, nbytes in given.grad_groups)
        policies = (
            replace(
                c,
                forward=change(c.forward, 0),
                recompute=c.recompute and change(c.recompute, 0),
                backward=c.backward and change(c.backward, grads),
            )
            for c in given.policies
        )
        return replace(given, policies=tuple(policies))

    return replace(work, blocks=tuple(map(block, work.blocks)))


# ------------------------------------------------------------------------------------------------------------
# What each of our kernels is worth in a step: its seconds beside those of the same in plain torch.
#
# In:  the kernels' calls of a planned step, a machine. Out: a :class:`Worth` per operator. A kernel is as
# fast as its ceiling (:mod:`~megacompile.hardware.kernel_ceilings`). Plain torch is the operation's eager
# form in :mod:`~megacompile.bench.kernel_bench`, traced on fake tensors: what its operators read and write at
# the memory's bandwidth, and its products; for attention without softcap torch's own kernels, at the rates of
# the machine. Launches count on neither side.


_TRACED = 512  # tokens of a recurrence, whose cost grows with them: its loop over chunks takes long to trace
_Cost = tuple[int, int]
"""Bytes that operators read and write, floating-point operations of products."""


@dataclass(frozen=True)
class Worth:
    """Calls of one operator in a step, forward and backward; their seconds with our kernels and without."""

    calls: int
    seconds: float
    without: float


def worth(calls: Calls, machine: Machine) -> dict[str, Worth]:
    """Return what each operator is worth that a kernel of ours runs and that has an eager form."""
    found: dict[str, Worth] = {}
    for call, count in calls:
        without = _without(call, machine) if call.work else None
        if without is None:
            continue
        name = call.op.removesuffix("_backward")
        past = found.get(name, Worth(0, 0.0, 0.0))
        found[name] = Worth(
            past.calls + count,
            past.seconds + count * _seconds(call, machine),
            past.without + count * without,
        )
    return found


def _seconds(call: KernelCall, machine: Machine) -> float:
    """Return the time of one call, with products that are the library's."""
    op = CALLED[call.op]
    beside = op.part.flops if op.spec.runs_kernels is None else None
    products = 0 if beside is None else beside(*call.shapes)
    kernel = KernelWork(call.op, call.dtype, call.variant, call.work)
    return kernel_seconds(kernel, machine) + products / machine.flops


def _without(call: KernelCall, machine: Machine) -> float | None:
    """The time of the same pass in plain torch; None where there is no eager form."""
    found = operation_of(call)
    if call.op in ("attention", "attention_backward"):
        backward = call.op == "attention_backward"
        if "softcap" not in call.variant:
            rate = machine.attention_backward if backward else machine.attention_forward
            return call.work / (rate or machine.flops)
        (batch, heads, tokens, width), (_, groups, *_) = call.shapes[backward:][:2]
        shape = batch, heads, groups, tokens, width
        found = "capped_attention", shape, "backward" if backward else "forward"
    if found is None:
        return None
    nbytes, products = _eager(*found, call)
    return nbytes / machine.memory_bandwidth + products / machine.flops


def _eager(operation: str, shape: Shape, kind: str, call: KernelCall) -> _Cost:
    """The cost of a call's eager form, the forward or the backward."""
    chunked = CALLED[call.op].part.chunk is not None
    tokens = shape[3] if chunked else 1
    few = min(tokens, _TRACED)
    shape = (*shape[:3], few, *shape[4:]) if chunked else shape
    nbytes, products = _traced(operation, shape, call.dtype)[kind == "backward"]
    return nbytes * tokens // few, products * tokens // few


@cache
def _traced(operation: str, shape: Shape, dtype: str) -> tuple[_Cost, _Cost]:
    """The costs of an eager form's forward and backward."""
    case = OPERATIONS[operation]

    def run(*inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        made = case.eager(*inputs)
        outputs = made if isinstance(made, tuple) else (made,)
        grads = [torch.zeros((), dtype=o.dtype).expand_as(o) for o in outputs]
        return outputs, torch.autograd.grad(outputs, inputs[: case.trained], grads)

    with FakeTensorMode():
        inputs = inputs_of(case, shape, getattr(torch, dtype), torch.device("cpu"))
        graph = make_fx(run)(*inputs).graph
    nodes = list(graph.nodes)
    results: Any = graph.output_node().args[0]
    ends = 1 + max(map(nodes.index, results[0]))
    return _cost(nodes[:ends]), _cost(nodes[ends:])


def _cost(nodes: Sequence[fx.Node]) -> _Cost:
    called = [n for n in nodes if n.op == "call_function"]
    return sum(map(moved, called)), sum(map(flops, called))


# ------------------------------------------------------------------------------------------------------------
# A question about a training step, and its answer: what was asked, planned, predicted.
#
# In:  what :class:`~megacompile.cli.estimator.Study` found. Out: figures of it. Bytes are ints, times
# seconds.


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
        return lower_bound(
            self.work, self.mode, machine, model_flops=self.model_flops, plan=self.planned.plan
        )

    @cached_property
    def worth(self) -> dict[str, Worth]:
        """Return what our kernels are worth in the step, by operator."""
        calls = step_calls(self.compiled, self.planned.plan, self.mode)
        return worth(calls, self.question.terms.machine)

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
        planned = self.prediction(clip)
        return planned.least_host if planned else self.least.hosts[clip].total

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
    """The fewest host bytes of the plans of small peak that fit the device, with all state on NVMe where it
    may go there; of the smallest where none fits."""
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


# ------------------------------------------------------------------------------------------------------------
# Will it fit and how fast: from a model, a machine and budgets to an answer.
#
# In:  a model on the meta device and a :class:`~megacompile.cli.estimator.Question`. Out: an
# :class:`~megacompile.cli.estimator.Answer`, for clipping and without, planned by what plans a training run
# (:mod:`megacompile.planner.plan_program`). Nothing here needs weights, a GPU or triton. Where the step does
# not fit, an answer holds the least budgets instead of predictions.


Progress = Callable[[str], None]
DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Study:
    """One model in one dtype; captures are kept, so that budgets vary at little cost, and so do machines with
    the same GPU. ``form`` is the state of the ``optimizer``."""

    def __init__(self, model: Model, dtype: Dtype, progress: Progress, optimizer: str = "adamw") -> None:
        self.model, self.progress, self._dtype, self._optimizer = model, progress, dtype, optimizer
        own = optimizer != "adamw"
        self.form: Form = Foreign(optimizer_of(optimizer, model.module)) if own else "fp32"
        self._known: Known = {}  # so that sweeps never get slower
        self._repeated: dict[Kind, Repeated] = {}
        self._least: dict[tuple[Any, ...], tuple[LeastBudgets, Compiled]] = {}  # by what it depends on

    def captured(self, batch: int, seq: int) -> Compiled:
        """The batch with no weight cut; its work has all FLOPs."""
        return self._whole((batch, seq, False, None, 1, 1), self.form)[0]

    def _whole(self, kind: Kind, form: Form) -> tuple[Compiled, float]:
        """The batch with no weight cut, and the share of model FLOPs that the graph misses."""
        return self._complete(kind, form, next(self._repeat(kind).tilings()))

    def _complete(
        self, kind: Kind, form: Form, candidate: TilingCandidate[Compiled]
    ) -> tuple[Compiled, float]:
        """A batch that is cut in some way, with all FLOPs and the state in its work, and the share of FLOPs
        that was missed."""
        compiled = candidate.build()
        work, missed = complete_flops(compiled.assembly.work, self.model.forward_flops(*kind[:2]))
        assembly = replace(compiled.assembly, work=work)
        if form not in ("fp32", self.form):
            assembly = with_state(assembly, form)
        return replace(compiled, assembly=assembly), missed

    def _repeat(self, kind: Kind) -> Repeated:
        """The batch's captures, made once."""
        if kind not in self._repeated:
            batch, seq, stored, gpu, ranks, replicas = kind
            self.progress(f"capturing {self.model.name}, {batch} × {seq} tokens")
            ids = torch.zeros(batch, seq, dtype=torch.long)
            read = read_batch({"input_ids": ids, "labels": ids}, self.model.module)
            self._repeated[kind] = Repeated(
                self.model,
                read,
                DTYPES[self._dtype],
                stored=stored,
                gpu=gpu,
                ranks=ranks,
                replicas=replicas,
                optimizer=self._optimizer,
                form=self.form,
            )
        return self._repeated[kind]

    def tilings(self, question: Question, chunk: int = 0) -> Iterator[TilingCandidate[Compiled]]:
        """The batch with no weight cut, then with ever smaller pieces; its work has all FLOPs."""
        for candidate in self._repeat(question.kind).tilings(chunk):
            yield replace(candidate, build=functools.partial(self._build, question, candidate))

    def _build(self, question: Question, candidate: TilingCandidate[Compiled]) -> Compiled:
        return self._complete(question.kind, question.optimizer_state, candidate)[0]

    def _told(self, question: Question, chunk: int) -> Iterator[TilingCandidate[Compiled]]:
        """The same, and says when pieces get smaller."""
        for candidate in self.tilings(question, chunk):
            yield candidate
            self.progress("cutting large weights into smaller pieces")

    def least(self, question: Question) -> tuple[LeastBudgets, Compiled]:
        """The least of the first cuts that fit the budget; of all cuts where none does."""
        q = question
        key = q.kind, q.micro_batches, q.hbm_budget, q.gpus, q.optimizer_state
        if key not in self._least:
            self._least[key] = self._find_least(question)
        return self._least[key]

    def _find_least(self, question: Question) -> tuple[LeastBudgets, Compiled]:
        mode, budget = question.mode(True), question.hbm_budget
        best: tuple[int, Compiled] | None = None

        def plan(chunk: int, most: int) -> Compiled:
            nonlocal best
            if chunk:
                self.progress(f"running sequences in chunks of {chunk:,} tokens")
            needs = tried(self._told(question, chunk), mode, budget, enough=budget, most=most)
            for tiling, need in needs:
                if best is None or need < best[0]:
                    best = need, tiling
                if need <= budget:
                    return tiling
            assert best is not None
            raise BudgetError("no cuts fit", least_bytes=best[0])

        try:
            compiled = first_that_fits(self._repeat(question.kind).chunks(), budget, plan)
        except BudgetError:
            assert best is not None
            compiled = best[1]
        return least_budgets(compiled, question), compiled

    def answer(
        self, question: Question, *, both: bool = True, clip: bool = True, known: Answer | None = None
    ) -> Answer:
        """Plan the question's step; with ``both``, with clipping and without, else as ``clip`` says.

        What ``known``, an answer to the same question, has planned is not planned again.
        """
        _, missed = self._whole(question.kind, question.optimizer_state)
        needs, compiled = (known.least, known.compiled) if known else self.least(question)
        predictions = dict(known.predictions) if known else {}
        for clipping in (True, False) if both else (clip,):
            if needs.device_bytes <= question.hbm_budget and clipping not in predictions:
                self.progress(f"searching {'with' if clipping else 'without'} clipping")
                predictions |= self._predict(question, clipping)
        return Answer(question, self.model, compiled, needs, predictions, missed)

    def _predict(self, question: Question, clip: bool) -> dict[bool, Prediction]:
        mode = question.mode(clip)
        repeated = self._repeat(question.kind)

        def plan(chunk: int, most: int) -> tuple[Compiled, Planned]:
            tilings, gathers, known = self.tilings(question, chunk), repeated.gathers, self._known
            return plan_program(tilings, mode, question.terms, gathers=gathers, known=known, most=most)

        try:
            compiled, planned = first_that_fits(repeated.chunks(), question.hbm_budget, plan)
        except BudgetError:
            return {}
        flops = question.micro_batches * self.model.step_flops(question.batch, question.seq)
        return {clip: Prediction(question, mode, compiled, planned, flops)}


def least_budgets(compiled: Compiled, question: Question) -> LeastBudgets:
    """Return the least that the step needs: of the device with everything streamed and little kept; of the
    host by what fits the device, with all state on NVMe where it may go there."""
    work, mode = compiled.assembly.work, question.mode(True)
    nbytes, plan = least(work, mode)
    hosts = {clip: least_host(compiled, question, question.mode(clip)) for clip in (True, False)}
    return LeastBudgets(lower_memory(work, plan, mode), nbytes, hosts)


# ------------------------------------------------------------------------------------------------------------
# Figures of a planned step: what compute does, who waits for whom.
#
# In: a planned step, a machine. Out: plain numbers in seconds, each by the definition in its docstring, so
# that a report can be checked by hand.


def compute_parts(step: Step, machine: Machine, model_flops: float) -> dict[str, float]:
    """Busy seconds of the compute stream: model FLOPs, those beyond (recompute), what attention and
    recurrences take longer than products, memory traffic, what launches of kernels add to these, and what of
    gradients and updates is done there."""
    kinds = ("accumulate", "norm", "adam", "orthogonalize")
    updates = [op for op in step.on("compute") if op.kind in kinds]
    ops = [op for op in step.ops if op.kind in COMPUTES]
    flops = sum(op.flops for op in ops)
    attention = sum(attention_delay(op, machine) for op in ops)
    traffic = sum(traffic_seconds(op, machine) for op in ops)
    worked = flops / machine.flops + attention + traffic
    return {
        "model FLOPs": model_flops / machine.flops,
        "FLOPs beyond, mostly recompute": max(0.0, flops - model_flops) / machine.flops,
        "slower attention, recurrences": attention,
        "memory traffic": traffic,
        "launches": max(0.0, sum(duration(op, machine) for op in ops) - worked),
        "updates on the device": sum(duration(op, machine) for op in updates),
    }


CAUSES: dict[Stream, str] = {
    "compute": "compute", "h2d": "copies to the device", "d2h": "copies to the host",
    "host": "host Adam and norms", "nvme_read": "reads from NVMe", "nvme_write": "writes to NVMe",
    "comm": "exchanges between devices",
}  # fmt: skip
IDLE = "nothing to do"


def waits(planned: Planned) -> dict[Stream, dict[str, float]]:
    """Idle seconds of each stream in one step, by cause; with its busy time they add up to the step.

    A gap of the compute stream is charged to the stream that is behind in the chain of waits; one of another
    stream to what the operation after it waits for and ends last. What is left of the step is time in which
    compute keeps pace with the busiest stream, and another stream has nothing to do.
    """
    step, timeline = planned.step, planned.timeline
    period, chain = timeline.step_seconds, _Chain(planned)
    ready = {op.stream: timeline.ends[i] - period for i, op in enumerate(step.ops)}
    found: dict[Stream, dict[str, float]] = {stream: defaultdict(float) for stream in ready}
    for index, op in enumerate(step.ops):
        start, end, free = timeline.starts[index], timeline.ends[index], ready[op.stream]
        busy = end > start or op.stream == "compute"  # which also waits before what takes no time
        if busy and start - free > 1e-9:
            if op.stream == "compute":
                found[op.stream][CAUSES[chain.behind(index)]] += start - free
            elif foreign := chain.foreign(index):
                when, cause = max(foreign)
                found[op.stream][CAUSES[step.ops[cause].stream]] += min(start, max(free, when)) - free
        if busy:
            ready[op.stream] = end
    busiest = max((s for s in STREAMS if s != "compute"), key=lambda s: timeline.busy[s])
    for stream, causes in found.items():
        rest = max(0.0, period - timeline.busy[stream] - sum(causes.values()))
        causes[CAUSES[busiest] if stream == "compute" else IDLE] += rest
    return {
        stream: {name: t for name, t in sorted(causes.items(), key=lambda c: -c[1]) if t > 1e-3 * period}
        for stream, causes in found.items()
    }


class _Chain:
    """The causes that each operation waits for, in this step or the one before: their ends with their
    indices."""

    def __init__(self, planned: Planned) -> None:
        self.ops, ends = planned.step.ops, planned.timeline.ends
        period = planned.timeline.step_seconds
        # what an operation waits for and this step has not recorded yet is of the step before
        latest = {op.event: (ends[i] - period, i) for i, op in enumerate(self.ops)}
        streams: dict[Stream, tuple[float, int]] = {}
        self._before: list[list[tuple[float, int]]] = []
        for index, op in enumerate(self.ops):
            own = [streams[op.stream]] if op.stream in streams else []
            self._before.append([*(latest[e] for e in op.waits if e in latest), *own])
            latest[op.event] = streams[op.stream] = (ends[index], index)

    def foreign(self, index: int) -> list[tuple[float, int]]:
        """Return what an operation waits for on other streams."""
        return [c for c in self._before[index] if self.ops[c[1]].stream != self.ops[index].stream]

    def behind(self, index: int) -> Stream:
        """The stream whose own backlog delayed the compute operation ``index``."""
        foreign = self.foreign(index)
        if not foreign:
            return "host"
        _, index = max(foreign)
        for _ in range(len(self.ops)):
            cause = max(self._before[index], default=None)
            if cause is None or self.ops[cause[1]].stream in ("compute", self.ops[index].stream):
                break
            index = cause[1]
        return self.ops[index].stream

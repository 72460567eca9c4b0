"""Will it fit and how fast: from a model, a machine and budgets to a :class:`Answer`.

In:  a model on the meta device and a :class:`Question`. Out: an :class:`Answer`, for clipping and
without, by the same capture, search and simulation that a training run uses. Nothing here needs
weights, a GPU or triton. The figures of one answer agree: where the step does not fit, it holds the
least budgets instead of predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megacompile.capture.batch import read_batch
from megacompile.cli.figures import (
    Stall,
    compute_parts,
    stalls,
)
from megacompile.cli.presets import Model
from megacompile.cli.unroll import Repeated
from megacompile.compiler import Scheduled
from megacompile.errors import BudgetError
from megacompile.frontend import Compiled
from megacompile.host.needs import HostBytes, host_bytes, state_in_ram
from megacompile.machine.catalog import Dtype, MachineProfile
from megacompile.machine.rates import Machine
from megacompile.passes import lower
from megacompile.plan.plan import Mode, Plan
from megacompile.plan.workload import BlockWork, Call, Workload
from megacompile.schedule.dump import write_dump
from megacompile.schedule.schedule import Schedule
from megacompile.search.bound import Bound, lower_bound
from megacompile.search.candidates import Planned
from megacompile.search.planner import search
from megacompile.search.residency import reside, trained_groups
from megacompile.search.tiers import Drive, Tiers
from megacompile.search.tile_choice import choose, least_step, tried
from megacompile.step.operations import Step
from megacompile.step.verify import verify

Progress = Callable[[str], None]
_DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Question:
    """What is asked: ``batch`` sequences of ``seq`` tokens, ``micro_batches`` times per step."""

    profile: MachineProfile
    batch: int
    seq: int
    hbm_budget: int
    micro_batches: int = 1
    dtype: Dtype = "bf16"
    host_budget: int | None = None
    nvme_budget: int | None = None

    @property
    def tokens(self) -> int:
        return self.batch * self.seq * self.micro_batches

    @property
    def stored(self) -> bool:
        """Whether state may go to NVMe."""
        return self.nvme_budget is not None

    @property
    def machine(self) -> Machine:
        return self.profile.rates(self.dtype)


@dataclass(frozen=True)
class Prediction:
    """One planned step, with or without clipping, over weights cut as ``compiled`` has them."""

    mode: Mode
    compiled: Compiled
    planned: Planned
    seconds: float
    tokens_per_second: float
    model_flops_per_second: float
    mfu: float
    bound: Bound
    host: HostBytes
    compute: dict[str, float]
    stalls: tuple[Stall, ...]


@dataclass(frozen=True)
class Least:
    """The least device bytes of any plan, the step that reaches it, and the least host bytes."""

    step: Step
    device_bytes: int
    hosts: dict[str, HostBytes]


@dataclass(frozen=True)
class Answer:
    """``clipped`` and ``streamed`` are None where the device budget is too small.

    ``least`` is of the cuts of ``compiled``: the first that fit, of all tried the least where none does.
    """

    question: Question
    model: Model
    compiled: Compiled
    least: Least
    clipped: Prediction | None
    streamed: Prediction | None
    missed_flops: float

    @property
    def work(self) -> Workload:
        return self.compiled.assembly.work

    def prediction(self, clip: bool) -> Prediction | None:
        return self.clipped if clip else self.streamed

    def fits_device(self) -> bool:
        return self.clipped is not None or self.streamed is not None

    def host_need(self, clip: bool) -> int:
        """Host bytes of the step as planned, or the least where nothing was planned."""
        planned = self.prediction(clip)
        return planned.host.total if planned else self.least.hosts["clipped" if clip else "streamed"].total

    def fits_host(self, clip: bool) -> bool:
        budget = self.question.host_budget
        return budget is None or self.host_need(clip) <= budget

    def fits(self, clip: bool) -> bool:
        return self.fits_device() and self.fits_host(clip)


class Study:
    """One model in one dtype; captures are kept, so that budgets and machines vary at little cost."""

    def __init__(self, model: Model, dtype: Dtype, progress: Progress) -> None:
        self.model = model
        self.progress = progress
        self._dtype = dtype
        self._winners: dict[tuple[object, ...], list[Plan]] = {}  # so that sweeps never get slower
        self._repeated: dict[tuple[int, int, bool], Repeated] = {}

    def captured(self, batch: int, seq: int, *, stored: bool = False) -> tuple[Compiled, Workload, float]:
        """The batch with no weight cut, its workload, and the share of model FLOPs that its graph misses."""
        compiled, missed = next(self._completed(batch, seq, stored))
        return compiled, compiled.assembly.work, missed

    def rungs(self, question: Question) -> Iterator[Compiled]:
        """The batch with no weight cut, then with ever smaller pieces; its work has all FLOPs."""
        completed = self._completed(question.batch, question.seq, question.stored)
        return (compiled for compiled, _ in completed)

    def _completed(self, batch: int, seq: int, stored: bool) -> Iterator[tuple[Compiled, float]]:
        flops = self.model.step_flops(batch, seq)
        for compiled in self._repeat(batch, seq, stored).rungs():
            work, missed = complete_flops(compiled.assembly.work, flops)
            yield replace(compiled, assembly=replace(compiled.assembly, work=work)), missed

    def _repeat(self, batch: int, seq: int, stored: bool) -> Repeated:
        """The batch's captures, made once; ``stored``: the state may go to NVMe."""
        if (batch, seq, stored) not in self._repeated:
            self.progress(f"capturing {self.model.name}, {batch} × {seq} tokens")
            ids = torch.zeros(batch, seq, dtype=torch.long)
            kind = read_batch({"input_ids": ids, "labels": ids}, self.model.module)
            repeated = Repeated(self.model, kind, _DTYPES[self._dtype], stored=stored)
            self._repeated[batch, seq, stored] = repeated
        return self._repeated[batch, seq, stored]

    def least(self, question: Question) -> tuple[Least, Compiled]:
        """The least of the first cuts that fit the budget; of all cuts where none does."""
        best: tuple[int, Compiled] | None = None
        mode = Mode("train", question.micro_batches, deferred=True)
        for rung, need in tried(self.rungs(question), mode):
            if best is None or need < best[0]:
                best = need, rung
            if need <= question.hbm_budget:
                break
            self.progress("cutting large weights into smaller pieces")
        assert best is not None
        stored = question.nvme_budget is not None
        return find_least(best[1], best[1].assembly.work, question.micro_batches, stored=stored), best[1]

    def answer(
        self, question: Question, *, both: bool = True, clip: bool = True, known: Answer | None = None
    ) -> Answer:
        """Plan the question's step; with ``both``, with clipping and without, else as ``clip`` says.

        What ``known``, an answer to the same question, has planned is not planned again.
        """
        missed = self.captured(question.batch, question.seq, stored=question.stored)[2]
        least, compiled = (known.least, known.compiled) if known else self.least(question)
        predictions = {c: known.prediction(c) if known else None for c in (True, False)}
        if least.device_bytes <= question.hbm_budget:
            for clipping in (True, False):
                if predictions[clipping] is None and (both or clipping == clip):
                    self.progress(f"searching {'with' if clipping else 'without'} clipping")
                    predictions[clipping] = self._predict(question, clipping)
        return Answer(question, self.model, compiled, least, predictions[True], predictions[False], missed)

    def _predict(self, question: Question, clip: bool) -> Prediction | None:
        mode = Mode("train", question.micro_batches, deferred=clip)
        repeated = self._repeat(question.batch, question.seq, question.stored)
        try:
            compiled, planned = choose(
                self.rungs(question), mode, question.hbm_budget, lambda c: self._plan(question, c, mode),
                gathers=repeated.gathers, resides=not question.stored,
            )  # fmt: skip
        except BudgetError:
            return None
        work, machine = compiled.assembly.work, question.machine
        if not any(group.state.startswith("nvme") for group in planned.plan.groups):
            planned = reside(planned, work, mode, machine, question.hbm_budget, None)
        flops = question.micro_batches * self.model.step_flops(question.batch, question.seq)
        bound = lower_bound(work, mode, machine, model_flops=flops, plan=planned.plan)
        seconds = planned.timeline.step_seconds
        return Prediction(
            mode, compiled, planned, seconds, question.tokens / seconds, flops / seconds,
            flops / seconds / question.profile.peak(question.dtype), bound,
            host_bytes(compiled.assembly, "fp32", planned.plan, planned.step),
            compute_parts(planned.step, machine, flops), stalls(planned),
        )  # fmt: skip

    def _plan(self, question: Question, compiled: Compiled, mode: Mode) -> Planned:
        """As the compiler plans; raises :class:`BudgetError` where nothing fits."""
        host, drive = None, drive_for(compiled, question)
        if drive is None and question.host_budget is not None:
            host = max(0, question.host_budget - state_in_ram(compiled.assembly.groups, "fp32"))
        work, rates = compiled.assembly.work, question.machine
        known = self._winners.setdefault((question.batch, question.seq, mode, work.digest), [])
        planned = search(
            work, mode, rates, question.hbm_budget, host_budget=host, drive=drive,
            residents=() if drive is not None else trained_groups(work), also=known[-8:],
        )  # fmt: skip
        known.append(planned.plan)
        return planned


def drive_for(compiled: Compiled, question: Question) -> Drive | None:
    """Where the state may live, if some of it may be on a drive."""
    if question.nvme_budget is None or question.host_budget is None:
        return None
    tiers = Tiers("fp32", question.host_budget, stored=True, nvme_budget_bytes=question.nvme_budget)
    return Drive.of(compiled.assembly.groups, tiers)


def complete_flops(work: Workload, model_flops: float) -> tuple[Workload, float]:
    """The workload with FLOPs that its graph could not count, and the share that was missing.

    Products in a grouped kernel (mixture of experts) may have no FLOP formula; what is missing against
    the closed form is spread over the blocks that have FLOPs, in proportion.
    """
    forward = sum((b.choice("none").forward.flops for b in work.blocks), 0)
    missed = 1 - 3 * forward / model_flops
    if missed < 0.02 or not forward:
        return work, 0.0
    factor = 1 / (1 - missed)
    blocks = tuple(_scaled(block, factor) for block in work.blocks)
    return replace(work, blocks=blocks), missed


def _scaled(block: BlockWork, factor: float) -> BlockWork:
    def call(given: Call | None) -> Call | None:
        return given and replace(given, flops=round(given.flops * factor))

    choices = tuple(
        replace(
            c, forward=call(c.forward) or c.forward, recompute=call(c.recompute), backward=call(c.backward)
        )
        for c in block.choices
    )
    return replace(block, choices=choices)


def find_least(compiled: Compiled, work: Workload, micro_batches: int, *, stored: bool = False) -> Least:
    """The plan of least device bytes: stream everything, just in time, keep nothing; if ``stored``, with all
    state on a drive."""
    mode = Mode("train", micro_batches, deferred=True)
    peak, plan, step = least_step(work, mode)
    if stored:
        plan = replace(plan, groups=tuple(replace(g, state="nvme-all") for g in plan.groups), window=1)
    held = replace(plan, blocks=tuple(replace(b, stash="device") for b in plan.blocks))
    modes = {"clipped": mode, "streamed": replace(mode, deferred=False)}
    hosts = {n: host_bytes(compiled.assembly, "fp32", held, lower(work, held, m)) for n, m in modes.items()}
    return Least(step, peak, hosts)


def schedule_of(answer: Answer, clip: bool) -> Schedule | None:
    """The planned step as something to look at; None where nothing was planned."""
    prediction, q = answer.prediction(clip), answer.question
    if prediction is None:
        return None
    title = f"train step of {answer.model.name}."
    mode, plan = prediction.mode, prediction.planned.plan
    work = prediction.compiled.assembly.work
    return Schedule(title, work, plan, mode, q.machine, q.hbm_budget, tokens=q.tokens)


def dump(answer: Answer, folder: Path, clip: bool) -> None:
    """Prove the planned step safe in every order, and write every stage's output to ``folder``."""
    prediction, schedule = answer.prediction(clip), schedule_of(answer, clip)
    if prediction is None or schedule is None:
        return
    proof = verify(schedule.step, schedule.work, budget_bytes=schedule.budget_bytes)
    source, planned = schedule.source, prediction.planned
    scheduled = Scheduled(prediction.compiled, prediction.mode, planned, proof, schedule.title, source)
    write_dump(folder / "train", scheduled, schedule)

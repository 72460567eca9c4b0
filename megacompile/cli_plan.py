"""Will it fit and how fast: from a model, a machine and budgets to a :class:`Answer`.

In:  a model on the meta device and a :class:`Question`. Out: an :class:`Answer`, for clipping and
without, by the same capture, search and simulation that a training run uses. Nothing here needs
weights, a GPU or triton. The figures of one answer agree: where the step does not fit, it holds the
least budgets instead of predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from megacompile.batch import read_batch
from megacompile.cli_figures import (
    Bound,
    Host,
    Stall,
    compute_parts,
    host_bytes,
    lower_bound,
    stalls,
    with_drive,
)
from megacompile.compiler import Compiled, Scheduled
from megacompile.dump import write_dump
from megacompile.errors import BudgetError
from megacompile.machine import Machine
from megacompile.machines import Dtype, MachineProfile
from megacompile.passes import lower
from megacompile.plan import BlockPlan, GroupPlan, Mode, Plan
from megacompile.plan_tiers import Tiers, choose_tiers, with_state_bytes
from megacompile.planner import Planned, search
from megacompile.presets import Model
from megacompile.schedule import Schedule
from megacompile.step import Step, peak_bytes
from megacompile.unroll import compile_repeated
from megacompile.verify import verify
from megacompile.workload import BlockWork, Call, Workload

Stash = Literal["device", "host"]
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
    def machine(self) -> Machine:
        return self.profile.rates(self.dtype)


@dataclass(frozen=True)
class Prediction:
    """One planned step, with or without clipping."""

    mode: Mode
    planned: Planned
    seconds: float
    tokens_per_second: float
    model_flops_per_second: float
    mfu: float
    bound: Bound
    host: Host
    compute: dict[str, float]
    stalls: tuple[Stall, ...]


@dataclass(frozen=True)
class Least:
    """The least device bytes of any plan, the step that reaches it, and the least host bytes."""

    step: Step
    device_bytes: int
    hosts: dict[str, Host]


@dataclass(frozen=True)
class Answer:
    """``clipped`` and ``streamed`` are None where the device budget is too small."""

    question: Question
    model: Model
    compiled: Compiled
    work: Workload
    least: Least
    clipped: Prediction | None
    streamed: Prediction | None
    missed_flops: float

    def prediction(self, clip: bool) -> Prediction | None:
        return self.clipped if clip else self.streamed

    def fits_device(self) -> bool:
        return self.clipped is not None or self.streamed is not None

    def host_need(self, clip: bool) -> int:
        """Host bytes of the step as planned, or the least where nothing was planned."""
        planned = self.prediction(clip)
        return planned.host.total if planned else self.least.hosts["clipped" if clip else "streamed"].total

    def fits_host(self, clip: bool) -> bool:
        budget, drive, planned = self.question.host_budget, self.question.nvme_budget, self.prediction(clip)
        if planned is not None and drive is not None and planned.host.nvme > drive:
            return False
        return budget is None or self.host_need(clip) <= budget

    def fits(self, clip: bool) -> bool:
        return self.fits_device() and self.fits_host(clip)


class Study:
    """One model in one dtype; captures are kept, so that budgets and machines vary at little cost."""

    def __init__(self, model: Model, dtype: Dtype, progress: Progress) -> None:
        self.model = model
        self.progress = progress
        self._dtype = dtype
        self._winners: dict[tuple[int, int, Mode], list[Plan]] = {}  # so that sweeps never get slower
        self._captured: dict[tuple[int, int], tuple[Compiled, Workload, float]] = {}

    def captured(self, batch: int, seq: int) -> tuple[Compiled, Workload, float]:
        """The compiled batch, its workload, and the share of model FLOPs that its graph misses."""
        if (batch, seq) not in self._captured:
            self.progress(f"capturing {self.model.name}, {batch} × {seq} tokens")
            ids = torch.zeros(batch, seq, dtype=torch.long)
            kind = read_batch({"input_ids": ids, "labels": ids}, self.model.module)
            compiled = compile_repeated(self.model, kind, _DTYPES[self._dtype])
            flops = self.model.step_flops(batch, seq)
            self._captured[batch, seq] = (compiled, *complete_flops(compiled.assembly.work, flops))
        return self._captured[batch, seq]

    def answer(self, question: Question, *, both: bool = True, clip: bool = True) -> Answer:
        """Plan the question's step; with ``both``, with clipping and without, else as ``clip`` says."""
        compiled, work, missed = self.captured(question.batch, question.seq)
        least = find_least(compiled, work, question.micro_batches)
        predictions: dict[bool, Prediction | None] = {True: None, False: None}
        if least.device_bytes <= question.hbm_budget:
            for clipping in (True, False):
                self.progress(f"searching {'with' if clipping else 'without'} clipping")
                if both or clipping == clip:
                    predictions[clipping] = self._predict(question, compiled, work, clipping)
        return Answer(
            question, self.model, compiled, work, least, predictions[True], predictions[False], missed
        )

    def _predict(
        self, question: Question, compiled: Compiled, work: Workload, clip: bool
    ) -> Prediction | None:
        mode = Mode("train", question.micro_batches, deferred=clip)
        state = host_bytes(compiled.assembly, Step((), {}, 1), mode)
        host = None
        if question.host_budget is not None and question.nvme_budget is None:
            host = max(0, question.host_budget - state.state)
        known = self._winners.setdefault((question.batch, question.seq, mode), [])
        try:
            planned = search(
                work, mode, question.machine, question.hbm_budget, host_budget=host, also=known[-8:]
            )
        except BudgetError:
            return None
        known.append(planned.plan)
        planned = on_drive(work, planned, compiled, mode, question) or planned
        flops = question.micro_batches * self.model.step_flops(question.batch, question.seq)
        bound = lower_bound(work, flops, mode, question.machine)
        seconds = planned.timeline.step_seconds
        return Prediction(
            mode, planned, seconds, question.tokens / seconds, flops / seconds,
            flops / seconds / question.profile.peak(question.dtype), bound,
            with_drive(host_bytes(compiled.assembly, planned.step, mode), compiled.assembly, planned.plan),
            compute_parts(planned.step, question.machine, flops), stalls(planned),
        )  # fmt: skip


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


def find_least(compiled: Compiled, work: Workload, micro_batches: int) -> Least:
    """The plan of least device bytes: stream everything, just in time, keep nothing."""
    mode = Mode("train", micro_batches, deferred=True)
    best: tuple[int, Plan, Step] | None = None
    stashes: tuple[Stash, ...] = ("device", "host")
    for stash in stashes:
        for choice in ("none", "some", "least"):
            plan = Plan(
                blocks=(BlockPlan(choice, stash),) * len(work.blocks),
                groups=(GroupPlan("stream", 0),) * len(work.groups),
                grad_lag=0,
            )
            step = lower(work, plan, mode)
            peak = peak_bytes(step)
            if best is None or peak < best[0]:
                best = (peak, plan, step)
    assert best is not None
    peak, plan, step = best
    streaming = replace(mode, deferred=False)
    hosts = {
        "clipped": host_bytes(compiled.assembly, step, mode),
        "streamed": host_bytes(compiled.assembly, lower(work, plan, streaming), streaming),
    }
    return Least(step, peak, {name: replace(host, stash=0) for name, host in hosts.items()})


def schedule_of(answer: Answer, clip: bool) -> Schedule | None:
    """The planned step as something to look at; None where nothing was planned."""
    prediction, q = answer.prediction(clip), answer.question
    if prediction is None:
        return None
    title = f"train step of {answer.model.name}."
    mode, plan = prediction.mode, prediction.planned.plan
    work = with_state_bytes(answer.work, answer.compiled.assembly.groups, "fp32")
    return Schedule(title, work, plan, mode, q.machine, q.hbm_budget, tokens=q.tokens)


def on_drive(
    work: Workload, planned: Planned, compiled: Compiled, mode: Mode, question: Question
) -> Planned | None:
    """The plan with as much state on NVMe as the host budget demands; None where nothing is to be moved."""
    if question.nvme_budget is None or question.host_budget is None:
        return None
    layouts, tiers = compiled.assembly.groups, Tiers("fp32", question.host_budget, stored=True)
    sized = with_state_bytes(work, layouts, "fp32")
    return choose_tiers(planned, sized, mode, question.machine, layouts, tiers)


def dump(answer: Answer, folder: Path, clip: bool) -> None:
    """Prove the planned step safe in every order, and write every stage's output to ``folder``."""
    prediction, schedule = answer.prediction(clip), schedule_of(answer, clip)
    if prediction is None or schedule is None:
        return
    proof = verify(schedule.step, schedule.work, budget_bytes=schedule.budget_bytes)
    source, planned = schedule.source, prediction.planned
    scheduled = Scheduled(answer.compiled, prediction.mode, planned, proof, schedule.title, source)
    write_dump(folder / "train", scheduled, schedule)

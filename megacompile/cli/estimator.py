"""Will it fit, and how fast: from a model, a machine and budgets to an answer.

In: a model on the meta device and a :class:`~megacompile.cli.plan_answer.Question`. Out: an
:class:`~megacompile.cli.plan_answer.Answer`, for clipping and without, planned by what plans a training run
(:mod:`megacompile.planner.plan_program`). Nothing here needs weights, a GPU or triton. Where the step does
not fit, an answer holds the least budgets instead of predictions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from megacompile.api.frontend import Compiled
from megacompile.capture.batch import read_batch
from megacompile.cli.models import Model, optimizer_of
from megacompile.cli.plan_answer import Answer, Kind, LeastBudgets, Prediction, Question, least_host
from megacompile.cli.repeat_layers import Repeated
from megacompile.cli.workload_flops import complete_flops
from megacompile.hardware.catalog import Dtype
from megacompile.passes import lower_memory
from megacompile.planner.group_state import with_state
from megacompile.planner.min_feasible_budget import least
from megacompile.planner.plan_evaluator import Planned
from megacompile.planner.plan_program import Known, first_that_fits, plan_program
from megacompile.planner.tiling import TilingCandidate, tried
from megacompile.planner.too_small import TooSmall
from megacompile.state.moment_formats import Form
from megacompile.state.torch_optimizer import TorchOptimizer

Progress = Callable[[str], None]
DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Study:
    """One model in one dtype; captures are kept, so that budgets vary at little cost, and so do machines with
    the same GPU. ``form`` is the state of the ``optimizer``."""

    def __init__(self, model: Model, dtype: Dtype, progress: Progress, optimizer: str = "adamw") -> None:
        self.model, self.progress, self._dtype, self._optimizer = model, progress, dtype, optimizer
        own = optimizer != "adamw"
        self.form: Form = TorchOptimizer(optimizer_of(optimizer, model.module)) if own else "fp32"
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

        def plan(chunk: int, most: int) -> Compiled | TooSmall:
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
            return TooSmall("no cuts fit", best[0])

        compiled = first_that_fits(self._repeat(question.kind).chunks(), budget, plan)
        if isinstance(compiled, TooSmall):
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

        def plan(chunk: int, most: int) -> tuple[Compiled, Planned] | TooSmall:
            tilings, gathers, known = self.tilings(question, chunk), repeated.gathers, self._known
            return plan_program(tilings, mode, question.terms, gathers=gathers, known=known, most=most)

        found = first_that_fits(repeated.chunks(), question.hbm_budget, plan)
        if isinstance(found, TooSmall):
            return {}
        compiled, planned = found
        flops = question.micro_batches * self.model.step_flops(question.batch, question.seq)
        return {clip: Prediction(question, mode, compiled, planned, flops)}


def least_budgets(compiled: Compiled, question: Question) -> LeastBudgets:
    """Return the least that the step needs: of the device with everything streamed and little kept; of the
    host by what fits the device, with all state on NVMe where it may go there."""
    work, mode = compiled.assembly.work, question.mode(True)
    nbytes, plan = least(work, mode)
    hosts = {clip: least_host(compiled, question, question.mode(clip)) for clip in (True, False)}
    return LeastBudgets(lower_memory(work, plan, mode), nbytes, hosts)

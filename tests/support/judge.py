"""Judge one architecture by the contract on exactness, beside eager PyTorch, at several budgets.

In: a :class:`~tests.support.zoo.Case`. Out: a :class:`Verdict`. What programs are held against comes from
:mod:`tests.support.judge_eager`.
"""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import megacompile
from megacompile.errors import ScheduleError
from megacompile.graph.fusion_report import Fusions
from megacompile.state.master_layout import slot_view
from tests.support.captures import Captures
from tests.support.judge_eager import EagerError, EagerRuns, Gradients, WrongError
from tests.support.zoo import Case

GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of a gradient's scale
FUSED = {torch.float32: 5e-4, torch.bfloat16: 1e-2}
DEVIATIONS = 4  # of eager's own errors, where they are a matter of chance: thousands of tensors are compared


@dataclass
class Verdict:
    """What came out for one architecture in one dtype.

    ``status``: right, refused, eager fails, or WRONG. ``reason`` says why for all but right.
    ``budgets`` holds per budget: its bytes, measured and predicted peak, positions of a chunk (0: no loops),
    the largest gradient's distance to eager in parts of its scale. ``by_chance``: it took eager runs with
    weights rounded otherwise to say how far from fp32 eager is.
    """

    name: str
    kind: str
    dtype: str
    status: str = "right"
    reason: str = ""
    parameters: int = 0
    blocks: int = 0
    templates: int = 0
    budgets: dict[str, dict[str, Any]] = field(default_factory=dict)
    placed: dict[str, int] = field(default_factory=dict)
    near_misses: int = 0
    fused_distance: float | None = None
    by_chance: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(case: Case, dtype: torch.dtype) -> Verdict:
    """Train ``case`` at budgets of 100 %, 40 % and the least feasible, and with fused kernels."""
    verdict = Verdict(case.name, case.kind, str(dtype).removeprefix("torch."))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Captures().shared():  # what does not depend on the budget is made once for all programs
                _Judge(case, dtype, verdict).run()
    except (WrongError, ScheduleError) as error:  # no schedule here is the user's own
        verdict.status, verdict.reason = "WRONG", str(error)
    except megacompile.MegacompileError as error:
        verdict.status, verdict.reason = "refused", str(error)
    except EagerError as error:
        verdict.status, verdict.reason = "eager fails", str(error)
    return verdict


class _Judge:
    def __init__(self, case: Case, dtype: torch.dtype, verdict: Verdict) -> None:
        self.case, self.dtype, self.verdict = case, dtype, verdict

    def run(self) -> None:
        self.eager = EagerRuns(self.case, self.dtype)
        self.verdict.parameters = sum(p.numel() for p in self.eager.model.parameters())
        self.trace = self.eager.train() if self.dtype == torch.float32 else None
        plenty = self._at("100 %", "1GB")
        least = self._least()
        share = f"{self.case.share:.0%}".replace("%", " %")
        self._at(share, max(int(self.case.share * plenty), least))
        self._at("least", least)
        if self.case.kernels:
            found, fusions, _ = self._by_hand("1GB", kernels=True)
            self.verdict.placed, self.verdict.near_misses = fusions.counts, len(fusions.near_misses)
            self.verdict.fused_distance = self._judge_gradients(found, FUSED[self.dtype], "fused kernels")

    def _program(self, budget: int | str, **options: Any) -> megacompile.Program:
        model, habits = copy.deepcopy(self.eager.model), self.case.habits
        return megacompile.compile(
            model, budget if isinstance(budget, str) else f"{budget}B", optimizer=habits.optimizer(model),
            max_grad_norm=habits.max_grad_norm, compute_dtype=self.dtype, **self.case.options, **options,
        )  # fmt: skip

    def _least(self) -> int:
        micro = self.eager.given(self.eager.steps[0])
        alone = len(micro) > 1 and not self.eager.together
        return max(self._refused(batch) for batch in (micro if alone else [micro]))

    def _refused(self, batch: Any) -> int:
        """The least budget for a step on micro-batches, or for one of them by hand, as a refusal names it."""
        program = self._program("1kB")
        try:
            if isinstance(batch, list):
                program.prepare(batch)
            else:
                program.forward_backward(batch)
        except megacompile.BudgetError as error:
            assert error.least_bytes is not None, error
            return error.least_bytes
        raise AssertionError("a budget of 1 kB was accepted")

    def _at(self, label: str, budget: int | str) -> int:
        """Train at one budget; returns the peak that was predicted."""
        program = self._program(budget)
        losses, norms, states = [], [], []
        for micro in self.eager.steps:
            out = program.train_step(self.eager.given(micro))
            losses.append(float(out.loss))
            norms += [] if out.grad_norm is None else [float(out.grad_norm)]
            states.append(program.state_dict())
            if self.case.evaluates:
                program.evaluate(self.eager.given(micro)[-1])
        memory = program.memory
        peak = memory.predicted_peak_bytes
        record = {
            "budget_bytes": memory.budget_bytes,
            "peak_bytes": memory.device_peak_bytes,
            "predicted_bytes": peak,
            "chunk": program.schedule.work.loops[1],
        }
        work = program._session.scheduled().compiled
        self.verdict.blocks = len(work.part.blocks)
        self.verdict.templates = len(work.templates)
        self.verdict.budgets[label] = record
        program.close()
        if memory.device_peak_bytes > memory.budget_bytes:
            raise WrongError(f"{memory.device_peak_bytes} bytes were used of {memory.budget_bytes}")
        trace = self.trace
        same = trace is not None and losses == trace.losses and norms == trace.norms
        if (
            same
            and trace is not None
            and all(torch.equal(states[-1][n], v) for n, v in trace.weights.items())
        ):
            record["distance"] = 0.0
            return peak
        if not all(map(math.isfinite, losses)):
            raise WrongError(f"the losses at {label} are {losses}")
        found, _, by_hand = self._by_hand(budget)
        record["distance"] = self._judge_gradients(found, GRADIENT[self.dtype], label)
        self._judge_update(found, by_hand, states[0], label)
        return peak

    def _by_hand(self, budget: int | str, **options: Any) -> tuple[Gradients, Fusions, dict[str, Tensor]]:
        """The first step made by hand: its gradients, what was placed, the weights after it.

        Under accumulation the least budget may be a little larger.
        """
        micro = self.eager.given(self.eager.steps[0])
        weights = self.case.habits.trainer(self.eager.model).weights(micro)
        program = self._program(budget, **options)
        try:
            program.forward_backward(micro[0], weight=weights[0])
        except megacompile.BudgetError as error:
            program = self._program(error.least_bytes or "1GB", **options)
            program.forward_backward(micro[0], weight=weights[0])
        for batch, weight in zip(micro[1:], weights[1:], strict=True):
            program.forward_backward(batch, weight=weight)
        program.synchronize()
        found, fusions = program_gradients(program), program.fusions
        program.optimizer_step()
        state = program.state_dict()
        program.close()
        return found, fusions, state

    def _judge_update(
        self, found: Gradients, by_hand: dict[str, Tensor], stepped: dict[str, Tensor], label: str
    ) -> None:
        """A step by hand beside Adam on the gradients that were ``found``, and the first ``train_step``.

        The latter's gradients differ by rounding, so of it only those parts are compared whose gradients
        are no rounding errors.
        """
        for name, (want, rate) in self._updated(found).items():
            bound = 1e-3 * rate + 4 * torch.finfo(torch.float32).eps * want.abs()
            if bool(((by_hand[name] - want).abs() > bound).any()):
                raise WrongError(f"the update of {name} by hand at {label} is not Adam's")
        gradients = self.eager.stepped if self.eager.together else found
        for name, (want, rate) in self._updated(gradients).items():
            if name in gradients and not (self.verdict.by_chance or self._is_rounding(name)):
                size = gradients[name].abs()
                sure = size > 10 * GRADIENT[self.dtype] * size.max()
                if bool(((stepped[name] - want).abs() > 5e-2 * rate)[sure].any()):
                    raise WrongError(f"the first update of {name} at {label} is not Adam's")

    def _updated(self, gradients: Gradients) -> dict[str, tuple[Tensor, float]]:
        """(value, learning rate) of each parameter after one clipped step of Adam on ``gradients``."""
        model = copy.deepcopy(self.eager.model)
        trainer = self.case.habits.trainer(model)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clone() if name in gradients else None
        trainer.apply()
        rates = {id(p): float(g["lr"]) for g in trainer.optimizer.param_groups for p in g["params"]}
        return {n: (p.detach(), rates.get(id(p), 0.0)) for n, p in model.named_parameters()}

    @property
    def _whole(self) -> float:
        """The largest entry of all gradients."""
        return max(float(g.abs().max()) for g in self.eager.exact.values())

    def _is_rounding(self, name: str) -> bool:
        """Whether a gradient is zero but for rounding: in fp32, far below the model's. It has no scale."""
        exact = self.eager.exact.get(name)
        return exact is None or float(exact.abs().max()) <= 10 * torch.finfo(torch.float32).eps * self._whole

    def _judge_gradients(self, found: Gradients, tolerance: float, label: str) -> float:
        """The largest distance to eager in parts of a gradient's scale; raises where it is too large."""
        if set(found) < set(self.eager.exact):
            raise WrongError(f"no gradient at {label} for {sorted(set(self.eager.exact) - set(found))[0]}")
        worst = 0.0
        whole = self._whole
        noise = torch.finfo(torch.float32).eps * whole
        for name, ours in found.items():
            if not ours.numel():
                continue
            reference = self.eager.exact.get(name, torch.zeros_like(ours))
            plain = self.eager.plain.get(name, torch.zeros_like(ours))
            scale = float(reference.abs().max())
            rounding = self._is_rounding(name)
            error = float((ours - reference).abs().max())
            slack = 10 * torch.finfo(self.dtype).eps * whole if rounding else tolerance * scale + noise
            theirs = float((plain - reference).abs().max())
            if not error <= theirs + slack and self.eager.neighbours:
                draws = [theirs, *(float((n[name] - reference).abs().max()) for n in self.eager.neighbours)]
                theirs = max(*draws, statistics.mean(draws) + DEVIATIONS * statistics.stdev(draws))
                self.verdict.by_chance = True
            if not error <= theirs + slack and name in self.eager.double:
                reference = self.eager.double[name]
                error = float((ours - reference).abs().max())
                theirs = float((plain - reference).abs().max())
            if not error <= theirs + slack:
                raise WrongError(
                    f"the gradient of {name} at {label} is off by {error:.2e}, eager by {theirs:.2e}, "
                    f"its scale is {scale:.2e}"
                )
            worst = max(worst, 0.0 if rounding else float((ours - plain).abs().max()) / scale)
        return worst


def program_gradients(program: megacompile.Program) -> Gradients:
    """The gradients that wait, on the host or on the device, by the model's parameter."""
    runtime = program._session.runtime
    assert runtime is not None
    flats: dict[int, Tensor] = {}
    for layout in runtime.state.groups:
        if layout.index in runtime.resident.landed:  # kept on the device, with the group's state
            flats[layout.index] = runtime.resident.gradient(layout.index, ("dgrad",))
        elif layout.index in runtime._held.landed:  # bytes; what is accumulated waits in FP32
            raw = runtime.buffers.gradients[layout.index]
            flats[layout.index] = raw[: 4 * layout.elements].view(torch.float32)
    found: Gradients = {}
    for name, places in program._session.values._homes.items():
        if all(group in flats for group, _ in places):
            slots = ((flats[group], runtime.state.groups[group].slots[slot]) for group, slot in places)
            pieces = [slot_view(flat, slot).clone() for flat, slot in slots]
            found[name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return found

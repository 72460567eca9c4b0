"""Judge one architecture by the contract on exactness, beside eager PyTorch, at several budgets.

The reference is eager PyTorch with our attention and dropout operators and the same Adam; that these
operators stand for what the model itself computes is checked apart, with dropout off, against the
model as transformers runs it.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import megacompile
from megacompile.capture.batch import is_transformers
from megacompile.capture.forms import parameter_forms
from megacompile.capture.graph import find_loss
from megacompile.compiler import Compiler, Front
from megacompile.fuse.placement import fuse
from megacompile.fuse.report import Fusions
from megacompile.host.state import slot_view
from tests.reference import EagerTrainer, Trace, train_eager
from tests.zoo import Case

STEPS = 3
GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of a gradient's scale
FUSED = {torch.float32: 5e-4, torch.bfloat16: 1e-2}
NATIVE = 1e-3  # of a gradient's scale: our attention beside the model's own
Gradients = dict[str, Tensor]


@dataclass
class Verdict:
    """What came out for one architecture in one dtype.

    ``status``: right, refused, eager fails, or WRONG. ``reason`` says why for all but right.
    ``budgets`` holds per budget: its bytes, measured and predicted peak, "bitwise" or the largest
    gradient's distance to eager in parts of its scale, blocks and templates.
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class WrongError(AssertionError):
    """A program does not compute what eager does."""


def judge(case: Case, dtype: torch.dtype) -> Verdict:
    """Train ``case`` at budgets of 100 %, 40 % and the least feasible, and with fused kernels."""
    verdict = Verdict(case.name, case.kind, str(dtype).removeprefix("torch."))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _Judge(case, dtype, verdict).run()
    except megacompile.MegacompileError as error:
        verdict.status, verdict.reason = "refused", str(error)
    except WrongError as error:
        verdict.status, verdict.reason = "WRONG", str(error)
    except EagerError as error:
        verdict.status, verdict.reason = "eager fails", str(error)
    return verdict


class EagerError(Exception):
    """The model cannot be built or trained by plain PyTorch, so there is nothing to compare with."""


class _Judge:
    def __init__(self, case: Case, dtype: torch.dtype, verdict: Verdict) -> None:
        self.case, self.dtype, self.verdict = case, dtype, verdict
        self.steps = [self._batch(s) for s in range(STEPS)]
        try:
            self.model = case.build()
            verdict.parameters = sum(p.numel() for p in self.model.parameters())
            self.native = self._native(None)
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise EagerError(f"{type(error).__name__}: {first}") from error
        self.before: Compiler | None = None

    def _batch(self, seed: int) -> dict[str, Any]:
        """A batch whose values fp32 and bf16 hold alike; a plain module is given its compute dtype."""
        batch = self.case.batch(seed)
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                batch[name] = value.bfloat16().float()
        return batch

    def _given(self, batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        if is_transformers(self.model):
            return batch
        floats = {n: v.to(dtype) for n, v in batch.items() if isinstance(v, Tensor) and v.is_floating_point()}
        return {**batch, **floats}

    def run(self) -> None:
        self.exact = self._eager(torch.float32)
        self._compare_native()
        self.plain = self.exact if self.dtype == torch.float32 else self._eager(self.dtype)
        self.trace = self._train() if self.dtype == torch.float32 else None
        plenty = self._at("100 %", "1GB")
        least = self._least()
        self._at("40 %", max(int(0.4 * plenty), least))
        self._at("least", least)
        self._fused()

    # ---- references -----------------------------------------------------------------------------

    def _native(self, attention: str | None) -> tuple[float, Gradients]:
        """Loss and gradients in eval mode of the model as it is, without any operator of ours."""
        model = copy.deepcopy(self.model).eval()
        _without_cache(model)
        if attention is not None:
            model.set_attn_implementation(attention)  # type: ignore[operator]
        loss = find_loss(model(**self.steps[0]))
        loss.backward()
        return float(loss), _gradients(model)

    def _compare_native(self) -> None:
        """Our operators against the model's own, its default attention or (mostly slower) its plain one.

        The two differ themselves where a row of padding sees no key at all.
        """
        model = copy.deepcopy(self.model).eval()
        _without_cache(model)
        loss = float(_trainer(model).backward([self.steps[0]], [1.0]))
        found = _gradients(model)
        complaint = self._native_complaint(loss, found, self.native)
        if complaint and hasattr(self.model, "set_attn_implementation"):
            complaint = self._native_complaint(loss, found, self._native("eager"))
        if complaint:
            raise WrongError(complaint)

    def _native_complaint(self, loss: float, found: Gradients, native: tuple[float, Gradients]) -> str:
        if not math.isclose(loss, native[0], rel_tol=1e-5):
            return f"our operators give the loss {loss}, the model {native[0]}"
        far, name = _farthest(found, native[1])
        return f"our operators' gradient of {name} is off by {far:.1e} of its scale" if far > NATIVE else ""

    def _eager(self, dtype: torch.dtype) -> Gradients:
        model = copy.deepcopy(self.model)
        _without_cache(model)
        for name, (form, _) in parameter_forms(model, dtype).items():
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(form)
        _trainer(model).backward([self._given(self.steps[0], dtype)], [1.0])
        return _gradients(model)

    def _train(self) -> Trace:
        model = copy.deepcopy(self.model)
        _without_cache(model)
        return train_eager(_trainer(model), self.steps)

    # ---- programs -------------------------------------------------------------------------------

    def _program(self, budget: int | str, **options: Any) -> megacompile.Program:
        model = copy.deepcopy(self.model)
        program = megacompile.compile(
            model, budget if isinstance(budget, str) else f"{budget}B", optimizer=_adamw(model),
            max_grad_norm=1.0, compute_dtype=self.dtype, **options,
        )  # fmt: skip
        self._share(program._compiler)
        return program

    def _share(self, compiler: Compiler) -> None:
        """What does not depend on the budget is compiled once for all programs; captured once of all."""
        before, self.before = self.before, self.before or compiler
        if before is None:
            return
        compiler._differentiated = before._differentiated
        if compiler._kernels == before._kernels:
            compiler._fronts, compiler._compiled = before._fronts, before._compiled
            return
        for key, front in before._fronts.items():
            compiler._fronts[key] = Front(front.captured, *fuse(front.captured, compiler._kernels))

    def _least(self) -> int:
        program = self._program("1kB")
        try:
            program.prepare(self._given(self.steps[0], self.dtype))
        except megacompile.BudgetError as error:
            assert error.least_bytes is not None, error
            return error.least_bytes
        raise AssertionError("a budget of 1 kB was accepted")

    def _at(self, label: str, budget: int | str) -> int:
        """Train at one budget; returns the peak that was predicted."""
        program = self._program(budget)
        losses, norms = [], []
        for batch in self.steps:
            out = program.train_step(self._given(batch, self.dtype))
            losses.append(float(out.loss))
            norms.append(float(out.grad_norm if out.grad_norm is not None else math.nan))
        memory = program.memory
        peak = memory.predicted_peak_bytes
        record = {
            "budget_bytes": memory.budget_bytes,
            "peak_bytes": memory.device_peak_bytes,
            "predicted_bytes": peak,
        }
        work = program._scheduled().compiled
        self.verdict.blocks = len(work.part.blocks)
        self.verdict.templates = len(work.templates)
        self.verdict.budgets[label] = record
        state = program.state_dict()
        program.close()
        if memory.device_peak_bytes > memory.budget_bytes:
            raise WrongError(f"{memory.device_peak_bytes} bytes were used of {memory.budget_bytes}")
        trace = self.trace
        same = trace is not None and losses == trace.losses and norms == trace.norms
        if same and trace is not None and all(torch.equal(state[n], v) for n, v in trace.weights.items()):
            record["distance"] = 0.0
            return peak
        if not all(map(math.isfinite, losses)):
            raise WrongError(f"the losses at {label} are {losses}")
        record["distance"] = self._judge_gradients(
            self._first_gradients(budget)[0], GRADIENT[self.dtype], label
        )
        return peak

    def _first_gradients(self, budget: int | str, **options: Any) -> tuple[Gradients, Fusions]:
        """The first step's gradients; under accumulation the least budget may be a little larger."""
        program = self._program(budget, **options)
        try:
            program.forward_backward(self._given(self.steps[0], self.dtype))
        except megacompile.BudgetError as error:
            program = self._program(error.least_bytes or "1GB", **options)
            program.forward_backward(self._given(self.steps[0], self.dtype))
        program.wait()
        found = program_gradients(program), program.fusions
        program.close()
        return found

    def _judge_gradients(self, found: Gradients, tolerance: float, label: str) -> float:
        """The largest distance to eager in parts of a gradient's scale; raises where it is too large."""
        if set(found) < set(self.exact):
            raise WrongError(f"no gradient at {label} for {sorted(set(self.exact) - set(found))[0]}")
        worst = 0.0
        # a gradient that is zero but for rounding has no scale of its own
        noise = torch.finfo(torch.float32).eps * max(float(g.abs().max()) for g in self.exact.values())
        for name, ours in found.items():
            reference = self.exact.get(name)
            if reference is None:
                reference = torch.zeros_like(ours)
            scale = float(reference.abs().max())
            error = float((ours - reference).abs().max())
            plain = self.plain.get(name, torch.zeros_like(ours))
            theirs = float((plain - reference).abs().max())
            if not error <= theirs + tolerance * scale + noise:
                raise WrongError(
                    f"the gradient of {name} at {label} is off by {error:.2e}, eager by {theirs:.2e}, "
                    f"its scale is {scale:.2e}"
                )
            distance = float((ours - plain).abs().max())
            worst = max(worst, distance / scale if scale > 10 * noise else 0.0)
        return worst

    def _fused(self) -> None:
        found, fusions = self._first_gradients("1GB", kernels=True)
        self.verdict.placed = fusions.counts
        self.verdict.near_misses = len(fusions.near_misses)
        self.verdict.fused_distance = self._judge_gradients(found, FUSED[self.dtype], "fused kernels")


def program_gradients(program: megacompile.Program) -> Gradients:
    """The gradients that wait, on the host or on the device, by parameter."""
    runtime = program._runtime
    assert runtime is not None
    found: Gradients = {}
    for layout in runtime.state.groups:
        raw = runtime.buffers.gradients.get(layout.index)  # bytes; what is accumulated waits in FP32
        flat = None if raw is None else raw[: 4 * layout.elements].view(torch.float32)
        if flat is None and layout.trainable:  # kept on the device, with the group's state
            flat = runtime.resident.gradient(layout.index, ("dgrad",))
        if flat is not None:
            found |= {s.parameter.name: slot_view(flat, s).clone() for s in layout.slots}
    return found


def _gradients(model: nn.Module) -> Gradients:
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


def _farthest(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """(largest distance in parts of the larger of a tensor's scale and a hundredth of the model's, name)."""
    whole = max((float(w.abs().max()) for w in wanted.values()), default=0.0)
    distances = []
    for name, want in wanted.items():
        got = found.get(name, torch.zeros_like(want))
        scale = max(float(want.abs().max()), 1e-2 * whole, 1e-9)
        distances.append((float((got - want).abs().max()) / scale, name))
    return max(distances, default=(0.0, ""))


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def _trainer(model: nn.Module) -> EagerTrainer:
    return EagerTrainer(model, _adamw(model), max_grad_norm=1.0)


def _without_cache(model: nn.Module) -> None:
    """Training needs no cache, and some models fail where their layers have none to offer."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False  # type: ignore[union-attr]

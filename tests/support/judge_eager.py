"""What a model gives in plain PyTorch: the references that :mod:`tests.support.judge` holds programs against.

The reference is eager PyTorch with our operators and the same Adam; that these operators stand for what the
model itself computes is checked apart, with dropout off, against the model as transformers runs it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.capture.batch import is_transformers, read_batch
from megacompile.capture.loss_value import find_loss
from megacompile.capture.parameter_forms import parameter_forms
from tests.support.reference import Trace, train_eager
from tests.support.zoo import Case

STEPS = 3
NEIGHBOURS = 6  # eager runs in low precision where one is not enough
NATIVE = 1e-3  # of a gradient's scale: our attention beside the model's own
Gradients = dict[str, Tensor]


class EagerError(Exception):
    """The model cannot be built or trained by plain PyTorch, so there is nothing to compare with."""


class WrongError(AssertionError):
    """A program does not compute what eager does."""


class EagerRuns:
    """Eager runs of a case: ``exact`` and ``plain`` hold the first step's gradients in fp32 and ``dtype``,
    made by hand.

    ``floats`` is the dtype that floats of a batch are given in, None where they stay as they are.
    """

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self.steps = [[self._batch(s * case.micro + m) for m in range(case.micro)] for s in range(STEPS)]
        try:
            self.model = case.build()
            _without_cache(self.model)
            self.native = self._native(None)
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise EagerError(f"{type(error).__name__}: {first}") from error
        loss, gradients = self.native
        if not (math.isfinite(loss) and all(bool(g.isfinite().all()) for g in gradients.values())):
            raise EagerError(f"The loss is {loss}, or a gradient is not finite.")
        self.floats = dtype if not is_transformers(self.model) else None
        self.exact = self._eager(torch.float32)
        self._compare_native()
        self.plain = self.exact if dtype == torch.float32 else self._plain()

    def given(self, micro: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Micro-batches as eager in ``dtype`` and programs take them."""
        return cast_floats(micro, self.floats)

    def _batch(self, seed: int) -> dict[str, Any]:
        """A batch whose values fp32 and bf16 hold alike; a plain module is given its compute dtype."""
        batch = self.case.batch(seed)
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                batch[name] = value.bfloat16().float()
        return batch

    def _native(self, attention: str | None) -> tuple[float, Gradients]:
        """Loss and gradients in eval mode of the model as it is, without any operator of ours."""
        model = copy.deepcopy(self.model).eval()
        if attention is not None:
            model.set_attn_implementation(attention)  # type: ignore[operator]
        loss = find_loss(model(**self.steps[0][0]))
        loss.backward()
        return float(loss), _gradients(model)

    def _compare_native(self) -> None:
        """Our operators against the model's own, its default attention or (mostly slower) its plain one.

        The two differ themselves where a row of padding sees no key at all.
        """
        model = copy.deepcopy(self.model).eval()
        loss = float(self.case.habits.trainer(model).backward(self.steps[0][:1], [1.0]))
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

    def _eager(
        self,
        dtype: torch.dtype,
        floats: torch.dtype | None = None,
        *,
        seed: int | None = None,
        by_hand: bool = True,
    ) -> Gradients:
        """The first step's gradients in ``dtype``; with a ``seed``, weights are rounded by chance.

        With several micro-batches, dropout made ``by_hand`` is not that of one ``train_step``.
        """
        model = copy.deepcopy(self.model)
        for name, (form, _) in parameter_forms(model, dtype).items():
            parameter = model.get_parameter(name)
            chance = seed is not None and form == torch.bfloat16
            value = _rounded_by_chance(parameter.data, seed or 0) if chance else parameter.data
            parameter.data = value.to(form)
        trainer = self.case.habits.trainer(model)
        micro = cast_floats(self.steps[0], floats)
        trainer.backward(micro, trainer.weights(micro), by_hand=by_hand)
        return _gradients(model)

    def _plain(self) -> Gradients:
        """Gradients of plain low-precision eager, which for some models needs a batch in that dtype too."""
        try:
            return self._eager(self.dtype, self.floats)
        except RuntimeError:
            self.floats = self.dtype
        try:
            return self._eager(self.dtype, self.floats)
        except RuntimeError as error:
            raise EagerError(f"RuntimeError: {str(error).strip().splitlines()[0]}") from error

    @functools.cached_property
    def neighbours(self) -> list[Gradients]:
        """Plain low-precision eager again, from weights that were rounded otherwise.

        One run is one draw of rounding errors, and where experts are chosen by rounded scores a few
        choices flip: how far eager is from fp32 is then a matter of chance, which several runs show.
        """
        if self.dtype == torch.float32:
            return []
        return [self._eager(self.dtype, self.floats, seed=seed) for seed in range(NEIGHBOURS)]

    @functools.cached_property
    def double(self) -> dict[str, Tensor]:
        """The first step's gradients in fp64, beside which eager's own rounding in fp32 shows; {} in bf16, or
        where the model does not run so.
        """
        if self.dtype != torch.float32:
            return {}
        model = copy.deepcopy(self.model).double()
        trainer = self.case.habits.trainer(model)
        try:
            trainer.backward(
                cast_floats(self.steps[0], torch.float64), trainer.weights(self.steps[0]), by_hand=True
            )
        except RuntimeError:
            return {}
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    @property
    def together(self) -> bool:
        """Whether ``train_step`` takes several micro-batches in one program, as it does if they are alike."""
        keys = [read_batch(b, self.model).key for b in self.given(self.steps[0])]
        return len(keys) > 1 and len(set(keys)) == 1

    @functools.cached_property
    def stepped(self) -> Gradients:
        """The gradients of the first ``train_step`` in ``dtype``."""
        return self._eager(self.dtype, self.floats, by_hand=False)

    def train(self) -> Trace:
        model = copy.deepcopy(self.model)
        return train_eager(self.case.habits.trainer(model), self.steps)


def cast_floats(micro: Sequence[dict[str, Any]], dtype: torch.dtype | None) -> list[dict[str, Any]]:
    """Micro-batches with their floats in ``dtype``; None leaves them as they are."""
    return [
        {n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in b.items()}
        for b in micro
    ]


def _gradients(model: nn.Module) -> Gradients:
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None and p.numel()}


def _farthest(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """(largest distance in parts of the larger of a tensor's scale and a hundredth of the model's, name)."""
    whole = max((float(w.abs().max()) for w in wanted.values()), default=0.0)
    distances = []
    for name, want in wanted.items():
        got = found.get(name, torch.zeros_like(want))
        scale = max(float(want.abs().max()), 1e-2 * whole, 1e-9)
        distances.append((float((got - want).abs().max()) / scale, name))
    return max(distances, default=(0.0, ""))


def _rounded_by_chance(value: Tensor, seed: int) -> Tensor:
    """fp32 values, up or down to a value of bf16, the nearer one more often."""
    generator = torch.Generator().manual_seed(seed)
    dither = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, generator=generator)
    return ((value.contiguous().view(torch.int32) + dither) & -65536).view(torch.float32)


def _without_cache(model: nn.Module) -> None:
    """Training needs no cache, and some models fail where their layers have none to offer."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False  # type: ignore[union-attr]

"""Compare whatever computes an operator's eager form with it: in no tensor, results and gradients, may it be
farther from float64 than eager torch is in the same dtype, by more than a tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megacompile.kernels.eager_form import EagerForm, Function, Shape, normal

SLACK = {torch.float32: 5e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def inputs_of(form: EagerForm, shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Fresh leaves of a shape, with the same values at each call."""
    made = form.make(shape, torch.Generator(device).manual_seed(0))
    moved = [x.to(device, dtype if x.is_floating_point() else x.dtype) for x in made]
    return [x.detach().requires_grad_(i < form.trained) for i, x in enumerate(moved)]


def gradients_like(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A random gradient of each output, with the same values at each call."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    return [normal(generator, *o.shape).to(o.dtype) for o in outputs]


def outputs_of(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of a form as a tuple."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def all_results(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, then gradients, where there are some."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    outputs = outputs_of(function(*leaves))
    wanted = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(outputs, wanted, gradients_like(outputs)) if wanted else ()
    return [*(o.detach() for o in outputs), *grads]


def check(
    form: EagerForm,
    shape: Shape,
    dtype: torch.dtype,
    functions: Mapping[str, Function],
    device: torch.device,
) -> dict[str, tuple[float, str]]:
    """(worst error, what is wrong or nothing) of each function."""
    inputs = inputs_of(form, form.check_shape(shape, device), dtype, device)
    doubles = [
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs
    ]
    exact = all_results(form.eager, doubles)
    allowed = [e + SLACK[dtype] for e in _errors(all_results(form.eager, inputs), exact)]
    found = {}
    for name, function in functions.items():
        try:
            errors = _errors(all_results(function, inputs), exact)
        except Exception as error:
            found[name] = (0.0, f"fails: {first_line(error)}")
            continue
        wrong = [i for i, (e, a) in enumerate(zip(errors, allowed, strict=True)) if not e <= a]
        note = f"wrong: result {wrong[0]} is off by {errors[wrong[0]]:.1e} of scale" if wrong else ""
        found[name] = (max(errors), note)
    return found


def _errors(got: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    if [tuple(x.shape) for x in got] != [tuple(x.shape) for x in exact]:
        raise ValueError(f"its results are {[tuple(x.shape) for x in got]}")
    pairs = zip(got, exact, strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs]


def first_line(error: Exception) -> str:
    """The first line of what an error says, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]

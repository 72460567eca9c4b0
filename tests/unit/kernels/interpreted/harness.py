"""What the interpreted tests share: shapes, the tolerance rule, gradcheck, planted faults."""

from collections.abc import Callable, Sequence
from types import EllipsisType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

SLACK = {torch.float32: 5e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}
LOW = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *LOW)
# Odd on purpose: one row, not powers of two, more rows than a tile, columns beyond one warp.
SHAPES = ((1, 4096), (199, 123), (1199, 41))
ALL = slice(None)

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def results(function: Function, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of ``function`` and, for inputs that require it, their gradients."""
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    out = function(*leaves)
    out = (out,) if isinstance(out, Tensor) else out
    wanted = [x for x in leaves if x.requires_grad]
    seeds = [g.to(o.dtype) for g, o in zip(grads, out, strict=True)]
    return [*(o.detach() for o in out), *torch.autograd.grad(out, wanted, seeds)]


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).requires_grad_()


def compare(
    kernel: Function,
    eager: Function,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    grads: Sequence[Tensor] | None = None,
    floor: float = 0.0,
) -> None:
    """|kernel - float32| <= |eager in dtype - float32| + slack, each as a maximum over a tensor.

    The slack is relative to the largest magnitude in the float32 result, or to ``floor`` where that
    is larger: a gradient that is a difference of large equal terms has no scale of its own. Forward
    outputs and the gradients of all inputs that require them are held to the rule.
    """
    low = [
        x.detach().to(dtype).requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs
    ]
    if grads is None:
        shapes = eager(*low)
        shapes = (shapes,) if isinstance(shapes, Tensor) else shapes
        grads = [torch.randn(o.shape).to(dtype) for o in shapes]
    exact = [x.detach().float().requires_grad_() if x.requires_grad else x for x in low]
    exact = [x.float() if x.is_floating_point() else x for x in exact]
    ours, theirs = results(kernel, low, grads), results(eager, low, grads)
    for index, (a, b, true) in enumerate(zip(ours, theirs, results(eager, exact, grads), strict=True)):
        assert a.dtype == b.dtype, (index, a.dtype, b.dtype)
        assert_close(a, b, true, dtype, f"result {index}", floor)


def assert_close(
    ours: Tensor,
    eager: Tensor,
    true: Tensor,
    dtype: torch.dtype,
    what: str,
    floor: float = 0.0,
) -> None:
    """The tolerance rule on one tensor; infinities and NaN must stand in the same places."""
    assert ours.shape == true.shape, (what, ours.shape, true.shape)
    if not true.numel():
        return
    ours, eager, true = ours.float(), eager.float(), true.float()
    finite = eager.isfinite() & true.isfinite()
    torch.testing.assert_close(ours[~finite], eager[~finite], equal_nan=True)
    ours, eager, true = ours[finite], eager[finite], true[finite]
    if not true.numel():
        return
    error, allowed = (ours - true).abs().max(), (eager - true).abs().max()
    slack = SLACK[dtype] * true.abs().max().clamp(min=floor)
    assert error <= allowed + slack, f"{what}: error {error:.3e} > {allowed:.3e} + {slack:.3e}"


def gradcheck(function: Function, *inputs: Tensor) -> None:
    """torch's gradcheck in float64, along one direction of all inputs."""
    doubles = [
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs
    ]
    assert torch.autograd.gradcheck(function, doubles, fast_mode=True)


def strided(x: Tensor) -> Tensor:
    """Equal values, but a column stride of two within rows padded by three elements."""
    store = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"), dtype=x.dtype)
    view = store[..., 1 : 1 + 2 * x.shape[-1] : 2]
    view.copy_(x.detach())
    return view.requires_grad_(x.requires_grad)


def shared(x: Tensor) -> Tensor:
    """Values of which all rows are one, and rows apart from it in memory are NaN."""
    store = torch.full((3, *x.shape[1:]), float("nan"), dtype=x.dtype)
    store[1] = x.detach()[0]
    return store[1:2].expand_as(x).requires_grad_(x.requires_grad)


def spread(x: Tensor) -> Tensor:
    """A differentiable view-like copy with a column stride of two."""
    return torch.stack((x, x), dim=-1)[..., 0]


def without(*index: int | slice | EllipsisType) -> Callable[[Tensor], Tensor]:
    """What returns a tensor with zeros at ``index``."""

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[index] = 0
        return x

    return change


def plant(
    monkeypatch: pytest.MonkeyPatch,
    launchers: ModuleType,
    name: str,
    argument: str,
    change: Callable[[Tensor], Tensor],
) -> None:
    """Let launchers give one of their kernels an argument wrong."""
    launch = launchers.launch

    def spoiled(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        if kernel is getattr(launchers, name):
            place = kernel.arg_names.index(f"{argument}_ptr")
            args = *args[:place], change(args[place]), *args[place + 1 :]
        launch(kernel, grid, *args, **constants)

    monkeypatch.setattr(launchers, "launch", spoiled)

# mypy: allow-untyped-defs, allow-incomplete-defs
"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) on the device, for groups that stay there.

    w *= 1 - lr * weight_decay;  m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g
    w -= lr / (1 - beta1**step) * m / (sqrt(v / (1 - beta2**step)) + eps)

in float32, with g = grad * scale: the operations of torch's fused kernel, in its order and with its fused
multiply-adds and no others, as ``megacompile/state/adam.h`` has them. So a group's bits do not depend on
where
it is updated. weight: flat float32, or
bfloat16 with ``low`` (int16), its halves: ``high = bits + 0x8000 >> 16`` (the value to nearest, ties up)
and ``low = bits - (high << 16)``, which give back all 2**32 patterns. exp_avg, exp_avg_sq: flat float32.
grad: flat, any float type. scale: float32 with one element on the device (1 / accumulation, the
clipping factor), or None. All in place and contiguous. One program updates 1024 elements. Traffic per
parameter: 24 bytes and the gradient (both moments and four bytes of weight, each read and written).
"""

import ctypes
import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from megacompile.kernels._triton import ceil_div, launch, pointer, runs_triton, tl, triton
from megacompile.kernels.registry import OpSpec, declare

BLOCK = 1024
State = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""weight, low, exp_avg, exp_avg_sq."""


@dataclass(frozen=True)
class Constants:
    """The factors of an update; computed in float64 on the host, once per step."""

    decay: float
    lerp: float  # from the mean to the gradient; from there to the mean where that is nearer
    beta2: float
    one_minus_beta2: float
    correction2: float
    eps: float
    step_size: float

    @property
    def from_grad(self) -> bool:
        """Return whether the mean is nearer to the gradient."""
        return self.lerp < 0

    @classmethod
    def of(
        cls, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int
    ) -> "Constants":
        """For update number ``step``, counted from 1."""
        correction2 = math.sqrt(1.0 - beta2**step)
        step_size = lr / (1.0 - beta1**step)
        lerp = ctypes.c_float(1.0 - beta1).value
        lerp = lerp if lerp < 0.5 else lerp - 1.0
        return cls(1.0 - lr * weight_decay, lerp, beta2, 1.0 - beta2, correction2, eps, step_size)


@triton.jit
def joined(high, low):
    """The float32 of a bfloat16 and an int16 half."""
    bits = (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def halves(x):
    """(bfloat16, int16) of a float32."""
    bits = x.to(tl.int32, bitcast=True)
    high = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, bits.to(tl.int16)


@triton.jit
def adamw_kernel(
    weight_ptr, low_ptr, exp_avg_ptr, exp_avg_sq_ptr, grad_ptr, scale_ptr, count,
    decay, lerp, beta2, one_minus_beta2, correction2, eps, step_size,
    SPLIT: tl.constexpr, SCALED: tl.constexpr, FROM_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The module's formula; divisions and the root are rounded as IEEE says, as on the host."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    weight = tl.load(weight_ptr + at, mask=inside)
    if SPLIT:
        weight = joined(weight, tl.load(low_ptr + at, mask=inside))
    grad = tl.load(grad_ptr + at, mask=inside).to(tl.float32)
    if SCALED:
        grad = grad * tl.load(scale_ptr)
    mean = tl.load(exp_avg_ptr + at, mask=inside)
    square = tl.load(exp_avg_sq_ptr + at, mask=inside)
    mean = tl.fma(grad - mean, tl.zeros_like(mean) + lerp, grad if FROM_GRAD else mean)
    square = tl.fma(one_minus_beta2 * grad, grad, square * beta2)
    tl.store(exp_avg_ptr + at, mean, mask=inside)
    tl.store(exp_avg_sq_ptr + at, square, mask=inside)
    below = tl.div_rn(tl.sqrt_rn(square), tl.zeros_like(square) + correction2) + eps
    weight = weight * decay - tl.div_rn(step_size * mean, below)
    if SPLIT:
        high, low = halves(weight)
        tl.store(weight_ptr + at, high, mask=inside)
        tl.store(low_ptr + at, low, mask=inside)
    else:
        tl.store(weight_ptr + at, weight, mask=inside)


def adamw_triton(state: State, grad: Tensor, constants: Constants, scale: Tensor | None) -> None:
    """The update by the kernel."""
    weight, low, exp_avg, exp_avg_sq = state
    launch(
        adamw_kernel,
        (ceil_div(weight.numel(), BLOCK),),
        *(weight, pointer(low, weight), exp_avg, exp_avg_sq, grad.contiguous()),
        *(pointer(scale, weight), weight.numel()),
        *astuple(constants),
        SPLIT=low is not None,
        SCALED=scale is not None,
        FROM_GRAD=constants.from_grad,
        BLOCK=BLOCK,
        fuses=False,
    )


def adamw_reference(state: State, grad: Tensor, constants: Constants, scale: Tensor | None) -> None:
    """The update in plain torch."""
    weight, low, exp_avg, exp_avg_sq = state
    value = weight if low is None else join_reference(weight, low)
    grad = grad.float() if scale is None else grad.float() * scale
    step = constants.lerp * (grad - exp_avg)
    exp_avg.copy_(grad + step if constants.from_grad else exp_avg + step)
    exp_avg_sq.mul_(constants.beta2).add_(constants.one_minus_beta2 * grad * grad)
    below = exp_avg_sq.sqrt() / constants.correction2 + constants.eps
    value = value * constants.decay - constants.step_size * exp_avg / below
    if low is None:
        weight.copy_(value)
    else:
        high, rest = split_reference(value)
        weight.copy_(high)
        low.copy_(rest)


def join_reference(high: Tensor, low: Tensor) -> Tensor:
    """The float32 values of bfloat16 and int16 halves, in plain torch."""
    return ((high.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low) in plain torch."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


@torch.library.custom_op("megacompile::adamw_", mutates_args=("weight", "low", "exp_avg", "exp_avg_sq"))
def adamw_(
    weight: Tensor,
    low: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    scale: Tensor | None,
) -> None:
    """One update, in place; see the module's docstring."""
    if (weight.dtype, low is None) not in ((torch.float32, True), (torch.bfloat16, False)):
        raise ValueError("adamw_ takes float32 weights, or bfloat16 weights with their low halves")
    written = [x for x in (weight, low, exp_avg, exp_avg_sq) if x is not None]
    if not all(x.is_contiguous() and x.numel() == grad.numel() for x in written):
        raise ValueError("adamw_ writes to contiguous tensors with as many elements as the gradient")
    constants = Constants.of(lr, beta1, beta2, eps, weight_decay, step)
    run = adamw_triton if runs_triton(weight) else adamw_reference
    run((weight, low, exp_avg, exp_avg_sq), grad, constants, scale)


declare(OpSpec("adamw_"))

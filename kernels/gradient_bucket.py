# mypy: allow-untyped-defs, allow-incomplete-defs
"""Gradients into a flat bucket: cast, scale, accumulate and sum of squares in one pass.

    value = grad * scale (+ bucket, where ``add``)        bucket[start : start + n] = value

The returned sum of squares is that of ``value`` in float32, so that the last micro-batch gives the
gradient's norm; it is summed in a fixed order, and it is not finite where a value is not.

bucket: flat and contiguous, float32 or bfloat16. grad: any shape and float type, n elements in
row-major order. scale: float32 with one element, on the device, or None for 1. Computed in float32,
4096 elements to a program. Traffic per element: the gradient read, the bucket written (and read, where
``add``).
"""

from functools import partial

import torch
from torch import Tensor

from megacompile.kernels._triton import AotCase, aot_cases, ceil_div, launch, pointer, runs_triton, tl, triton

BLOCK = 4096


@triton.jit
def accumulate_gradient_kernel(
    grad_ptr, bucket_ptr, scale_ptr, squares_ptr, count,
    SCALED: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The bucket's part, and for each program the sum of squares of what it wrote."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        value = value * tl.load(scale_ptr)
    if ADD:
        value += tl.load(bucket_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(bucket_ptr + at, value.to(bucket_ptr.dtype.element_ty), mask=inside)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(value * value, axis=0))


def accumulate_triton(bucket: Tensor, grad: Tensor, scale: Tensor | None, add: bool) -> Tensor:
    """The kernel on a bucket's part; returns the sum of squares."""
    programs = ceil_div(grad.numel(), BLOCK)
    squares = grad.new_empty(programs, dtype=torch.float32)
    launch(
        accumulate_gradient_kernel,
        (programs,),
        *(grad.contiguous(), bucket, pointer(scale, bucket), squares, grad.numel()),
        SCALED=scale is not None,
        ADD=add,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return squares.sum()


def accumulate_reference(bucket: Tensor, grad: Tensor, scale: Tensor | None, add: bool) -> Tensor:
    """The same in plain torch."""
    value = grad.flatten().float()
    if scale is not None:
        value = value * scale
    if add:
        value = value + bucket.float()
    bucket.copy_(value)
    return value.square().sum()


@torch.library.custom_op("megacompile::accumulate_gradient", mutates_args=("bucket",))
def accumulate_gradient(
    bucket: Tensor, grad: Tensor, start: int = 0, scale: Tensor | None = None, add: bool = False
) -> Tensor:
    """Write grad at ``bucket[start:]``; returns the sum of squares, float32 without dimensions."""
    if not 0 <= start <= bucket.numel() - grad.numel():
        raise ValueError(
            f"a gradient of {grad.numel()} elements at {start} does not fit a bucket of {bucket.numel()}"
        )
    if not bucket.is_contiguous():
        raise ValueError("accumulate_gradient writes to contiguous buckets alone")
    part = bucket[start : start + grad.numel()]
    run = accumulate_triton if runs_triton(grad) else accumulate_reference
    return run(part, grad, scale, add)


@accumulate_gradient.register_fake
def _(bucket: Tensor, grad: Tensor, start: int = 0, scale: Tensor | None = None, add: bool = False) -> Tensor:
    return grad.new_empty((), dtype=torch.float32)


def pack(bucket: Tensor, tensors: list[Tensor], starts: list[int]) -> None:
    """Copy each tensor, cast, to its place in a flat bucket (torch's multi-tensor copy)."""
    torch._foreach_copy_(_parts(bucket, tensors, starts), [t.flatten() for t in tensors])


def unpack(bucket: Tensor, tensors: list[Tensor], starts: list[int]) -> None:
    """Copy each tensor, cast, from its place in a flat bucket; tensors must be contiguous."""
    torch._foreach_copy_([t.view(-1) for t in tensors], _parts(bucket, tensors, starts))


def _parts(bucket: Tensor, tensors: list[Tensor], starts: list[int]) -> list[Tensor]:
    return [bucket[s : s + t.numel()] for s, t in zip(starts, tensors, strict=True)]


@aot_cases
def _aot() -> list[AotCase]:
    def case(bucket: torch.dtype, add: bool) -> None:
        grad = torch.empty(1 << 20, dtype=torch.bfloat16, device="meta")
        scale = torch.empty(1, device="meta")
        accumulate_triton(torch.empty_like(grad, dtype=bucket), grad, scale, add)

    return [
        ("bf16 to fp32", partial(case, torch.float32, False)),
        ("bf16 onto fp32", partial(case, torch.float32, True)),
        ("bf16 onto bf16", partial(case, torch.bfloat16, True)),
    ]

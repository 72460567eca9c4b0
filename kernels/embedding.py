# mypy: allow-untyped-defs, allow-incomplete-defs
"""Embedding lookup and its gradient, deterministic whatever repeats.

weight: [V, H]. ids: int64 [...]. out: [..., H] (a copy of rows: the library's lookup). The gradient
of the weight is summed per row in float32, in the order of the positions, and rounded once: the
positions are sorted by id, and the first position of each run of equal ids sums the run. Atomics
would make the result depend on timing, and bf16 atomics would round at each addition.

Grid: positions x 1024 columns; a program whose position starts no run ends at once. Traffic: each row
of the gradient once, each row that occurs written once, all others zeroed. A run is summed by one
program, so a token that fills a batch of millions is the slowest one.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import (
    AotCase,
    accumulator,
    aot_cases,
    as_rows,
    ceil_div,
    launch,
    next_power_of_2,
    runs_triton,
    tl,
    triton,
    wide,
)

BLOCK = 1024
RUN = 8


@triton.jit
def embedding_backward_kernel(
    grad_ptr, ids_ptr, order_ptr, ends_ptr, out_ptr, stride, columns, padding,
    ACC: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of the run that starts at this sorted position, if one does."""
    position = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + position)
    before = tl.load(ids_ptr + tl.maximum(position - 1, 0))
    starts = (position == 0) | (before != token)
    if starts & (token != padding):
        end = tl.load(ends_ptr + position).to(tl.int32)
        total = tl.zeros((BLOCK,), dtype=ACC)
        for begin in range(position, end, RUN):
            member = begin + tl.arange(0, RUN)
            row = tl.load(order_ptr + member, mask=member < end, other=0)
            inside = (member < end)[:, None] & (col < columns)[None, :]
            at = grad_ptr + row[:, None] * stride + col[None, :]
            total += tl.sum(tl.load(at, mask=inside, other=0.0).to(ACC), axis=0)
        out = out_ptr + token * columns + col
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=col < columns)


def backward_triton(grad: Tensor, ids: Tensor, rows: int, padding: int) -> Tensor:
    """dw: [rows, H] of grad's type."""
    grads = as_rows(grad)
    sorted_ids, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_ids, sorted_ids, right=True)
    out = grad.new_zeros((rows, grads.shape[1]))
    block = min(BLOCK, next_power_of_2(grads.shape[1]))
    launch(
        embedding_backward_kernel,
        (grads.shape[0], ceil_div(grads.shape[1], block)),
        *(grads, sorted_ids, order, ends, out, grads.stride(0), grads.shape[1], padding),
        ACC=accumulator(grad.dtype),
        RUN=RUN,
        BLOCK=block,
    )
    return out


def embedding_backward_reference(grad: Tensor, ids: Tensor, rows: int, padding: int) -> Tensor:
    """dw in plain torch, summed in float32."""
    grads = as_rows(grad).to(wide(grad.dtype))
    flat = ids.flatten()
    grads = torch.where((flat == padding)[:, None], 0.0, grads)
    out = grads.new_zeros((rows, grads.shape[1]))
    return out.index_add_(0, flat, grads).to(grad.dtype)


@torch.library.custom_op("megacompile::embedding", mutates_args=())
def embedding_op(weight: Tensor, ids: Tensor, padding: int = -1) -> Tensor:
    """weight[ids]; the row ``padding`` gets no gradient (-1: no such row)."""
    return torch.nn.functional.embedding(ids, weight)


@torch.library.custom_op("megacompile::embedding_backward", mutates_args=())
def embedding_backward_op(grad: Tensor, ids: Tensor, rows: int, padding: int) -> Tensor:
    """The gradient of the weight [rows, H], in grad's type."""
    run = backward_triton if runs_triton(grad) else embedding_backward_reference
    return run(grad, ids, rows, padding)


@embedding_op.register_fake
def _(weight: Tensor, ids: Tensor, padding: int = -1) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@embedding_backward_op.register_fake
def _(grad: Tensor, ids: Tensor, rows: int, padding: int) -> Tensor:
    return grad.new_empty((rows, grad.shape[-1]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    weight, ids, ctx.padding = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(ids)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    return embedding_backward_op(grad, ids, ctx.rows, ctx.padding), None, None


embedding_op.register_autograd(_backward, setup_context=_setup)


def embedding(weight: Tensor, ids: Tensor, padding: int = -1) -> Tensor:
    """weight[ids], differentiable in the weight."""
    out: Tensor = embedding_op(weight, ids, padding)
    return out


@aot_cases
def _aot() -> list[AotCase]:
    def case(dtype: torch.dtype) -> None:
        grad = torch.empty((8192, 4096), dtype=dtype, device="meta")
        ids = torch.empty(8192, dtype=torch.int64, device="meta")
        backward_triton(grad, ids, 128256, -1)

    return [("4096 bf16", partial(case, torch.bfloat16)), ("4096 fp32", partial(case, torch.float32))]

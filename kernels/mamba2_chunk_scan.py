# mypy: allow-untyped-defs, allow-incomplete-defs
"""Mamba-2's scan, the state space dual (Dao and Gu 2024, arXiv:2405.21060), as its models compute it.

Each head has a state S [N, P], zero at first, and for each token t

    S = exp(A dt_t) S + dt_t B_t x_t^T        out_t = S^T C_t + D x_t

x: [B, T, H, P]. dt: [B, T, H], not negative. A, D: [H], A negative. B, C: [B, T, G, N], G dividing H. out:
[B, T, H, P]. Computed in float32 (float64 for float64 x), as is out: the models norm it before they round it.
Saves the inputs and the states before every 256th token.

Tokens are taken in chunks of 64. With c the sum of A dt from a chunk's start, z its last, u = dt x, and S the
state before the chunk:

    out = tril(C B^T * exp(c_i - c_j)) u + exp(c) C S + D x        S' = exp(z) S + B^T (exp(z - c) u)

so that all but S is a product of matrices. C B^T, C S and the last product take all heads of a group at once.
Plain torch on every device.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megacompile.kernels._triton import ceil_div, wide
from megacompile.kernels.mamba2_reference import CHUNK, Inputs, backward_reference, forward_reference


@torch.library.custom_op("megacompile::mamba2_chunk_scan", mutates_args=())
def mamba2_chunk_scan_op(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, states that the backward starts from); see the module's docstring."""
    return forward_reference(Inputs(x, dt, A, B, C, D))


@torch.library.custom_op("megacompile::mamba2_chunk_scan_backward", mutates_args=())
def mamba2_chunk_scan_backward_op(
    grad: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, dt, A, B, C, D."""
    d_x, d_dt, d_A, d_B, d_C, d_D = backward_reference(grad, Inputs(x, dt, A, B, C, D), states)
    return d_x, d_dt, d_A, d_B, d_C, d_D


@mamba2_chunk_scan_op.register_fake
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape, dtype=wide(x.dtype))
    return out, out.new_empty(Inputs(x, *rest).states_shape)


@mamba2_chunk_scan_backward_op.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:6])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = mamba2_chunk_scan_backward_op(grad, *ctx.saved_tensors)
    return found


mamba2_chunk_scan_op.register_autograd(_backward, setup_context=_setup)


def mamba2_chunk_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """out, differentiable in all inputs."""
    out: Tensor = mamba2_chunk_scan_op(x, dt, A, B, C, D)[0]
    return out


@register_flop_formula(torch.ops.megacompile.mamba2_chunk_scan)
def mamba2_chunk_scan_flops(
    x: Any, dt: Any, A: Any, B: Any, *_: Any, out_val: Any = None, products: Any = (1, 1, 2), **__: Any
) -> int:
    """Those of the products: so many, for each token, of its chunk's tokens with N of each group, with P of
    each head, and of N with P of each head."""
    batch, tokens, heads, width = x
    groups, inner = B[2:]
    of_groups, of_heads, of_states = products
    each = of_groups * CHUNK * inner * groups
    each += heads * width * (of_heads * CHUNK + of_states * inner)
    return int(2 * batch * ceil_div(tokens, CHUNK) * CHUNK * each)


@register_flop_formula(torch.ops.megacompile.mamba2_chunk_scan_backward)
def mamba2_chunk_scan_backward_flops(
    grad: Any, x: Any, dt: Any, A: Any, B: Any, *_: Any, out_val: Any = None, **__: Any
) -> int:
    """The same, of the forward's scores and states once more and of the gradients."""
    return mamba2_chunk_scan_flops(x, dt, A, B, products=(3, 2, 6))

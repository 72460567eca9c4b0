"""The operator of one piece of a large head: what its range of the vocabulary adds to a cross-entropy.

It is a custom operator for what plain torch would hold: the logits of a piece of the vocabulary are formed in
chunks of ``workspace`` bytes in both passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import wide
from megacompile.kernels.linear_cross_entropy import add_product_, head_backward_flops, head_flops, tiles
from megacompile.kernels.registry import OpPass, OpSpec, declare


@torch.library.custom_op("megacompile::head_tile", mutates_args=())
def head_tile(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, softcap: float, workspace: int
) -> tuple[Tensor, Tensor]:
    """Compute what one piece of the vocabulary adds to a cross-entropy: ([3, T], log-sum-exp [T]).

    The rows of the first are the log-sum-exp of the piece's logits, the logit at the label (0 where
    the label lies in another piece), and the sum of the logits; all in at least float32. The second
    repeats the log-sum-exp for the backward and has no gradient. hidden [T, H], weight [V, H], bias
    [V] or None, labels int64 [T] counted from the piece's first row; ``softcap`` c > 0 maps logits z
    to c·tanh(z / c).
    """
    dtype = wide(hidden.dtype)
    tokens = hidden.shape[0]
    top = hidden.new_full((tokens,), float("-inf"), dtype=dtype)
    total, target, mass = hidden.new_zeros((3, tokens), dtype=dtype).unbind()
    for columns, logits in tiles(hidden, weight, bias, workspace):
        z = _soft_capped(logits.to(dtype), softcap)
        mass += z.sum(1)
        target += _at(z, labels - columns.start)
        above = torch.maximum(top, z.amax(1))
        base = torch.where(above == float("-inf"), 0.0, above)
        total = total * torch.exp(top - base) + (z - base[:, None]).exp_().sum(1)
        top = above
    lse = top + total.log()
    return torch.stack((lse, target, mass)), lse


def _soft_capped(z: Tensor, softcap: float) -> Tensor:
    return torch.tanh(z / softcap) * softcap if softcap > 0 else z


def _at(z: Tensor, labels: Tensor) -> Tensor:
    """z at each row's label, 0 where the label is no column of z."""
    inside = (labels >= 0) & (labels < z.shape[1])
    picked = z.gather(1, labels.clamp(0, z.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return torch.where(inside, picked, torch.zeros((), dtype=z.dtype, device=z.device))


@head_tile.register_fake
def _(hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    parts = hidden.new_empty((3, hidden.shape[0]), dtype=wide(hidden.dtype))
    return parts, torch.empty_like(parts[0])


@torch.library.custom_op("megacompile::head_tile_backward", mutates_args=())
def head_tile_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    softcap: float,
    workspace: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`head_tile` for (hidden, weight, bias); the last is empty without a bias.

    ``grad`` is [3, T]. Chunks of logits are formed again and overwritten by their gradient.
    """
    of_lse, of_target, of_mass = grad.unbind()
    total = torch.zeros_like(hidden, dtype=lse.dtype)
    dweight = torch.empty_like(weight)
    dbias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    for columns, logits in tiles(hidden, weight, bias, workspace):
        z = _soft_capped(logits.to(lse.dtype), softcap)
        slope = (z - lse[:, None]).exp_().mul_(of_lse[:, None]).add_(of_mass[:, None])
        local = labels - columns.start
        inside = (local >= 0) & (local < z.shape[1])
        index = local.clamp(0, z.shape[1] - 1).unsqueeze(1)
        slope.scatter_add_(1, index, torch.where(inside, of_target, 0.0).unsqueeze(1))
        if softcap > 0:
            slope *= 1.0 - (z / softcap).square_()
        del z
        logits.copy_(slope)
        torch.mm(logits.t(), hidden, out=dweight[columns])
        if bias is not None:
            dbias[columns] = slope.sum(0).to(bias.dtype)
        del slope
        add_product_(total, logits, weight[columns])
    return total.to(hidden.dtype, copy=True), dweight, dbias


@head_tile_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    return torch.empty_like(hidden), torch.empty_like(weight), dbias


def _head_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    hidden, weight, bias, labels, ctx.softcap, ctx.workspace = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(hidden, weight, bias, labels, output[1])


def _head_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, labels, lse = ctx.saved_tensors
    dhidden, dweight, dbias = head_tile_backward(
        grad.contiguous(), hidden, weight, bias, labels, lse, ctx.softcap, ctx.workspace
    )
    return dhidden, dweight, None if bias is None else dbias, None, None, None


head_tile.register_autograd(_head_backward, setup_context=_head_setup)


declare(OpSpec("head_tile", OpPass(head_flops), OpPass(head_backward_flops)))
declare(OpSpec("take_rows"))
declare(OpSpec("put_rows"))

HEAD_TILE = torch.ops.megacompile.head_tile.default

"""Cross-entropy on logits, one loss per token, over a whole vocabulary or tile by tile.

    z = softcap * tanh(logits / softcap)  (where softcap > 0; Gemma 2, arXiv:2408.00118)
    lse = logsumexp(z)
    loss = lse - (1 - s) * z[label] - s * mean(z) + z_loss * lse**2

with label smoothing s (Szegedy et al. 2015, arXiv:1512.00567) and z-loss (PaLM, arXiv:2204.02311).
logits: [T, V], any float type. labels: int64 [T]; ``ignore_index`` gives loss 0 and gradient 0, any
other label outside [0, V) a NaN loss. loss: [T] float32 (float64 for float64 logits). Saved: the
logits and stats [2, T], the maximum of z and the logarithm of the sum of exp(z - maximum). Their
sum is lse, but rounded to one float32 it would cost 0.4 % of every probability at logits of 60000.
"""

from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import as_rows, wide
from megacompile.kernels.cross_entropy_tiles import Terms, accumulate, finish, gradient_, new_state


@torch.library.custom_op("megacompile::cross_entropy", mutates_args=())
def cross_entropy_op(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(loss [T], stats [2, T]); see the module's docstring."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError("cross_entropy needs logits [T, V] and labels [T]")
    terms = Terms(logits.shape[1], ignore_index, label_smoothing, z_loss, softcap)
    labels = labels.contiguous()
    state = new_state(logits, logits.shape[0])
    accumulate(state, as_rows(logits), labels, 0, terms)
    return finish(state, labels, terms)


@torch.library.custom_op("megacompile::cross_entropy_backward", mutates_args=())
def cross_entropy_backward_op(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    """The gradient of the logits, in their type."""
    terms = Terms(logits.shape[1], ignore_index, label_smoothing, z_loss, softcap)
    out = logits.new_empty(logits.shape)
    labels, grad = labels.contiguous(), grad.contiguous()
    return gradient_(as_rows(logits), labels, stats.contiguous(), grad, 0, terms, out)


@cross_entropy_op.register_fake
def _(logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    stats = logits.new_empty((2, logits.shape[0]), dtype=wide(logits.dtype))
    return torch.empty_like(stats[0]), stats


@cross_entropy_backward_op.register_fake
def _(grad: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, labels, *ctx.terms = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, labels, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    logits, labels, stats = ctx.saved_tensors
    dlogits = cross_entropy_backward_op(grad, logits, labels, stats, *ctx.terms)
    return dlogits, None, None, None, None, None


cross_entropy_op.register_autograd(_backward, setup_context=_setup)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """The loss per token [T], differentiable in the logits."""
    terms = ignore_index, label_smoothing, z_loss, softcap
    loss: Tensor = cross_entropy_op(logits, labels, *terms)[0]
    return loss

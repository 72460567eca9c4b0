"""Muon in three parts, of which the device has the second: momentum, Newton–Schulz iterations, the step.

In:  a matrix's flat arrays: its gradient, its momentum, its masters; the settings of ``torch.optim.Muon``.
Out: its update in bfloat16, the orthogonal factor of that, and the masters one step later.

``torch.optim.Muon`` rounds an update to bfloat16 before the iterations, which give bfloat16: so what goes to
the device and comes back loses nothing. Factors come back in the memory order of their matrix: the device
turns those that the iterations leave transposed, because the host would take many times as long.

Invariant: masters and momentum become bitwise what ``torch.optim.Muon`` makes of them on a device that
multiplies as this one does.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr

from megacompile.state import adam

CHUNK = 1 << 19  # elements that the host goes over at a time: 2 MB of each array, which stay in the cache
MOMENTUM_BYTES = 10  # that the first pass moves per element, beside the gradient: momentum, and the update
STEP_BYTES = 10  # and the last one: the factor, and masters


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is torch's Muon itself."""
    return type(optimizer) is torch.optim.Muon


def scratch_bytes(shape: Sequence[int]) -> int:
    """Bytes that :func:`step` takes beside its arrays: a chunk's masters, and its factor, in FP32."""
    return 8 * min(CHUNK, math.prod(shape))


def updates_in(grad: Tensor) -> Tensor:
    """Return where in a flat gradient's memory the update in bfloat16 lies, flat."""
    return grad.view(torch.bfloat16)[: grad.numel()]


@torch.no_grad()
def add_momentum(
    grad: Tensor,
    momentum: Tensor,
    settings: Mapping[str, Any],
    scale: float,
    buffer: Tensor,
    threads: int | None = None,
) -> None:
    """Add a flat gradient times ``scale`` to a flat momentum, and leave the update in the gradient's place;
    ``buffer`` holds a chunk in FP32."""
    out, beta = updates_in(grad), settings["momentum"]
    by_kernel, narrow = adam.backend("muon") == "c", grad.dtype == torch.bfloat16
    size = grad.numel() if by_kernel and narrow else CHUNK  # then it is read where it is written
    for start in range(0, grad.numel(), max(1, size)):
        piece = slice(start, start + size)
        if by_kernel:
            made = out[piece] if narrow else updates_in(buffer[: grad[piece].numel()])
            scalars = (ctypes.c_double * 2)(scale, beta)
            arguments = grad[piece], momentum[piece], made, scalars, narrow, bool(settings["nesterov"])
            count = threads or torch.get_num_threads()
            adam.call_kernel("mc_muon_momentum", made.numel(), *arguments, count, kernel="muon")
            if not narrow:
                out[piece].copy_(made)
            continue
        gradient = buffer[: grad[piece].numel()].copy_(grad[piece])
        if scale != 1:
            gradient.mul_(scale)
        momentum[piece].lerp_(gradient, 1 - beta)
        update = gradient.lerp_(momentum[piece], beta) if settings["nesterov"] else momentum[piece]
        out[piece].copy_(update)  # of what was read already


@torch.no_grad()
def orthogonalize(update: list[Tensor], settings: Mapping[str, Any]) -> Tensor:
    """Take a matrix out of the list, which alone holds it; its orthogonal factor, flat, as the matrix lay.

    The operators are those of torch's ``_zeropower_via_newtonschulz``, in their order; what they made is let
    go as soon as nothing reads it.
    """
    a, b, c = settings["ns_coefficients"]
    x = update.pop()
    by_columns, tall = x.stride(0) < x.stride(1), x.size(0) > x.size(1)
    if tall:
        x = x.T
    x.div_(x.norm().clamp(min=settings["eps"]))
    for _ in range(settings["ns_steps"]):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        del gram
        x = torch.addmm(x, polynomial, x, beta=a)
        del polynomial
    return (x.T if tall != by_columns else x).contiguous().view(-1)


@torch.no_grad()
def step(
    masters: Sequence[Tensor],
    factor: Tensor,
    shape: tuple[int, int],
    settings: Mapping[str, Any],
    buffer: Tensor,
    threads: int | None = None,
) -> None:
    """Decay flat masters of a matrix, in FP32 or as two halves, and move them along a flat factor; ``buffer``
    holds a chunk in FP32."""
    lr = float(settings["lr"])
    decay = 1 - lr * settings["weight_decay"]
    rate = -_adjust_lr(lr, settings["adjust_lr_fn"], torch.Size(shape))
    if adam.backend("muon") == "c":
        low, scalars = masters[1] if len(masters) > 1 else None, (ctypes.c_double * 2)(decay, rate)
        count = threads or torch.get_num_threads()
        adam.call_kernel(
            "mc_muon_step", factor.numel(), masters[0], low, factor, scalars, count, kernel="muon"
        )
        return
    for start in range(0, factor.numel(), CHUNK):
        part, *pieces = (flat[start : start + CHUNK] for flat in (factor, *masters))
        value = pieces[0]
        if len(pieces) > 1:
            value = adam.join(pieces[0], pieces[1], buffer[: part.numel()])
        value.mul_(decay).add_(part, alpha=rate)
        if len(pieces) > 1:
            adam.split(value, pieces[0], pieces[1])

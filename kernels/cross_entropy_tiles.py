# mypy: allow-untyped-defs, allow-incomplete-defs
"""Cross-entropy of logits that come in vocabulary tiles, one loss per token.

    z = softcap * tanh(logits / softcap)  (where softcap > 0; Gemma 2, arXiv:2408.00118)
    lse = logsumexp(z)
    loss = lse - (1 - s) * z[label] - s * mean(z)

with label smoothing s (Szegedy et al. 2015, arXiv:1512.00567). labels: int64 [T]; ``ignore_index`` gives
loss 0 and gradient 0, any other label outside [0, V) a NaN loss. Stats are the maximum of z and the
logarithm of the sum of exp(z - maximum). Their sum is lse, but rounded to one float32 it would cost 0.4 %
of every probability at logits of 60000.

``accumulate`` folds a tile of logits [T, columns] into a running state [4, T] (maximum, sum of
exponentials, z at the label, sum of z; Milakov and Gimelshein 2018, arXiv:1805.02867), ``finish`` turns the
state into losses and stats [2, T], ``gradient_`` overwrites a tile of logits with its gradient. State and
stats are float32 (float64 for float64 logits), and so is all arithmetic. Offsets of rows are int64: tokens
times vocabulary pass 2**31. Traffic per logit: one read in ``accumulate`` (and the state once per tile),
one read and one write in ``gradient_``.
"""

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from megacompile.kernels._triton import (
    accumulator,
    launch,
    launch_columns,
    next_power_of_2,
    runs_triton,
    tile_at,
    tl,
    triton,
    wide,
)
from megacompile.kernels.row_chunks import chunks

BLOCK = 4096


@dataclass(frozen=True)
class LossTerms:
    """The terms of the loss beside the cross-entropy."""

    vocabulary: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float = 0.0


@triton.jit
def capped(x, softcap, CAPPED: tl.constexpr):
    """softcap * tanh(x / softcap)."""
    if CAPPED:
        rise: tl.constexpr = -2.8853900817779268  # -2 log2(e)
        return softcap * (2.0 / (1.0 + tl.exp2(x * (rise / softcap))) - 1.0)
    return x


@triton.jit
def accumulate_kernel(
    logits_ptr, labels_ptr, state_ptr, stride, rows, columns, start, softcap,
    CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token: the columns [start, start + columns) of its row, in blocks.

    ``exp2``, since ``exp`` looks at each of its arguments for results below the normal numbers.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(state_ptr + row)
    total = tl.load(state_ptr + rows + row)
    mass = tl.zeros((BLOCK,), dtype=ACC)
    for begin in range(0, columns, BLOCK):
        col = begin + tl.arange(0, BLOCK)
        inside = col < columns
        x = tl.load(logits_ptr + row * stride + col, mask=inside, other=0.0).to(ACC)
        z = capped(x, softcap, CAPPED)
        if SMOOTHED:
            mass += tl.where(inside, z, 0.0)
        z = tl.where(inside, z, float("-inf"))
        above = tl.maximum(top, tl.max(z, axis=0))
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp2((top - base) * LOG2E) + tl.sum(tl.exp2((z - base) * LOG2E), axis=0)
        top = above
    tl.store(state_ptr + row, top)
    tl.store(state_ptr + rows + row, total)
    label = tl.load(labels_ptr + row) - start
    if (label >= 0) & (label < columns):
        picked = capped(tl.load(logits_ptr + row * stride + label).to(ACC), softcap, CAPPED)
        tl.store(state_ptr + 2 * rows + row, picked)
    if SMOOTHED:
        at = state_ptr + 3 * rows + row
        tl.store(at, tl.load(at) + tl.sum(mass, axis=0))


@triton.jit
def gradient_kernel(
    logits_ptr, labels_ptr, stats_ptr, grad_ptr, stride, rows, columns, start, vocabulary,
    ignore_index, label_smoothing, softcap,
    CAPPED: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of one token, overwritten. With p = exp(z - lse):

    grad * (p - s / V - (1 - s) * [column == label]) * (1 - (z / softcap)**2)
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row, first = tile_at(columns, BLOCK)
    col = first + tl.arange(0, BLOCK)
    inside = col < columns
    label = tl.load(labels_ptr + row)
    top = tl.load(stats_ptr + row)
    rest = tl.load(stats_ptr + rows + row)
    grad = tl.load(grad_ptr + row)
    x = tl.load(logits_ptr + row * stride + col, mask=inside, other=0.0).to(ACC)
    z = capped(x, softcap, CAPPED)
    share = tl.exp2((z - top - rest) * LOG2E) - label_smoothing / vocabulary
    slope = grad * (share - tl.where(col + start == label, 1.0 - label_smoothing, 0.0))
    if CAPPED:
        part = z * (1.0 / softcap)
        slope = slope * (1.0 - part * part)
    slope = tl.where(label == ignore_index, 0.0, slope)
    tl.store(logits_ptr + row * stride + col, slope.to(logits_ptr.dtype.element_ty), mask=inside)


def new_state(logits: Tensor, tokens: int) -> Tensor:
    """The state before any tile: [4, tokens] of (-inf, 0, 0, 0)."""
    state = logits.new_zeros((4, tokens), dtype=wide(logits.dtype))
    state[0] = float("-inf")
    return state


def accumulate(state: Tensor, logits: Tensor, labels: Tensor, start: int, terms: LossTerms) -> None:
    """Fold the logits of columns [start, start + logits.shape[1]) into ``state``."""
    if not runs_triton(logits):
        for part in chunks(logits):
            accumulate_reference(state[:, part], logits[part], labels[part], start, terms)
        return
    accumulate_triton(state, logits, labels, start, terms)


def accumulate_triton(state: Tensor, logits: Tensor, labels: Tensor, start: int, terms: LossTerms) -> None:
    """``accumulate`` by the kernel; logits must have unit column stride."""
    block = min(BLOCK, next_power_of_2(logits.shape[1]))
    launch(
        accumulate_kernel,
        (logits.shape[0],),
        *(logits, labels, state, logits.stride(0), *logits.shape, start, terms.softcap),
        CAPPED=terms.softcap > 0,
        SMOOTHED=terms.label_smoothing > 0,
        ACC=accumulator(logits.dtype),
        BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
    )


def accumulate_reference(state: Tensor, logits: Tensor, labels: Tensor, start: int, terms: LossTerms) -> None:
    """``accumulate`` in plain torch."""
    z = _capped(logits.to(state.dtype), terms.softcap)
    top = torch.maximum(state[0], z.amax(1))
    base = torch.where(top == float("-inf"), 0.0, top)
    state[1] = state[1] * torch.exp(state[0] - base) + torch.exp(z - base[:, None]).sum(1)
    state[0] = top
    local = labels - start
    here = (local >= 0) & (local < z.shape[1])
    picked = z.gather(1, local.clamp(0, z.shape[1] - 1).unsqueeze(1)).squeeze(1)
    state[2] = torch.where(here, picked, state[2])
    state[3] += z.sum(1)


def finish(state: Tensor, labels: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """(loss, stats) of a state that has seen the whole vocabulary."""
    top, rest = state[0], state[1].log()
    smooth = terms.label_smoothing
    loss = rest + (1.0 - smooth) * (top - state[2])
    if smooth:
        loss = loss + smooth * (top - state[3] / terms.vocabulary)
    known = (labels >= 0) & (labels < terms.vocabulary)
    loss = torch.where(known, loss, float("nan"))
    return torch.where(labels == terms.ignore_index, 0.0, loss), torch.stack((top, rest))


def gradient_(
    logits: Tensor, labels: Tensor, stats: Tensor, grad: Tensor, start: int, terms: LossTerms
) -> None:
    """The gradient of a tile of logits, written over it; grad: [T], of the losses."""
    if runs_triton(logits):
        gradient_triton(logits, labels, stats, grad, start, terms)
        return
    for part in chunks(logits):
        given = logits[part], labels[part], stats[:, part], grad[part]
        logits[part] = gradient_reference(*given, start, terms)


def gradient_triton(
    logits: Tensor, labels: Tensor, stats: Tensor, grad: Tensor, start: int, terms: LossTerms
) -> None:
    """``gradient_`` by the kernel; logits must have unit column stride."""
    block = min(BLOCK // 2, next_power_of_2(logits.shape[1]))
    launch_columns(
        *(gradient_kernel, *logits.shape, block, logits.dtype),
        *(logits, labels, stats, grad, logits.stride(0), *logits.shape, start),
        *astuple(terms),
        CAPPED=terms.softcap > 0,
    )


def gradient_reference(
    logits: Tensor, labels: Tensor, stats: Tensor, grad: Tensor, start: int, terms: LossTerms
) -> Tensor:
    """The gradient of a tile of logits in plain torch, in the type of ``stats``."""
    z = _capped(logits.to(stats.dtype), terms.softcap)
    smooth = terms.label_smoothing
    (top, rest), grad, label = stats[:, :, None], grad[:, None], labels[:, None]
    slope = torch.exp(z - top - rest) - smooth / terms.vocabulary
    columns = torch.arange(start, start + z.shape[1], device=z.device)
    slope = grad * torch.where(columns == label, slope - (1.0 - smooth), slope)
    if terms.softcap:
        slope = slope * (1.0 - (z / terms.softcap).square())
    return torch.where(label == terms.ignore_index, 0.0, slope)


def _capped(z: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(z / softcap) if softcap else z

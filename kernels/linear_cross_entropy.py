# mypy: allow-untyped-defs, allow-incomplete-defs
"""A linear head and its cross-entropy without ever holding the logits."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from megacompile.kernels._triton import (
    AotCase,
    accumulator,
    aot_cases,
    ceil_div,
    chunks,
    launch,
    launch_columns,
    next_power_of_2,
    on_gpu,
    runs_triton,
    tile_at,
    tl,
    triton,
    wide,
)
from megacompile.kernels.registry import (
    Arguments,
    Cost,
    Kernel,
    Operation,
    OpPass,
    OpSpec,
    Shape,
    declare,
    normal,
)

# ------------------------------------------------------------------------------------------------------------
# Cross-entropy of logits that come in vocabulary tiles, one loss per token.
#
#     z = softcap * tanh(logits / softcap)  (where softcap > 0; Gemma 2, arXiv:2408.00118)
#     lse = logsumexp(z)
#     loss = lse - (1 - s) * z[label] - s * mean(z)
#
# with label smoothing s (Szegedy et al. 2015, arXiv:1512.00567). labels: int64 [T]; ``ignore_index`` gives
# loss 0 and gradient 0, any other label outside [0, V) a NaN loss. Stats are the maximum of z and the
# logarithm of the sum of exp(z - maximum). Their sum is lse, but rounded to one float32 it would cost 0.4 %
# of every probability at logits of 60000.
#
# ``accumulate`` folds a tile of logits [T, columns] into a running state [4, T] (maximum, sum of
# exponentials, z at the label, sum of z; Milakov and Gimelshein 2018, arXiv:1805.02867), ``finish`` turns the
# state into losses and stats [2, T], ``gradient_`` overwrites a tile of logits with its gradient. State and
# stats are float32 (float64 for float64 logits), and so is all arithmetic. Offsets of rows are int64: tokens
# times vocabulary pass 2**31. Traffic per logit: one read in ``accumulate`` (and the state once per tile),
# one read and one write in ``gradient_``.


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


@aot_cases("linear_cross_entropy")
def _aot() -> list[AotCase]:
    def case(columns: int, dtype: torch.dtype, terms: LossTerms) -> None:
        logits = torch.empty((4096, columns), dtype=dtype, device="meta")
        labels = torch.empty(4096, dtype=torch.int64, device="meta")
        state = new_state(logits, 4096)
        accumulate_triton(state, logits, labels, 0, terms)
        gradient_triton(logits, labels, state, state[0], 0, terms)

    whole, every = LossTerms(128256), LossTerms(128256, -100, 0.1, 30.0)
    return [
        ("128256 bf16", partial(case, 128256, torch.bfloat16, whole)),
        ("128256 bf16 all terms", partial(case, 128256, torch.bfloat16, every)),
        ("8192 bf16", partial(case, 8192, torch.bfloat16, whole)),
        ("8192 fp32", partial(case, 8192, torch.float32, whole)),
    ]


# ------------------------------------------------------------------------------------------------------------
# A linear head and its cross-entropy without ever holding the logits.
#
# loss[t] = cross_entropy(hidden[t] @ weight.T + bias), with the terms of the tiles above. Both passes walk
# over the vocabulary in tiles whose logits fit ``workspace`` bytes: the forward folds each tile into a
# running log-sum-exp, the backward forms the tile's logits again, overwrites them with their gradient and
# multiplies. Tiling the vocabulary, not the tokens, makes every row of the weight's gradient one matrix
# product over all tokens: it is accumulated in float32 inside the product and rounded once, without a float32
# buffer of the weight's size. What does accumulate over tiles is the gradient of hidden: float32 [T, H].
# Products are the library's (cuBLAS).
#
# hidden: [T, H]. weight: [V, H]. bias: [V] or None. labels: int64 [T]. loss: [T] float32 (or float64). Saves
# hidden, weight and stats [2, T]. Extra cost: the head's forward product once more.


WORKSPACE = 256 << 20
STEP = 256


def tile_width(tokens: int, vocabulary: int, itemsize: int, workspace: int) -> int:
    """Return the number of columns of logits that fit the workspace: a multiple of 256, and at least that."""
    fitting = workspace // max(1, tokens * itemsize) // STEP * STEP
    return min(max(fitting, STEP), vocabulary)


def tiles(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, workspace: int
) -> Iterator[tuple[slice, Tensor]]:
    """(columns, their logits) tile by tile, all in one buffer, in hidden's type.

    Of fake tensors, on which only memory is measured, the first two tiles and the last stand for all.
    """
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    width = tile_width(tokens, vocabulary, hidden.element_size(), workspace)
    buffer = hidden.new_empty(tokens * width)
    starts: Sequence[int] = range(0, vocabulary, width)
    if isinstance(hidden, FakeTensor):
        starts = sorted({*starts[:2], *starts[-1:]})
    for start in starts:
        columns = slice(start, min(start + width, vocabulary))
        part = weight[columns]
        logits = buffer[: tokens * part.shape[0]].view(tokens, part.shape[0])
        if bias is None:
            torch.mm(hidden, part.t(), out=logits)
        else:
            torch.addmm(bias[columns], hidden, part.t(), out=logits)
        yield columns, logits


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total is wider than a and b; beside the CPU, within the product.

    Of fake tensors, on which only memory is measured, that takes none.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif on_gpu(a) and isinstance(a, FakeTensor):
        pass  # torch 2.11's fake kernel of the product below fails
    elif a.device.type != "cpu":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        for part in chunks(b, a.shape[0] + b.shape[1]):
            total.addmm_(a[:, part].to(total.dtype), b[part].to(total.dtype))


@torch.library.custom_op("megacompile::linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    workspace: int,
) -> tuple[Tensor, Tensor]:
    """(loss [T], stats [2, T]); see the module's docstring."""
    if hidden.ndim != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError("linear_cross_entropy needs hidden [T, H] and labels [T]")
    terms = LossTerms(weight.shape[0], ignore_index, label_smoothing, softcap)
    labels = labels.contiguous()
    state = new_state(hidden, hidden.shape[0])
    for columns, logits in tiles(hidden, weight, bias, workspace):
        accumulate(state, logits, labels, columns.start, terms)
    return finish(state, labels, terms)


@torch.library.custom_op("megacompile::linear_cross_entropy_backward", mutates_args=())
def linear_cross_entropy_backward_op(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    stats: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    workspace: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dhidden, dweight, dbias); dbias is empty where there is no bias."""
    terms = LossTerms(weight.shape[0], ignore_index, label_smoothing, softcap)
    labels, grad, stats = labels.contiguous(), grad.contiguous(), stats.contiguous()
    total = torch.zeros_like(hidden, dtype=wide(hidden.dtype))
    dweight, dbias = torch.empty_like(weight), _bias_like(bias, weight)
    for columns, logits in tiles(hidden, weight, bias, workspace):
        gradient_(logits, labels, stats, grad, columns.start, terms)
        torch.mm(logits.t(), hidden, out=dweight[columns])
        add_product_(total, logits, weight[columns])
        if bias is not None:
            dbias[columns] = logits.sum(0, dtype=total.dtype).to(bias.dtype)
    return total.to(hidden.dtype, copy=True), dweight, dbias


def _bias_like(bias: Tensor | None, weight: Tensor) -> Tensor:
    return weight.new_empty(0) if bias is None else torch.empty_like(bias)


@linear_cross_entropy_op.register_fake
def _(hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    stats = hidden.new_empty((2, hidden.shape[0]), dtype=wide(hidden.dtype))
    return torch.empty_like(stats[0]), stats


@linear_cross_entropy_backward_op.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight), _bias_like(bias, weight)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    hidden, weight, bias, labels, *ctx.terms = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(hidden, weight, bias, labels, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, labels, stats = ctx.saved_tensors
    dhidden, dweight, dbias = linear_cross_entropy_backward_op(
        grad, hidden, weight, bias, labels, stats, *ctx.terms
    )
    none = itertools.repeat(None, 5)
    return dhidden, dweight, None if bias is None else dbias, *none


linear_cross_entropy_op.register_autograd(_backward, setup_context=_setup)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    workspace: int = WORKSPACE,
) -> Tensor:
    """The loss per token [T], differentiable in hidden, weight and bias."""
    terms = ignore_index, label_smoothing, softcap, workspace
    loss: Tensor = linear_cross_entropy_op(hidden, weight, bias, labels, *terms)[0]
    return loss


def head_flops(hidden: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    """Count one product of hidden and the head's weight, by their shapes."""
    return 2 * int(hidden[0]) * int(hidden[1]) * int(weight[0])


def head_backward_flops(grad: Any, hidden: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    """Count the logits again, and two products for the gradients."""
    return 3 * head_flops(hidden, weight)


def _launches(fixed: int, for_tile: int) -> Callable[[Arguments], int]:
    """Count launches beside the tiles of logits, and those for each."""

    def count(given: Arguments) -> int:
        hidden, vocabulary = given["hidden"], len(given["weight"])
        width = tile_width(len(hidden), vocabulary, hidden.element_size(), given["workspace"])
        return fixed + for_tile * ceil_div(vocabulary, width)

    return count


def _logits_bytes(passes: int) -> Callable[[Arguments], int]:
    """Count the bytes of logits that kernels read, and in a backward write."""
    return lambda given: passes * len(given["hidden"]) * len(given["weight"]) * given["hidden"].element_size()


def _vocabulary(given: Arguments) -> str:
    more = given["label_smoothing"] > 0.0 or given["softcap"] > 0.0
    return f"{len(given['weight'])} all terms" if more else f"{len(given['weight'])}"


def _eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """A head and its mean loss over tokens, from logits in at least float32, as transformers' losses."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(wide(logits.dtype)), labels)


def _costs(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
    tokens, width, vocabulary = shape
    product, nbytes = 2 * tokens * width * vocabulary, (tokens + vocabulary) * width * itemsize
    return Cost(nbytes, product), Cost(2 * nbytes, 2 * product)


def _inputs(s: Shape, g: torch.Generator) -> list[Tensor]:
    labels = torch.randint(0, s[2], (s[0],), generator=g, device=g.device)
    return [normal(g, s[0], s[1]), normal(g, s[2], s[1], scale=s[1] ** -0.5), labels]


_FORWARD, _BACKWARD = (Kernel(f"{name}_kernel") for name in ("accumulate", "gradient"))
declare(
    OpSpec(
        "linear_cross_entropy",
        OpPass(head_flops, _launches(16, 2), _logits_bytes(1), kernels=(_FORWARD,)),
        OpPass(head_backward_flops, _launches(2, 4), _logits_bytes(2), kernels=(_BACKWARD,)),
        variant=_vocabulary,
        benchmarks=(
            Operation(
                "linear_cross_entropy",
                ("tokens", "width", "vocabulary"),
                ((4096, 4096, 128256), (8192, 2048, 151936)),
                _inputs,
                2,
                _eager,
                _costs,
                lambda x, w, labels: linear_cross_entropy(x, w, labels).mean(),
                lambda shapes, _: (*shapes[0], shapes[1][0]),
                lambda liger, x, w, labels: liger.liger_fused_linear_cross_entropy(x, w, labels),
            ),
        ),
    )
)

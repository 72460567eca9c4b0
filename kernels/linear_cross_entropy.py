# mypy: allow-untyped-defs, allow-incomplete-defs
"""A linear head and its cross-entropy without ever holding the logits.

loss[t] = cross_entropy(hidden[t] @ weight.T + bias), with the terms of
:mod:`~megacompile.kernels.cross_entropy_tiles`. Both passes walk over the vocabulary in tiles whose logits
fit ``workspace`` bytes: the forward folds each tile into a running log-sum-exp, the backward forms the tile's
logits again, overwrites them with their gradient and multiplies. Tiling the vocabulary, not the tokens, makes
every row of the weight's gradient one matrix product over all tokens: it is accumulated in float32 inside the
product and rounded once, without a float32 buffer of the weight's size. What does accumulate over tiles is
the gradient of hidden: float32 [T, H]. Products are the library's (cuBLAS).

hidden: [T, H]. weight: [V, H]. bias: [V] or None. labels: int64 [T]. loss: [T] float32 (or float64). Saves
hidden, weight and stats [2, T]. Extra cost: the head's forward product once more.

Where it is known in advance how much each token's loss counts, :func:`linear_cross_entropy_with_gradients`
makes the gradients with the loss, and spends no product more: it walks over the tokens, so that a piece's
logits are whole. The weight's gradient is then a float32 sum over pieces (as in Liger-Kernel's fused linear
cross-entropy, arXiv:2410.10989, whose pieces are of tokens, too).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from megacompile.kernels._triton import ceil_div, on_gpu, wide
from megacompile.kernels.cross_entropy_tiles import LossTerms, accumulate, finish, gradient_, new_state
from megacompile.kernels.eager_form import EagerForm, Shape, normal
from megacompile.kernels.registry import Arguments, OpPass, OpSpec, declare
from megacompile.kernels.row_chunks import chunks

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

    On fake tensors, which only measure memory, the first two tiles and the last stand for all.
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

    On fake tensors, which only measure memory, that takes none.
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


@torch.library.custom_op("megacompile::linear_cross_entropy_with_gradients", mutates_args=())
def linear_cross_entropy_with_gradients_op(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    workspace: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss [T], dhidden, dweight, dbias) where ``grad`` [T] is the gradient of the losses; dbias is empty
    where there is no bias."""
    terms = LossTerms(weight.shape[0], ignore_index, label_smoothing, softcap)
    labels, grad, dtype = labels.contiguous(), grad.contiguous(), wide(hidden.dtype)
    loss, dhidden = hidden.new_empty(len(hidden), dtype=dtype), torch.empty_like(hidden)
    pieces = _pieces(hidden, weight, workspace)
    sums = len(pieces) != 1  # one piece needs no sum: its product is rounded once as the sum is
    dweight = torch.zeros_like(weight, dtype=dtype) if sums else torch.empty_like(weight)
    dbias = torch.zeros_like(_bias_like(bias, weight), dtype=dtype)
    for piece, part, logits in _logits_of_pieces(hidden, weight, bias, pieces):
        local = labels[piece]
        state = new_state(logits, len(part))
        accumulate(state, logits, local, 0, terms)
        loss[piece], stats = finish(state, local, terms)
        gradient_(logits, local, stats, grad[piece], 0, terms)
        torch.mm(logits, weight, out=dhidden[piece])
        if sums:
            add_product_(dweight, logits.t(), part)
        else:
            torch.mm(logits.t(), part, out=dweight)
        if bias is not None:
            dbias += logits.sum(0, dtype=dtype)
        del logits  # no memory but the sum's beside its rounded copy
    return loss, dhidden, dweight.to(weight.dtype), dbias.to(weight.dtype)


def _logits_of_pieces(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, pieces: Sequence[slice]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(tokens, their hidden states, their logits) piece by piece, the logits all in one buffer."""
    buffer = hidden.new_empty(max((p.stop - p.start for p in pieces), default=0) * len(weight))
    for piece in pieces:
        part = hidden[piece]
        logits = buffer[: len(part) * len(weight)].view(len(part), len(weight))
        if bias is None:
            torch.mm(part, weight.t(), out=logits)
        else:
            torch.addmm(bias, part, weight.t(), out=logits)
        yield piece, part, logits


def piece_length(hidden: Tensor, weight: Tensor, workspace: int) -> int:
    """Return the tokens of a piece: their logits take the workspace, or as many bytes as the weight if that
    is more; a multiple of 256.

    The float32 sum of the weight's gradient is read and written once for each: for a head of 128,256 × 4,096
    and 32,768 tokens that is 34 GB, 12 ms on an H100 beside 146 of products.
    """
    row = max(1, len(weight) * hidden.element_size())
    return max(1, ceil_div(max(workspace, weight.nbytes), row * STEP)) * STEP


def _pieces(hidden: Tensor, weight: Tensor, workspace: int) -> list[slice]:
    """On fake tensors, which only measure memory, the first two and the last stand for all."""
    tokens, length = len(hidden), piece_length(hidden, weight, workspace)
    starts: Sequence[int] = range(0, tokens, length)
    if isinstance(hidden, FakeTensor):
        starts = sorted({*starts[:2], *starts[-1:]})
    return [slice(start, min(start + length, tokens)) for start in starts]


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


@linear_cross_entropy_with_gradients_op.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = hidden.new_empty(len(hidden), dtype=wide(hidden.dtype))
    return loss, torch.empty_like(hidden), torch.empty_like(weight), _bias_like(bias, weight)


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


def linear_cross_entropy_with_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    grad: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    workspace: int = WORKSPACE,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss per token [T] and, for their gradient ``grad`` [T], those of hidden, weight and bias."""
    terms = ignore_index, label_smoothing, softcap, workspace
    found: tuple[Tensor, Tensor, Tensor, Tensor] = linear_cross_entropy_with_gradients_op(
        grad, hidden, weight, bias, labels, *terms
    )
    return found


def head_flops(hidden: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    """Count one product of hidden and the head's weight, by their shapes."""
    return 2 * int(hidden[0]) * int(hidden[1]) * int(weight[0])


def head_backward_flops(grad: Any, hidden: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    """Count the logits again, and two products for the gradients."""
    return 3 * head_flops(hidden, weight)


def head_with_gradients_flops(grad: Any, hidden: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    """Count the logits, and two products for the gradients."""
    return 3 * head_flops(hidden, weight)


def _number_of_pieces(given: Arguments) -> int:
    hidden = given["hidden"]
    return ceil_div(len(hidden), piece_length(hidden, given["weight"], given["workspace"]))


def _launches_of_pieces(given: Arguments) -> int:
    """Count a piece's products, its state, loss and gradients, and the sum that is zeroed and rounded."""
    pieces = _number_of_pieces(given)
    return 2 * (pieces != 1) + 20 * pieces


def _moved_by_pieces(given: Arguments) -> int:
    """Count the bytes of logits that kernels read and write, and those of the sum."""
    pieces, weight = _number_of_pieces(given), given["weight"]
    summed = weight.numel() * wide(weight.dtype).itemsize
    return _logits_bytes(3)(given) + (2 * pieces * summed if pieces > 1 else 0)


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


def _eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """A head and its mean loss over tokens, from logits in at least float32, as transformers' losses."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(wide(logits.dtype)), labels)


def _inputs(s: Shape, g: torch.Generator) -> list[Tensor]:
    labels = torch.randint(0, s[2], (s[0],), generator=g, device=g.device)
    return [normal(g, s[0], s[1]), normal(g, s[2], s[1], scale=s[1] ** -0.5), labels]


declare(
    OpSpec(
        "linear_cross_entropy",
        OpPass(head_flops, _launches(16, 2), _logits_bytes(1)),
        OpPass(head_backward_flops, _launches(2, 4), _logits_bytes(2)),
        OpPass(head_with_gradients_flops, _launches_of_pieces, _moved_by_pieces),
        eager=(
            EagerForm(
                "linear_cross_entropy",
                ("tokens", "width", "vocabulary"),
                (4096, 4096, 128256),
                _inputs,
                2,
                _eager,
                lambda x, w, labels: linear_cross_entropy(x, w, labels).mean(),
                lambda shapes, _: (*shapes[0], shapes[1][0]),
            ),
        ),
    )
)

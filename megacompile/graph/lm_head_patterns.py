"""Pattern of the fuse stage: a linear head and the cross-entropy of what it returns.

Found backwards from ``aten.cross_entropy_loss``: views and casts up to a softcap, then the linear layer.
The replacement never holds the logits; the mean over labels that count stays ordinary torch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.graph.pattern_tools import (
    Emitter,
    Match,
    NearMissError,
    Pattern,
    aten,
    is_call,
    is_cast,
    operands,
    ordered,
    scaled,
    value,
)
from megacompile.kernels.linear_cross_entropy import WORKSPACE

_HEAD_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_HEAD_COPIES = (aten.alias.default, aten.clone.default)
_MEAN, _SUM = 1, 2
Slice = tuple[int, int, int]
"""(dimension, start, end) of leading positions whose logits the loss reads."""
_SHARE = 8


@dataclass(frozen=True)
class _Terms:
    """The arguments of a cross-entropy beside logits and labels."""

    reduction: int
    ignore_index: int
    smoothing: float
    softcap: float
    slices: tuple[Slice, ...]


def linear_cross_entropy(node: fx.Node) -> Match | None:
    """``cross_entropy(softcap(linear(hidden)).float().view(-1, V), labels)``."""
    if not is_call(node, aten.cross_entropy_loss.default):
        return None
    logits, labels, weight, reduction, ignore, smoothing = _arguments(node)
    if weight is not None:
        raise NearMissError("its classes are weighted")
    if value(labels).ndim != 1 or value(labels).dtype != torch.int64 or value(logits).ndim != 2:
        raise NearMissError(
            f"its labels are {value(labels).dtype}{list(value(labels).shape)}, not one int64 per row"
        )
    linear, softcap, inside, views, slices = _chain(logits)
    hidden, matrix, *bias = [a for a in operands(linear) if a is not None]
    assert isinstance(hidden, fx.Node) and isinstance(matrix, fx.Node)
    if value(hidden).dtype != value(matrix).dtype:
        raise NearMissError(f"hidden is {value(hidden).dtype}, the head's weight {value(matrix).dtype}")
    terms = _Terms(reduction, ignore, smoothing, softcap, slices)
    dtype = value(node).dtype

    def build(emit: Emitter, inputs: Sequence[fx.Node]) -> fx.Node:
        return _emit(emit, inputs, terms, linear, dtype)

    inputs = (hidden, matrix, labels, *bias)
    nodes = ordered(inside | {node})
    return Match("linear_cross_entropy", node, nodes, inputs, build, linear, views=views, stays=True)


def _arguments(node: fx.Node) -> tuple[fx.Node, fx.Node, Any, int, int, float]:
    if node.kwargs:
        raise NearMissError("its arguments are given by name")
    defaults: tuple[Any, ...] = (None, _MEAN, -100, 0.0)
    x, labels, *rest = operands(node)
    weight, reduction, ignore, smoothing = (*rest, *defaults[len(rest) :])
    return x, labels, weight, reduction, ignore, smoothing


def _chain(
    logits: fx.Node,
) -> tuple[fx.Node, float, set[fx.Node], tuple[fx.Node, ...], tuple[Slice, ...]]:
    """(linear, softcap, the nodes from it to the loss, the views among them, the slices, first one first)."""
    inside: set[fx.Node] = set()
    views: list[fx.Node] = []
    slices: list[Slice] = []
    softcap = 0.0
    node = logits
    width = value(logits).shape[-1]
    while not is_call(node, aten.linear.default):
        inside.add(node)
        capped = _softcap(node)
        if (
            is_call(node, *_HEAD_VIEWS)
            and value(node).shape[-1] == value(operands(node)[0]).shape[-1] == width
        ):
            if value(node).ndim != 2:
                raise NearMissError(f"the logits are viewed as {list(value(node).shape)} before the loss")
            views.append(node)
            node = operands(node)[0]
        elif is_cast(node) or is_call(node, *_HEAD_COPIES):
            node = operands(node)[0]
        elif (part := _positions(node)) is not None:
            slices.append(part)
            node = operands(node)[0]
        elif capped is not None and not softcap:
            node, softcap, between = capped
            inside |= between
        else:
            target = str(node.target).removesuffix(".default") if node.op == "call_function" else "an input"
            raise NearMissError(f"its logits come from {target}, not from a linear layer")
    return node, softcap, inside | {node}, tuple(views), tuple(reversed(slices))


def _positions(node: fx.Node) -> Slice | None:
    """Return what a slice of a leading dimension keeps: ``logits[:, :-1]``."""
    if not is_call(node, aten.slice.Tensor) or operands(node)[4:] not in ((), (1,)):
        return None
    x, dim, start, end = (*operands(node), *(0, None, None)[len(operands(node)) - 1 :])[:4]
    size = value(x).shape[dim]
    if dim % value(x).ndim == value(x).ndim - 1:
        return None
    return dim % value(x).ndim, start or 0, size if end is None else min(end, size)


def _softcap(node: fx.Node) -> tuple[fx.Node, float, set[fx.Node]] | None:
    """(logits, cap, the nodes between) of ``cap * tanh(logits / cap)``."""
    outer = scaled(node, aten.mul.Tensor)
    if outer is None or not is_call(outer[0], aten.tanh.default):
        return None
    tanh, cap = outer
    inner = scaled(operands(tanh)[0], aten.div.Tensor)
    if inner is None or inner[1] != cap or not cap > 0:
        return None
    assert isinstance(operands(tanh)[0], fx.Node)
    return inner[0], cap, {tanh, operands(tanh)[0]}


def _emit(
    emit: Emitter, inputs: Sequence[fx.Node], terms: _Terms, linear: fx.Node, dtype: torch.dtype
) -> fx.Node:
    hidden, matrix, labels, *bias = inputs
    for part in terms.slices:
        hidden = emit.call(aten.slice.Tensor, hidden, *part, like=linear)
    if value(hidden).ndim != 2:
        if not value(hidden).is_contiguous():
            hidden = emit.call(aten.clone.default, hidden, memory_format=torch.contiguous_format, like=linear)
        hidden = emit.call(aten.view.default, hidden, [-1, value(hidden).shape[-1]], like=linear)
    pair = emit.call(
        torch.ops.megacompile.linear_cross_entropy.default, hidden, matrix, bias[0] if bias else None, labels,
        terms.ignore_index, terms.smoothing, terms.softcap, workspace_bytes(value(hidden), value(matrix)),
        like=linear,
    )  # fmt: skip
    loss = emit.call(operator.getitem, pair, 0, like=linear)
    if terms.reduction in (_MEAN, _SUM):
        loss = emit.call(aten.sum.default, loss)
    if terms.reduction == _MEAN:
        counted = emit.call(aten.ne.Scalar, labels, terms.ignore_index)
        loss = emit.call(aten.div.Tensor, loss, emit.call(aten.sum.default, counted))
    if value(loss).dtype not in (dtype, torch.float64):
        loss = emit.call(aten._to_copy.default, loss, dtype=dtype)
    return loss


def workspace_bytes(hidden: Tensor, weight: Tensor) -> int:
    """Bytes of a tile of logits, of hidden [T, H], weight [V, H]: an eighth of the weight's gradient, which
    the backward holds anyway, but as many as the hidden states have.
    """
    # The float32 sum of the hidden states' gradient is read and written once per tile, so a tile of fixed
    # size would make that quadratic in tokens. In the backward of Llama-8B's head benchmarks.head_traffic
    # counts 1.2 GB at 4,096 tokens. At 65,536 an eighth of the weight is 717 GB (238 ms at an H100's catalog
    # rates, the products 261), as many bytes as the hidden states 69 GB (23 ms); at 131,072 4,304 and 137 GB.
    return max(min(WORKSPACE, weight.numel() * weight.element_size() // _SHARE),
               hidden.numel() * hidden.element_size())  # fmt: skip


PATTERNS: dict[str, Pattern] = {"linear_cross_entropy": linear_cross_entropy}

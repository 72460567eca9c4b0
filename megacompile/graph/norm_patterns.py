"""Patterns of the fuse stage: RMSNorm in its cast orders, and LayerNorm."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from megacompile.graph.captured import module_path
from megacompile.graph.pattern_tools import (
    Emitter,
    Match,
    NearMissError,
    Pattern,
    aten,
    is_call,
    is_cast,
    is_tensor,
    number,
    only_user,
    operands,
    ordered,
    other,
    scaled,
    value,
)


def layer_norm(node: fx.Node) -> Match | None:
    """``aten.layer_norm`` over the last dimension."""
    if not is_call(node, aten.layer_norm.default):
        return None
    x, shape, weight, bias, eps = (*operands(node), *(None, None, 1e-5)[len(operands(node)) - 2 :])[:5]
    if node.kwargs:
        raise NearMissError("its arguments are given by name")
    if not isinstance(shape, (list, tuple)) or len(shape) != 1:
        raise NearMissError(f"it normalises over {shape}, not over the last dimension alone")
    assert isinstance(x, fx.Node)
    given = [n for n in (x, weight, bias) if isinstance(n, fx.Node)]
    if any(value(n).dtype != value(x).dtype for n in [node, *given]):
        raise NearMissError("input, weights and result are not of one dtype")

    def build(emit: Emitter, inputs: Sequence[fx.Node]) -> fx.Node:
        parts = iter(inputs)
        filled = [next(parts) if isinstance(n, fx.Node) else None for n in (x, weight, bias)]
        return emit.call(
            operator.getitem, emit.call(torch.ops.megacompile.layer_norm.default, *filled, eps), 0
        )

    return Match("layer_norm", node, (node,), tuple(given), build, node)


@dataclass(frozen=True)
class _Rms:
    """The subgraph of an RMSNorm, in the fused operator's terms."""

    x: fx.Node
    weight: fx.Node | None
    eps: float
    offset: float
    cast_early: bool


def rms_norm(node: fx.Node) -> Match | None:
    """``x * rsqrt(mean(x**2) + eps)``, with or without a weight, in either cast order."""
    if is_call(node, aten.rms_norm.default):
        return _from_operator(node)
    mean = _mean_square(node)
    if mean is None:
        return None
    wide, eps, inside = mean
    x = wide
    if (
        is_cast(wide)
        and torch.finfo(value(wide).dtype).bits > torch.finfo(value(operands(wide)[0]).dtype).bits
    ):
        x = operands(wide)[0]
        inside.add(wide)
    norm = only_user(node)
    if norm is None or not is_call(norm, aten.mul.Tensor) or other(norm, node) not in (wide, x):
        raise NearMissError(f"{node.name} does not scale the tensor whose squares it is made of")
    inside |= {node, norm}
    return _match(*_weighted(norm, x, eps, inside))


def _mean_square(node: fx.Node) -> tuple[fx.Node, float, set[fx.Node]] | None:
    """(x, eps, the nodes between) of ``rsqrt(mean(x**2) + eps)``."""
    inverse = is_call(node, aten.pow.Tensor_Scalar) and operands(node)[1] == -0.5
    if not inverse and not is_call(node, aten.rsqrt.default):
        return None
    inner: Any = operands(node)[0]
    summed = scaled(inner, aten.add.Tensor)
    if summed is None or not is_call(summed[0], aten.mean.dim):
        return None
    mean, eps = summed
    square, dims, *keep = operands(mean)
    x = _squared(square)
    if x is None or not isinstance(square, fx.Node):
        return None
    if dims not in ([-1], [value(x).ndim - 1]) or keep != [True]:
        raise NearMissError(f"the mean is taken over {dims}, not over the last dimension alone")
    return x, eps, {inner, mean, square}


def _squared(node: Any) -> fx.Node | None:
    """x of ``x**2`` and ``x * x``."""
    power = is_call(node, aten.pow.Tensor_Scalar) and operands(node)[1] == 2
    product = is_call(node, aten.mul.Tensor) and operands(node)[0] is operands(node)[1]
    x = operands(node)[0] if power or product else None
    return x if isinstance(x, fx.Node) else None


def _weighted(
    norm: fx.Node, x: fx.Node, eps: float, inside: set[fx.Node]
) -> tuple[fx.Node, _Rms, set[fx.Node]]:
    """Follow the casts and the weight behind ``norm``: (last node, what it says, all nodes)."""
    root, early, user = norm, False, only_user(norm)
    if user is not None and is_cast(user):
        root, early, user = user, True, only_user(user)
    weight, offset = None, 0.0
    if user is not None and is_call(user, aten.mul.Tensor):
        found = _weight(other(user, root), value(x).shape[-1])
        if found is not None:
            weight, offset, between = found
            inside |= between | {root, user}
            root, user = user, only_user(user)
    if not early and user is not None and is_cast(user):
        inside.add(root)
        root = user
    inside.add(root)
    mixed = value(norm).dtype != value(x).dtype
    return root, _Rms(x, weight, eps, offset, early or not mixed), inside


def _weight(node: Any, width: int) -> tuple[fx.Node, float, set[fx.Node]] | None:
    """(weight, offset, the nodes between) of ``weight``, ``weight.float() + 1`` and the like."""
    if not is_tensor(node) or tuple(value(node).shape) != (width,):
        return None
    between: set[fx.Node] = set()
    offset = 0.0
    moved = scaled(node, aten.add.Tensor)
    if moved is not None:
        between.add(node)
        node, offset = moved
    if is_cast(node):
        between.add(node)
        node = operands(node)[0]
    return node, offset, between


def _match(root: fx.Node, rms: _Rms, inside: set[fx.Node]) -> Match:
    weight, dtype = rms.weight, value(root).dtype
    result = value(rms.x).dtype
    if rms.cast_early and weight is not None:
        result = torch.promote_types(result, value(weight).dtype)
    if torch.finfo(result).bits < torch.finfo(dtype).bits:
        raise NearMissError(f"its result is {dtype}, the fused operator's {result}")

    def build(emit: Emitter, inputs: Sequence[fx.Node]) -> fx.Node:
        x, *rest = inputs
        args = (x, rest[0] if rest else None, rms.eps, rms.offset, rms.cast_early)
        fused = emit.call(operator.getitem, emit.call(torch.ops.megacompile.rms_norm.default, *args), 0)
        if result != dtype and value(fused).dtype != torch.float64:
            fused = emit.call(aten._to_copy.default, fused, dtype=dtype)
        return fused

    inputs = (rms.x,) if weight is None else (rms.x, weight)
    return Match("rms_norm", root, ordered(inside), inputs, build, root)


def _from_operator(node: fx.Node) -> Match:
    """``torch.nn.functional.rms_norm``, which multiplies before it casts."""
    x, shape, weight, eps = (*operands(node), None, None)[:4]
    assert isinstance(x, fx.Node) and isinstance(shape, (list, tuple))
    if len(shape) != 1:
        raise NearMissError(f"it normalises over {shape}, not over the last dimension alone")
    if value(node).dtype != value(x).dtype:
        raise NearMissError("its result has another dtype than its input")
    bound = number(eps)
    if bound is None:
        bound = torch.finfo(value(x).dtype).eps
    assert weight is None or isinstance(weight, fx.Node)
    return _match(node, _Rms(x, weight, bound, 0.0, False), {node})


def add_rms_norm(node: fx.Node) -> Match | None:
    """An addition and the fused RMSNorm of the sum, where both stand in one layer."""
    norm = operands(node)[0] if is_call(node, operator.getitem) else None
    if not is_call(norm, torch.ops.megacompile.rms_norm.default) or operands(node)[1] != 0:
        return None
    total, *rest = operands(norm)
    if not is_call(total, aten.add.Tensor) or total.kwargs or not all(map(is_tensor, operands(total))):
        return None
    x, residual = operands(total)
    if not value(x).shape == value(residual).shape == value(total).shape:
        return None
    outer = module_path(total)
    if outer and not module_path(node).startswith(f"{outer}."):
        raise NearMissError("its sum belongs to another layer, which would have to pass on both terms")
    if not value(x).dtype == value(residual).dtype == value(total).dtype:
        raise NearMissError(f"it adds {value(x).dtype} and {value(residual).dtype}")
    weight, *terms = rest
    inputs = (x, residual) if weight is None else (x, residual, weight)

    def build(emit: Emitter, given: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        args = (*given[:2], given[2] if weight is not None else None, *terms)
        new = emit.call(torch.ops.megacompile.add_rms_norm.default, *args)
        return emit.call(operator.getitem, new, 0), emit.call(operator.getitem, new, 1)

    inside = ordered({total, norm, node})
    return Match(
        "add_rms_norm", node, inside, inputs, build, node, also=(total,), takes=(("rms_norm", node),)
    )


NORM_PATTERNS: dict[str, Pattern] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "layer_norm": layer_norm,
}

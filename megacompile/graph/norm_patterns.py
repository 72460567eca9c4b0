"""Fusion patterns of norms and rotations: RMSNorm, LayerNorm, RoPE, and both on heads."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    halves,
    is_call,
    is_cast,
    is_tensor,
    number,
    only_user,
    operands,
    ordered,
    other,
    scaled,
    slice_range,
    source,
    stepped,
    value,
)

# ------------------------------------------------------------------------------------------------------------
# Patterns of the fuse stage: RMSNorm in its cast orders, and LayerNorm.


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


# ------------------------------------------------------------------------------------------------------------
# Pattern of the fuse stage: rotary position embeddings.


_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def rope(node: fx.Node) -> Match | None:
    """A rotation: half-split, with ``cat([-b, a])`` or as two products, or of neighbouring columns."""
    if is_call(node, *_VIEWS) and is_call(operands(node)[0], aten.stack.default):
        return _rotate_pairs(node, operands(node)[0])
    if not is_call(node, aten.cat.default) or len(operands(node)[0]) != 2:
        return None
    if (operands(node)[1:] or (0,))[0] not in (-1, value(node).ndim - 1):
        return None
    first, second = operands(node)[0]
    if is_call(first, aten.neg.default):
        return _rotate_half(node, first, second)
    if is_call(first, aten.sub.Tensor) and is_call(second, aten.add.Tensor):
        return _two_products(node, first, second)
    return None


def _rotate_half(node: fx.Node, negated: fx.Node, front: Any) -> Match | None:
    found = halves(front, operands(negated)[0])
    if found is None:
        return None
    x, inside = found
    return _turned(node, x, inside | {negated}, interleaved=False)


def _turned(node: fx.Node, x: fx.Node, inside: set[fx.Node], *, interleaved: bool) -> Match:
    """The match around ``node``, the turned and negated copy of x."""
    turned = only_user(node)
    if turned is None or not is_call(turned, aten.mul.Tensor):
        raise NearMissError("the rotated half is not multiplied by a sine")
    root = only_user(turned)
    kept = other(root, turned) if root is not None else None
    if root is None or not is_call(root, aten.add.Tensor) or not is_call(kept, aten.mul.Tensor):
        raise NearMissError("the rotated half is not added to a product with a cosine")
    if x not in operands(kept):
        raise NearMissError("the product with the cosine has another factor than the rotated tensor")
    inside |= {node, turned, kept, root}
    match = _rotation(root, x, other(kept, x), other(turned, node), inside, interleaved=interleaved)
    return replace(match, views=(node,)) if interleaved else match


def _rotate_pairs(node: fx.Node, stack: fx.Node) -> Match | None:
    """``x * cos + stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin``."""
    pair, *dim = operands(stack)
    if len(pair) != 2 or dim not in ([-1], [value(stack).ndim - 1]) or not is_call(pair[0], aten.neg.default):
        return None
    negated, even = pair
    odd = operands(negated)[0]
    if not (is_call(odd, aten.slice.Tensor) and is_call(even, aten.slice.Tensor)):
        return None
    x = operands(even)[0]
    every = [(x, value(x).ndim - 1, start, 2) for start in (1, 0)]
    if [stepped(odd), stepped(even)] != every or value(node).shape != value(x).shape:
        return None
    return _turned(node, x, {stack, negated, even, odd}, interleaved=True)


def _two_products(node: fx.Node, minus: fx.Node, plus: fx.Node) -> Match | None:
    """``cat([a * cos - b * sin, b * cos + a * sin])`` with tables of half the width."""
    products = [*operands(minus), *operands(plus)]
    if len(products) != 4 or not all(is_call(p, aten.mul.Tensor) for p in products):
        return None
    (a, cos), (b, sin), _, _ = (operands(p) for p in products)
    if [tuple(operands(p)) for p in products[2:]] not in ([(b, cos), (a, sin)], [(a, sin), (b, cos)]):
        return None
    found = halves(a, b)
    if found is None:
        return None
    x, inside = found
    return _rotation(node, x, cos, sin, inside | {node, minus, plus, *products}, doubled=True)


def _rotation(
    root: fx.Node,
    x: fx.Node,
    cos: Any,
    sin: Any,
    inside: set[fx.Node],
    *,
    doubled: bool = False,
    interleaved: bool = False,
) -> Match:
    """The match, with the casts around it and the columns that pass unrotated."""
    user = only_user(root)
    if user is not None and is_cast(user) and _widened(x, inside) is not None:
        inside.add(x)
        x = operands(x)[0]
    if user is not None and is_cast(user) and value(user).dtype == value(x).dtype:
        inside.add(user)
        root, user = user, only_user(user)
    if value(root).dtype != value(x).dtype:
        raise NearMissError(f"its result is {value(root).dtype}, its input {value(x).dtype}")
    rotary = value(x).shape[-1]
    for table in (cos, sin):
        if not is_tensor(table) or value(table).shape[-1] * (1 + doubled) != rotary:
            raise NearMissError(f"its tables do not have one value for each of {rotary} columns")
        lead = value(x).shape[:-1]
        if not _spreads(value(table).shape[:-1], lead):
            raise NearMissError("its tables have more rows than its input")
    if value(x).ndim > 4:
        raise NearMissError(f"its input has {value(x).ndim} dimensions, more than four")
    x, root, inside = _partial(x, root, user, inside)

    def build(emit: Emitter, inputs: Sequence[fx.Node]) -> fx.Node:
        tables = [emit.call(aten.cat.default, [t, t], -1) for t in inputs[1:]] if doubled else inputs[1:]
        return emit.call(torch.ops.megacompile.rope.default, inputs[0], *tables, interleaved)

    return Match("rope", root, ordered(inside), (x, cos, sin), build, root, fixed=(1, 2))


def _widened(x: fx.Node, inside: set[fx.Node]) -> fx.Node | None:
    """Return what x is a wider copy of, where nothing outside the match reads the copy."""
    return operands(x)[0] if is_cast(x) and all(user in inside for user in x.users) else None


def _spreads(shape: torch.Size, onto: torch.Size) -> bool:
    """Return whether a shape broadcasts onto another one without changing it."""
    pairs = zip(reversed(shape), reversed(onto), strict=False)
    return len(shape) <= len(onto) and all(a in (1, b) for a, b in pairs)


def _partial(
    x: fx.Node, root: fx.Node, user: fx.Node | None, inside: set[fx.Node]
) -> tuple[fx.Node, fx.Node, set[fx.Node]]:
    """Widen a rotation of the first columns to the whole tensor where the rest is put back."""
    if user is None or not is_call(user, aten.cat.default) or len(operands(user)[0]) != 2:
        return x, root, inside
    front, rest = operands(user)[0]
    whole = source(x)
    head = set[fx.Node]() if whole is x else {x}
    if is_call(whole, aten.slice.Tensor) and (slice_range(whole) or (1,))[0] == 0:
        head |= {whole}
        whole = operands(whole)[0]
    rotary = value(x).shape[-1]
    matches = front is root and is_call(rest, aten.slice.Tensor) and operands(rest)[0] is whole
    if not matches or slice_range(rest) != (rotary, value(whole).shape[-1]) or operands(user)[1:] != (-1,):
        return x, root, inside
    return whole, user, inside | head | {rest, user}


ROPE_PATTERNS: dict[str, Pattern] = {"rope": rope}


# ------------------------------------------------------------------------------------------------------------
# Pattern of the fuse stage: the RMSNorm of each query's or key's head and the rotation behind it.


ops = torch.ops.megacompile


def qk_norm_rope(node: fx.Node) -> Match | None:
    """The fused rotation of what a fused RMSNorm over heads returns, moved behind the heads or not."""
    if not is_call(node, ops.rope.default):
        return None
    x, cos, sin, interleaved = operands(node)
    moved = is_call(x, aten.transpose.int) and operands(x)[1:] == (1, 2)
    normed = operands(x)[0] if moved else x
    norm = operands(normed)[0] if is_call(normed, operator.getitem) else None
    if not is_call(norm, ops.rms_norm.default) or operands(normed)[1] != 0:
        return None
    given, weight, eps, offset, _ = operands(norm)
    if weight is None or value(x).ndim != 4:
        return None
    if interleaved:
        raise NearMissError("its rotation turns pairs of neighbouring columns")
    if value(given).dtype != value(x).dtype:
        raise NearMissError(f"the norm of {value(given).dtype} is {value(x).dtype}")
    for table in (cos, sin):
        if value(table).ndim != 4 or value(table).shape[1:3] != (1, value(x).shape[2]):
            raise NearMissError(f"its tables are {list(value(table).shape)}, not one row for each token")

    def build(emit: Emitter, inputs: Sequence[fx.Node]) -> fx.Node:
        heads, *rest = inputs
        if moved:
            heads = emit.call(aten.transpose.int, heads, 1, 2)
        return emit.call(operator.getitem, emit.call(ops.qk_norm_rope.default, heads, *rest, eps, offset), 0)

    inside = ordered({norm, normed, x, node})
    takes = ("rms_norm", normed), ("rope", node)
    return Match(
        "qk_norm_rope", node, inside, (given, weight, cos, sin), build, node, fixed=(2, 3), takes=takes
    )


QK_NORM_PATTERNS: dict[str, Pattern] = {"qk_norm_rope": qk_norm_rope}

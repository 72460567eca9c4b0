"""Pattern of the fuse stage: rotary position embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

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
    only_user,
    operands,
    ordered,
    other,
    slice_range,
    source,
    stepped,
    value,
)

_ROPE_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def rope(node: fx.Node) -> Match | None:
    """A rotation: half-split, with ``cat([-b, a])`` or as two products, or of neighbouring columns."""
    if is_call(node, *_ROPE_VIEWS) and is_call(operands(node)[0], aten.stack.default):
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

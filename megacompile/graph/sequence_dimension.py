"""Where the values of a graph have their positions, as long as no position reads a later one.

The property that is followed from node to node: *an element of position p in row b depends on positions up
to p of row b alone*. Operators on elements, or over other dimensions than those of rows and positions, keep
it, and so does causal attention. Of any other operator nothing is known, and so it is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

Dims = tuple[int, int]
"""The dimensions of rows and of positions; one and the same where they are flattened into one."""


@dataclass(frozen=True)
class Place:
    """The place of a value's rows and positions, whatever views make of its dimensions.

    Element e belongs to row (e // row) % rows and to position (e // token) % length + first.
    """

    rows: int
    row: int
    token: int
    length: int
    first: int = 0

    def dims(self, shape: torch.Size) -> Dims | None:
        """The dimensions of this shape that are rows and positions; None where they are in pieces."""
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        tokens = [d for d, stride in enumerate(strides) if stride == self.token and shape[d] > 1]
        if len(tokens) != 1 or self.length < 2:
            return None
        if shape[tokens[0]] == self.rows * self.length and self.row == self.length * self.token:
            return tokens[0], tokens[0]
        rows = [d for d, stride in enumerate(strides) if stride == self.row and shape[d] == self.rows]
        return (rows[0], tokens[0]) if len(rows) == 1 and shape[tokens[0]] == self.length else None

    def moved(self, shape: torch.Size, dims: Dims) -> Place:
        """The same rows and positions in other dimensions of another shape."""
        token = math.prod(shape[dims[1] + 1 :])
        flat = dims[0] == dims[1]
        return replace(
            self, row=self.length * token if flat else math.prod(shape[dims[0] + 1 :]), token=token
        )

    def cut(self, start: int, length: int) -> Place:
        """Return the place of flat rows of one position each, those from ``start`` on."""
        return replace(self, length=length, first=self.first + start, row=length)


def name_of(node: fx.Node) -> str:
    """The name of an operator, without its namespace."""
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def arguments(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by their names, defaults among them."""
    assert isinstance(node.target, torch._ops.OpOverload)
    given = node.target._schema.arguments
    named = {a.name: a.default_value for a in given}
    return named | dict(zip(named, node.args, strict=False)) | node.kwargs


def first_value(node: fx.Node) -> Tensor:
    """Return the value of a node, or the first of several: all have their positions in the same
    dimensions."""
    value = node.meta["val"]
    found: Tensor = value if isinstance(value, Tensor) else value[0]
    return found


class Positions:
    """The places of all values that depend on tokens."""

    def __init__(self) -> None:
        self._places: dict[fx.Node, Place] = {}

    def __contains__(self, node: object) -> bool:
        return node in self._places

    def __getitem__(self, node: fx.Node) -> Place:
        return self._places[node]

    def put(self, node: fx.Node, place: Place) -> None:
        """Say where an input has its positions."""
        self._places[node] = place

    def follow(self, node: fx.Node) -> bool:
        """Return whether a call is known to keep the property; notes where its result has its positions."""
        given, value = [n for n in node.all_input_nodes if n in self._places], node.meta.get("val")
        if not given or name_of(node) in _SHAPES_ALONE:
            return name_of(node) != "attention"  # of something else than tokens, whose padding is not known
        if isinstance(value, Tensor) and value.numel() == 0:
            return True
        several = isinstance(value, (tuple, list)) and all(isinstance(v, Tensor) for v in value)
        found = self._place_of(node, given) if isinstance(value, Tensor) or (several and value) else None
        if found is not None:
            self._places[node] = found
        return found is not None

    def _place_of(self, node: fx.Node, given: list[fx.Node]) -> Place | None:
        name, place = name_of(node), self._places[given[0]]
        if name in _VIEW_OPERATORS:
            return place if first_value(node).dtype == first_value(given[0]).dtype else None
        if any(self.dims(n) is None for n in given):
            return None
        rule = _POSITION_RULES.get(name)
        if rule is None and (
            node.target is operator.getitem or torch.Tag.pointwise in getattr(node.target, "tags", ())
        ):
            rule = _elements
        found = rule(self, node, given) if rule is not None else None
        return place.moved(first_value(node).shape, found) if isinstance(found, tuple) else found

    def dims(self, node: fx.Node) -> Dims | None:
        """The dimensions of rows and positions of a value."""
        return self._places[node].dims(first_value(node).shape)

    def alike(self, nodes: Iterable[fx.Node]) -> bool:
        """Return whether values have the same positions, in the same dimensions counted from the last one."""
        forms = set()
        for node in nodes:
            place, dims, shape = self._places[node], self.dims(node), first_value(node).shape
            assert dims is not None
            at = tuple(d - len(shape) for d in dims)
            forms.add((at, shape[dims[0]], place.length, place.first))
        return len(forms) == 1


def _elements(known: Positions, node: fx.Node, given: list[fx.Node]) -> Dims | None:
    """An operator on elements that are aligned, as broadcasting does, from the last dimension on."""
    shape, own, dims = first_value(node).shape, first_value(given[0]).shape, known.dims(given[0])
    assert dims is not None
    moved = dims[0] + len(shape) - len(own), dims[1] + len(shape) - len(own)
    kept = all(shape[there] == own[here] for here, there in zip(dims, moved, strict=True))
    return moved if kept and known.alike(given) else None


def _looked_up(known: Positions, node: fx.Node, given: list[fx.Node]) -> Dims | None:
    """Rows of a table that is the same for all positions."""
    return known.dims(given[0]) if given == [arguments(node)["indices"]] else None


def _product(known: Positions, node: fx.Node, given: list[fx.Node]) -> Dims | None:
    """A product with a matrix that is the same for all positions, not over the positions."""
    left = node.args[1 if name_of(node) == "addmm" else 0]
    dims, rank = known.dims(given[0]), first_value(given[0]).dim()
    assert dims is not None
    return dims if given == [left] and rank - 1 not in dims and first_value(node).dim() == rank else None


def _permuted(known: Positions, node: fx.Node, given: list[fx.Node]) -> Dims | None:
    rank, dims, named = first_value(node).dim(), known.dims(given[0]), arguments(node)
    assert dims is not None
    order = list(range(rank))
    if "dims" in named:
        order = [d % rank for d in named["dims"]]
    else:
        a, b = named["dim0"] % rank, named["dim1"] % rank
        order[a], order[b] = order[b], order[a]
    return order.index(dims[0]), order.index(dims[1])


def _over(known: Positions, node: fx.Node, given: list[fx.Node]) -> Dims | None:
    """An operator over some dimensions, none of them of rows or positions, one of which it may drop."""
    named, value, dims = arguments(node), first_value(given[0]), known.dims(given[0])
    assert dims is not None
    over = named.get("dim", range(-len(named.get("normalized_shape", ())), 0))
    over = {d % value.dim() for d in ([over] if isinstance(over, int) else over or range(value.dim()))}
    if over & set(dims) or not known.alike(given):
        return None
    dropped = over if first_value(node).dim() < value.dim() else set()
    return dims[0] - sum(d < dims[0] for d in dropped), dims[1] - sum(d < dims[1] for d in dropped)


def _joined(known: Positions, node: fx.Node, given: list[fx.Node]) -> Dims | Place | None:
    """Several values behind each other, in the dimension of positions where each goes on where one ends."""
    named, dims = arguments(node), known.dims(given[0])
    assert dims is not None
    parts = named["tensors"]
    if named["dim"] % first_value(node).dim() != dims[1]:
        return _over(known, node, given)
    places = [known[part] for part in parts if part in known]
    ends = [place.first + place.length for place in places]
    goes_on = all(place.first == end for place, end in zip(places[1:], ends, strict=False))
    apart = dims[0] != dims[1] or places[0].rows == 1
    if not (goes_on and apart and len(places) == len(parts) and {known.dims(p) for p in parts} == {dims}):
        return None
    whole = replace(places[0], length=ends[-1] - places[0].first)
    return whole.moved(first_value(node).shape, dims)


def _stacked(known: Positions, node: fx.Node, given: list[fx.Node]) -> Dims | None:
    """Several values beside each other in a dimension of their own."""
    at, dims = arguments(node)["dim"] % first_value(node).dim(), known.dims(given[0])
    assert dims is not None
    return (dims[0] + (dims[0] >= at), dims[1] + (dims[1] >= at)) if known.alike(given) else None


def _sliced(known: Positions, node: fx.Node, given: list[fx.Node]) -> Dims | Place | None:
    """A part of any dimension, also of that of positions where rows are apart."""
    named, value, dims = arguments(node), first_value(given[0]), known.dims(given[0])
    assert dims is not None
    dim, start = named["dim"] % value.dim(), named["start"] or 0
    if dim not in dims:
        return dims
    shape, place = first_value(node).shape, known[given[0]]
    flattened = dims[0] == dims[1] and place.rows > 1
    if dim != dims[1] or flattened or named["step"] != 1 or start < 0:
        return None
    return replace(place, length=shape[dim], first=place.first + start).moved(shape, dims)


def _attended(known: Positions, node: fx.Node, given: list[fx.Node]) -> Dims | None:
    """Causal attention [B, H, T, D] of queries over keys of the same positions."""
    named = arguments(node)
    rows, tokens = known.dims(given[0]) or (-1, -1)
    queries = {named["q"], named["k"], named["v"]}
    lengths = {x.meta["val"].shape[2] for x in queries}
    causal = named["causal"] and len(lengths) == 1 and queries.issuperset(given)
    return (rows, tokens) if causal and known.alike(given) and tokens == 2 and rows in (0, 2) else None


_SHAPES_ALONE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_empty"}
_VIEW_OPERATORS = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten"}
_POSITION_RULES: dict[str, Callable[[Positions, fx.Node, list[fx.Node]], Dims | Place | None]] = {
    **dict.fromkeys(
        ("clone", "alias", "detach", "_to_copy", "to", "type_as", "expand", "dropout"), _elements
    ),
    "embedding": _looked_up,
    **dict.fromkeys(("linear", "mm", "matmul", "bmm", "addmm"), _product),
    **dict.fromkeys(("permute", "transpose"), _permuted),
    **dict.fromkeys(("sum", "mean", "amax", "var", "var_mean", "softmax", "log_softmax", "logsumexp"), _over),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "linalg_vector_norm"), _over),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "select", "unbind", "argmax"), _over),
    "cat": _joined,
    "stack": _stacked,
    "slice": _sliced,
    "attention": _attended,
}

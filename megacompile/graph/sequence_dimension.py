"""What operators do to the dimension of a sequence: one analysis, for padding and for chunks of positions.

:func:`carried` sorts the dimensions of an operator's argument: dimensions of the result too, whose elements
are made of that element alone, and dimensions that the operator works over. Each rule is a sufficient
condition. What no rule knows works over all dimensions.

:class:`Positions` follows a property from node to node with it: *an element of position p in row b depends on
positions up to p of row b alone*. Operators on elements, or over other dimensions than those of rows and
positions, keep it, and so do causal attention, parts and joined parts. Any other operator is refused, because
nothing is known of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

Dims = tuple[int, int]
"""The dimensions of rows and of positions; one and the same where they are flattened into one."""
Carried = tuple[int | None, ...]
"""Of each dimension of an argument the result's, or None."""


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


def worked_over(node: fx.Node, rank: int) -> set[int]:
    """Return the dimensions, of an argument's ``rank``, that an operator is told to work over: all, where it
    is told none."""
    named = arguments(node)
    dims = named.get("dim", named.get("dims"))
    if dims is None or dims == []:
        dims = range(-len(named.get("normalized_shape", ())), 0) or range(rank)
    return {d % max(1, rank) for d in ([dims] if isinstance(dims, int) else dims)}


def carried(node: fx.Node, argument: fx.Node) -> Carried:
    """Return for each dimension of an argument the result's, if an index of it is made of the same index
    alone; None if it is made of others too, or nothing is known.

    Results and arguments of several tensors have their positions in the same dimensions: the first one stands
    for all.
    """
    if not isinstance(argument.meta.get("val"), (Tensor, tuple, list)):
        return ()
    rule = _RULES.get(name_of(node))
    if rule is None and (
        node.target is operator.getitem or torch.Tag.pointwise in getattr(node.target, "tags", ())
    ):
        rule = _elements
    rank = first_value(argument).dim()
    return (None,) * rank if rule is None else rule(node, argument)


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
        if name in VIEWS:  # in terms of elements, so that dimensions may be joined
            return place if first_value(node).dtype == first_value(given[0]).dtype else None
        if any(self.dims(n) is None for n in given):
            return None
        if name in _OF_POSITIONS and (found := _OF_POSITIONS[name](self, node, given)) is not None:
            return found
        places = [self._places[n] for n in given]
        ends = {self._moved(node, n) for n in given}
        (dims, *others) = ends
        if others or dims is None or len({(p.length, p.first) for p in places}) > 1:
            return None
        return place.moved(first_value(node).shape, dims)

    def _moved(self, node: fx.Node, argument: fx.Node) -> Dims | None:
        """The dimensions of the result that an argument's rows and positions are in."""
        dims, over = self.dims(argument), carried(node, argument)
        assert dims is not None
        row, token = (over[d] for d in dims)
        return None if row is None or token is None else (row, token)

    def dims(self, node: fx.Node) -> Dims | None:
        """The dimensions of rows and positions of a value."""
        return self._places[node].dims(first_value(node).shape)


def _elements(node: fx.Node, argument: fx.Node) -> Carried:
    """An operator on elements that are aligned, as broadcasting does, from the last dimension on."""
    shape, own = first_value(node).shape, first_value(argument).shape
    behind = len(shape) - len(own)
    return tuple(d + behind if shape[d + behind] == size else None for d, size in enumerate(own))


def _viewed(node: fx.Node, argument: fx.Node) -> Carried:
    """Dimensions that stay whole, with as many elements behind each."""
    shape, own = first_value(node).shape, first_value(argument).shape
    places = {(size, math.prod(shape[d + 1 :])): d for d, size in enumerate(shape) if size > 1}
    return tuple(places.get((size, math.prod(own[d + 1 :]))) for d, size in enumerate(own))


def _looked_up(node: fx.Node, argument: fx.Node) -> Carried:
    """Rows of a table that is the same for all positions."""
    rank = first_value(argument).dim()
    return tuple(range(rank)) if argument is arguments(node)["indices"] else (None,) * rank


def _product(node: fx.Node, argument: fx.Node) -> Carried:
    """A product with a matrix that is the same for all positions, not over the positions."""
    rank, at = first_value(argument).dim(), int(name_of(node) == "addmm")
    others = [a for i, a in enumerate(node.args) if i != at]
    if argument is not node.args[at] or argument in others or first_value(node).dim() != rank:
        return (None,) * rank
    return (*range(rank - 1), None)


def _permuted(node: fx.Node, argument: fx.Node) -> Carried:
    rank, named = first_value(node).dim(), arguments(node)
    order = list(reversed(range(rank)))  # of t, which names none
    if "dims" in named:
        order = [d % rank for d in named["dims"]]
    elif "dim0" in named:
        a, b = named["dim0"] % rank, named["dim1"] % rank
        order = list(range(rank))
        order[a], order[b] = b, a
    return tuple(order.index(d) for d in range(rank))


def _over(node: fx.Node, argument: fx.Node) -> Carried:
    """An operator over some dimensions, one of which it may drop."""
    first, rank = next(iter(arguments(node).values())), first_value(argument).dim()
    parts = first if isinstance(first, (list, tuple)) else [first]
    if argument not in parts and first_value(argument).shape != first_value(parts[0]).shape:
        return (None,) * rank  # such as a norm's weight
    over = worked_over(node, rank)
    dropped = over if first_value(node).dim() < rank else set()
    return tuple(None if d in over else d - sum(o < d for o in dropped) for d in range(rank))


def _spread(node: fx.Node, argument: fx.Node) -> Carried:
    """The gradient of a part: zeros around it, in a dimension of its own or in one that it has."""
    rank, whole = first_value(argument).dim(), first_value(node).dim()
    (at,) = worked_over(node, whole)
    if rank < whole:
        return tuple(d + (d >= at) for d in range(rank))
    return tuple(None if d == at else d for d in range(rank))


def _stacked(node: fx.Node, argument: fx.Node) -> Carried:
    """Several values beside each other in a dimension of their own."""
    at = arguments(node)["dim"] % first_value(node).dim()
    return tuple(d + (d >= at) for d in range(first_value(argument).dim()))


def _joined(known: Positions, node: fx.Node, given: list[fx.Node]) -> Place | None:
    """Several values behind each other in the dimension of positions, where each goes on where one ends."""
    named, dims = arguments(node), known.dims(given[0])
    assert dims is not None
    parts = named["tensors"]
    places = [known[part] for part in parts if part in known]
    ends = [place.first + place.length for place in places]
    goes_on = all(place.first == end for place, end in zip(places[1:], ends, strict=False))
    apart = dims[0] != dims[1] or places[0].rows == 1
    along = named["dim"] % first_value(node).dim() == dims[1]
    if not (
        along and goes_on and apart and len(places) == len(parts) and {known.dims(p) for p in parts} == {dims}
    ):
        return None
    whole = replace(places[0], length=ends[-1] - places[0].first)
    return whole.moved(first_value(node).shape, dims)


def _sliced(known: Positions, node: fx.Node, given: list[fx.Node]) -> Place | None:
    """A part of the dimension of positions, where rows are apart."""
    named, value, dims = arguments(node), first_value(given[0]), known.dims(given[0])
    assert dims is not None
    dim, start = named["dim"] % value.dim(), named["start"] or 0
    shape, place = first_value(node).shape, known[given[0]]
    flattened = dims[0] == dims[1] and place.rows > 1
    if dim != dims[1] or flattened or named["step"] != 1 or start < 0:
        return None
    return replace(place, length=shape[dim], first=place.first + start).moved(shape, dims)


def _attended(known: Positions, node: fx.Node, given: list[fx.Node]) -> Place | None:
    """Causal attention [B, H, T, D] of queries over keys of the same positions."""
    named, places = arguments(node), [known[n] for n in given]
    rows, tokens = known.dims(given[0]) or (-1, -1)
    queries = {named["q"], named["k"], named["v"]}
    lengths = {x.meta["val"].shape[2] for x in queries}
    causal = named["causal"] and len(lengths) == 1 and queries.issuperset(given)
    apart = rows == 0 or (rows == 2 and places[0].rows == 1)
    alike = {(*(known.dims(n) or ()), p.rows, p.length, p.first) for n, p in zip(given, places, strict=True)}
    if not (causal and len(alike) == 1 and tokens == 2 and apart):
        return None
    return places[0].moved(first_value(node).shape, (rows, tokens))


VIEWS = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten"}
PRODUCTS = {"linear", "mm", "matmul", "bmm", "addmm"}  # over the left one's last dimension
_SHAPES_ALONE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_empty"}
_RULES: dict[str, Callable[[fx.Node, fx.Node], Carried]] = {
    **dict.fromkeys(
        ("clone", "alias", "detach", "_to_copy", "to", "type_as", "expand", "dropout"), _elements
    ),
    **dict.fromkeys(VIEWS, _viewed),
    "embedding": _looked_up,
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(("permute", "transpose", "t"), _permuted),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "var", "var_mean"), _over),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp"), _over),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "linalg_vector_norm"), _over),
    **dict.fromkeys(
        ("split", "split_with_sizes", "chunk", "select", "unbind", "argmax", "slice", "cat"), _over
    ),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _over),
    **dict.fromkeys(("slice_backward", "select_backward"), _spread),
    "stack": _stacked,
}
_OF_POSITIONS: dict[str, Callable[[Positions, fx.Node, list[fx.Node]], Place | None]] = {
    "cat": _joined,
    "slice": _sliced,
    "attention": _attended,
}

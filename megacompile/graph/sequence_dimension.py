"""The sequence dimension of a graph: where positions are, what mixes them, and padding on the right."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from megacompile.graph.captured import Captured, results_of, written_buffers

# ------------------------------------------------------------------------------------------------------------
# Where the values of a graph have their positions, as long as no position reads a later one.
#
# The property that is followed from node to node: *an element of position p in row b depends on positions up
# to p of row b alone*. Operators on elements, or over other dimensions than those of rows and positions, keep
# it, and so does causal attention. Of any other operator nothing is known, and so it is refused.


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
        if name in _VIEWS:
            return place if first_value(node).dtype == first_value(given[0]).dtype else None
        if any(self.dims(n) is None for n in given):
            return None
        rule = _RULES.get(name)
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
_VIEWS = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten"}
_RULES: dict[str, Callable[[Positions, fx.Node, list[fx.Node]], Dims | Place | None]] = {
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


# ------------------------------------------------------------------------------------------------------------
# Which calls of a graph mix the positions of a sequence by other means than attention that a mask governs.
#
# In: a graph and how long the sequence is. Out: what may carry padding to a token before it.


_MIXING = ("_fft_", "conv", "im2col", "pool", "flip", "roll", "einsum", "pad")  # whatever a mask says
_PRODUCTS = {"matmul", "mm", "bmm", "addmm", "baddbmm", "linear"}  # over the left one's last dimension
_WHOLE = {"sum", "mean", "max", "min", "prod", "std", "var", "norm", "linalg_vector_norm"}  # of all elements
_MOVING = {
    *("cat", "stack", "squeeze", "unsqueeze", "permute"),
    *("gather", "index_select", "scatter", "index_add"),
}
_CUTTING = {"slice", "pad", "constant_pad_nd"}  # or nothing, where the shape stays
_RESHAPES = {"view", "reshape", "_unsafe_view"}
_LAYING = {"add", "sub", "masked_fill", "where"}  # a mask over scores
_SOFTMAX = {"softmax", "_softmax"}
_KEEPING = {
    *("_to_copy", "to", "type_as", "expand", "clone", "alias", "dropout", "mul", "div"),
    *_RESHAPES,
}


def masked(graph: fx.Graph, masks: set[fx.Node]) -> set[fx.Node]:
    """A model's own attention: softmaxes over what a mask was laid over, and products with their results."""
    laid: set[fx.Node] = set()
    shares: set[fx.Node] = set()
    products: set[fx.Node] = set()
    for node in graph.nodes:
        first, name = next(iter(node.all_input_nodes), None), name_of(node)
        if name in _LAYING and any(a in masks for a in node.all_input_nodes):
            laid.add(node)
        if (name in _SOFTMAX and first in laid) or (name in _KEEPING and first in shares):
            shares.add(node)
        elif name in _KEEPING and first in laid:
            laid.add(node)
        elif name in _PRODUCTS and first in shares:
            products.add(node)
    return shares | products


def mixes(node: fx.Node, length: int) -> bool:
    """Return whether a node mixes positions of a sequence of this length by other means than attention."""
    target, name = node.target, name_of(node)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return isinstance(target, torch._ops.HigherOrderOperator)
    given = [v for v in (a.meta.get("val") for a in node.all_input_nodes) if _is_float(v)]
    made: Any = node.meta.get("val")
    if not given or (name in _CUTTING and made.shape == given[0].shape):
        return False
    if any(part in name for part in _MIXING) and not _is_causal(node, length):
        return any(length in v.shape for v in (given[0], made) if _is_float(v))
    if name in _PRODUCTS:
        left = node.args[1 if "add" in name else 0]
        return isinstance(left, fx.Node) and left.meta["val"].shape[-1] == length
    if length not in given[0].shape or name in _MOVING:
        return False
    if name in _RESHAPES:
        return not _keeps_whole(given[0].shape, made.shape, length)
    return any(given[0].shape[d] == length for d in _dimensions(node, given[0].dim()))


def _keeps_whole(shape: torch.Size, made: torch.Size, length: int) -> bool:
    """Return whether a view has all positions in one dimension, be it with others, and not in chunks."""
    position = math.prod(shape[shape.index(length) + 1 :])
    inner = [math.prod(made[d + 1 :]) for d in range(len(made))]
    return any(
        position % within == 0 and size * within % (length * position) == 0
        for size, within in zip(made, inner, strict=True)
    )


def _is_causal(node: fx.Node, length: int) -> bool:
    """Return whether a node convolves along positions, and only those are read that no later position
    reaches.

    Output i of a convolution reads the inputs up to i - padding + dilation * (width - 1).
    """
    if name_of(node) != "conv1d":
        return False
    found = arguments(node)
    (stride,), (padding,), (dilation,) = found["stride"], found["padding"], found["dilation"]
    reach = dilation * (found["weight"].meta["val"].shape[-1] - 1)
    causal = stride == 1 and padding >= reach and found["input"].meta["val"].shape[-1] == length
    return causal and all(_reads_first(user, length) for user in node.users)


def _reads_first(node: fx.Node, length: int) -> bool:
    """Return whether a node is a slice of no more than the first ``length`` of the last dimension."""
    if name_of(node) != "slice":
        return False
    found, made = arguments(node), node.meta["val"]
    last, first = found["dim"] % made.dim() == made.dim() - 1, found["start"] in (None, 0)
    return last and first and found["step"] == 1 and made.shape[-1] <= length


def _dimensions(node: fx.Node, rank: int) -> list[int]:
    """The dimensions over which an operator works; where it only takes the start of one, none."""
    found = arguments(node)
    if found.get("start", 1) in (0, None) or found.get("index", 1) == 0:
        return []
    if "dim" not in found and "dims" not in found:
        return list(range(rank)) if name_of(node) in _WHOLE else []
    dims = found.get("dim", found.get("dims"))
    dims = range(rank) if dims is None or dims == [] else dims
    return [dims] if isinstance(dims, int) else list(dims)


def _is_float(found: Any) -> TypeGuard[Tensor]:
    return isinstance(found, Tensor) and (found.is_floating_point() or found.is_complex())


# ------------------------------------------------------------------------------------------------------------
# Padding on the right of causal rows, whose mask is without effect and may be left out.
#
# In: a batch, for ``is_padded_right``; a graph that was traced without the padding of its masks, for
# ``reads_no_padding``. Out: whether the loss and all gradients are those of the graph with masks.
#
# The proof. Row b of a batch has ``n[b]`` tokens, then padding, and no label from n[b] on. Masks of padding
# hide keys from n[b] on. Causal attention at a position before n[b] sees none of these keys in either case.
# So without the masks nothing changes before n[b], as long as an element of position p in row b depends on
# positions up to p of row b alone, which :mod:`~megacompile.graph.sequence_dimension` follows through the
# graph. Cross-entropy meets such elements with labels of the same or later positions; those from n[b] on it
# ignores, so the loss does not depend on anything there. The same is true of values that are filled where
# such labels are ignored, as outputs for a loss outside of the program may be. Hence nothing at padding gets
# a gradient, nor gives one to a weight.
#
# What refutes the proof: a graph that still reads the mask, as a router's loss does that counts tokens by it;
# a router's loss that counts all; convolutions, recurrences, logits among the results.


aten = torch.ops.aten
_IGNORED = -100
_ENTRIES = {"input_ids", "attention_mask", "labels", "position_ids", "num_items_in_batch"}
_COPIES = ("clone", "alias", "detach", "_to_copy", "to")
_COMPARING = (aten.ne.Scalar, aten.eq.Scalar)
_ROW_VIEWS = ("view", "reshape", "_unsafe_view", "flatten")


def is_padded_right(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a batch of tokens has padding at the ends of its rows alone, and no label there.

    ``input_ids``, ``attention_mask`` (0 at padding) and ``labels`` (-100 there): [B, T].
    """
    ids, mask, labels = (kwargs.get(name) for name in ("input_ids", "attention_mask", "labels"))
    if not (isinstance(ids, Tensor) and isinstance(mask, Tensor) and isinstance(labels, Tensor)):
        return False
    tensors = {name for name, value in kwargs.items() if isinstance(value, Tensor)}
    if ids.dim() != 2 or not ids.shape == mask.shape == labels.shape or tensors - _ENTRIES:
        return False
    real = mask != 0
    resumed = real[:, 1:] & ~real[:, :-1]
    return not bool(resumed.any()) and bool((real | (labels == _IGNORED)).all())


def reads_no_padding(captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the proof holds of a graph that was traced on this batch, whose tensors are all
    distinct."""
    leaves = pytree.tree_leaves((args, kwargs))
    read = {name: leaves[index] for name, index in captured.inputs.items()}
    if any(leaf is kwargs["attention_mask"] for leaf in read.values()) or written_buffers(captured.graph):
        return False
    known, labels = Positions(), Labels()
    rows, length = kwargs["input_ids"].shape
    for node in captured.graph.nodes:
        if node.name in read and node.op == "placeholder":
            leaf = read[node.name]
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                continue
            if leaf.shape != (rows, length):
                return False
            (labels if leaf is kwargs["labels"] else known).put(node, Place(rows, length, 1, length))
        elif node.op == "call_function" and not _holds(node, known, labels):
            return False
    return not any(node in known for node in results_of(captured.graph))


class Labels(Positions):
    """The places of labels, -100 at padding, and of what tells where labels are ignored, or are not."""

    def __init__(self) -> None:
        super().__init__()
        self.ignored: set[fx.Node] = set()
        self.counted: set[fx.Node] = set()


def _holds(node: fx.Node, known: Positions, labels: Labels) -> bool:
    _follow_labels(node, labels)
    if name_of(node) == "cross_entropy_loss" and node.args[0] in known:
        return _ignores(node, known, labels)
    if name_of(node) == "masked_fill" and node.args[1] in labels.ignored and _fills(node, known, labels):
        return True
    return known.follow(node)


def _fills(node: fx.Node, known: Positions, labels: Labels) -> bool:
    """Return whether each position is filled where the label of its own or a later one is ignored."""
    x, mask = node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(mask, fx.Node)
    if x not in known or known.dims(x) != labels.dims(mask) or node.all_input_nodes != [x, mask]:
        return False
    at, of = known[x], labels[mask]
    return first_value(x).shape == first_value(mask).shape and at.first <= of.first


def _follow_labels(node: fx.Node, labels: Labels) -> None:
    """Labels that are copied, flattened, cut or moved to earlier positions are still ignored at padding."""
    source = next(iter(node.all_input_nodes), None)
    if source not in labels or len(node.all_input_nodes) > 1:
        return
    assert source is not None
    if source in labels.ignored | labels.counted or node.target in _COMPARING:
        _follow_comparison(node, source, labels)
        return
    name, place, value = name_of(node), labels[source], node.meta["val"]
    if not isinstance(value, Tensor) or value.dtype not in (torch.int64, source.meta["val"].dtype):
        return
    length, apart = value.shape[-1], source.meta["val"].dim() == 2
    if name in _ROW_VIEWS + _COPIES:
        labels.put(node, place)
    elif name in ("pad", "constant_pad_nd") and apart:
        named = arguments(node)
        behind = list(named["pad"])[::2] == [0] and named.get("mode", "constant") == "constant"
        if behind and named["value"] == _IGNORED:
            labels.put(node, place.cut(0, length))
    elif name == "slice" and apart and arguments(node)["dim"] in (1, -1) and arguments(node)["step"] == 1:
        start = arguments(node)["start"] or 0
        if start >= 0:
            labels.put(node, place.cut(start, length))


def _follow_comparison(node: fx.Node, source: fx.Node, labels: Labels) -> None:
    """Follow where labels are -100, and the opposite; at padding the first is true."""
    opposite = {aten.logical_not.default, aten.bitwise_not.default}
    if source in labels.ignored | labels.counted:
        if node.target not in opposite:
            return
        is_ignored = source in labels.counted
    elif node.args[1] != _IGNORED:
        return
    else:
        is_ignored = node.target is aten.eq.Scalar
    labels.put(node, labels[source])
    (labels.ignored if is_ignored else labels.counted).add(node)


def _ignores(node: fx.Node, known: Positions, labels: Labels) -> bool:
    """Return whether each row of logits meets a label of its own or a later position, and no weight of
    classes."""
    named = arguments(node)
    logits, label = named["self"], named["target"]
    if named["weight"] is not None or named["ignore_index"] != _IGNORED or label not in labels:
        return False
    if label in labels.ignored | labels.counted or first_value(logits).dim() != 2:
        return False
    if known.dims(logits) != (0, 0):
        return False
    at, of = known[logits], labels[label]
    return at.length == of.length and at.first <= of.first

"""Which calls of a graph mix the positions of a sequence by other means than attention that a mask governs.

In: a graph and how long the sequence is. Out: what may carry padding to a token before it.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from megacompile.graph.sequence_dimension import PRODUCTS, VIEWS, arguments, name_of, worked_over

_MIXING = ("_fft_", "conv", "im2col", "pool", "flip", "roll", "einsum", "pad")  # whatever a mask says
_PRODUCTS = {*PRODUCTS, "baddbmm"}
# if told no dimensions
_OVER_ALL = {"sum", "mean", "max", "min", "prod", "std", "var", "norm", "linalg_vector_norm"}
_MOVING = {"cat", "stack", "permute", "gather", "index_select", "scatter", "index_add"}
_CUTTING = {"slice", "pad", "constant_pad_nd"}  # or nothing, where the shape stays
_LAYING = {"add", "sub", "masked_fill", "where"}  # a mask over scores
_SOFTMAX = {"softmax", "_softmax"}
_KEEPING = {
    *("_to_copy", "to", "type_as", "expand", "clone", "alias", "dropout", "mul", "div"),
    *("view", "reshape", "_unsafe_view"),
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
    if name in VIEWS:
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


def _dimensions(node: fx.Node, rank: int) -> set[int]:
    """The dimensions over which an operator works; where it only takes the start of one, none."""
    found = arguments(node)
    takes_start = found.get("start", 1) in (0, None) or found.get("index", 1) == 0
    told = "dim" in found or "dims" in found
    return worked_over(node, rank) if not takes_start and (told or name_of(node) in _OVER_ALL) else set()


def _is_float(found: Any) -> TypeGuard[Tensor]:
    return isinstance(found, Tensor) and (found.is_floating_point() or found.is_complex())

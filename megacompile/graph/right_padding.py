"""Padding on the right of causal rows, whose mask is without effect and may be left out.

In: a batch, for ``is_padded_right``; a graph that was traced without the padding of its masks, for
``reads_no_padding``. Out: whether the loss and all gradients are those of the graph with masks.

The proof. Row b of a batch has ``n[b]`` tokens, then padding, and no label from n[b] on. Masks of padding
hide keys from n[b] on. Causal attention at a position before n[b] sees none of these keys in either case.
So without the masks nothing changes before n[b], as long as an element of position p in row b depends on
positions up to p of row b alone, which :mod:`~megacompile.graph.sequence_dimension` follows through the
graph. Cross-entropy meets such elements with labels of the same or later positions; those from n[b] on it
ignores, so the loss does not depend on anything there. The same is true of values that are filled where
such labels are ignored, as outputs for a loss outside of the program may be. Hence nothing at padding gets
a gradient, nor gives one to a weight.

These refute the proof: a graph that still reads the mask, as a router's loss does to count tokens; a router's
loss over all tokens; convolutions, recurrences, logits among the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from megacompile.graph.captured import Captured, results_of
from megacompile.graph.node_storage import written_buffers
from megacompile.graph.sequence_dimension import Place, Positions, arguments, first_value, name_of

aten = torch.ops.aten
_IGNORED = -100
_ENTRIES = {"input_ids", "attention_mask", "labels", "position_ids", "num_items_in_batch"}
_COPY_OPERATORS = ("clone", "alias", "detach", "_to_copy", "to")
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
    if name in _ROW_VIEWS + _COPY_OPERATORS:
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

"""Tiles of a head with its cross-entropy: one range of the vocabulary each, the logits never whole.

Every tile gives three numbers per token, the log-sum-exp of its logits, the logit at the label, and the
logits' sum; what follows the last tile adds them up to the loss of the fused operator that this stage
starts from. All of it is ordinary autograd, so a tile needs nothing of the others in its backward.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from megacompile.graph.pattern_tools import aten, is_call, operands, value
from megacompile.graph.tile_graph import TileEmitter, TileGraph
from megacompile.kernels.head_tile import HEAD_TILE

FUSED = torch.ops.megacompile.linear_cross_entropy.default
_WORKSPACE = 256 << 20
_COLUMNS = 512  # of logits at once at least: narrower products are slow
_LSE, _TARGET, _MASS = 0, 1, 2


def tile_head(graph: TileGraph, node: fx.Node) -> None:
    """Replace a fused head over a cut weight; ``node`` returns (loss per token, statistics)."""
    hidden, weight, bias, labels, ignored, smoothing, softcap, _ = operands(node)
    emit = graph.site(node)
    pieces = graph.pieces[weight]
    biases = graph.pieces.get(bias) if bias is not None else None
    columns = _COLUMNS * value(labels).shape[0] * value(hidden).element_size()
    parts, local = [], labels
    for i, piece in enumerate(pieces):
        with emit.tile(piece.label):
            chunk = min(_WORKSPACE, max(columns, value(piece.node).nbytes // 4))
            own = biases[i].node if biases else bias
            if own is bias and bias is not None:
                own = emit.call(aten.slice.Tensor, bias, 0, piece.start, piece.stop)
            found = emit.call(HEAD_TILE, hidden, piece.node, own, local, softcap, chunk)
            parts.append(emit.call(operator.getitem, found, 0))
            if i + 1 < len(pieces):
                local = emit.call(aten.sub.Tensor, local, piece.rows)
    loss = _combine(emit, parts, labels, ignored, smoothing, pieces[-1].stop)
    for user in list(node.users):
        assert is_call(user, operator.getitem) and operands(user)[1] == 0
        user.replace_all_uses_with(loss)
        graph.graph.erase_node(user)
    graph.graph.erase_node(node)


def _combine(
    emit: TileEmitter, parts: list[fx.Node], labels: fx.Node, ignored: int, smoothing: float, vocabulary: int
) -> fx.Node:
    """The loss per token: 0 for the ignored label, NaN for one outside of the vocabulary."""
    stacked = emit.call(aten.stack.default, parts)

    def term(i: int) -> fx.Node:
        return emit.call(aten.select.int, stacked, 1, i)

    lse = emit.call(aten.logsumexp.default, term(_LSE), [0])
    target = emit.call(aten.sum.dim_IntList, term(_TARGET), [0])
    if smoothing:
        target = emit.call(aten.mul.Tensor, target, 1.0 - smoothing)
        mass = emit.call(aten.sum.dim_IntList, term(_MASS), [0])
        target = emit.call(aten.add.Tensor, target, emit.call(aten.mul.Tensor, mass, smoothing / vocabulary))
    loss = emit.call(aten.sub.Tensor, lse, target)
    below = emit.call(aten.lt.Scalar, labels, 0)
    unknown = emit.call(aten.logical_or.default, below, emit.call(aten.ge.Scalar, labels, vocabulary))
    loss = emit.call(aten.masked_fill.Scalar, loss, unknown, float("nan"))
    return emit.call(aten.masked_fill.Scalar, loss, emit.call(aten.eq.Scalar, labels, ignored), 0.0)

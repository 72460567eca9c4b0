"""Tile: weights that are too large to be on the device whole become several parameters of rows each.

In: :class:`~megacompile.graph.captured.Captured` and the rows at which parameters are cut. Out: the same with
a rewritten copy of the graph. Every piece is a parameter of its own, ``name[start:stop]``. Its operators are
marked, so that partition makes a block of them: an embedding looks its tokens up piece by piece, or leaves
that to the host (``rows``), a linear layer computes some of its outputs, a product with [inputs, outputs]
uses some of its inputs, a head adds to the loss what one range of the vocabulary does (``head``), a bank
computes some of its experts (``experts``). Anything else that reads a cut parameter is given the pieces put
together, which is right for every operator and saves nothing. Invariant: no tile reads more than one piece of
a parameter.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from megacompile.graph.captured import Captured
from megacompile.graph.expert_tiles import banks, tile_bank
from megacompile.graph.fusion_report import NearMiss
from megacompile.graph.fusion_rewriter import fuse
from megacompile.graph.gathered_rows import gather_rows, gathers
from megacompile.graph.head_tiles import FUSED, tile_head
from megacompile.graph.pattern_tools import aten, is_call, operands, value
from megacompile.graph.tile_cuts import Cuts
from megacompile.graph.tile_graph import TileGraph, is_matmul


@dataclass(frozen=True)
class Tiled:
    """The rewritten graph; ``left`` says which heads over cut weights keep their logits whole and why."""

    captured: Captured
    cuts: Cuts
    left: tuple[NearMiss, ...] = ()


def tile(captured: Captured, cuts: Cuts, *, gather: bool = False) -> Tiled:
    """Replace the cut parameters by their pieces; ``captured`` itself is left as it is.

    ``gather`` allows the host to gather rows of cut tables.
    """
    if not set(cuts) & set(captured.parameters.values()):
        return Tiled(captured, {})
    cut = {p for p, name in captured.parameters.items() if len(cuts.get(name, ())) > 2}
    headed, left = _with_fused_heads(captured, cut)
    graph = TileGraph(headed, cuts)
    for node in list(graph.graph.nodes):
        if gather and gathers(node, headed) and operands(node)[0] in graph.pieces:
            gather_rows(graph, node)
    for bank in banks(graph.graph):
        if all(graph.cuts(w) for w in bank.weights):
            tile_bank(graph, bank)
    for node in list(graph.graph.nodes):
        if is_call(node, FUSED) and graph.cuts(operands(node)[1]):
            tile_head(graph, node)
        elif is_call(node, aten.embedding.default) and graph.cuts(operands(node)[0]):
            _tile_embedding(graph, node)
        elif is_call(node, aten.linear.default) and graph.cuts(operands(node)[1]):
            _tile_linear(graph, node)
        elif is_matmul(node) and graph.cuts(operands(node)[-1]):
            _tile_product(graph, node)
    return Tiled(graph.finish(), cuts, left)


def _with_fused_heads(captured: Captured, cut: set[str]) -> tuple[Captured, tuple[NearMiss, ...]]:
    """Heads over cut weights as the fused operator, whose arguments say all that their tiles must know."""
    fused, report = fuse(captured, {"linear_cross_entropy": True})
    heads = [n for n in fused.graph.nodes if is_call(n, FUSED)]
    if any(operands(n)[1].name in cut for n in heads):
        return fused, report.near_misses
    return captured, report.near_misses


def _tile_embedding(graph: TileGraph, node: fx.Node) -> None:
    """``table[ids]``: each piece fills in the rows of the tokens that lie in it.

    The first piece takes every id below its end and the last one every id that is left, so that an id
    outside of the table fails as it does without tiles. ids are counted from the piece's first row.
    """
    table, ids, *rest = operands(node)
    padding = rest[0] if rest and rest[0] >= 0 else -1
    emit = graph.site(node)
    pieces = graph.pieces[table]
    found: fx.Node | None = None
    for i, piece in enumerate(pieces):
        with emit.tile(piece.label):
            last = i + 1 == len(pieces)
            outside = emit.call(aten.lt.Scalar, ids, 0) if i else emit.call(aten.ge.Scalar, ids, piece.rows)
            if i and not last:
                behind = emit.call(aten.ge.Scalar, ids, piece.rows)
                outside = emit.call(aten.logical_or.default, outside, behind)
            own = emit.call(aten.masked_fill.Scalar, ids, outside, 0)
            padded = padding - piece.start if piece.start <= padding < piece.stop else -1
            rows = emit.call(aten.embedding.default, piece.node, own, padded)
            if found is not None:
                rows = emit.call(aten.where.self, emit.call(aten.unsqueeze.default, outside, -1), found, rows)
            found = rows
            if not last:
                ids = emit.call(aten.sub.Tensor, ids, piece.rows)
    assert found is not None
    node.replace_all_uses_with(found)
    graph.graph.erase_node(node)


def _tile_linear(graph: TileGraph, node: fx.Node) -> None:
    """``x @ weight.T + bias``: each piece gives some of the outputs, which are put side by side."""
    x, weight, *rest = operands(node)
    bias = rest[0] if rest else None
    biases = graph.pieces.get(bias) if bias is not None else None
    emit = graph.site(node)
    outputs = []
    for i, piece in enumerate(graph.pieces[weight]):
        with emit.tile(piece.label):
            own = biases[i].node if biases else bias
            if own is bias and bias is not None:
                own = emit.call(aten.slice.Tensor, bias, 0, piece.start, piece.stop)
            outputs.append(emit.call(aten.linear.default, x, piece.node, own))
    joined = emit.call(aten.cat.default, outputs, -1)
    node.replace_all_uses_with(joined)
    graph.graph.erase_node(node)


def _tile_product(graph: TileGraph, node: fx.Node) -> None:
    """``bias + x @ weight``: each piece multiplies some of the inputs; products are added in float32.

    Inputs are copied apart first, so that all tiles of a size share one template and each hands back the
    gradient of its own inputs alone.
    """
    *bias, x, weight = operands(node)
    emit = graph.site(node)
    pieces, narrow = graph.pieces[weight], value(node).dtype in (torch.bfloat16, torch.float16)
    parts = emit.call(aten.split_with_sizes.default, x, [p.rows for p in pieces], -1)
    given = [emit.call(aten.clone.default, emit.call(operator.getitem, parts, i)) for i in range(len(pieces))]
    total: fx.Node | None = None
    for own, piece in zip(given, pieces, strict=True):
        with emit.tile(piece.label):
            product = emit.call(aten.matmul.default, own, piece.node)
            if narrow:
                product = emit.call(aten._to_copy.default, product, dtype=torch.float32)
            total = product if total is None else emit.call(aten.add.Tensor, total, product)
    assert total is not None
    total = emit.call(aten.add.Tensor, total, *bias) if bias else total
    total = emit.call(aten._to_copy.default, total, dtype=value(node).dtype) if narrow else total
    node.replace_all_uses_with(total)
    graph.graph.erase_node(node)

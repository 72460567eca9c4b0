"""Tiles of a bank of experts: some experts each, one after the other, on the rows sorted by expert.

A bank is the part of the graph between the grouped products over stacked weights [E, ...] that share one
tensor of offsets. A tile moves its experts' rows to the front, runs the same operators on them, and adds
the result to the sum at the rows' old places. The number of rows is known on the device alone, so shapes
stay those of all rows, and the products skip the rows behind the last offset.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from megacompile.graph.block_cuts import SHARE
from megacompile.graph.expert_patterns import is_product
from megacompile.graph.pattern_tools import aten, is_call, operands, value
from megacompile.graph.tile_graph import TileEmitter, TileGraph
from megacompile.kernels.registry import called
from megacompile.kernels.row_ranges import PUT_ROWS, TAKE_ROWS

_ROWWISE = {
    aten.split.Tensor, aten.chunk.default, aten.slice.Tensor, aten._to_copy.default, aten.clone.default,
    aten.alias.default, operator.getitem,
}  # fmt: skip


@dataclass(frozen=True)
class Bank:
    """Grouped products that share ``offsets``, and ``inside``, all nodes from the first to the last.

    ``rows`` are the nodes outside whose first dimension is the sorted rows, ``tables`` parameters from
    which rows are gathered.
    """

    offsets: fx.Node
    weights: tuple[fx.Node, ...]
    inside: tuple[fx.Node, ...]
    rows: tuple[fx.Node, ...]
    tables: tuple[fx.Node, ...]

    @property
    def result(self) -> fx.Node:
        return self.inside[-1]


def banks(graph: fx.Graph) -> list[Bank]:
    """All banks of a graph whose weights are placeholders and whose inner operators act row by row."""
    by_offsets: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if is_product(node):
            by_offsets.setdefault(operands(node)[2], []).append(node)
    found = (_bank(offsets, products) for offsets, products in by_offsets.items())
    return [bank for bank in found if bank is not None]


def _bank(offsets: fx.Node, products: list[fx.Node]) -> Bank | None:
    weights = tuple(dict.fromkeys(_stacked(operands(p)[1]) for p in products))
    inside = _bank_nodes_between(products)
    count = value(products[0]).shape[0]
    rows: dict[fx.Node, None] = {}
    tables: dict[fx.Node, None] = {}
    for node in inside:
        if node is not inside[-1] and any(u not in inside for u in node.users):
            return None
        given = [a for a in node.all_input_nodes if a not in inside]
        if is_product(node):
            given = [a for a in given if a is operands(node)[0]]
        elif _gathers(node):
            tables[operands(node)[0]] = None
            given = [operands(node)[1][0]]
        elif not _acts_by_row(node):
            return None
        if any(value(a).ndim not in (1, 2) or value(a).shape[0] != count for a in given):
            return None
        rows.update(dict.fromkeys(given))
    if any(w.op != "placeholder" for w in (*weights, *tables)):
        return None
    return Bank(offsets, weights, inside, tuple(rows), tuple(tables))


def _stacked(node: fx.Node) -> fx.Node:
    """The stacked weights behind a transposition."""
    return operands(node)[0] if is_call(node, aten.transpose.int) else node


def _bank_nodes_between(products: list[fx.Node]) -> tuple[fx.Node, ...]:
    """The products, what lies on the ways between them, and rows gathered from a table on the way."""
    last = products[-1]
    below = set(products)
    order = list(_reachable(products[0], last))
    for node in order:
        if any(a in below for a in node.all_input_nodes):
            below.add(node)
    above = {last}
    for node in reversed(order):
        if node in below and any(u in above for u in node.users):
            above.add(node)
    inside = {n for n in order if n in above}
    inside |= {a for n in inside for a in n.all_input_nodes if a not in inside and _gathers(a)}
    return tuple(sorted(inside))


def _reachable(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first
    while True:
        yield node
        if node is last:
            return
        node = node.next


def _gathers(node: fx.Node) -> bool:
    """``table[rows]``, one row of a parameter for each sorted row."""
    if not is_call(node, aten.index.Tensor):
        return False
    table, indices = operands(node)
    return table.op == "placeholder" and len(indices) == 1 and value(indices[0]).ndim == 1


def _acts_by_row(node: fx.Node) -> bool:
    """Return whether row i of the result is computed from row i of the tensors among the arguments."""
    target = node.target
    if target in _ROWWISE:
        return not is_call(node, *_ROWWISE - {operator.getitem}) or _keeps_rows(node)
    call = called(target)
    pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    pointwise |= call is not None and call.spec.along == "elements"
    return pointwise and all(value(a).ndim == 2 for a in node.all_input_nodes)


def _keeps_rows(node: fx.Node) -> bool:
    """Return whether a split, slice or copy leaves the first dimension alone."""
    args = operands(node)
    rank = value(args[0]).ndim
    if is_call(node, aten.slice.Tensor):
        return (args[1] if len(args) > 1 else 0) % rank != 0
    if is_call(node, aten.split.Tensor, aten.chunk.default):
        return (args[2] if len(args) > 2 else 0) % rank != 0
    return True


def tile_bank(graph: TileGraph, bank: Bank) -> None:
    """Replace a bank over cut weights by tiles and the sum of their results."""
    emit = graph.site(bank.result)
    pieces = [graph.pieces[w] for w in bank.weights]
    experts = pieces[0][-1].stop
    zero = emit.call(aten.new_zeros.default, bank.offsets, [1])
    bounds = emit.call(aten.cat.default, [zero, bank.offsets])
    ranges = [
        emit.call(aten.clone.default, emit.call(aten.slice.Tensor, bounds, 0, p.start, p.stop + 1))
        for p in pieces[0]
    ]
    total: fx.Node | None = None
    for i, piece in enumerate(pieces[0]):
        own = {w: p[i].node for w, p in zip(bank.weights, pieces, strict=True)}
        with emit.tile(piece.label):
            result = _tile(emit, bank, own, ranges[i], piece.rows / experts)
            total = result if total is None else emit.call(aten.add.Tensor, total, result)
    assert total is not None
    bank.result.replace_all_uses_with(total)
    for node in reversed(bank.inside):
        graph.graph.erase_node(node)


def _tile(
    emit: TileEmitter, bank: Bank, own: dict[fx.Node, fx.Node], bounds: fx.Node, share: float
) -> fx.Node:
    """The bank's operators on the rows of one range of experts; ``bounds`` are theirs, the start first."""
    start = emit.call(aten.slice.Tensor, bounds, 0, 0, 1)
    offsets = emit.call(aten.sub.Tensor, emit.call(aten.slice.Tensor, bounds, 0, 1), start)
    count = emit.call(aten.slice.Tensor, offsets, 0, -1)
    origin = emit.call(aten.zeros_like.default, start)
    copies: dict[fx.Node, fx.Node] = {bank.offsets: offsets, **{t: t for t in bank.tables}}
    for node in bank.rows:
        copies[node] = emit.call(TAKE_ROWS, node, start, count)
    for node in bank.inside:
        if is_product(node):
            _transposed(emit, operands(node)[1], own, copies)
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        copy = emit.call(node.target, *args, **kwargs, like=node)
        if is_product(node):
            copy.meta[SHARE] = share
        if _gathers(node):  # the gradient of rows that belong to no expert here is undefined
            copy = emit.call(TAKE_ROWS, copy, origin, count)
        copies[node] = copy
    return emit.call(PUT_ROWS, copies[bank.result], start, count)


def _transposed(
    emit: TileEmitter, weight: fx.Node, own: dict[fx.Node, fx.Node], copies: dict[fx.Node, fx.Node]
) -> None:
    """A product's weight as this tile's own: the piece, transposed as the whole is."""
    piece = own[_stacked(weight)]
    copies[weight] = (
        piece if weight.op == "placeholder" else emit.call(aten.transpose.int, piece, *operands(weight)[1:])
    )

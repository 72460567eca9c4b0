"""Rows of a table that the host gathers: a lookup by ids of the batch needs no table on the device.

In: a graph whose tables are cut, and an embedding. Where the ids are computed from the batch's leaves
alone, the host knows them when a step begins. Then the looked-up rows become an input of the graph,
:class:`~megacompile.graph.captured.Rows`, in the shape of the embedding's result; their gradient leaves the
device as it is, and the host adds it into the table's. A copy of the rows makes them a block of their own,
so that one block alone reads them and gives their gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from megacompile.graph.captured import Captured, Rows
from megacompile.graph.pattern_tools import aten, is_call, operands, value
from megacompile.graph.tile_graph import TileGraph

FEWER = 2
"""A table must have so many times the rows that a batch looks up."""
_MOST_NODES = 64  # that compute ids: more would be no look at a batch, but work


def gathers(node: fx.Node, captured: Captured) -> bool:
    """Return whether a node is an embedding whose rows the host can gather, and few enough of them."""
    if not is_call(node, aten.embedding.default):
        return False
    table, ids, *rest = operands(node)
    if table.name not in captured.parameters or any(rest[1:]) or value(table).ndim != 2:
        return False
    return FEWER * value(ids).numel() <= value(table).shape[0] and _on_host(ids, captured) is not None


def gather_rows(graph: TileGraph, node: fx.Node) -> None:
    """Replace an embedding that :func:`gathers` by rows that come from the host."""
    table, ids, *rest = operands(node)
    pieces = graph.pieces[table]
    nodes = _on_host(ids, graph.captured)
    assert nodes is not None
    source, find = _function(nodes, ids, graph.captured)
    rows = Rows(
        tuple(graph.name_of(p) for p in pieces),
        tuple(p.stop for p in pieces),
        rest[0] if rest and rest[0] >= 0 else -1,
        source,
        find,
    )
    given = graph.add_rows(table, value(node), rows)
    emit = graph.site(node)
    with emit.tile("[ids]"):
        copied = emit.call(aten.clone.default, given)
    node.replace_all_uses_with(copied)
    graph.graph.erase_node(node)


def _on_host(ids: fx.Node, captured: Captured) -> list[fx.Node] | None:
    """The nodes that compute ``ids`` in order, if they read leaves of the batch alone; leaves are not among
    them."""
    found: dict[fx.Node, None] = {}
    waiting, leaves = [ids], 0
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        if node.op == "placeholder":
            if node.name not in captured.inputs:
                return None
            leaves += 1
        else:
            target = node.target
            plain = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
            if not (plain or target is operator.getitem) or len(found) == _MOST_NODES:
                return None
            found[node] = None
            waiting += node.all_input_nodes
    return sorted(found) if leaves else None


def _function(
    nodes: Sequence[fx.Node], ids: fx.Node, captured: Captured
) -> tuple[str, Callable[[Sequence[Tensor]], Tensor]]:
    """(source, function): ``ids`` from the leaves of a batch, which may be on any device."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    leaves = {a: None for n in (*nodes, ids) for a in (*n.all_input_nodes, n) if a.op == "placeholder"}
    for leaf in leaves:
        copies[leaf] = graph.placeholder(leaf.name)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[ids])
    module = fx.GraphModule({}, graph)
    places = [captured.inputs[leaf.name] for leaf in leaves]

    def find(batch: Sequence[Tensor]) -> Tensor:
        found: Tensor = module(*(batch[i].cpu() for i in places))
        return found

    return str(graph).strip(), find

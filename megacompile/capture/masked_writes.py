"""Writes to where a mask holds: by ``where`` if all places get the same, refused for what is trained."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from megacompile.capture.functionalise import fake_result, tensor_form
from megacompile.capture.host_values import is_alike
from megacompile.errors import UntraceableError
from megacompile.graph.captured import module_path

aten = torch.ops.aten


def choose_by_masks(graph: fx.Graph) -> None:
    """Write what is put alike to all places where a mask holds by ``where``, whose gradient need not know how
    many there are."""
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        (base, indices, put), mask = node.args[:3], node.args[1][0]
        if len(indices) > 1 or mask is None or mask.meta["val"].dtype != torch.bool or any(node.args[3:]):
            continue
        rest = base.meta["val"].dim() - mask.meta["val"].dim()
        if not is_alike(put.meta["val"], rest):
            continue
        with graph.inserting_before(node):
            for _ in range(rest):
                mask = _call_like(graph, node, aten.unsqueeze.default, mask, -1)
            if put.meta["val"].dim() > rest:
                put = _call_like(graph, node, aten.squeeze.dim, put, 0)
            chosen = _call_like(graph, node, aten.where.self, mask, put, base)
        if tensor_form(chosen.meta["val"]) == tensor_form(node.meta["val"]):
            node.replace_all_uses_with(chosen)
    graph.eliminate_dead_code()


def _call_like(graph: fx.Graph, node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call in the place of another one."""
    made = graph.call_function(target, args)
    made.meta = node.meta | {"val": fake_result(target, args, {})}
    return made


def refuse_masked_writes(graph: fx.Graph, parameters: Collection[str]) -> None:
    """Refuse a write of what is trained to where a mask holds: how many places its gradient is of depends on
    values."""
    trained: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name in parameters or not trained.isdisjoint(node.all_input_nodes):
            trained.add(node)
        if node.target is not aten.index_put.default or node.args[2] not in trained:
            continue
        if any(n.meta["val"].dtype in (torch.bool, torch.uint8) for n in node.all_input_nodes):
            raise UntraceableError(
                f"{module_path(node) or 'The model'} writes to where a mask holds, by {node.target}, and the "
                "mask depends on more than the batch: use torch.where, or masked_scatter."
            )

"""Reuse: an operator writes its result over an argument that nothing reads again.

In: the graph of one block function and the arguments that it owns. Out: the same graph, with calls of
in-place twins for operators that have one. The traced graphs stay functional; this is the last thing that
happens to a function before it is printed. Invariant: a storage is written only if the function owns it (it
made it, or it was donated) and no later node reads any view of it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.graph.node_storage import is_view, storage_nbytes, view_base
from megacompile.kernels.registry import called

aten = torch.ops.aten
_ADD_PRODUCT = aten.addmm.default


def reuse(graph: fx.Graph, owned: set[fx.Node]) -> None:
    """Rewrite ``graph``; ``owned`` are the placeholders whose storage it may overwrite."""
    for node in list(graph.nodes):
        call = called(node.target)
        twin = None if call is None else call.part.twin
        if twin is None or node.kwargs:
            continue
        if _may_write(graph, node, twin.over, owned):
            places = [node.args[i] for i in twin.over]
            with graph.inserting_before(node):
                graph.call_function(twin.target, twin.arguments(node.args))
            _replace_by_twin(graph, node, places)


def add_in_place(graph: fx.Graph, owned: set[fx.Node]) -> None:
    """Write products over the matrix that they start from, as starting from a copy moves two more."""
    for node in list(graph.nodes):
        if node.target is not _ADD_PRODUCT or node.kwargs or not _may_write(graph, node, (0,), owned):
            continue
        with graph.inserting_before(node):
            product = graph.call_function(aten.addmm_.default, node.args)
        product.meta = dict(node.meta)
        _replace_by_twin(graph, node, [node.args[0]])


def _may_write(graph: fx.Graph, node: fx.Node, over: tuple[int, ...], owned: set[fx.Node]) -> bool:
    places: list[Any] = [node.args[i] for i in over]
    roots = [view_base(p) for p in places]
    if len(set(roots)) < len(roots) or any(r.op == "placeholder" and r not in owned for r in roots):
        return False
    values = node.meta["val"] if len(places) > 1 else (node.meta["val"],)
    if [_layout(v) for v in values] != [_layout(p.meta["val"]) for p in places]:
        return False
    order = {n: i for i, n in enumerate(graph.nodes)}
    aliases = {n for n in graph.nodes if view_base(n) in roots}
    users = {user for alias in aliases for user in alias.users if user not in aliases}
    others = [a for i, a in enumerate(node.args) if i not in over]
    return all(order[user] <= order[node] for user in users) and not any(a in aliases for a in others)


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, storage_nbytes(x)


def _replace_by_twin(graph: fx.Graph, node: fx.Node, places: list[Any]) -> None:
    if len(places) == 1:
        node.replace_all_uses_with(places[0])
    for user in list(node.users):
        assert user.target is operator.getitem and not is_view(user)
        user.replace_all_uses_with(places[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)

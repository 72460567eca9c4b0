"""Operators of others that write into arguments, as operators that return what they would write.

In: a graph that calls such operators, as those of attention libraries' backwards do. Out: the same graph with
a twin of each, a custom operator that writes into copies; the graph copies the results to the written
arguments. Torch makes that functional, which it does not do with an operator of others.
"""

from __future__ import annotations

import functools
import operator
import re
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.capture.call_tensors import given_by_name, written_names

aten = torch.ops.aten
_KNOWN = {"aten", "prims", "megacompile"}
_TENSORS = {"Tensor", "Optional[Tensor]"}


def is_of_others(target: Any) -> bool:
    """Return whether a node calls an operator that neither torch nor this package defines."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in _KNOWN


def return_writes(graph: fx.Graph) -> None:
    """Call the twins of operators of others that write into arguments."""
    for node in list(graph.nodes):
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not is_of_others(target):
            continue
        if target._schema.is_mutable and (twin := _twin(target)) is not None:
            _call_twin(graph, node, twin)


def _call_twin(graph: fx.Graph, node: fx.Node, twin: Any) -> None:
    target: Any = node.target
    given = given_by_name(target, node.args, node.kwargs)
    written: list[Any] = [given[n] for n in written_names(target) if given.get(n) is not None]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    value = node.meta.get("val")
    with next(x.meta["val"] for x in written).fake_mode:
        values = twin(*args, **kwargs)

    def put(function: Any, arguments: tuple[Any, ...], val: Any) -> fx.Node:
        new = graph.call_function(function, arguments)
        new.meta = {**node.meta, "val": val}
        return new

    with graph.inserting_before(node):
        call = graph.call_function(twin, node.args, node.kwargs)
        call.meta = {**node.meta, "val": values}
        items = [put(operator.getitem, (call, i), x) for i, x in enumerate(values)]
        for argument, item in zip(written, items, strict=False):
            put(aten.copy_.default, (argument, item), argument.meta["val"])
    results = items[len(written) :]
    if isinstance(value, Tensor):
        node.replace_all_uses_with(results[0])
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


@functools.cache
def _twin(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Define the operator that returns the written arguments, then the results; None where lists are written,
    or results are no new tensors."""
    schema, written = target._schema, written_names(target)
    types = {str(a.type) for a in schema.arguments if a.name in written}
    if not types <= _TENSORS or any(str(r.type) != "Tensor" or r.alias_info for r in schema.returns):
        return None
    arguments = re.sub(r"\(\w+!?( -> [\w|]+)?\)", "", str(schema).partition("(")[2].rpartition(" -> ")[0])

    def returned(*args: Any, **kwargs: Any) -> list[Tensor]:
        given = given_by_name(target, args, kwargs)
        copies = {n: given[n].clone() for n in written if given.get(n) is not None}
        made = target(**(given | copies))
        return [*copies.values(), *(() if made is None else (made,) if isinstance(made, Tensor) else made)]

    name = f"megacompile_written::{target.namespace}_{schema.name.partition('::')[2]}_{target._overloadname}"
    twin = torch.library.custom_op(name, returned, mutates_args=(), schema=f"({arguments} -> Tensor[]")
    twin.register_fake(returned)
    return twin._opoverload

"""What nodes of a graph share storage: views, their bases, and bytes; and which are reached from others."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx


def is_view(node: Any) -> bool:
    """Return whether a node returns an alias of its first input (or picks one from a list of aliases)."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    target = node.target
    if target in (torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    alias = target._schema.arguments and target._schema.arguments[0].alias_info
    return bool(alias) and not target._schema.is_mutable


def is_mutable(node: fx.Node) -> bool:
    """Return whether a node calls an operator that writes into its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def view_base(node: fx.Node) -> fx.Node:
    """The node whose storage a view shows; the node itself where it is no view."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def storage_nbytes(value: Tensor) -> int:
    """Bytes of a dense tensor's storage."""
    return value.untyped_storage().nbytes() if value.layout == torch.strided else 0


def reached(starts: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes that are reached from ``starts``, these included; ``onward`` is asked about each once."""
    found: set[fx.Node] = set()
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += onward(node)
    return found


WRITE = torch.ops.aten.copy_.default
"""Writes a new value into a buffer of the model: all that writes in a captured graph."""
BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
"""By a batch's own statistics; (result, mean, 1 / deviation, new running mean, new running variance)."""


def written_buffers(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a graph that it writes, each once."""
    return [n.args[0] for n in graph.nodes if n.target is WRITE]

"""Narrow: of a product of which only ranges of positions are read, only these are computed.

``linear(hidden)[:, a:b]`` becomes ``linear(hidden[:, a:b])``, so that no more logits are alive at a time
than who reads them in parts asks for. Done where no gradient comes back, as it would be summed in parts,
and where the ranges hold no more positions than the whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.graph.pattern_tools import aten, is_call, operands, value


def narrow(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Move slices of leading dimensions in front of the linear layers and detaches that they are taken of."""
    pending = [n for n in reversed(graph.nodes) if is_call(n, aten.detach.default)]
    while pending:
        source = pending.pop()
        slices = list(source.users)
        if not is_call(source, aten.detach.default, aten.linear.default) or not _only_sliced(source, slices):
            continue
        for part in slices:
            pending.append(_swap(graph, part, source, mode))
        given = operands(source)[0]
        graph.erase_node(source)
        pending.append(given)


def _only_sliced(source: fx.Node, slices: list[fx.Node]) -> bool:
    """Return whether nothing reads more than disjoint ranges of leading dimensions."""
    whole = value(source)
    for part in slices:
        if not is_call(part, aten.slice.Tensor) or part.kwargs or operands(part)[4:] not in ((), (1,)):
            return False
        if operands(part)[1] % whole.ndim == whole.ndim - 1:
            return False
    rows = sum(math.prod(value(part).shape[:-1]) for part in slices)
    return bool(slices) and rows <= math.prod(whole.shape[:-1])


def _swap(graph: fx.Graph, part: fx.Node, source: fx.Node, mode: FakeTensorMode) -> fx.Node:
    """Write a slice of what ``source`` computes as what it computes of a slice; returns the new node."""
    given, *rest = operands(source)
    target: Any = source.target
    with graph.inserting_before(part), mode, torch.no_grad():
        inner = graph.call_function(aten.slice.Tensor, (given, *operands(part)[1:]))
        inner.meta = dict(part.meta, val=aten.slice.Tensor(value(given), *operands(part)[1:]))
        outer = graph.call_function(target, (inner, *rest))
        values = [value(a) if isinstance(a, fx.Node) else a for a in (inner, *rest)]
        outer.meta = dict(part.meta, val=target(*values))
    part.replace_all_uses_with(outer)
    graph.erase_node(part)
    return outer

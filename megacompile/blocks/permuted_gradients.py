"""Gradients of rows that were put into another order: gathered, where torch scatters them into zeros.

A mixture of experts sorts rows by expert and takes the results back by ``inverse``, with ``inverse[order] =
arange(n)``. The gradient of ``y[inverse]`` is ``grad[order]``; torch's rule adds ``grad`` at ``inverse`` to
zeros, which on a GPU sorts the indices too. Invariant: equal values, but that zeros keep their sign.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.graph.pattern_tools import Emitter, aten, is_call, operands, value

_FRESH = (aten.new_zeros.default, aten.zeros.default)
_VIEW_OPERATORS = (aten._unsafe_view.default, aten.view.default, aten.reshape.default)


def gather_permuted(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Replace each sum into zeros at all places of a permutation, in place."""
    changed = False
    for node in list(graph.nodes):
        order = _scattered_back(node)
        if order is None:
            continue
        rows = operands(node)[2]
        with graph.inserting_before(node):
            emit = Emitter(graph, node, lambda: mode)
            repeated = _repeated(rows)
            if repeated is not None:
                rows, times = repeated
                order = emit.call(aten.floor_divide.default, order, times)
            found = emit.call(aten.index.Tensor, rows, [order])
        node.replace_all_uses_with(found)
        changed = True
    if changed:
        graph.eliminate_dead_code()


def _scattered_back(node: fx.Node) -> fx.Node | None:
    """The order whose inverse tells where ``zeros.index_put([inverse], rows, accumulate=True)`` puts rows."""
    if not is_call(node, aten.index_put.default) or operands(node)[3:] != (True,):
        return None
    zeros, places, rows = operands(node)[:3]
    if not is_call(zeros, *_FRESH) or len(places) != 1 or value(zeros).shape != value(rows).shape:
        return None
    return _inverted(places[0])


def _inverted(places: Any) -> fx.Node | None:
    """The order of a sorted vector of which ``places`` are the inverse."""
    if not is_call(places, aten.index_put.default) or operands(places)[3:] not in ((), (False,)):
        return None
    _, indices, numbers = operands(places)[:3]
    order = indices[0] if len(indices) == 1 else None
    if not is_call(order, operator.getitem) or operands(order)[1] != 1:
        return None
    if not is_call(operands(order)[0], aten.sort.default, aten.sort.stable) or value(order).ndim != 1:
        return None
    counts = is_call(numbers, aten.arange.default) and operands(numbers) == (len(value(order)),)
    return order if counts and value(places).shape == value(order).shape else None


def _repeated(rows: fx.Node) -> tuple[fx.Node, int] | None:
    """(x, n) of a copy [T n, H] of x [T, H] in which each row stands n times, one after the other."""
    if not is_call(rows, *_VIEW_OPERATORS) or not is_call(copy := operands(rows)[0], aten.clone.default):
        return None
    if not is_call(wide := operands(copy)[0], aten.expand.default):
        return None
    column = operands(wide)[0]
    if not is_call(column, aten.unsqueeze.default) or operands(column)[1] != 1:
        return None
    x = operands(column)[0]
    if value(x).ndim != 2 or value(rows).shape != (value(wide).shape[:2].numel(), value(x).shape[1]):
        return None
    return x, value(wide).shape[1]

"""Fold sums: the operator that makes the last term of a sum adds the other one itself.

In: a template's joint graph. Out: the graph where ``x + a @ b`` is one product, and x plus the gradient of an
RMSNorm one kernel. A kernel of its own would read both terms and write their sum; so only x is read, if its
memory takes the result (:mod:`~megacompile.blocks.inplace_reuse`).
Invariants: a sum is rounded once instead of twice, and nothing else changes; no value lives longer.
"""

from __future__ import annotations

import operator

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.graph.pattern_tools import Emitter, aten, is_call, operands, value
from megacompile.kernels.add_rms_norm import MAX_ADD_RMS_NORM_BACKWARD, add_rms_norm_backward_op
from megacompile.kernels.rms_norm import rms_norm_backward_op

_OTHER_SHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_NORM_BACKWARD = rms_norm_backward_op._opoverload


def with_folded_sums(joint: fx.Graph, mode: FakeTensorMode) -> fx.Graph:
    """Return a copy of a joint graph whose sums are folded into the operators that make a term of them."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint, {}))
    for node in list(graph.nodes):
        if is_call(node, aten.add.Tensor):
            _fold(graph, node, mode)
    graph.eliminate_dead_code()
    return graph


def _fold(graph: fx.Graph, total: fx.Node, mode: FakeTensorMode) -> None:
    """Replace a sum of two tensors of one form, if what makes the later one can add the earlier."""
    if total.kwargs or not all(isinstance(t, fx.Node) and _same_form(t, total) for t in total.args):
        return
    earlier, later = sorted(operands(total), key=_shown)  # nodes are ordered as they are in their graph
    shown = _shown(later)
    maker = operands(shown)[0] if _is_norm_gradient(shown) else shown
    if not earlier < maker or not _read_by_nothing_else(later, shown):
        return
    with graph.inserting_before(maker):
        emit = Emitter(graph, maker, lambda: mode)
        if is_call(maker, aten.mm.default):
            rows = emit.call(aten.view.default, earlier, list(value(maker).shape), like=total)
            made = emit.call(aten.addmm.default, rows, *maker.args)
        elif maker is not shown:
            grad, *others = operands(maker)
            both = emit.call(add_rms_norm_backward_op._opoverload, grad, earlier, *others)
            for user in list(maker.users):
                result = emit.call(operator.getitem, both, operands(user)[1], like=user)
                user.replace_all_uses_with(result)
            made = emit.call(operator.getitem, both, 0)
        else:
            return
        found = emit.call(aten.view.default, made, list(value(total).shape), like=total)
    total.replace_all_uses_with(found)
    graph.erase_node(total)


def _same_form(term: fx.Node, total: fx.Node) -> bool:
    a, b = value(term), value(total)
    return (a.shape, a.dtype) == (b.shape, b.dtype) and a.is_contiguous() and b.is_contiguous()


def _shown(term: fx.Node) -> fx.Node:
    """The node whose value a term shows, perhaps in another shape."""
    while is_call(term, *_OTHER_SHAPES):
        term = operands(term)[0]
    return term


def _read_by_nothing_else(term: fx.Node, shown: fx.Node) -> bool:
    while len(term.users) == 1 and term is not shown:
        term = operands(term)[0]
    return len(term.users) == 1


def _is_norm_gradient(node: fx.Node) -> bool:
    """Return whether a node is the gradient that an RMSNorm gives its input, of rows that the kernel with a
    sum takes too."""
    if not is_call(node, operator.getitem) or operands(node)[1] != 0:
        return False
    return is_call(operands(node)[0], _NORM_BACKWARD) and value(node).shape[-1] <= MAX_ADD_RMS_NORM_BACKWARD

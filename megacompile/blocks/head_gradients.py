"""Compute the gradients of a head in its forward, with the loss, if they are known but for one factor.

In: a template's joint graph with an operator that can make both at once, as a fused head with its
cross-entropy does. Out: the graph in which it does, so that the backward forms no logits again: it multiplies
by the gradient of the loss. That is possible if the gradient of each token's loss is in proportion to the
gradient of one output of the block, as with a mean over labels.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.blocks.joint_graph import depends_on
from megacompile.graph.node_storage import reached
from megacompile.graph.pattern_tools import Emitter, aten, is_call, operands, value
from megacompile.kernels.registry import called

# What passes a gradient on in proportion to it, and the operands that may be the gradient.
_PROPORTIONAL: dict[Any, tuple[int, ...]] = {
    aten.alias.default: (0,),
    aten.clone.default: (0,),
    aten.expand.default: (0,),
    aten.neg.default: (0,),
    aten.reshape.default: (0,),
    aten.squeeze.dim: (0,),
    aten.unsqueeze.default: (0,),
    aten.view.default: (0,),
    aten._to_copy.default: (0,),
    aten.div.Scalar: (0,),
    aten.div.Tensor: (0,),
    aten.mul.Scalar: (0,),
    aten.mul.Tensor: (0, 1),
}


def with_gradients_in_forward(joint: fx.Graph, inputs: int, mode: FakeTensorMode) -> fx.Graph | None:
    """Return a copy of a joint graph whose forward makes a head's gradients; None where it has no such head.

    Its first ``inputs`` placeholders are the template's, the others gradients of outputs.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint, {}))
    tangents = frozenset([n for n in graph.nodes if n.op == "placeholder"][inputs:])
    heads = [n for n in graph.nodes if _is_backward(n)]
    if not heads or not all(_merged(graph, head, tangents, mode) for head in heads):
        return None
    graph.eliminate_dead_code()
    return graph


def _is_backward(node: fx.Node) -> bool:
    """Return whether a node is the backward of an operator that can make its gradients with its result."""
    call = called(node.target)
    return call is not None and call.spec.with_gradients is not None and call.part is call.spec.backward


def _merged(graph: fx.Graph, backward: fx.Node, tangents: frozenset[fx.Node], mode: FakeTensorMode) -> bool:
    """Replace an operator and its backward by the one that is both; False where the gradient of its result
    is not known before it but for one factor."""
    grad, *others = operands(backward)
    forward = next(operands(a)[0] for a in others if is_call(a, operator.getitem) and _is_pair(a, backward))
    found = _proportional(grad, tangents)
    if found is None:
        return False
    tangent, passed = found
    beside = [a for n in passed for a in n.all_input_nodes if a is not tangent and a not in passed]
    known = reached(beside, lambda n: n.all_input_nodes)
    if forward in known or known & tangents:
        return False
    _move_before(forward, known)
    emit = Emitter(graph, forward, lambda: mode)
    with graph.inserting_before(forward):
        factor = value(tangent)
        one = emit.call(aten.full.default, [], 1.0, dtype=factor.dtype, device=factor.device)
        copies = {tangent: one}
        for node in passed:
            args = fx.map_arg(node.args, lambda n: copies.get(n, n))
            copies[node] = emit.call(node.target, *args, **node.kwargs, like=node)
        both = emit.call(_with_gradients(backward), copies.get(grad, one), *forward.args)
        loss = emit.call(operator.getitem, both, 0)
    for user in list(forward.users):
        if operands(user)[1] == 0:
            user.replace_all_uses_with(loss)
    for user in list(backward.users):
        with graph.inserting_before(user):
            made = emit.call(operator.getitem, both, 1 + operands(user)[1], like=user)
            user.replace_all_uses_with(emit.call(aten.mul.Tensor, made, tangent, like=user))
    return True


def _is_pair(statistics: fx.Node, backward: fx.Node) -> bool:
    """Return whether a node picks a result of the operator whose backward reads it."""
    call, other = called(operands(statistics)[0].target), called(backward.target)
    return call is not None and other is not None and call.part is other.spec.forward


def _with_gradients(backward: fx.Node) -> Any:
    """The operator that is both."""
    call = called(backward.target)
    assert call is not None
    return getattr(torch.ops.megacompile, f"{call.spec.name}_with_gradients").default


def _proportional(grad: fx.Node, tangents: frozenset[fx.Node]) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return the gradient of an output, a number, to which a gradient is in proportion, and the nodes between
    the two, in order; None if there is no such output."""
    dependent = depends_on(grad.graph, tangents)
    passed: list[fx.Node] = []
    while grad not in tangents:
        carriers = [i for i, a in enumerate(grad.args) if a in dependent]
        if len(carriers) != 1 or carriers[0] not in _PROPORTIONAL.get(grad.target, ()):
            return None
        passed.insert(0, grad)
        grad = operands(grad)[carriers[0]]
    return None if value(grad).ndim else (grad, passed)


def _move_before(place: fx.Node, nodes: Collection[fx.Node]) -> None:
    """Move those of the nodes that come after a place in the graph to stand before it, in their order."""
    after = itertools.dropwhile(lambda n: n is not place, place.graph.nodes)
    for node in [n for n in after if n in nodes]:
        place.prepend(node)

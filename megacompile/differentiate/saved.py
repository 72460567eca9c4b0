"""Saved sets: which forward tensors a backward starts from.

In: a template's joint graph. Out: :class:`Joint`, the graph with the roles of its nodes, and saved sets.
Invariants: weights and what is computed from weights alone are never saved, and views are never saved (their
base is).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.capture.views import is_view, reached
from megacompile.differentiate.costs import ATTENTION, flat, is_heavy
from megacompile.differentiate.joint import Ref, trace_joint
from megacompile.partition.blocks import Template


@dataclass(frozen=True)
class Joint:
    """A joint graph: its outputs, gradients of its inputs (None where there is none), and names.

    ``refs`` names inputs, gradients of outputs, and outputs. ``backward`` holds the nodes that depend on a
    gradient, ``static`` those that are computed from weights and buffers alone.
    """

    graph: fx.Graph
    outs: list[fx.Node]
    grads: list[fx.Node | None]
    refs: dict[fx.Node, Ref]
    backward: frozenset[fx.Node]
    static: frozenset[fx.Node]


_KEPT: WeakKeyDictionary[Template, Joint] = WeakKeyDictionary()


def joint_of(template: Template, mode: FakeTensorMode) -> Joint:
    """Trace a template's forward and backward and tell its nodes apart; made once while a template lives."""
    if template not in _KEPT:
        _KEPT[template] = _joint_of(template, mode)
    return _KEPT[template]


def _joint_of(template: Template, mode: FakeTensorMode) -> Joint:
    graph = trace_joint(template, mode)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    count = len(template.examples)
    inputs, tangents = placeholders[:count], placeholders[count:]
    results = flat(graph.output_node().args[0])
    outs = results[: len(template.out_grads)]
    refs: dict[fx.Node, Ref] = {n: ("in", i) for i, n in enumerate(inputs)}
    with_grad = [k for k, g in enumerate(template.out_grads) if g]
    refs.update({n: ("grad", k) for n, k in zip(tangents, with_grad, strict=True)})
    for k, node in enumerate(outs):
        refs.setdefault(node, ("out", k))
    fixed = {n for n, k in zip(inputs, template.kinds, strict=True) if k in ("weight", "buffer")}
    moving = _depends_on(graph, [n for n in placeholders if n not in fixed])
    static = frozenset(n for n in graph.nodes if n not in moving and not is_heavy(n))
    backward = frozenset(_depends_on(graph, tangents))
    return Joint(graph, outs, results[len(outs) :], refs, backward, static)


def _depends_on(graph: fx.Graph, roots: Iterable[fx.Node]) -> set[fx.Node]:
    found = set(roots)
    for node in graph.nodes:
        if any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def keeps_all(_: fx.Node) -> bool:
    """Of a saved set that holds whatever the backward reads."""
    return True


def is_attention(node: fx.Node) -> bool:
    """Whether a node is a result of attention, or attention itself."""
    if node.target is operator.getitem:
        return is_attention(node.args[0])  # type: ignore[arg-type]
    return node.target is ATTENTION


def saved_set(joint: Joint, keeps: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Forward tensors that the backward starts from, in the order of the forward.

    Inputs and outputs count as given. Results of operators that ``keeps`` names are kept; what is derived
    from them is derived again.
    """
    saved: set[fx.Node] = set()

    def onward(node: fx.Node) -> list[fx.Node]:
        if node in joint.refs:
            return []
        passes_on = is_view(node) or node in joint.static or _is_tuple(node)
        if passes_on or (node.all_input_nodes and not keeps(node)):
            return node.all_input_nodes
        saved.add(node)
        return []

    reached(_read_by_backward(joint), onward)
    return [n for n in joint.graph.nodes if n in saved]


def _read_by_backward(joint: Joint) -> list[fx.Node]:
    """The forward nodes that the backward reads, and gradients that no output's gradient changes."""
    nodes = [n for n in joint.graph.nodes if n in joint.backward and n.op != "output"]
    reads = [a for node in nodes for a in node.all_input_nodes]
    reads += [grad for grad in joint.grads if grad is not None]
    return [node for node in reads if node not in joint.backward]


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (list, tuple))

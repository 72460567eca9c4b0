"""Saved sets: which forward tensors a backward starts from.

In: a template's joint graph. Out: saved sets. Invariants: weights and what is computed from weights alone are
never saved, and views are never saved (their base is).
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from megacompile.blocks.costs import ATTENTION, is_heavy, is_product
from megacompile.blocks.joint_graph import Joint
from megacompile.graph.node_storage import is_view, reached
from megacompile.kernels.registry import called


def keeps_all(_: fx.Node) -> bool:
    """Return whether a saved set holds whatever the backward reads."""
    return True


def is_attention(node: fx.Node) -> bool:
    """Return whether a node is a result of attention, or attention itself."""
    if node.target is operator.getitem:
        return is_attention(node.args[0])  # type: ignore[arg-type]
    return node.target is ATTENTION


def keeps_narrow(joint: Joint) -> Callable[[fx.Node], bool]:
    """Return what keeps results of products and attention, but no product that a gated activation reads.

    Gate and up are two thirds of these bytes in a layer of Llama-3.1-8B. On an H100 each GB of them that is
    kept spares 5.5 ms, and each GB of the others 9.
    """

    def onward(node: fx.Node) -> list[fx.Node]:
        passes_on = is_view(node) or _is_tuple(node) or node.target is operator.getitem
        return node.all_input_nodes if passes_on or _is_gated(node) else []

    gated = [n for n in joint.graph.nodes if n not in joint.backward and _is_gated(n)]
    wide = {n for n in reached(gated, onward) if is_product(n)}
    return lambda node: is_heavy(node) and node not in wide


def _is_gated(node: fx.Node) -> bool:
    """Return whether a node is a gated activation."""
    call = called(node.target)
    return call is not None and call.spec.gates and call.part is call.spec.forward


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

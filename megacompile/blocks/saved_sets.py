"""Saved sets: which forward tensors a backward starts from.

In: a template's joint graph. Out: saved sets. Invariants: weights and what is computed from weights alone are
never saved, and views are never saved (their base is).
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from megacompile.blocks.costs import ATTENTION
from megacompile.blocks.joint_graph import Joint
from megacompile.graph.node_storage import is_view, reached


def keeps_all(_: fx.Node) -> bool:
    """Return whether a saved set holds whatever the backward reads."""
    return True


def is_attention(node: fx.Node) -> bool:
    """Return whether a node is a result of attention, or attention itself."""
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

"""The joint graph: a template's forward and backward traced as one functional graph, and parts of it.

The gradient rules are those of eager PyTorch. Invariant: no operator writes in place, and nothing is a
constant of the trace. :class:`Joint` is the graph with the roles of its nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from megacompile.blocks.costs import flat, is_heavy
from megacompile.blocks.memory_meter import is_oversized
from megacompile.blocks.partition import Template
from megacompile.blocks.permuted_gradients import gather_permuted
from megacompile.capture.own_gradients import hand_on
from megacompile.capture.patches import graphs_alone
from megacompile.capture.written_arguments import return_writes
from megacompile.errors import CaptureError
from megacompile.graph.node_storage import BATCH_NORM, is_mutable, reached, storage_nbytes
from megacompile.graph.pattern_tools import aten

RefKind = Literal["in", "out", "saved", "grad"]
Ref = tuple[RefKind, int]


@graphs_alone()
def trace_joint(template: Template, mode: FakeTensorMode) -> fx.Graph:
    """Graph of (inputs..., gradients of outputs...) -> (outputs..., new values of buffers..., gradients of
    inputs...)."""
    module = fx.GraphModule({}, template.graph)

    def joint(inputs: list[Tensor], grads: list[Tensor]) -> tuple[list[Any], list[Any]]:
        outputs = fx.Interpreter(module).run(*inputs)
        roots = [o for o, g in zip(outputs, template.out_grads, strict=False) if g]
        leaves = [(i, k) for i, k in zip(inputs, template.kinds, strict=True) if i.requires_grad]
        found: list[Tensor | None] = []
        if roots and leaves:
            raw = torch.autograd.grad(roots, [i for i, _ in leaves], grads, allow_unused=True)
            found = [_own_memory(grad, *leaf) for grad, leaf in zip(raw, leaves, strict=True)]
        return list(outputs), found

    with mode:
        inputs = [e.detach().requires_grad_(e.requires_grad) for e in template.examples]
        grads = [
            torch.empty_like(o, memory_format=torch.preserve_format)
            for o, g in zip(template.results, template.out_grads, strict=True)
            if g
        ]
        traced = make_fx(joint)(inputs, grads)  # what comes of no argument is of this mode, too
    hand_on(traced.graph)
    return_writes(traced.graph)
    if any(is_mutable(n) for n in traced.graph.nodes):
        # some gradient rules write in place; a second trace without autograd makes them functional
        with mode, torch.no_grad():
            traced = make_fx(torch.func.functionalize(traced, remove="mutations"))(inputs, grads)
            traced.graph.eliminate_dead_code()
    _check_functional(traced.graph, template)
    gather_permuted(traced.graph, mode)
    _read_no_statistics(traced.graph)
    for node in list(traced.graph.nodes):
        if is_oversized(node):
            _copy_after(traced.graph, node, mode)
    return traced.graph


def _read_no_statistics(graph: fx.Graph) -> None:
    """Give the backward of a norm by a batch's own statistics no running ones, which it does not use."""
    for node in graph.nodes:
        if node.target is aten.native_batch_norm_backward.default and node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def without_statistics(graph: fx.Graph, inputs: list[Ref]) -> list[Ref]:
    """Drop new running statistics of norms that nothing reads; return the remaining arguments."""
    arguments = [n for n in graph.nodes if n.op == "placeholder"]
    unread: set[fx.Node] = set()
    for node in [n for n in graph.nodes if n.target is BATCH_NORM]:
        if all(user.args[1] < 3 for user in node.users):
            unread |= {node.args[3], node.args[4]}
            node.target, node.args = aten._native_batch_norm_legit.no_stats, (*node.args[:3], *node.args[5:])
            node.meta["val"] = node.meta["val"][:3]
    gone = {n for n in arguments if n in unread and not n.users}
    for node in gone:
        graph.erase_node(node)
    return [ref for node, ref in zip(arguments, inputs, strict=True) if node not in gone]


def _own_memory(grad: Tensor | None, leaf: Tensor, kind: str) -> Tensor | None:
    """A gradient that keeps no more memory than its own alive and, for a value, is laid out as it is.

    A slice of a larger tensor would hold all of it, while a plan counts bytes by tensor; and the block
    that is handed a value's gradient was traced for the value's layout.
    """
    if grad is None:
        return None
    if kind == "value" and grad.stride() != leaf.stride():
        strides = leaf.stride()
        order = sorted(range(leaf.dim()), key=lambda d: (-strides[d], d))
        inverse = sorted(range(leaf.dim()), key=order.__getitem__)
        grad = grad.permute(order).contiguous().permute(inverse)
    if storage_nbytes(grad) > grad.numel() * grad.element_size():
        grad = grad.clone()
    return grad


def _copy_after(graph: fx.Graph, node: fx.Node, mode: FakeTensorMode) -> None:
    with graph.inserting_after(node):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    with mode:
        copy.meta = {**node.meta, "val": node.meta["val"].clone()}
    node.replace_all_uses_with(copy, lambda user: user is not copy)


def _check_functional(graph: fx.Graph, template: Template) -> None:
    for node in graph.nodes:
        if node.op == "get_attr":
            raise CaptureError(
                f"{template.name or 'The model'} creates a constant tensor in its "
                "backward, which cannot be placed: report the operator it uses."
            )
        if is_mutable(node):
            raise CaptureError(
                f"The backward of {template.name or 'the model'} calls {node.target}, which writes in "
                "place and cannot be recomputed: replace the operator that it differentiates."
            )


def extract(joint: fx.Graph, results: list[fx.Node], given: dict[fx.Node, Ref]) -> tuple[fx.Graph, list[Ref]]:
    """The subgraph from ``given`` to ``results``.

    In a backward, forward parts that are computed again stand right before their first use, so that
    they live as short as possible.
    """
    needed = _needed(results, given)
    inputs = [n for n in joint.nodes if n in needed and n in given]
    inputs.sort(key=lambda n: ("in", "out", "saved", "grad").index(given[n][0]))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def put(node: fx.Node) -> None:
        pending = [node]
        while pending:
            current = pending[-1]
            missing = [a for a in current.all_input_nodes if a not in copies]
            if missing:
                pending += reversed(missing)
            else:
                pending.pop()
                if current not in copies:
                    copies[current] = graph.node_copy(current, copies.__getitem__)

    moved = {n for n in inputs if given[n][0] == "grad"}
    backward = bool(moved)
    for node in joint.nodes:
        if node in needed and node not in given:
            if any(a in moved for a in node.all_input_nodes):
                moved.add(node)
            if node in moved or not backward:
                put(node)
    for node in results:
        put(node)
    graph.output(tuple(copies[n] for n in results))
    return graph, [given[n] for n in inputs]


def _needed(results: list[fx.Node], given: dict[fx.Node, Ref]) -> set[fx.Node]:
    return reached(results, lambda node: [] if node in given else node.all_input_nodes)


@dataclass(frozen=True)
class Joint:
    """A joint graph: its outputs, gradients of its inputs (None where there is none), and names.

    ``refs`` names inputs, gradients of outputs, and outputs. ``backward`` holds the nodes that depend on a
    gradient, ``static`` those that are computed from weights and buffers alone. ``written`` are pairs of a
    buffer that the forward changes and its new value.
    """

    graph: fx.Graph
    outs: list[fx.Node]
    grads: list[fx.Node | None]
    refs: dict[fx.Node, Ref]
    backward: frozenset[fx.Node]
    static: frozenset[fx.Node]
    written: tuple[tuple[fx.Node, fx.Node], ...] = ()


_JOINTS: WeakKeyDictionary[Template, Joint] = WeakKeyDictionary()


def joint_of(template: Template, mode: FakeTensorMode) -> Joint:
    """Trace a template's forward and backward and tell its nodes apart; made once while a template lives."""
    if template not in _JOINTS:
        _JOINTS[template] = joint_in(trace_joint(template, mode), template)
    return _JOINTS[template]


def joint_in(graph: fx.Graph, template: Template) -> Joint:
    """Tell the nodes of a template's joint graph apart."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    count = len(template.examples)
    inputs, tangents = placeholders[:count], placeholders[count:]
    results = flat(graph.output_node().args[0])
    outs, results = results[: len(template.out_grads)], results[len(template.out_grads) :]
    written = tuple((inputs[i], new) for i, new in zip(template.writes, results, strict=False))
    refs: dict[fx.Node, Ref] = {n: ("in", i) for i, n in enumerate(inputs)}
    with_grad = [k for k, g in enumerate(template.out_grads) if g]
    refs.update({n: ("grad", k) for n, k in zip(tangents, with_grad, strict=True)})
    for k, node in enumerate(outs):
        refs.setdefault(node, ("out", k))
    fixed = {n for n, k in zip(inputs, template.kinds, strict=True) if k in ("weight", "buffer")}
    moving = depends_on(graph, [n for n in placeholders if n not in fixed])
    static = frozenset(n for n in graph.nodes if n not in moving and not is_heavy(n))
    backward = frozenset(depends_on(graph, tangents))
    return Joint(graph, outs, results[len(written) :], refs, backward, static, written)


def depends_on(graph: fx.Graph, roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that some of these change, these included."""
    found = set(roots)
    for node in graph.nodes:
        if any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found

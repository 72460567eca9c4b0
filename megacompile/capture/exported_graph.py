"""What export leaves in a graph: checks and dead code are dropped, what could not run right is refused."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from megacompile.capture.refused_calls import FLEX
from megacompile.errors import CaptureError, UntraceableError
from megacompile.graph.captured import module_path
from megacompile.graph.node_storage import WRITE

aten = torch.ops.aten
_OURS = "megacompile"
CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}


def clean(graph: fx.Graph) -> None:
    """Drop checks and dead code, and refuse randomness that a recompute would not repeat."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in CHECKS:
            graph.erase_node(node)
        elif node.op == "call_function" and node.target is aten.copy.default:
            _replace_copy(graph, node)
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
            continue
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape):
            raise UntraceableError(
                f"{module_path(node) or 'The model'} makes a tensor whose shape depends on the values in the "
                f"batch ({node.target}): a scheduled step needs fixed shapes."
            )
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise UntraceableError(
                f"{module_path(node) or 'The model'} takes a number out of a tensor ({node.target}): compute "
                "with the tensor, or pass the number itself in the batch."
            )
        _refuse_call(node)
    graph.lint()


def _refuse_call(node: fx.Node) -> None:
    """Refuse an operator that draws random numbers or writes, one of graphs, one whose gradient is sparse."""
    target, where = node.target, module_path(node) or "The model"
    if isinstance(target, HigherOrderOperator):
        raise CaptureError(_of_graphs(where, node, target))
    if target is aten.instance_norm.default and node.args[3] is not None and node.args[5]:
        raise CaptureError(
            f"{where} changes its running statistics: of all norms BatchNorm alone may; build it with "
            "track_running_stats=False, or put it into eval mode."
        )
    if target is aten.embedding.default and any(node.args[4:5]):
        raise CaptureError(
            f"{where} is an embedding with sparse=True, whose gradient no "
            "Adam takes: build it with sparse=False."
        )
    if isinstance(target, torch._ops.OpOverload) and target.namespace != _OURS:
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise CaptureError(
                f"{where} calls {target}, whose randomness a recompute cannot repeat: make the numbers from "
                "torch.rand or randn without a generator, or move them into the batch."
            )
        if target._schema.is_mutable and target is not WRITE:
            raise CaptureError(
                f"{where} calls {target}, which writes in place: replace it by its out-of-place form."
            )


def _of_graphs(where: str, node: fx.Node, target: HigherOrderOperator) -> str:
    """Refuse an operator whose operands are graphs, or another operator that writes."""
    if "auto_functionalized" in str(target):
        return (
            f"{where} calls {node.args[0]}, which writes into its arguments: write it as an operator that "
            "returns new tensors, with mutates_args=()."
        )
    if "flex_attention" in str(target):
        return f"{where} calls flex attention, {FLEX}."
    return (
        f"{where} calls torch's {target}, whose parts are graphs of their own: compute all branches and "
        "choose by torch.where, and write loops in Python."
    )


def _replace_copy(graph: fx.Graph, node: fx.Node) -> None:
    """Write ``copy(target, source)``, which has no gradient rule, as a cast and an expansion."""
    source, value = node.args[1], node.meta["val"]
    assert isinstance(source, fx.Node)
    given = source.meta["val"]
    with graph.inserting_before(node):
        new = source
        if given.dtype != value.dtype:
            new = graph.call_function(aten._to_copy.default, (new,), {"dtype": value.dtype})
            new.meta = dict(node.meta, val=given.to(value.dtype))
        if given.shape != value.shape:
            new = graph.call_function(aten.expand.default, (new, list(value.shape)))
            new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)

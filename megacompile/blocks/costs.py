"""What one node of a graph costs: floating-point operations, bytes moved, kernels launched on a GPU."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megacompile.blocks.kernel_scratch import SORTED_FROM
from megacompile.blocks.memory_meter import tensors_of
from megacompile.capture.written_arguments import is_of_others
from megacompile.graph.node_storage import is_view
from megacompile.graph.sequence_dimension import arguments
from megacompile.kernels.registry import called
from megacompile.kernels.sdpa import attention, attention_backward

aten = torch.ops.aten
ATTENTION, _BACKWARD = attention._opoverload, attention_backward._opoverload
_LAUNCHES_OF = {  # of torch's operators, where not one; ``tests/simulated/test_blocks.py`` counts them
    aten.constant_pad_nd.default: 2,
    aten.nll_loss_backward.default: 2,
    aten.slice_backward.default: 2,
    aten.select_backward.default: 2,
}
_GROUPED = {  # products of sorted rows with stacked weights that an operator forms; torch has no formula yet
    "aten::_grouped_mm": 1,
    "transformers::grouped_mm_fallback": 1,  # in a loop over the experts
    "transformers::grouped_mm_fallback_backward": 2,
}
_SORTING = 21  # of a gradient of an embedding that sorts its indices
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")

_HEAVY_PARTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "attention", "cross_entropy", "lstm",
                "gru", "sort", "topk", "grouped", "einsum", "linear", "scan", "fft", "cumsum")  # fmt: skip


def is_heavy(node: fx.Node) -> bool:
    """Return whether an operator is worth keeping the result of: products, attention, searches, and whatever
    others define."""
    if node.target is operator.getitem:
        return is_heavy(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target._overloadpacket in flop_registry:
        return True
    call = called(node.target)
    if is_of_others(node.target) or (call is not None and call.spec.kept):
        return True
    name = node.target._schema.name.split("::")[1]
    return any(part in name for part in _HEAVY_PARTS)


def is_product(node: fx.Node) -> bool:
    """Return whether a node is a product of torch's own, which takes its operands' FLOPs and no more."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or called(target) is not None:
        return False
    return target._overloadpacket in flop_registry or target._schema.name in _GROUPED


def flat(value: Any) -> list[Any]:
    """The leaves of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in flat(part)]
    return [value]


def _traced_value(argument: Any) -> Tensor:
    """The tensor of an argument that is a node."""
    value: Tensor = argument.meta["val"]
    return value


def _traced_tensors(value: Any) -> list[Tensor]:
    return [v for v in flat(value) if isinstance(v, Tensor)]


def flops(node: fx.Node, share: float = 1.0) -> int:
    """Floating-point operations of the products and attention in one node.

    ``share`` is the part of its rows that a grouped product computes.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    found = flops_of(node.target, arguments, keywords, node.meta["val"])
    return round(found * share) if node.target._schema.name in _GROUPED else found


def flops_of(op: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> int:
    """Floating-point operations of the products and attention in a call of an operator."""
    if products := _GROUPED.get(op._schema.name):
        rows, inner = args[0].shape[-2:]
        return int(2 * products * rows * inner * args[1].shape[-1])
    formula = flop_registry.get(op._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def attention_flops(node: fx.Node) -> tuple[int, int]:
    """Return the part of a node's :func:`flops` that is attention's: forward, backward."""
    work = flops(node) if node.target in (ATTENTION, _BACKWARD) else 0
    return (work, 0) if node.target is ATTENTION else (0, work)


def grouped(node: fx.Node, share: float = 1.0) -> tuple[int, int]:
    """:func:`flops` of a grouped product, and the bytes that it reads and writes: stacked weights and their
    gradients whole, of rows the ``share`` that it computes. Any other node has none."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in _GROUPED:
        return 0, 0
    tensors = _operands(node)
    whole = sum(v.nbytes for v in tensors if v.ndim != 2)
    return flops(node, share), whole + round(share * sum(v.nbytes for v in tensors if v.ndim == 2))


def _operands(node: fx.Node) -> list[Tensor]:
    """The tensors that a node reads, each once, and those that it returns."""
    return _traced_tensors([a.meta["val"] for a in node.all_input_nodes]) + _traced_tensors(
        node.meta.get("val")
    )


def moved(node: fx.Node) -> int:
    """Bytes that one node reads and writes; views and products, counted by FLOPs, move nothing (those of
    :func:`grouped` ones stand apart), but for the matrix a product adds to, the logits a head's kernels
    read, and in its backward write, and what a scan in plain torch does beside its products."""
    call = called(node.target)
    if call is not None and call.part.moved is not None:
        return call.part.moved(values(node))
    if _starts_from_matrix(node):
        # the product reads it; out of place it is first copied to where the result goes
        return _traced_value(node).nbytes * (1 if node.target is aten.addmm_.default else 3)
    if is_view(node) or node.target is operator.getitem or flops(node):
        return 0
    return sum(v.nbytes for v in _operands(node))


def _starts_from_matrix(node: fx.Node) -> bool:
    """Return whether a node adds a product to a matrix, rather than to a row that its kernel adds."""
    sums = node.target in (aten.addmm.default, aten.addmm_.default)
    return sums and _traced_value(node.args[0]).shape == _traced_value(node).shape


def launches(node: fx.Node) -> int:
    """Kernels that one node launches on a GPU; views and fresh memory take none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_view(node):
        return 0
    if target._schema.name.removeprefix("aten::") in _EMPTY:
        return 0
    if target is aten.embedding_dense_backward.default:
        return _SORTING if _traced_value(node.args[1]).numel() >= SORTED_FROM else 2
    if (name := target._schema.name) in _GROUPED and target.namespace != "aten":
        return _GROUPED[name] * (1 + len(_traced_value(node.args[1])))
    call = called(target)
    if target is aten.addmm.default and _starts_from_matrix(node):
        return 2  # a copy, then the product
    if call is None:
        return _LAUNCHES_OF.get(target, 1)
    if callable(call.part.launches):
        return call.part.launches(values(node))
    rows = call.spec.along == "rows"
    copies = [a for a in node.all_input_nodes if rows and not _has_rows(a.meta["val"])]
    return call.part.launches + len(copies)


class WorkMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what operators of eager code do inside: the FLOPs of products, the bytes of all others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=out))
        elif func._schema.is_mutable or not any(a.alias_info for a in func._schema.arguments):
            self.moved += sum(t.nbytes for t in tensors_of((*args, out)))
        return out


def values(node: fx.Node) -> dict[str, Any]:
    """Return a call's arguments by their names, with the values of nodes in their place."""
    return {n: a.meta["val"] if isinstance(a, fx.Node) else a for n, a in arguments(node).items()}


def _has_rows(x: Tensor) -> bool:
    """Return whether the last dimension's rows follow each other at one distance: else a kernel takes a
    copy."""
    try:
        x.view(-1, x.shape[-1])
    except (RuntimeError, ValueError):  # of real tensors, of fake ones
        return False
    return True

"""Which of our operators a program calls, on which shapes, how often per step, and what they do.

In: the graphs of block functions and a plan. Out: :class:`KernelCall` with counts, which a dump writes
beside the plan, so that ``megacompile bench kernels --plan`` can time the very shapes of a program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from megacompile.blocks.costs import flat, flops, moved, values
from megacompile.kernels.eager_form import Shape
from megacompile.kernels.registry import CALLED, called


@dataclass(frozen=True, order=True)
class KernelCall:
    """One operator on tensors of these shapes; ``dtype`` is that of the largest one, ``constants`` are
    its other arguments, as text.

    ``work`` counts the bytes that its kernels move, of attention and of recurrences the floating-point
    operations of products; 0 where no kernel of ours runs them. ``teraflops`` is what those reach on an H100.
    """

    op: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    constants: tuple[str, ...]
    work: int = 0
    teraflops: float = 0.0


Calls = tuple[tuple[KernelCall, int], ...]


def kernel_calls(graph: fx.Graph) -> Calls:
    """The calls of our operators in a graph whose nodes carry their values."""
    return total([(_kernel_call(node), 1) for node in graph.nodes if is_ours(node)])


def total(calls: Iterable[tuple[KernelCall, int]]) -> Calls:
    """Equal calls added up, in a fixed order."""
    counts: Counter[KernelCall] = Counter()
    for call, count in calls:
        counts[call] += count
    return tuple(sorted(counts.items()))


def is_ours(node: fx.Node) -> bool:
    """Return whether a node calls one of our operators."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "megacompile"


def _kernel_call(node: fx.Node) -> KernelCall:
    assert isinstance(node.target, torch._ops.OpOverload)
    tensors = [a.meta["val"] for a in flat(node.args) if isinstance(a, fx.Node)]
    tensors = [t for t in tensors if isinstance(t, Tensor)]
    floats = [t for t in tensors if t.is_floating_point()]
    dtype = max(floats or tensors, key=Tensor.numel).dtype
    constants = [repr(a) for a in node.args if not isinstance(a, fx.Node)]
    return KernelCall(
        node.target._schema.name.removeprefix("megacompile::"),
        str(dtype).removeprefix("torch."),
        tuple(tuple(t.shape) for t in tensors),
        tuple(constants),
        *_work(node),
    )


def _work(node: fx.Node) -> tuple[int, float]:
    call = called(node.target)
    assert call is not None
    given = values(node)
    if call.spec.runs_kernels is None:
        return moved(node), 0.0
    if not call.spec.runs_kernels(given):
        return 0, 0.0
    reached = call.part.teraflops
    return flops(node), reached(given) if callable(reached) else reached


def eager_use(call: KernelCall) -> tuple[str, Shape, tuple[str, ...]] | None:
    """Return (eager form, its shape, its passes) of a call; None for a call without an eager form."""
    op = CALLED.get(call.op)
    if op is None or not op.spec.eager:
        return None
    form, *_ = op.spec.eager
    others = {"forward": op.spec.backward, "backward": op.spec.forward}
    read, first = (
        [a.name for a in getattr(torch.ops.megacompile, name).default._schema.arguments]
        for name in (call.op, op.spec.name)
    )
    # behind the gradient, unless that stands in its place, of the same shape
    behind = op.part is not op.spec.forward and first[0] in read
    shape = form.shape_of(call.shapes[behind:], call.constants)
    passes = tuple(name for name, other in others.items() if op.part is not other)
    return None if shape is None else (form.name, shape, passes)

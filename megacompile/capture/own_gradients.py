"""The operator of a gradient of one's own, as a ``torch.autograd.Function`` has it.

:func:`own_gradient` hands the function's results on, and its gradient is the function's backward, traced once
as a graph by itself. A template's joint graph has only the operators of forward and backward in its place, so
that saved tensors are planned as any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

BACKWARD_GRAPHS: dict[str, fx.GraphModule] = {}  # backwards, by what they compute


@torch.library.custom_op("megacompile::own_gradient", mutates_args=())
def own_gradient(
    results: Sequence[Tensor], inputs: Sequence[Tensor], saved: Sequence[Tensor], rule: str
) -> list[Tensor]:
    """Hand on ``results``, whose gradients become those of ``inputs`` by a rule that reads ``saved``."""
    return [result.clone() for result in results]


@own_gradient.register_fake
def _(
    results: Sequence[Tensor], inputs: Sequence[Tensor], saved: Sequence[Tensor], rule: str
) -> list[Tensor]:
    return [torch.empty_like(result) for result in results]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    results, _, saved, rule = inputs
    ctx.save_for_backward(*saved)
    ctx.rule, ctx.counts = rule, (len(results), len(saved))


def _backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    results, saved = ctx.counts
    rule = fx.Interpreter(BACKWARD_GRAPHS[ctx.rule])
    found = rule.run(*ctx.saved_tensors, *(grad.contiguous() for grad in grads))
    return [None] * results, list(found), [None] * saved, None


own_gradient.register_autograd(_backward, setup_context=_setup)
_OWN_GRADIENT = own_gradient._opoverload


def hand_on(graph: fx.Graph) -> None:
    """Replace results of :func:`own_gradient` by the function's own, where gradients are traced."""
    for node in [n for n in graph.nodes if n.target is _OWN_GRADIENT]:
        for item in list(node.users):
            item.replace_all_uses_with(node.args[0][item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)

"""Pattern of the fuse stage: routing weights, multiplied in before the experts' last product.

``(x @ W) * w`` of rows sorted by expert becomes ``(x * w) @ W``. The gradient of the weights is then made
of the product's input and that input's gradient, so that the backward does not read what the product
returns: it is neither saved nor computed again.

Float32 weights beside rows of 16 bits (DeepSeek-V3's kind) stay behind the product. There its result,
rounded once, is weighted and summed over a token's experts in float32. Before the product, weighted rows
would be rounded too, so a forward would round once more than eager's: in bfloat16, 8 experts a token, 1.2
times its error in the mean square. Where the types are one, both orders round twice, and their errors are
equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from megacompile.graph.pattern_tools import (
    Emitter,
    Match,
    NearMissError,
    Pattern,
    aten,
    is_call,
    is_tensor,
    operands,
    value,
)


def is_product(node: Any) -> bool:
    """Return whether a node multiplies sorted rows [N, K] by stacked weights [E, K, M] under offsets [E]."""
    targets = [aten._grouped_mm.default]
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        targets.append(torch.ops.transformers.grouped_mm_fallback.default)
    if not is_call(node, *targets) or len(operands(node)) < 3 or node.kwargs:
        return False
    x, weight, offsets = operands(node)[:3]
    plain = all(extra is None for extra in operands(node)[3:]) and isinstance(offsets, fx.Node)
    return plain and value(x).ndim == 2 and value(weight).ndim == 3


def routing_weights(node: fx.Node) -> Match | None:
    """A grouped product's rows [N, M], each times its own weight [N, 1]."""
    if not is_call(node, aten.mul.Tensor) or not all(is_tensor(a) for a in operands(node)):
        return None
    for result, weights in (operands(node), operands(node)[::-1]):
        if value(node).ndim == 2 and value(weights).shape == (len(value(node)), 1):
            return _weighted(node, result, weights)
    return None


def _weighted(node: fx.Node, result: fx.Node, weights: fx.Node) -> Match | None:
    if is_call(result, aten.add.Tensor) and any(is_product(a) for a in operands(result)):
        raise NearMissError("a bias is added to the experts' results before their weights are")
    if not is_product(result):
        return None
    x, stacked, offsets = operands(result)[:3]
    inner, outer = (value(n).shape[1] for n in (x, result))
    if inner > outer:
        raise NearMissError(f"the experts' inner rows are wider ({inner}) than their results ({outer})")
    # Under float32 weights eager sums in float32, so that rounding a row before the product as well costs 1.2
    # times eager's error in the mean square (8 experts a token).
    if not value(x).dtype == value(weights).dtype == value(result).dtype:
        raise NearMissError(f"its weights are {value(weights).dtype}, its rows {value(x).dtype}")

    def build(emit: Emitter, inputs: Sequence[fx.Node]) -> fx.Node:
        rows = emit.call(aten.mul.Tensor, inputs[0], inputs[3])
        return emit.call(result.target, rows, *inputs[1:3], like=result)

    inputs = x, stacked, offsets, weights
    return Match("routing_weights", node, (result, node), inputs, build, result, reordered=True)


EXPERT_PATTERNS: dict[str, Pattern] = {"routing_weights": routing_weights}

"""Pattern of the fuse stage: the RMSNorm of each query's or key's head and the rotation behind it."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from megacompile.graph.pattern_tools import (
    Emitter,
    Match,
    NearMissError,
    Pattern,
    aten,
    is_call,
    operands,
    ordered,
    value,
)

ops = torch.ops.megacompile


def qk_norm_rope(node: fx.Node) -> Match | None:
    """The fused rotation of what a fused RMSNorm over heads returns, moved behind the heads or not."""
    if not is_call(node, ops.rope.default):
        return None
    x, cos, sin, interleaved = operands(node)
    moved = is_call(x, aten.transpose.int) and operands(x)[1:] == (1, 2)
    normed = operands(x)[0] if moved else x
    norm = operands(normed)[0] if is_call(normed, operator.getitem) else None
    if not is_call(norm, ops.rms_norm.default) or operands(normed)[1] != 0:
        return None
    given, weight, eps, offset, _ = operands(norm)
    if weight is None or value(x).ndim != 4:
        return None
    if interleaved:
        raise NearMissError("its rotation turns pairs of neighbouring columns")
    if value(given).dtype != value(x).dtype:
        raise NearMissError(f"the norm of {value(given).dtype} is {value(x).dtype}")
    for table in (cos, sin):
        if value(table).ndim != 4 or value(table).shape[1:3] != (1, value(x).shape[2]):
            raise NearMissError(f"its tables are {list(value(table).shape)}, not one row for each token")

    def build(emit: Emitter, inputs: Sequence[fx.Node]) -> fx.Node:
        heads, *rest = inputs
        if moved:
            heads = emit.call(aten.transpose.int, heads, 1, 2)
        return emit.call(operator.getitem, emit.call(ops.qk_norm_rope.default, heads, *rest, eps, offset), 0)

    inside = ordered({norm, normed, x, node})
    takes = ("rms_norm", normed), ("rope", node)
    return Match(
        "qk_norm_rope", node, inside, (given, weight, cos, sin), build, node, fixed=(2, 3), takes=takes
    )


QK_NORM_PATTERNS: dict[str, Pattern] = {"qk_norm_rope": qk_norm_rope}

"""Pattern of the fuse stage: gated activations."""

from __future__ import annotations

import math
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
    halves,
    is_call,
    is_tensor,
    operands,
    ordered,
    other,
    scaled,
    stepped,
    value,
)

_TANH_SCALE = math.sqrt(2.0 / math.pi)


def glu(node: fx.Node) -> Match | None:
    """``activation(gate) * up`` for SiLU, both GELUs and ReLU, and GPT-OSS's with clamped inputs."""
    if not is_call(node, aten.mul.Tensor) or not all(is_tensor(a) for a in operands(node)):
        return None
    for active, up in (operands(node), operands(node)[::-1]):
        found = _activation(active)
        if found is not None and up is not active:
            return _gated(node, up, *found)
        swish = _scaled_swish(active)
        if swish is not None:
            return _clamped(node, up, *swish)
    return None


def _gated(node: fx.Node, up: Any, kind: str, gate: fx.Node, inside: set[fx.Node]) -> Match | None:
    if value(up).ndim == 0:
        return None
    if value(gate).shape != value(up).shape:
        raise NearMissError(f"gate {list(value(gate).shape)} and up {list(value(up).shape)} differ in shape")
    if not value(gate).dtype == value(up).dtype == value(node).dtype:
        raise NearMissError(f"gate is {value(gate).dtype}, up {value(up).dtype}")

    def build(emit: Emitter, inputs: Sequence[fx.Node]) -> fx.Node:
        return emit.call(torch.ops.megacompile.glu.default, inputs[0], inputs[-1], kind)

    inputs = (gate,) if up is gate else (gate, up)
    return Match("glu", node, ordered(inside | {node}), inputs, build, node)


def _activation(node: Any) -> tuple[str, fx.Node, set[fx.Node]] | None:
    """(name, its input, the nodes between) of an activation that the operator knows."""
    if is_call(node, aten.silu.default):
        return "silu", operands(node)[0], {node}
    if is_call(node, aten.relu.default):
        return "relu", operands(node)[0], {node}
    if is_call(node, aten.gelu.default):
        kind = "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu_erf"
        return kind, operands(node)[0], {node}
    return _spelled_gelu(node)


def _spelled_gelu(node: Any) -> tuple[str, fx.Node, set[fx.Node]] | None:
    """``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))`` written out."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for half, one_plus in (operands(node), operands(node)[::-1]):
        left, right = scaled(half, aten.mul.Tensor), scaled(one_plus, aten.add.Tensor)
        if left is None or right is None or left[1] != 0.5 or right[1] != 1.0:
            continue
        x, tanh = left[0], right[0]
        inner = scaled(operands(tanh)[0], aten.mul.Tensor) if is_call(tanh, aten.tanh.default) else None
        if inner is None or not math.isclose(inner[1], _TANH_SCALE, rel_tol=1e-9):
            continue
        summed = inner[0]
        cube = scaled(other(summed, x), aten.mul.Tensor) if is_call(summed, aten.add.Tensor) else None
        if cube is None or cube[1] != 0.044715 or not is_call(cube[0], aten.pow.Tensor_Scalar):
            continue
        if operands(cube[0]) == (x, 3):
            between = {node, half, one_plus, tanh, operands(tanh)[0], summed, other(summed, x), cube[0]}
            return "gelu_tanh", x, between
    return None


def _scaled_swish(node: Any) -> tuple[fx.Node, float, set[fx.Node]] | None:
    """(x, c, the nodes between) of ``x * sigmoid(c * x)``."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for x, gate in (operands(node), operands(node)[::-1]):
        if is_call(gate, aten.sigmoid.default):
            inner = scaled(operands(gate)[0], aten.mul.Tensor)
            if inner is not None and inner[0] is x:
                return x, inner[1], {node, gate, operands(gate)[0]}
    return None


def _clamped(node: fx.Node, up: Any, gate: fx.Node, alpha: float, inside: set[fx.Node]) -> Match:
    """The match of ``(clamp(up, -c, c) + 1) * g * sigmoid(alpha * g)`` with g = ``clamp(gate, max=c)``."""
    raised = scaled(up, aten.add.Tensor)
    clamps = [_clamp(gate), None if raised is None else _clamp(raised[0])]
    if raised is None or raised[1] != 1.0 or clamps[0] is None or clamps[1] is None:
        raise NearMissError("the gate is x * sigmoid(c * x), but not of clamped halves with one added to up")
    (low, limit), bounds = clamps[0][1:], clamps[1][1:]
    if low is not None or limit is None or bounds != (-limit, limit):
        raise NearMissError(f"gate is clamped to {(low, limit)}, up to {bounds}")
    packed = _packed(clamps[0][0], clamps[1][0])
    if packed is None:
        raise NearMissError("gate and up are not the halves, or the even and odd columns, of one tensor")
    both, between, interleaved = packed
    inside |= {node, up, raised[0], gate, *between}

    def build(emit: Emitter, inputs: Sequence[fx.Node]) -> fx.Node:
        target = torch.ops.megacompile.clamped_glu.default
        return emit.call(target, inputs[0], float(limit), alpha, interleaved)

    return Match("glu", node, ordered(inside), (both,), build, node)


def _clamp(node: Any) -> tuple[fx.Node, float | None, float | None] | None:
    """(x, least, most) of a clamp."""
    if not is_call(node, aten.clamp.default) or node.kwargs:
        return None
    x, low, high = (*operands(node), None, None)[:3]
    return x, low, high


def _packed(gate: fx.Node, up: fx.Node) -> tuple[fx.Node, set[fx.Node], bool] | None:
    """(the tensor that both are columns of, the nodes between, whether they alternate)."""
    found = halves(gate, up)
    if found is not None:
        return *found, False
    if is_call(gate, aten.slice.Tensor) and is_call(up, aten.slice.Tensor):
        x: fx.Node = operands(gate)[0]
        last, even = value(x).ndim - 1, value(x).shape[-1] % 2 == 0
        if even and [stepped(gate), stepped(up)] == [(x, last, start, 2) for start in (0, 1)]:
            return x, {gate, up}, True
    return None


GLU_PATTERNS: dict[str, Pattern] = {"glu": glu}

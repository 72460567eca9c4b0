"""Pattern of the fuse stage: gated activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from megacompile.fuse.match import (
    Emitter,
    Match,
    NearMissError,
    aten,
    is_call,
    is_tensor,
    operands,
    ordered,
    other,
    scaled,
    value,
)

_TANH_SCALE = math.sqrt(2.0 / math.pi)


def glu(node: fx.Node) -> Match | None:
    """``activation(gate) * up`` for SiLU, both GELUs and ReLU."""
    if not is_call(node, aten.mul.Tensor) or not all(is_tensor(a) for a in operands(node)):
        return None
    for active, up in (operands(node), operands(node)[::-1]):
        found = _activation(active)
        if found is not None and up is not active:
            return _gated(node, up, *found)
        if _scaled_sigmoid(active):
            raise NearMissError("the gate is x * sigmoid(c * x) with c other than 1")
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


def _scaled_sigmoid(node: Any) -> bool:
    """Whether a node is ``x * sigmoid(c * x)``."""
    if not is_call(node, aten.mul.Tensor):
        return False
    for x, gate in (operands(node), operands(node)[::-1]):
        if is_call(gate, aten.sigmoid.default):
            inner = scaled(operands(gate)[0], aten.mul.Tensor)
            if inner is not None and inner[0] is x:
                return True
    return False

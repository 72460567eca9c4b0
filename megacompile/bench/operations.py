"""List the benchmarked operations: eager forms with their least work, more shapes, Liger-Kernel's function.

Bytes are the least that a kernel must move: each input read once, each result written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from megacompile.kernels.decode_4bit import PER_SCALE, stored_4bit_bytes
from megacompile.kernels.decode_8bit import stored_8bit_bytes
from megacompile.kernels.eager_form import EPS, EagerForm, Shape
from megacompile.kernels.gated_delta import gated_delta_rule_backward_flops, gated_delta_rule_flops
from megacompile.kernels.mamba2 import mamba2_chunk_scan_backward_flops, mamba2_chunk_scan_flops
from megacompile.kernels.registry import EAGER_FORMS
from megacompile.kernels.sdpa import WINDOW


@dataclass(frozen=True)
class Cost:
    """The least work of one pass: bytes to and from device memory, floating-point operations."""

    nbytes: int
    flops: int = 0

    def __add__(self, more: Cost) -> Cost:
        return Cost(self.nbytes + more.nbytes, self.flops + more.flops)


Costs = Callable[[Shape, int], tuple[Cost, Cost]]
"""Forward and backward cost for a shape and an item size."""


@dataclass(frozen=True)
class Operation:
    """One row group of the benchmark. ``liger`` takes Liger-Kernel's functional interface, of version 0.6,
    and the arguments of the eager form."""

    form: EagerForm
    costs: Costs
    more_shapes: tuple[Shape, ...] = ()
    liger: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        return self.form.name

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.form.shape, *self.more_shapes


def _elementwise(inputs: int, outputs: int, backward: int) -> Costs:
    """Return the costs of an operator on [rows, columns]: how many such tensors a pass reads and writes."""

    def costs(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
        nbytes = torch.Size(shape).numel() * itemsize
        return Cost((inputs + outputs) * nbytes), Cost(backward * nbytes)

    return costs


def _attention(window: int) -> Costs:
    def costs(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
        batch, heads, groups, tokens, width = shape
        reach = min(window or tokens, tokens)
        pairs = reach * tokens - reach * (reach - 1) // 2
        flops = 4 * batch * heads * pairs * width
        q, kv = (batch * n * tokens * width * itemsize for n in (heads, 2 * groups))
        return Cost(2 * q + kv, flops), Cost(4 * q + 2 * kv, flops * 5 // 2)

    return costs


def _gated_delta(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
    batch, groups, heads, tokens, width, inner = shape
    q, v = (batch, tokens, groups, width), (batch, tokens, heads, inner)
    keys, values = 2 * torch.Size(q).numel() * itemsize, 2 * torch.Size(v).numel() * itemsize
    forward, backward = gated_delta_rule_flops(q, q, v), gated_delta_rule_backward_flops(v, q, q, v)
    return Cost(keys + values, forward), Cost(2 * keys + 3 * values // 2, backward)


def _linear_cross_entropy(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
    tokens, width, vocabulary = shape
    product, nbytes = 2 * tokens * width * vocabulary, (tokens + vocabulary) * width * itemsize
    return Cost(nbytes, product), Cost(2 * nbytes, 2 * product)


def _mamba2(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
    """Return the bytes that are read in x's type, and those of results and gradients in float32."""
    batch, groups, heads, tokens, width, inner = shape
    x, B = (batch, tokens, heads, width), (batch, tokens, groups, inner)
    values, read = torch.Size(x).numel(), (torch.Size(x).numel() + 2 * torch.Size(B).numel()) * itemsize
    given = x, x[:3], (heads,), B
    forward, backward = mamba2_chunk_scan_flops(*given), mamba2_chunk_scan_backward_flops(x, *given)
    return Cost(read + 4 * values, forward), Cost(2 * read + 4 * values, backward)


def _decoded(stored_bytes: Callable[[Shape], int]) -> Costs:
    return lambda shape, itemsize: (Cost(stored_bytes(shape) + prod(shape) * itemsize), Cost(0))


def _rope_liger(liger: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate half of the heads as queries and half as keys, which Liger rotates together."""
    q, k = x.chunk(2, 1)
    return torch.cat(liger.liger_rope(q, k, cos[:, 0], sin[:, 0]), 1)


def _operations() -> list[Operation]:
    form, rows, few_heads = EAGER_FORMS, ((16384, 8192),), ((2, 8, 8192, 128),)
    return [
        Operation(
            form["add_rms_norm"],
            _elementwise(2, 2, 4),
            rows,
            lambda liger, x, r, w: liger.liger_fused_add_rms_norm(x, r, w, EPS),
        ),
        Operation(form["attention"], _attention(0)),
        Operation(form["capped_attention"], _attention(WINDOW)),
        Operation(
            form["clamped_glu"],
            lambda s, itemsize: _elementwise(2, 1, 5)((s[0], s[1] // 2), itemsize),
        ),
        Operation(form["decode_4bit"], _decoded(lambda s: stored_4bit_bytes(prod(s), PER_SCALE))),
        Operation(form["decode_8bit"], _decoded(lambda s: stored_8bit_bytes(*s))),
        Operation(form["gated_delta_rule"], _gated_delta),
        Operation(
            form["glu"],
            _elementwise(2, 1, 5),
            ((8192, 28672),),
            lambda liger, gate, up: liger.liger_swiglu(gate, up),
        ),
        Operation(
            form["layer_norm"],
            _elementwise(1, 1, 3),
            liger=lambda liger, x, w, b: liger.liger_layer_norm(x, w, b, EPS),
        ),
        Operation(
            form["linear_cross_entropy"],
            _linear_cross_entropy,
            ((8192, 2048, 151936),),
            lambda liger, x, w, labels: liger.liger_fused_linear_cross_entropy(x, w, labels),
        ),
        Operation(form["mamba2_chunk_scan"], _mamba2),
        Operation(form["qk_norm_rope"], _elementwise(1, 1, 3), few_heads),
        Operation(
            form["rms_norm"],
            _elementwise(1, 1, 3),
            rows,
            lambda liger, x, w: liger.liger_rms_norm(x, w, EPS),
        ),
        Operation(form["rope"], _elementwise(1, 1, 2), few_heads, _rope_liger),
    ]


OPERATIONS = {operation.name: operation for operation in _operations()}

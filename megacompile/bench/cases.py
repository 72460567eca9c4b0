"""Bench: what is benchmarked. Each operation's inputs, eager form, bytes and floating-point operations.

A shape is a tuple of sizes, named by ``Operation.sizes``. Bytes are the least that a kernel must move:
each input read once, each result written once. The eager form is what a model writes in plain torch; in
float64 it is the reference of every provider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megacompile.bench.recurrences import gated_delta_rule, mamba2_chunk_scan
from megacompile.kernels._triton import wide
from megacompile.kernels.gated_delta_rule import gated_delta_rule_backward_flops, gated_delta_rule_flops
from megacompile.kernels.mamba2_chunk_scan import mamba2_chunk_scan_backward_flops, mamba2_chunk_scan_flops

Shape = tuple[int, ...]
Function = Callable[..., Tensor | tuple[Tensor, ...]]
EPS = 1e-6
SOFTCAP, WINDOW = 50.0, 1024
LIMIT, ALPHA = 7.0, 1.702
RECURRENCES = ("gated_delta_rule", "mamba2_chunk_scan")


@dataclass(frozen=True)
class Cost:
    """The least work of one pass: bytes to and from device memory, floating-point operations."""

    nbytes: int
    flops: int = 0

    def __add__(self, more: Cost) -> Cost:
        return Cost(self.nbytes + more.nbytes, self.flops + more.flops)


@dataclass(frozen=True)
class Operation:
    """One row group of the benchmark.

    ``make`` gives the inputs of a shape in float64, the differentiable ones first (``trained`` many);
    ``costs`` gives forward and backward cost for a shape and an item size.
    """

    name: str
    sizes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    make: Callable[[Shape, torch.Generator], list[Tensor]]
    trained: int
    eager: Function
    costs: Callable[[Shape, int], tuple[Cost, Cost]]

    def check_shape(self, shape: Shape, device: torch.device) -> Shape:
        """The shape in which correctness is checked: fewer tokens, on a CPU fewer classes too."""
        most = {"tokens": 512, "vocabulary": 8448 if device.type == "cpu" else shape[-1]}
        return tuple(min(s, most.get(name, s)) for name, s in zip(self.sizes, shape, strict=True))


def _normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device) * scale


def _integers(generator: torch.Generator, high: int, count: int) -> Tensor:
    return torch.randint(0, high, (count,), generator=generator, device=generator.device)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As Llama's: the product with the weight is in x's type."""
    y = x.to(wide(x.dtype))
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A residual addition and Llama's norm of the sum."""
    total = x + residual
    return rms_norm(total, weight), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """torch's."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


def glu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's product."""
    return F.silu(gate) * up


def clamped_glu(both: Tensor) -> Tensor:
    """GPT-OSS's, of gate and up in alternating columns."""
    gate, up = both[..., ::2].clamp(max=LIMIT), both[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Llama's, on [batch, heads, tokens, width]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def qk_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Qwen3's, of each head."""
    return rope(rms_norm(x, weight), cos, sin)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """A head and its mean loss over tokens, from logits in at least float32, as transformers' losses."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(wide(logits.dtype)), labels)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention with grouped heads."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def capped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gemma's: a causal window and capped scores."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).to(wide(q.dtype))
    scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
    at = torch.arange(q.shape[2], device=q.device)
    distance = at[:, None] - at
    scores = scores.masked_fill((distance < 0) | (distance >= WINDOW), float("-inf"))
    return scores.softmax(-1).to(q.dtype) @ v


def _elementwise(inputs: int, outputs: int, backward: int) -> Callable[[Shape, int], tuple[Cost, Cost]]:
    """Costs of an operator on [rows, columns]: how many such tensors a pass reads and writes."""

    def costs(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
        one = torch.Size(shape).numel() * itemsize
        return Cost((inputs + outputs) * one), Cost(backward * one)

    return costs


def _head_costs(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
    tokens, width, vocabulary = shape
    product, nbytes = 2 * tokens * width * vocabulary, (tokens + vocabulary) * width * itemsize
    return Cost(nbytes, product), Cost(2 * nbytes, 2 * product)


def _attention_costs(window: int) -> Callable[[Shape, int], tuple[Cost, Cost]]:
    def costs(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
        batch, heads, groups, tokens, width = shape
        reach = min(window or tokens, tokens)
        pairs = reach * tokens - reach * (reach - 1) // 2
        flops = 4 * batch * heads * pairs * width
        q, kv = (batch * n * tokens * width * itemsize for n in (heads, 2 * groups))
        return Cost(2 * q + kv, flops), Cost(4 * q + 2 * kv, flops * 5 // 2)

    return costs


def _delta_costs(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
    batch, groups, heads, tokens, width, inner = shape
    q, v = (batch, tokens, groups, width), (batch, tokens, heads, inner)
    keys, values = 2 * torch.Size(q).numel() * itemsize, 2 * torch.Size(v).numel() * itemsize
    forward, backward = gated_delta_rule_flops(q, q, v), gated_delta_rule_backward_flops(v, q, q, v)
    return Cost(keys + values, forward), Cost(2 * keys + 3 * values // 2, backward)


def _scan_costs(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
    """What is read in x's type, and results and their gradients in float32."""
    batch, groups, heads, tokens, width, inner = shape
    x, B = (batch, tokens, heads, width), (batch, tokens, groups, inner)
    values, read = torch.Size(x).numel(), (torch.Size(x).numel() + 2 * torch.Size(B).numel()) * itemsize
    given = x, x[:3], (heads,), B
    forward, backward = mamba2_chunk_scan_flops(*given), mamba2_chunk_scan_backward_flops(x, *given)
    return Cost(read + 4 * values, forward), Cost(2 * read + 4 * values, backward)


def _of_delta(shape: Shape, g: torch.Generator) -> list[Tensor]:
    batch, groups, heads, tokens, width, inner = shape
    q, k = (_normal(g, batch, tokens, groups, width) for _ in range(2))
    gates = -F.softplus(_normal(g, batch, tokens, heads))
    beta = _normal(g, batch, tokens, heads).sigmoid()
    return [q, k, _normal(g, batch, tokens, heads, inner), gates, beta]


def _of_scan(shape: Shape, g: torch.Generator) -> list[Tensor]:
    batch, groups, heads, tokens, width, inner = shape
    B, C = (_normal(g, batch, tokens, groups, inner) for _ in range(2))
    dt, A = F.softplus(_normal(g, batch, tokens, heads)), -_normal(g, heads).exp()
    return [_normal(g, batch, tokens, heads, width), dt, A, B, C, _normal(g, heads)]


def _qkv(shape: Shape, g: torch.Generator) -> list[Tensor]:
    batch, heads, groups, tokens, width = shape
    return [_normal(g, batch, tokens, n, width).transpose(1, 2) for n in (heads, groups, groups)]


def _turned(shape: Shape, g: torch.Generator) -> list[Tensor]:
    batch, heads, tokens, width = shape
    angles = torch.outer(torch.arange(tokens), 1e4 ** (-torch.arange(0, width, 2) / width)).repeat(1, 2)
    x = _normal(g, batch, tokens, heads, width).transpose(1, 2)
    return [x, angles.cos().double()[None, None], angles.sin().double()[None, None]]


def _normed(shape: Shape, g: torch.Generator) -> list[Tensor]:
    x, cos, sin = _turned(shape, g)
    return [x, _normal(g, shape[-1]), cos, sin]


_ROWS: Any = ((8192, 4096), (16384, 8192))
OPERATIONS: dict[str, Operation] = {
    o.name: o
    for o in (
        Operation("rms_norm", ("tokens", "width"), _ROWS,
                  lambda s, g: [_normal(g, *s), _normal(g, s[1])], 2, rms_norm, _elementwise(1, 1, 3)),
        Operation("add_rms_norm", ("tokens", "width"), _ROWS,
                  lambda s, g: [_normal(g, *s), _normal(g, *s), _normal(g, s[1])], 3, add_rms_norm,
                  _elementwise(2, 2, 4)),
        Operation("layer_norm", ("tokens", "width"), ((8192, 4096),),
                  lambda s, g: [_normal(g, *s), _normal(g, s[1]), _normal(g, s[1])], 3, layer_norm,
                  _elementwise(1, 1, 3)),
        Operation("glu", ("tokens", "width"), ((8192, 14336), (8192, 28672)),
                  lambda s, g: [_normal(g, *s), _normal(g, *s)], 2, glu, _elementwise(2, 1, 5)),
        Operation("clamped_glu", ("tokens", "columns"), ((16384, 5760),),
                  lambda s, g: [_normal(g, *s, scale=4.0)], 1, clamped_glu,
                  lambda s, itemsize: _elementwise(2, 1, 5)((s[0], s[1] // 2), itemsize)),
        Operation("rope", ("batch", "heads", "tokens", "width"), ((2, 32, 8192, 128), (2, 8, 8192, 128)),
                  _turned, 1, rope, _elementwise(1, 1, 2)),
        Operation("qk_norm_rope", ("batch", "heads", "tokens", "width"),
                  ((2, 32, 8192, 128), (2, 8, 8192, 128)), _normed, 2, qk_norm_rope, _elementwise(1, 1, 3)),
        Operation("linear_cross_entropy", ("tokens", "width", "vocabulary"),
                  ((4096, 4096, 128256), (8192, 2048, 151936)),
                  lambda s, g: [_normal(g, s[0], s[1]), _normal(g, s[2], s[1], scale=s[1] ** -0.5),
                                _integers(g, s[2], s[0])], 2, linear_cross_entropy, _head_costs),
        Operation("attention", ("batch", "heads", "groups", "tokens", "width"), ((2, 32, 8, 4096, 128),),
                  _qkv, 3, attention, _attention_costs(0)),
        Operation("capped_attention", ("batch", "heads", "groups", "tokens", "width"),
                  ((2, 16, 8, 4096, 128),), _qkv, 3, capped_attention, _attention_costs(WINDOW)),
        Operation("gated_delta_rule", ("batch", "groups", "heads", "tokens", "width", "inner"),
                  ((2, 16, 32, 4096, 128, 128),), _of_delta, 5, gated_delta_rule, _delta_costs),
        Operation("mamba2_chunk_scan", ("batch", "groups", "heads", "tokens", "width", "inner"),
                  ((1, 8, 128, 4096, 64, 128),), _of_scan, 6, mamba2_chunk_scan, _scan_costs),
    )
}  # fmt: skip


def inputs_of(operation: Operation, shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Fresh leaves of a shape, with the same values at each call."""
    made = operation.make(shape, torch.Generator(device).manual_seed(0))
    moved = [x.to(device, dtype if x.is_floating_point() else x.dtype) for x in made]
    return [x.detach().requires_grad_(i < operation.trained) for i, x in enumerate(moved)]


def gradients_like(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A random gradient of each output, with the same values at each call."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    return [_normal(generator, *o.shape).to(o.dtype) for o in outputs]

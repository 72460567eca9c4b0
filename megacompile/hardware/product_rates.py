"""Measure products of a model's layers as steps run them: one after the other, until power limits the clocks.

In: the shapes of the layers' weights. Out: :class:`ProductRates`. What a few cold products of the best size
reach, no step sees: an H100 took 749 TFLOP/s at first, and 700 to 730 inside steps.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from megacompile.errors import MegacompileError

Weights = Sequence[tuple[int, int]]  # [out, in] of each linear layer
LLAMA_8B: Weights = (*[(4096, 4096), (1024, 4096), (14336, 4096)] * 2, (4096, 14336))  # one of its layers
TOKENS = 8192
_LOAD, _MEASURED = 1.0, 0.3  # seconds of products before those that count, and of these at the least


class ProductRates(NamedTuple):
    """FLOPs per second of a layer's products at first, and after a second of nothing else."""

    cold: float
    hot: float

    def __str__(self) -> str:
        return f"{self.cold / 1e12:.4g} TFLOP/s at first, {self.hot / 1e12:.4g} after {_LOAD:g} s of them"


def layer_weights(model: nn.Module) -> Weights:
    """The shapes of a model's linear layers but its head; those of equal layers, once."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    if not linears:
        raise MegacompileError(
            f"This {type(model).__name__} has no nn.Linear whose products could be timed: profile without it."
        )
    counts = Counter((m.out_features, m.in_features) for m in linears)
    layers = math.gcd(*counts.values())
    return tuple(shape for shape, count in counts.items() for _ in range(count // layers))


def measure_products(weights: Weights, device: str = "cuda", tokens: int = TOKENS) -> ProductRates:
    """Time the forward's product and both of the backward of each weight, in bf16."""
    run, flops = _layer(weights, device, tokens)
    run()  # loads what multiplies
    cold = flops / _mean(run, 0.0)
    _mean(run, _LOAD)
    return ProductRates(cold, flops / _mean(run, _MEASURED))


def _layer(weights: Weights, device: str, tokens: int) -> tuple[Callable[[], None], int]:
    """Return a run of all products to its end, and its FLOPs. Values are drawn: zeros take less power."""
    widest, most = max(map(max, weights)), max(out * into for out, into in weights)
    x, grad, weight = (
        torch.randn(count, device=device, dtype=torch.bfloat16)
        for count in (tokens * widest, tokens * widest, most)
    )

    def run() -> None:
        for out, into in weights:
            given, g = x[: tokens * into].view(tokens, into), grad[: tokens * out].view(tokens, out)
            w = weight[: out * into].view(out, into)
            for left, right in ((given, w.T), (g, w), (g.T, given)):
                torch.mm(left, right)
        if device != "cpu":
            torch.cuda.synchronize()

    return run, 6 * tokens * sum(out * into for out, into in weights)


def _mean(run: Callable[[], None], seconds: float) -> float:
    """Seconds of a run, of as many as begin within so many seconds."""
    count, start = 0, time.perf_counter()
    while True:
        run()
        count, passed = count + 1, time.perf_counter() - start
        if passed >= seconds:
            return passed / count

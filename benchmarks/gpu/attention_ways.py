"""Attentions that a plan could call, each by itself: speed, distance from torch's flash attention, bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.findings import Recorder
from megacompile.capture import sdpa
from megacompile.kernels.attention import Rule, flash_attention_backward, flash_attention_forward

aten = torch.ops.aten
_SHAPES = ((2, 32, 8, 4096, 128), (1, 32, 8, 32768, 128))  # batch, heads, key heads, tokens, width
Results = tuple[Tensor, ...]


def times(to: Recorder) -> None:
    """Time causal attention in bf16: TFLOP/s, the error as a share of the largest value, equal bits.

    cuDNN's backward sums in an order that may change; its forward could go before flash attention's backward.
    """
    from triton.testing import do_bench

    for shape in _SHAPES:
        for name, (run, flops, exact) in _ways(shape).items():
            what = f"{name} {'x'.join(map(str, shape))}"
            if to.done(what):
                continue
            with to.finding(what) as finding:
                first = [x.clone() for x in run()]
                finding["error"] = max(map(_error, first, exact()))
                finding["bits repeat"] = all(all(map(torch.equal, first, run())) for _ in range(3))
                milliseconds = do_bench(run, warmup=50, rep=150, return_mode="median")
                finding |= {"ms": milliseconds, "TFLOP/s": flops / milliseconds / 1e9}


def _ways(shape: tuple[int, ...]) -> dict[str, tuple[Callable[[], Results], float, Callable[[], Results]]]:
    """By name: a call, its FLOPs, and what its results are compared with."""
    batch, heads, groups, tokens, width = shape
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, n, tokens, width, device="cuda", dtype=torch.bfloat16, generator=generator)
        for n in (heads, groups, groups, heads)
    )
    scale = width**-0.5
    forward_flops = 2.0 * batch * heads * tokens**2 * width
    out, lse = sdpa.forward(q, k, v, None, True, scale)
    rule = Rule(scale)
    seed = torch.empty(2, dtype=torch.uint64, device="cuda")

    def cudnn() -> Any:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, scale=scale)

    cudnn_once = functools.cache(cudnn)

    def cudnn_backward() -> Results:
        out, lse, *tokens_of, seed, offset, _ = cudnn_once()
        return aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
            grad, q, k, v, out, lse, seed, offset, None, *tokens_of, 0.0, True, scale=scale
        )

    def after_cudnn() -> Results:
        out, lse, *_ = cudnn_once()
        lse = lse.reshape(batch, heads, tokens)
        return sdpa.backward(grad, q, k, v, out.contiguous(), lse, None, True, scale)

    def any_order() -> Results:
        return aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            grad, q, k, v, out, lse, None, None, tokens, tokens, 0.0, True, seed, seed[:0], scale=scale
        )

    def flash() -> Results:
        return sdpa.forward(q, k, v, None, True, scale)

    def flash_backward() -> Results:
        return sdpa.backward(grad, q, k, v, out, lse, None, True, scale)

    back = 2.5 * forward_flops
    return {
        "flash forward": (flash, forward_flops, flash),
        "cuDNN forward": (lambda: cudnn()[:1], forward_flops, flash),
        "our kernel's forward": (lambda: flash_attention_forward(q, k, v, rule)[:1], forward_flops, flash),
        "flash backward, deterministic": (flash_backward, back, flash_backward),
        "flash backward": (any_order, back, flash_backward),
        "flash backward after cuDNN's forward": (after_cudnn, back, flash_backward),
        "cuDNN backward": (cudnn_backward, back, flash_backward),
        "our kernel's backward": (
            lambda: flash_attention_backward(grad, q, k, v, out, lse, rule)[:3], back, flash_backward
        ),
    }  # fmt: skip


def _error(ours: Tensor, exact: Tensor) -> float:
    exact = exact.float()
    return float((ours.float() - exact).abs().max() / exact.abs().max())

"""Attentions that a plan could call, each by itself: speed, distance from torch's flash attention, bits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.findings import Recorder
from benchmarks.gpu.work import device, share_off
from megacompile.kernels import attention, torch_sdpa
from megacompile.kernels.attention import Rule, Tile, flash_attention_backward, flash_attention_forward

aten = torch.ops.aten
# Of a Hopper's backward, heads 128 wide: queries, keys, warps, stages. By Triton 3.6 none spills, but kv of
# 64 x 128 and of 64 x 64, 24 and 16 bytes.
_TILES = (
    {"q": Tile(64, 64, 4, 2)}, {"q": Tile(64, 64, 8, 2)}, {"q": Tile(64, 128, 4, 2)},
    {"q": Tile(128, 64, 8, 3)}, {"q": Tile(128, 128, 8, 2)},
    {"kv": Tile(64, 128, 8, 2)}, {"kv": Tile(32, 128, 8, 3)}, {"kv": Tile(32, 64, 4, 2)},
    {"kv": Tile(64, 64, 8, 2)}, {"k": Tile(64, 128, 8, 2), "v": Tile(64, 128, 8, 2)},
)  # fmt: skip
_MOST = 2e-2  # of the largest value, that one attention in bf16 differs from another
Results = tuple[Tensor, ...]
Way = tuple[Callable[[], Results], float, Callable[[], Results]]


def times(to: Recorder, shapes: Sequence[Sequence[int]]) -> None:
    """Time causal attention in bf16: TFLOP/s, the error as a share of the largest value, equal bits.

    A shape is batch, heads, key heads, tokens and width. cuDNN's backward sums in an order that may change;
    its forward could go before flash attention's backward, which then takes its log-sum-exps.
    """
    from triton.testing import do_bench

    for shape in shapes:
        for name, (run, flops, exact) in _ways(tuple(shape), _TILES if shape == shapes[0] else ()).items():
            what = f"{name} {'x'.join(map(str, shape))}"
            if to.done(what):
                continue
            with to.finding(what) as finding:
                first = [x.clone() for x in run()]
                finding["error"] = max(itertools.starmap(share_off, zip(first, exact(), strict=True)))
                finding["right"] = finding["error"] < _MOST
                finding["bits repeat"] = all(all(map(torch.equal, first, run())) for _ in range(3))
                milliseconds = do_bench(run, warmup=25, rep=100, return_mode="median")
                finding |= {"ms": milliseconds, "TFLOP/s": flops / milliseconds / 1e9}


def _ways(shape: tuple[int, ...], tiles: Sequence[dict[str, Tile]]) -> dict[str, Way]:
    """By name: a call, its FLOPs, and what its results are compared with."""
    batch, heads, groups, tokens, width = shape
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, n, tokens, width, device=device(), dtype=torch.bfloat16)
        for n in (heads, groups, groups, heads)
    )
    scale = width**-0.5
    forward_flops = 2.0 * batch * heads * tokens**2 * width
    out, lse = torch_sdpa.forward(q, k, v, None, True, scale)
    rule = Rule(scale)
    seed = torch.empty(2, dtype=torch.uint64, device=device())
    usual = attention.tiles_for(("q", "kv", "k", "v"), q, v)

    def cudnn() -> Any:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, scale=scale)

    cudnn_once = functools.cache(cudnn)

    def cudnn_forward() -> Results:
        out, lse, *_ = cudnn()
        return out, lse.reshape(batch, heads, tokens)

    def cudnn_backward() -> Results:
        out, lse, *tokens_of, seed, offset, _ = cudnn_once()
        return aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
            grad, q, k, v, out, lse, seed, offset, None, *tokens_of, 0.0, True, scale=scale
        )

    def after_cudnn() -> Results:
        out, lse, *_ = cudnn_once()
        lse = lse.reshape(batch, heads, tokens)
        return torch_sdpa.backward(grad, q, k, v, out.contiguous(), lse, None, True, scale)

    def any_order() -> Results:
        return aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            grad, q, k, v, out, lse, None, None, tokens, tokens, 0.0, True, seed, seed[:0], scale=scale
        )

    def flash() -> Results:
        return torch_sdpa.forward(q, k, v, None, True, scale)

    def flash_backward() -> Results:
        return torch_sdpa.backward(grad, q, k, v, out, lse, None, True, scale)

    def our_backward(chosen: dict[str, Tile]) -> Results:
        both = {n: t for n, t in usual.items() if n == "q" or "q" in chosen} | chosen
        with mock.patch.object(
            attention, "tiles_for", lambda names, *_: {n: both[n] for n in names if n in both}
        ):
            return flash_attention_backward(grad, q, k, v, out, lse, rule)[:3]

    back = 2.5 * forward_flops
    tiled = {
        f"our kernel's backward, {' and '.join(f'{n} by {_text(t)}' for n, t in chosen.items())}": (
            functools.partial(our_backward, chosen), back, flash_backward
        )
        for chosen in tiles
    }  # fmt: skip
    return {
        "flash forward": (flash, forward_flops, flash),
        "cuDNN forward": (cudnn_forward, forward_flops, flash),
        "our kernel's forward": (lambda: flash_attention_forward(q, k, v, rule), forward_flops, flash),
        "flash backward, deterministic": (flash_backward, back, flash_backward),
        "flash backward": (any_order, back, flash_backward),
        "flash backward after cuDNN's forward": (after_cudnn, back, flash_backward),
        "cuDNN backward": (cudnn_backward, back, flash_backward),
        f"our kernel's backward, {' and '.join(f'{n} by {_text(t)}' for n, t in usual.items())}": (
            lambda: flash_attention_backward(grad, q, k, v, out, lse, rule)[:3], back, flash_backward
        ),
        **tiled,
    }  # fmt: skip


def _text(tile: Tile) -> str:
    return f"{tile.block_m}x{tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages"

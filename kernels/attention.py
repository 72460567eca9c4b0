"""Attention for what the library's lacks: window, softcap, sinks, packed documents; grouped heads.

Flash attention (Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691) with

    s = scale * q @ k.T, capped to softcap * tanh(s / softcap) where softcap > 0
    visible(i, j): j <= i where causal; i - j < window, and j - i < window where not causal, if
                   window > 0; first[i] <= j < last[i] where there are documents
    out = softmax(s over visible j, and the head's sink logit) @ v

q: [B, H, S, D]. k: [B, G, T, D]. v: [B, G, T, Dv], G dividing H; i counts from T - S. sinks: [H] or
None (a logit in the denominator alone; Xiao et al. 2023, arXiv:2309.17453, as in GPT-OSS). bounds:
int32 [2, B, S] or None, the first and last of the document of each token, where S == T and
documents lie one after the other (``document_bounds``); the two are equal for padding. out:
[B, H, S, Dv], stored as [B, S, H, Dv]. lse: [B, H, S] float32 (float64 for float64), sink included.
A query that sees no key gives 0 and passes no gradient. Since lse is one float32, probabilities in
the backward are exact to its last place: 0.01 % at scores of 1000.

The backward is deterministic: one kernel for dk and dv, which walks over queries, one for dq, which
walks over keys; no atomics. Scores are formed transposed where the gradient needs them so: triton
3.4 to 3.7 miscompile ``dot(trans(cast(dot)))`` on Hopper. No registered operators: the compiler's
own attention operator calls ``flash_attention_forward`` and ``flash_attention_backward``.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import (
    AotCase,
    accumulator,
    aot_cases,
    arch_of,
    ceil_div,
    launch,
    next_power_of_2,
    on_gpu,
    pointer,
    runs_triton,
    wide,
)
from megacompile.kernels.attention_backward_kernels import (
    attention_backward_kv_kernel,
    attention_backward_q_kernel,
    attention_delta_kernel,
)
from megacompile.kernels.attention_kernels import attention_forward_kernel
from megacompile.kernels.attention_reference import Rule, backward_reference, forward_reference, sink_gradient

MAX_DIM = 256
MAX_GRID = 65535  # CUDA's, beyond the first dimension


@dataclass(frozen=True)
class Tile:
    """BLOCK_M queries by BLOCK_N keys, and how a kernel on them is launched."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


Tiles = Mapping[str, tuple[Tile | None, ...]]

# Per kernel, for heads up to 64, 128, 192 and 256 wide. None spills in its hot loop:
# see ceilings.csv. "kv" makes dk and dv at once, "k" and "v" one each: on 9.0 two warpgroups share no row of
# the scores from 128 keys on, and dk and dv of so many keys do not fit its registers. HOPPER and BLACKWELL
# (10.0) have more than 160 KiB of shared memory per block and products that read it directly. GEFORCE (12.0)
# gives the same work to twice the warps where four spill.
_SMALL, _NARROW = Tile(64, 32, 4, 2), Tile(32, 32, 8, 1)
_WIDE = (Tile(128, 128, 8, 2), Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(128, 64, 8, 2))
TILES: Tiles = {
    "forward": (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    "q": (_SMALL, Tile(64, 64, 8, 2), _NARROW, _NARROW),
    "kv": (_SMALL, Tile(32, 64, 8, 2), _NARROW, _NARROW),
}
HOPPER: Tiles = {
    "forward": _WIDE,
    "q": (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(128, 32, 8, 2)),
    "kv": (Tile(64, 128, 8, 2), Tile(32, 128, 8, 2)),
    "k": (None, None, Tile(32, 128, 8, 1), Tile(32, 128, 8, 2)),
    "v": (None, None, Tile(64, 128, 8, 2), Tile(32, 128, 8, 2)),
}
BLACKWELL: Tiles = {
    "forward": _WIDE,
    "q": (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    "kv": (Tile(64, 128, 8, 2), Tile(32, 64, 8, 2), _NARROW, _NARROW),
}
GEFORCE: Tiles = {**TILES, "kv": (Tile(64, 32, 8, 2), *TILES["kv"][1:])}
_OF_CHIP = {90: HOPPER, 100: BLACKWELL, 103: BLACKWELL, 120: GEFORCE, 121: GEFORCE}
WIDTHS = 64, 128, 192, 256


def tiles_for(kernels: tuple[str, ...], q: Tensor, v: Tensor) -> dict[str, Tile]:
    """The tiles of those of ``kernels`` that these head widths, this type and this chip take."""
    place = bisect_left(WIDTHS, max(q.shape[-1], v.shape[-1]))
    table = _OF_CHIP.get(arch_of(q), TILES)
    found = {name: table[name][place] for name in kernels if place < len(table.get(name, ()))}
    return {name: tile for name, tile in found.items() if tile is not None}


def document_bounds(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """int32 [2, 1, tokens] of packed documents: token t belongs to [first[t], last[t]).

    cu_seqlens: int [N + 1], rising from 0; tokens past its last entry are padding.
    """
    at = torch.arange(tokens, device=cu_seqlens.device)
    index = torch.searchsorted(cu_seqlens.to(at.dtype), at, right=True)
    padded = torch.cat((cu_seqlens, cu_seqlens[-1:])).to(torch.int32)
    return torch.stack((padded[index - 1], padded[index])).unsqueeze(1)


def _constants(q: Tensor, v: Tensor, rule: Rule, tile: Tile) -> dict[str, Any]:
    return {
        "CAUSAL": rule.causal,
        "WINDOW": rule.window > 0,
        "CAPPED": rule.softcap > 0,
        "BOUNDED": rule.bounds is not None,
        "ACC": accumulator(q.dtype),
        "DIM": q.shape[-1],
        "V_DIM": v.shape[-1],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": max(16, next_power_of_2(q.shape[-1])),
        "BLOCK_V": max(16, next_power_of_2(v.shape[-1])),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _bounds(bounds: Tensor | None, q: Tensor, stand_in: Tensor) -> tuple[Tensor, Tensor]:
    """(first, last), dense [B, S] each; one row of documents may stand for all of the batch."""
    if bounds is None:
        return stand_in, stand_in
    first, last = bounds.expand(2, q.shape[0], q.shape[2]).contiguous()
    return first, last


def _sizes(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Any, ...]:
    heads = q.shape[1]
    return (
        heads, heads // k.shape[1], q.shape[2], k.shape[2], rule.scale, rule.window, rule.softcap,
    )  # fmt: skip


def forward_triton(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """(out, lse) by the kernel."""
    batch, heads, queries, _ = q.shape
    out = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
    lse = q.new_empty(batch, heads, queries, dtype=wide(q.dtype))
    q, k, v = _dense(q), _dense(k), _dense(v)
    tile = tiles_for(("forward",), q, v)["forward"]
    first, last = _bounds(rule.bounds, q, lse)
    launch(
        attention_forward_kernel,
        (ceil_div(queries, tile.block_m), heads, batch),
        *(q, k, v, pointer(rule.sinks, lse), first, last, out, lse),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        *_sizes(q, k, v, rule),
        SINKS=rule.sinks is not None,
        **_constants(q, v, rule, tile),
    )
    return out, lse


def _delta(out: Tensor, grad: Tensor, lse: Tensor) -> Tensor:
    """[B, H, S], the sum of out * grad over the last dimension."""
    delta = torch.empty_like(lse)
    batch, heads, queries = lse.shape
    block = max(16, next_power_of_2(out.shape[-1]))
    block_m = max(16, 4096 // block)
    launch(
        attention_delta_kernel,
        (ceil_div(queries, block_m), heads, batch),
        *(out, grad, delta),
        *out.stride()[:3],
        *grad.stride()[:3],
        *(heads, queries),
        V_DIM=out.shape[-1],
        ACC=accumulator(out.dtype),
        BLOCK_M=block_m,
        BLOCK_V=block,
    )
    return delta


def backward_triton(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks) by the kernels."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    grad, q, k, v, out = (_dense(x) for x in (grad, q, k, v, out))
    lse = lse.contiguous()
    delta = _delta(out, grad, lse)
    first, last = _bounds(rule.bounds, q, lse)
    inputs = q, k, v, grad, lse, delta, first, last
    strides = [s for x in inputs[:4] for s in x.stride()[:3]]
    sizes = _sizes(q, k, v, rule)
    for part, tile in tiles_for(("kv", "k", "v"), q, v).items():
        launch(
            attention_backward_kv_kernel,
            (ceil_div(k.shape[2], tile.block_n), k.shape[1], k.shape[0]),
            *(*inputs, dk, dv),
            *strides,
            *sizes,
            KEYS="k" in part,
            VALUES="v" in part,
            **_constants(q, v, rule, tile),
        )
    tile = tiles_for(("q",), q, v)["q"]
    launch(
        attention_backward_q_kernel,
        (ceil_div(q.shape[2], tile.block_m), q.shape[1], q.shape[0]),
        *(*inputs, dq),
        *strides,
        *sizes,
        **_constants(q, v, rule, tile),
    )
    return dq, dk, dv, sink_gradient(lse, delta, rule.sinks)


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these: heads up to 256 wide, a grid that fits; on a GPU, 16-bit types.

    Exact float32 products run beside the tensor cores, where every tile that was tried spills.
    """
    batch, heads = q.shape[:2]
    fits = max(batch, heads) <= MAX_GRID and batch * heads < 1 << 31
    return fits and max(q.shape[-1], v.shape[-1]) <= MAX_DIM and (q.element_size() == 2 or not on_gpu(q))


def _reaching(q: Tensor, k: Tensor, rule: Rule) -> Rule:
    """A window that reaches every key is none: models write 2**31 - 1, which would wrap."""
    return rule if rule.window < max(q.shape[2], k.shape[2]) else replace(rule, window=0)


def flash_attention_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """(out, lse); see the module's docstring. The kernel compares scores before it scales them."""
    fits = runs_triton(q) and supports(q, k, v) and rule.scale > 0
    run = forward_triton if fits else forward_reference
    return run(q, k, v, _reaching(q, k, rule))


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks), contiguous; dsinks is empty where there are no sinks."""
    run = backward_triton if runs_triton(q) and supports(q, k, v) else backward_reference
    return run(grad, q, k, v, out, lse, _reaching(q, k, rule))


@aot_cases
def _aot() -> list[AotCase]:
    def case(dims: tuple[int, int], rule: Rule, sinks: bool = False, packed: bool = False) -> None:
        q, k, v = (
            torch.empty((2, 4096, heads, dim), dtype=torch.bfloat16, device="meta").transpose(1, 2)
            for heads, dim in ((32, dims[0]), (8, dims[0]), (8, dims[1]))
        )
        logits = q[0, :, 0, 0].contiguous() if sinks else None
        bounds = torch.empty((2, 2, 4096), dtype=torch.int32, device="meta") if packed else None
        rule = replace(rule, sinks=logits, bounds=bounds)
        out, lse = forward_triton(q, k, v, rule)
        backward_triton(out, q, k, v, out, lse, rule)

    causal, window = Rule(0.1), Rule(0.1, window=1024)
    gemma, every = replace(causal, softcap=50.0), replace(window, softcap=50.0)
    return [
        *((f"{d} all bf16", partial(case, (d, d), every, True, True)) for d in (64, 128, 256)),
        ("64 two-sided bf16", partial(case, (64, 64), Rule(0.1, False, 512))),
        *((f"{d} causal bf16", partial(case, (d, d), causal)) for d in (64, 128, 256)),
        ("192/128 causal bf16", partial(case, (192, 128), causal)),
        ("128 window bf16", partial(case, (128, 128), window)),
        ("128 packed bf16", partial(case, (128, 128), causal, packed=True)),
        ("64 sinks bf16", partial(case, (64, 64), causal, sinks=True)),
        ("64 window sinks bf16", partial(case, (64, 64), window, sinks=True)),
        ("256 softcap bf16", partial(case, (256, 256), gemma)),
        ("256 window softcap bf16", partial(case, (256, 256), every)),
    ]

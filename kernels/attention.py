# mypy: allow-untyped-defs, allow-incomplete-defs
"""Attention for what the library's lacks: window, softcap, sinks, packed documents; grouped heads.

Flash attention (Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691) with

    s = scale * q @ k.T, capped to softcap * tanh(s / softcap) where softcap > 0
    visible(i, j): j <= i where causal; i - j < window, and j - i < window where not causal, if
                   window > 0; first[i] <= j < last[i] where there are documents
    out = softmax(s over visible j, and the head's sink logit) @ v

q: [B, H, S, D]. k: [B, G, T, D]. v: [B, G, T, Dv], G dividing H; i counts from T - S. sinks: [H] or None (a
logit in the denominator alone; Xiao et al. 2023, arXiv:2309.17453, as in GPT-OSS). bounds: int32 [2, B, S]
or None, the first and last of the document of each token, where S == T and documents lie one after the
other (``document_bounds``); the two are equal for padding. out: [B, H, S, Dv], stored as [B, S, H, Dv].
lse: [B, H, S] float32 (float64 for float64), sink included. A query that sees no key gives 0 and passes no
gradient. Since lse is one float32, probabilities in the backward are exact to its last place: 0.01 % at
scores of 1000.

The backward is deterministic: one kernel for dk and dv, which walks over queries, one for dq, which
walks over keys; no atomics. Scores are formed transposed where the gradient needs them so: triton
3.4 to 3.7 miscompile ``dot(trans(cast(dot)))`` on Hopper. No registered operators: the compiler's
own attention operator calls ``flash_attention_forward`` and ``flash_attention_backward``.

The Triton kernels address tensors by the strides of batch, head and row; their last dimension is contiguous.
``first`` and ``last`` are int32 [B, S] where BOUNDED. Everything that is exponentiated is in base 2. Products
take 16-bit tiles and accumulate in float32 (ACC); so do all sums. Grids are blocks x heads x batch: with one
flat dimension, what divides it stays live, and two kernels spill on 8.6 and 8.9. Head and row are int64
where they meet a stride: a head's offset passes 2**31 in long sequences. Traffic: q once; k and v once per
block of queries that sees them.

Conventions of the backward's kernels are those of the forward's. They make delta, then dq over keys, then dk
and dv over queries. Traffic: dq reads q and grad once, k and v once per block of queries; dk and dv read k
and v once, q and grad once per block of keys and member of the group.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import (
    accumulator,
    arch_of,
    ceil_div,
    launch,
    next_power_of_2,
    on_gpu,
    pointer,
    runs_triton,
    tl,
    triton,
    wide,
)
from megacompile.kernels.attention_sinks import sink_gradient
from megacompile.kernels.cross_entropy_tiles import capped


@dataclass(frozen=True, eq=False)
class Rule:
    """The rule of what a query sees, and how scores are formed; sinks: [H], bounds: int32 [2, B, S]."""

    scale: float
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    bounds: Tensor | None = None


def visible_reference(q: Tensor, k: Tensor, rule: Rule) -> Tensor:
    """bool, broadcastable to [B, H, S, T]."""
    key = torch.arange(k.shape[2], device=q.device)
    distance = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2] - key
    seen = distance >= 0 if rule.causal else torch.ones_like(distance, dtype=torch.bool)
    if rule.window:
        seen = seen & (distance < rule.window)
        seen = seen if rule.causal else seen & (-distance < rule.window)
    if rule.bounds is None:
        return seen
    first, last = rule.bounds[:, :, None, :, None]
    inside: Tensor = (key >= first) & (key < last)
    return seen & inside


def scores(q: Tensor, k: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """(capped scores, probabilities, lse) in plain torch."""
    dtype = wide(q.dtype)
    keys = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    s = q.to(dtype) @ keys.mT * rule.scale
    s = rule.softcap * torch.tanh(s / rule.softcap) if rule.softcap else s
    hidden = s.masked_fill(~visible_reference(q, k, rule), float("-inf"))
    lse = hidden.logsumexp(-1)
    if rule.sinks is not None:
        lse = torch.logaddexp(lse, rule.sinks.to(dtype).view(1, -1, 1))
    base = torch.where(lse == float("-inf"), 0.0, lse)
    return s, torch.exp(hidden - base.unsqueeze(-1)), lse


def forward_reference(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """(out, lse) in plain torch, with the whole score matrix."""
    _, p, lse = scores(q, k, rule)
    out: Tensor = p @ v.to(p.dtype).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse


def backward_reference(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks) in plain torch."""
    s, p, _ = scores(q, k, rule)
    group = q.shape[1] // k.shape[1]
    keys, values = (x.to(p.dtype).repeat_interleave(group, dim=1) for x in (k, v))
    grad = grad.to(p.dtype)
    delta = (out.to(p.dtype) * grad).sum(-1)
    ds = p * (grad @ values.mT - delta.unsqueeze(-1)) * rule.scale
    ds = ds * (1.0 - (s / rule.softcap).square()) if rule.softcap else ds
    dk, dv = ds.mT @ q.to(p.dtype), p.mT @ grad
    dk, dv = (x.view(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))
    dq = (ds @ keys).to(q.dtype).contiguous()
    return dq, dk.to(k.dtype), dv.to(v.dtype), sink_gradient(lse, delta, rule.sinks)


@triton.jit
def visible(
    query, key, keys, first, last, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BOUNDED: tl.constexpr
):
    """Mask of the pairs that attend; the arguments broadcast against each other."""
    seen = (key < keys) & (query == query)
    if CAUSAL:
        seen = seen & (key <= query)
    if WINDOW:
        seen = seen & (query - key < window)
        if not CAUSAL:
            seen = seen & (key - query < window)
    if BOUNDED:
        seen = seen & (key >= first) & (key < last)
    return seen


@triton.jit
def key_range(
    start, rows, first_ptr, last_ptr, offset, keys, window, queries,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(least, end) of the keys that some of queries [start, start + BLOCK_M) see, the same of the keys that
    all of them see, and the queries' documents."""
    low = 0
    high = keys
    all_low = 0
    all_high = keys
    if CAUSAL:
        high = tl.minimum(high, start + BLOCK_M + offset)
        all_high = tl.minimum(all_high, start + offset + 1)
    if WINDOW:
        low = tl.maximum(low, start + offset - window + 1)
        all_low = tl.maximum(all_low, start + BLOCK_M + offset - window)
        if not CAUSAL:
            high = tl.minimum(high, start + BLOCK_M + offset + window - 1)
            all_high = tl.minimum(all_high, start + offset + window)
    first = rows
    last = rows
    if BOUNDED:
        first = tl.load(first_ptr + rows, mask=rows < queries, other=keys)
        last = tl.load(last_ptr + rows, mask=rows < queries, other=0)
        low = tl.maximum(low, tl.min(first, axis=0))
        high = tl.minimum(high, tl.max(last, axis=0))
        all_low = tl.maximum(all_low, tl.max(first, axis=0))
        all_high = tl.minimum(all_high, tl.min(last, axis=0))
    return low // BLOCK_N * BLOCK_N, high, all_low, all_high, first, last


@triton.jit
def query_range(
    start, key, first_ptr, last_ptr, offset, keys, window, queries,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(least, end) of the queries that see some of keys [start, start + BLOCK_N), and of those that see all
    of these."""
    low = 0
    high = queries
    all_low = 0
    all_high = tl.where(start + BLOCK_N <= keys, queries + BLOCK_M, 0)
    if CAUSAL:
        low = tl.maximum(low, start - offset)
        all_low = tl.maximum(all_low, start + BLOCK_N - 1 - offset)
    if WINDOW:
        high = tl.minimum(high, start + BLOCK_N - 1 + window - offset)
        all_high = tl.minimum(all_high, start + window - offset)
        if not CAUSAL:
            low = tl.maximum(low, start - window + 1 - offset)
            all_low = tl.maximum(all_low, start + BLOCK_N - window - offset)
    if BOUNDED:
        # A document's queries are its keys, so its bounds are those of what sees this key.
        begins = tl.load(first_ptr + key, mask=key < keys, other=keys)
        ends = tl.load(last_ptr + key, mask=key < keys, other=0)
        low = tl.maximum(low, tl.min(begins, axis=0))
        high = tl.minimum(high, tl.max(ends, axis=0))
        all_low = tl.maximum(all_low, tl.max(begins, axis=0))
        all_high = tl.minimum(all_high, tl.min(ends, axis=0))
    return low // BLOCK_M * BLOCK_M, high, all_low, all_high


@triton.jit
def place(heads):
    """(batch, head, both as one index) of this program; its block of rows is the grid's first axis."""
    return tl.program_id(2), tl.program_id(1), tl.program_id(2) * heads + tl.program_id(1)


@triton.jit
def matrix(ptr, batch, batch_stride, head, head_stride):
    """Return a pointer to the matrix of one head; its offset is int64."""
    return ptr + batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride


@triton.jit
def within(row, rows, col, COLUMNS: tl.constexpr):
    """Return the mask of what exists of [row, col]; columns are compared only where ``col`` counts more."""
    inside = (row < rows)[:, None]
    if col.shape[0] != COLUMNS:
        inside = inside & (col < COLUMNS)[None, :]
    return inside


@triton.jit
def load_rows(ptr, row, stride, rows, col, COLUMNS: tl.constexpr):
    """[row, col] of a matrix whose rows lie ``stride`` apart, zero outside of it."""
    at = ptr + row[:, None].to(tl.int64) * stride + col[None, :]
    return tl.load(at, mask=within(row, rows, col, COLUMNS), other=0.0)


@triton.jit
def store_rows(ptr, row, stride, rows, col, COLUMNS: tl.constexpr, value):
    """The counterpart of ``load_rows``, in the type of ``ptr``."""
    at = ptr + row[:, None].to(tl.int64) * stride + col[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=within(row, rows, col, COLUMNS))


@triton.jit
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, first_ptr, last_ptr, out_ptr, lse_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row,
    heads, group, queries, keys, scale, window, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    BOUNDED: tl.constexpr, ACC: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head; long rows (late queries) start first."""
    LOG2E: tl.constexpr = 1.4426950408889634
    batch, head, line = place(heads)
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    v_col = tl.arange(0, BLOCK_V)
    q = load_rows(matrix(q_ptr, batch, q_batch, head, q_head), row, q_row, queries, col, DIM)
    k_ptr = matrix(k_ptr, batch, k_batch, head // group, k_head)
    v_ptr = matrix(v_ptr, batch, v_batch, head // group, v_head)
    first_ptr += batch.to(tl.int64) * queries
    last_ptr += batch.to(tl.int64) * queries
    offset = keys - queries
    low, high, all_low, all_high, first, last = key_range(
        start, row, first_ptr, last_ptr, offset, keys, window, queries,
        CAUSAL, WINDOW, BOUNDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    unit = LOG2E if CAPPED else scale * LOG2E
    top = tl.full((BLOCK_M,), float("-inf"), dtype=ACC)
    total = tl.zeros((BLOCK_M,), dtype=ACC)
    out = tl.zeros((BLOCK_M, BLOCK_V), dtype=ACC)
    for begin in range(low, high, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, key, k_row, keys, col, DIM)
        s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC)
        if CAPPED:
            s = capped(s * scale, softcap, CAPPED)
        if (begin < all_low) | (begin + BLOCK_N > all_high):
            seen = visible(
                row[:, None] + offset, key[None, :], keys, first[:, None], last[:, None], window,
                CAUSAL, WINDOW, BOUNDED,
            )  # fmt: skip
            s = tl.where(seen, s, float("-inf"))
        above = tl.maximum(top, tl.max(s, axis=1) * unit)
        base = tl.where(above == float("-inf"), 0.0, above)
        shrink = tl.exp2(top - base)
        p = tl.exp2(s * unit - base[:, None])
        v = load_rows(v_ptr, key, v_row, keys, v_col, V_DIM)
        total = total * shrink + tl.sum(p, axis=1)
        update = tl.dot(p.to(v.dtype), v, input_precision="ieee", out_dtype=ACC)
        out = out * shrink[:, None] + update
        top = above
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(ACC) * LOG2E
        above = tl.maximum(top, sink)
        shrink = tl.exp2(top - above)
        total = total * shrink + tl.exp2(sink - above)
        out = out * shrink[:, None]
        top = above
    out = out / tl.where(total > 0.0, total, 1.0)[:, None]
    lse = (top + tl.log2(total)) / LOG2E
    tl.store(lse_ptr + line.to(tl.int64) * queries + row, lse, mask=row < queries)
    out_ptr = matrix(out_ptr, batch, out_batch, head, out_head)
    store_rows(out_ptr, row, out_row, queries, v_col, V_DIM, out)


@triton.jit
def attention_delta_kernel(
    out_ptr, grad_ptr, delta_ptr,
    out_batch, out_head, out_row, grad_batch, grad_head, grad_row, heads, queries,
    V_DIM: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """delta[i] = sum(out[i] * grad[i]), which is also the softmax's sum of p * dp; reads both once."""
    batch, head, line = place(heads)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_V)
    out_ptr = matrix(out_ptr, batch, out_batch, head, out_head)
    grad_ptr = matrix(grad_ptr, batch, grad_batch, head, grad_head)
    out = load_rows(out_ptr, row, out_row, queries, col, V_DIM).to(ACC)
    grad = load_rows(grad_ptr, row, grad_row, queries, col, V_DIM).to(ACC)
    tl.store(delta_ptr + line.to(tl.int64) * queries + row, tl.sum(out * grad, axis=1), mask=row < queries)


@triton.jit
def statistics(lse_ptr, delta_ptr, row, rows):
    """(lse in base 2, delta) of queries; an infinite lse, and so no probability, where they see no key."""
    LOG2E: tl.constexpr = 1.4426950408889634
    lse = tl.load(lse_ptr + row, mask=row < rows, other=float("inf"))
    delta = tl.load(delta_ptr + row, mask=row < rows, other=0.0)
    return tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E, delta


@triton.jit
def probability(s, lse, scale, CAPPED: tl.constexpr):
    """exp(s - lse) of masked scores, scaled where they are capped; lse in base 2."""
    LOG2E: tl.constexpr = 1.4426950408889634
    return tl.exp2(s * (LOG2E if CAPPED else scale * LOG2E) - lse)


@triton.jit
def slope(s, p, dp, delta, softcap, CAPPED: tl.constexpr):
    """ds before the scale, from scores that are capped and not masked; the arguments broadcast."""
    ds = p * (dp - delta)
    if CAPPED:
        part = s * (1.0 / softcap)
        ds = ds * (1.0 - part * part)
    return ds


@triton.jit
def attention_backward_q_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, first_ptr, last_ptr, dq_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    grad_batch, grad_head, grad_row,
    heads, group, queries, keys, scale, window, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    BOUNDED: tl.constexpr, ACC: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: dq of BLOCK_M queries of one head; dq is contiguous."""
    batch, head, line = place(heads)
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    v_col = tl.arange(0, BLOCK_V)
    q = load_rows(matrix(q_ptr, batch, q_batch, head, q_head), row, q_row, queries, col, DIM)
    grad_ptr = matrix(grad_ptr, batch, grad_batch, head, grad_head)
    grad = load_rows(grad_ptr, row, grad_row, queries, v_col, V_DIM)
    at = line.to(tl.int64) * queries
    lse, delta = statistics(lse_ptr + at, delta_ptr + at, row, queries)
    k_ptr = matrix(k_ptr, batch, k_batch, head // group, k_head)
    v_ptr = matrix(v_ptr, batch, v_batch, head // group, v_head)
    first_ptr += batch.to(tl.int64) * queries
    last_ptr += batch.to(tl.int64) * queries
    offset = keys - queries
    low, high, all_low, all_high, first, last = key_range(
        start, row, first_ptr, last_ptr, offset, keys, window, queries,
        CAUSAL, WINDOW, BOUNDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    for begin in range(low, high, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, key, k_row, keys, col, DIM)
        v = load_rows(v_ptr, key, v_row, keys, v_col, V_DIM)
        s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC)
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee", out_dtype=ACC)
        if CAPPED:
            s = capped(s * scale, softcap, CAPPED)
        p = probability(s, lse[:, None], scale, CAPPED)
        if (begin < all_low) | (begin + BLOCK_N > all_high):
            seen = visible(
                row[:, None] + offset, key[None, :], keys, first[:, None], last[:, None], window,
                CAUSAL, WINDOW, BOUNDED,
            )  # fmt: skip
            p = tl.where(seen, p, 0.0)
        ds = slope(s, p, dp, delta[:, None], softcap, CAPPED)
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee", out_dtype=ACC)
    store_rows(dq_ptr + line.to(tl.int64) * queries * DIM, row, DIM, queries, col, DIM, dq * scale)


@triton.jit
def attention_backward_kv_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, first_ptr, last_ptr, dk_ptr, dv_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    grad_batch, grad_head, grad_row,
    heads, group, queries, keys, scale, window, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    BOUNDED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ACC: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: dk (KEYS), dv (VALUES) of BLOCK_N keys of one key head, over its group's query heads."""
    batch, kv_head, kv_line = place(heads // group)
    start = tl.program_id(0) * BLOCK_N
    key = start + tl.arange(0, BLOCK_N)
    col = tl.arange(0, BLOCK_D)
    v_col = tl.arange(0, BLOCK_V)
    k = load_rows(matrix(k_ptr, batch, k_batch, kv_head, k_head), key, k_row, keys, col, DIM)
    v_ptr = matrix(v_ptr, batch, v_batch, kv_head, v_head)
    if KEYS:
        v = load_rows(v_ptr, key, v_row, keys, v_col, V_DIM)
    first_ptr += batch.to(tl.int64) * queries
    last_ptr += batch.to(tl.int64) * queries
    offset = keys - queries
    low, high, all_low, all_high = query_range(
        start, key, first_ptr, last_ptr, offset, keys, window, queries,
        CAUSAL, WINDOW, BOUNDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    dv = tl.zeros((BLOCK_N, BLOCK_V), dtype=ACC)
    for member in range(group):
        head = kv_head * group + member
        q_base = matrix(q_ptr, batch, q_batch, head, q_head)
        grad_base = matrix(grad_ptr, batch, grad_batch, head, grad_head)
        line = (batch * heads + head).to(tl.int64) * queries
        for begin in range(low, high, BLOCK_M):
            row = begin + tl.arange(0, BLOCK_M)
            q = load_rows(q_base, row, q_row, queries, col, DIM)
            grad = load_rows(grad_base, row, grad_row, queries, v_col, V_DIM)
            lse, delta = statistics(lse_ptr + line, delta_ptr + line, row, queries)
            s = tl.dot(k, tl.trans(q), input_precision="ieee", out_dtype=ACC)
            if CAPPED:
                s = capped(s * scale, softcap, CAPPED)
            p = probability(s, lse[None, :], scale, CAPPED)
            if (begin < all_low) | (begin + BLOCK_M > all_high):
                first = row
                last = row
                if BOUNDED:
                    first = tl.load(first_ptr + row, mask=row < queries, other=keys)
                    last = tl.load(last_ptr + row, mask=row < queries, other=0)
                seen = visible(
                    row[None, :] + offset, key[:, None], keys, first[None, :], last[None, :], window,
                    CAUSAL, WINDOW, BOUNDED,
                )  # fmt: skip
                p = tl.where(seen, p, 0.0)
            if VALUES:
                dv += tl.dot(p.to(grad.dtype), grad, input_precision="ieee", out_dtype=ACC)
            if KEYS:
                dp = tl.dot(v, tl.trans(grad), input_precision="ieee", out_dtype=ACC)
                ds = slope(s, p, dp, delta[None, :], softcap, CAPPED)
                dk += tl.dot(ds.to(q.dtype), q, input_precision="ieee", out_dtype=ACC)
    if KEYS:
        store_rows(dk_ptr + kv_line.to(tl.int64) * keys * DIM, key, DIM, keys, col, DIM, dk * scale)
    if VALUES:
        store_rows(dv_ptr + kv_line.to(tl.int64) * keys * V_DIM, key, V_DIM, keys, v_col, V_DIM, dv)


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

# Per kernel, for heads up to 64, 128, 192 and 256 wide. None spills in its hot loop: see ceilings.csv of
# megacompile/bench. "kv" makes dk and dv at once, "k" and "v" one each: on 9.0 two warpgroups share no row of
# the scores from 128 keys on, and dk and dv of so many keys do not fit its registers. HOPPER and BLACKWELL
# (10.0) have more than 160 KiB of shared memory per block and products that read it directly. GEFORCE (12.0)
# gives the same work to twice the warps where four spill.
_SMALL_TILE, _NARROW = Tile(64, 32, 4, 2), Tile(32, 32, 8, 1)
_WIDE = (Tile(128, 128, 8, 2), Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(128, 64, 8, 2))
TILES: Tiles = {
    "forward": (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    "q": (_SMALL_TILE, Tile(64, 64, 8, 2), _NARROW, _NARROW),
    "kv": (_SMALL_TILE, Tile(32, 64, 8, 2), _NARROW, _NARROW),
}
# Heads 128 wide, backward of 2 × 4,096 causal tokens with q by 128 × 64 in two stages and kv by 32 × 128 of
# eight warps: 2.77 ms on an H100. q in three stages: 2.62; kv by 32 × 64 of four warps: 2.50, by 64 × 64 of
# eight: 3.32 (benchmarks/results/h100-sxm-2, stage "attention ways"; each was timed alone).
HOPPER: Tiles = {
    "forward": _WIDE,
    "q": (Tile(128, 64, 8, 2), Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(128, 32, 8, 2)),
    "kv": (Tile(64, 128, 8, 2), Tile(32, 64, 4, 2)),
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


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _bounds(bounds: Tensor | None, q: Tensor, stand_in: Tensor) -> tuple[Tensor, Tensor]:
    """(first, last), dense [B, S] each; one row of documents may stand for all of the batch."""
    if bounds is None:
        return stand_in, stand_in
    first, last = bounds.expand(2, q.shape[0], q.shape[2]).contiguous()
    return first, last


def _grid_sizes(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Any, ...]:
    heads = q.shape[1]
    return (
        heads, heads // k.shape[1], q.shape[2], k.shape[2], rule.scale, rule.window, rule.softcap,
    )  # fmt: skip


def forward_triton(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """(out, lse) by the kernel."""
    batch, heads, queries, _ = q.shape
    out = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
    lse = q.new_empty(batch, heads, queries, dtype=wide(q.dtype))
    q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
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
        *_grid_sizes(q, k, v, rule),
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
    grad, q, k, v, out = (_unit_stride(x) for x in (grad, q, k, v, out))
    lse = lse.contiguous()
    delta = _delta(out, grad, lse)
    first, last = _bounds(rule.bounds, q, lse)
    inputs = q, k, v, grad, lse, delta, first, last
    strides = [s for x in inputs[:4] for s in x.stride()[:3]]
    sizes = _grid_sizes(q, k, v, rule)
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
    """Return whether the kernels take these: heads up to 256 wide, a grid that fits; on a GPU, 16-bit types.

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

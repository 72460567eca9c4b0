"""Bench: the eager forms of recurrences, chunk by chunk, as models write them in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megacompile.kernels._triton import wide

DELTA_CHUNK, SCAN_CHUNK = 64, 256
_EPS = 1e-6


def _chunks(x: Tensor, size: int, heads: int) -> Tensor:
    """[B, T, H, ...] as [B, ``heads``, chunks, size, ...], wide; zeros fill the last, heads are repeated."""
    missing = -x.shape[1] % size
    x = F.pad(x.to(wide(x.dtype)), (0, 0) * (x.ndim - 2) + (0, missing)).transpose(1, 2)
    x = x.repeat_interleave(heads // x.shape[1], 1)
    return x.reshape(*x.shape[:2], -1, size, *x.shape[3:])


def _decay(c: Tensor) -> Tensor:
    """exp(c_i - c_j) for i >= j of each chunk, else zero."""
    lower = torch.ones(c.shape[-1], c.shape[-1], dtype=torch.bool, device=c.device).tril()
    return (c[..., :, None] - c[..., None, :]).masked_fill(~lower, float("-inf")).exp()


def _whole(x: Tensor, tokens: int) -> Tensor:
    """[B, H, chunks, size, width] as [B, T, H, width]."""
    return x.flatten(2, 3)[:, :, :tokens].transpose(1, 2)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Qwen3-Next's linear attention; shapes and formulas are those of ``kernels/gated_delta_rule.py``."""
    tokens, heads, dtype = v.shape[1], v.shape[2], q.dtype
    q, k, v, beta = (_chunks(x, DELTA_CHUNK, heads) for x in (q, k, v, beta[..., None]))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    c = _chunks(g[..., None], DELTA_CHUNK, heads)[..., 0].cumsum(-1)
    decay, risen, z = _decay(c), c.exp()[..., None], c[..., -1:, None]
    system = (beta * (k @ k.mT) * decay).tril(-1) + torch.eye(DELTA_CHUNK, dtype=c.dtype, device=c.device)
    solved = torch.linalg.solve_triangular(system, beta * torch.cat((v, risen * k), -1), upper=False)
    values, reads = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores, writes = q @ k.mT * decay, k * (z - c[..., None]).exp()
    state = torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0])
    outs = []
    of_chunks = (x.unbind(2) for x in (values, reads, risen * q, scores, writes.mT, z.exp()))
    for value, read, query, score, write, carried in zip(*of_chunks, strict=True):
        written = value - read @ state
        outs.append(query @ state + score @ written)
        state = state * carried + write @ written
    return _whole(torch.stack(outs, 2), tokens).to(dtype)


def mamba2_chunk_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Mamba-2's scan; shapes and formulas are those of ``kernels/mamba2_chunk_scan.py``."""
    tokens, heads = x.shape[1:3]
    skip = D[:, None] * x.to(wide(x.dtype))
    x, B, C = (_chunks(y, SCAN_CHUNK, heads) for y in (x, B, C))
    dt = _chunks(dt, SCAN_CHUNK, heads)
    c = (dt * A[:, None, None]).cumsum(-1)
    z, x = c[..., -1:], x * dt[..., None]
    added = (B * (z - c).exp()[..., None]).mT @ x
    state = torch.zeros_like(added[:, :, 0])
    states = []
    for carried, more in zip(z.exp()[..., None].unbind(2), added.unbind(2), strict=True):
        states.append(state)
        state = state * carried + more
    out = (C @ B.mT * _decay(c)) @ x + c.exp()[..., None] * (C @ torch.stack(states, 2))
    return _whole(out, tokens) + skip

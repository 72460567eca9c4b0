"""Chunks of tokens, by which recurrences become products of matrices: their layout."""

import torch
from torch import Tensor
from torch.nn import functional as F

from megacompile.kernels._triton import wide


def in_chunks(x: Tensor, size: int, heads: int) -> Tensor:
    """[B, T, H, ...] as [B, ``heads``, chunks, size, ...], wide; zeros fill the last, heads are repeated."""
    missing = -x.shape[1] % size
    x = F.pad(x.to(wide(x.dtype)), (0, 0) * (x.ndim - 2) + (0, missing)).transpose(1, 2)
    x = x.repeat_interleave(heads // x.shape[1], 1)
    return x.reshape(*x.shape[:2], -1, size, *x.shape[3:])


def decays(c: Tensor) -> Tensor:
    """exp(c_i - c_j) for i >= j of each chunk, else zero."""
    lower = torch.ones(c.shape[-1], c.shape[-1], dtype=torch.bool, device=c.device).tril()
    return (c[..., :, None] - c[..., None, :]).masked_fill(~lower, float("-inf")).exp()


def out_of_chunks(x: Tensor, tokens: int) -> Tensor:
    """[B, H, chunks, size, width] as [B, T, H, width]."""
    return x.flatten(2, 3)[:, :, :tokens].transpose(1, 2)


def dense_tokens(x: Tensor, size: int) -> Tensor:
    """Columns side by side, tokens of a chunk of this size less than 2**31 elements apart."""
    return x if x.stride(-1) == 1 and x.stride(1) * size < 1 << 31 else x.contiguous()


def token_strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, tokens and heads."""
    return [x.stride(d) for x in tensors for d in range(3)]

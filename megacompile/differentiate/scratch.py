"""Memory that torch's CUDA kernels take beside their results, which a run on fake CPU tensors does not show.

In: an operator with its arguments, the device's number of multiprocessors. Out: the bytes that it holds while
it runs. The figures are those of ``mha_fwd`` and ``mha_bwd`` in torch's ``flash_api.cpp`` and of
``attention_backward.cu``; ``tests/simulated/test_scratch.py`` compares them with what torch asks its
allocator for. What :mod:`~megacompile.capture.sdpa` gives to torch's memory-efficient attention on CUDA runs
as flash attention on a CPU: it is told from the rest by its type and its mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_ROWS = 128  # the kernels' tiles of queries
_SPLIT_ROWS = 64  # and those of a forward that splits the keys
_MOST_SPLITS = 128
_NEARLY_FULL = 0.8  # of the multiprocessors: more splits do not pay
_GOOD_ENOUGH = 0.85  # of the best use of them
_COLUMNS = 16  # memory-efficient attention's masks have a multiple of these
_IN_REGISTERS = 128  # columns of a head whose sums memory-efficient attention holds in registers
_FORWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
)
_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
)


def scratch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], processors: int) -> int:
    """Bytes that a call holds on CUDA beside its arguments and results."""
    if func not in _FORWARD and func not in _BACKWARD:
        return 0
    mask = kwargs.get("attn_mask")
    if mask is None and args[0].element_size() == 2:
        return (_flash_forward if func in _FORWARD else _flash_backward)(processors, *args)
    return _aligned(mask) + (_efficient_forward if func in _FORWARD else _efficient_backward)(*args)


def _flash_forward(processors: int, q: Tensor, k: Tensor, *_: Any) -> int:
    """Partial results of each split of the keys, where there are too few queries for all multiprocessors."""
    batch, heads, length, dim = q.shape
    keys_per_tile = 256 if dim <= 64 else 128 if dim <= 128 else 64
    tiles, programs = -(-k.shape[2] // keys_per_tile), batch * heads * -(-length // _SPLIT_ROWS)
    splits = _splits(programs, 2 * processors, tiles)
    return splits * batch * heads * length * (1 + _width(dim)) * 4 if splits > 1 else 0


def _splits(programs: int, processors: int, tiles: int) -> int:
    """The fewest splits, of those that differ, that use the multiprocessors about as well as any."""
    if programs >= _NEARLY_FULL * processors:
        return 1
    use = {}
    for splits in range(1, min(_MOST_SPLITS, processors, tiles) + 1):
        if splits == 1 or -(-tiles // splits) != -(-tiles // (splits - 1)):
            waves = programs * splits / processors
            use[splits] = waves / math.ceil(waves)
    return next(splits for splits, share in use.items() if share >= _GOOD_ENOUGH * max(use.values()))


def _flash_backward(
    processors: int, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *_: Any
) -> int:
    """FP32 sums of dq, one for each program that adds to them in an order of its own, dk and dv of each query
    head where heads share keys, row sums, and copies of what is not stored as [B, S, H, D]."""
    batch, heads, length, dim = q.shape
    rows = batch * heads * -(-length // _ROWS) * _ROWS
    sums = -(-processors // (batch * heads)) * rows * _width(dim)
    copies = sum(x.nbytes for x in (grad, out) if not x.transpose(1, 2).is_contiguous())
    expanded = 2 * (k.nbytes // k.shape[1]) * heads if k.shape[1] != heads else 0
    return 4 * (rows + sums) + copies + expanded


def _aligned(mask: Tensor | None) -> int:
    """A mask whose rows begin at odd places, once more."""
    if mask is None or mask.shape[-1] % _COLUMNS == 0:
        return 0
    return mask.untyped_storage().nbytes() // mask.shape[-1] * (mask.shape[-1] + _COLUMNS)


def _efficient_forward(q: Tensor, *_: Any) -> int:
    """Sums of wide heads, and log-sum-exps of whole tiles."""
    batch, heads, length, dim = q.shape
    return 4 * batch * heads * -(-length // _ROWS) * _ROWS * (1 + (_width(dim) if dim > _IN_REGISTERS else 0))


def _efficient_backward(grad: Tensor, q: Tensor, *_: Any) -> int:
    """FP32 sums of dq, or the products of which row sums are made; row sums and log-sum-exps; of wide heads a
    tile of dk and of dv."""
    batch, heads, length, dim = q.shape
    tiles = -(-length // _ROWS) + (2 if dim > _IN_REGISTERS else 0)
    return 4 * batch * heads * tiles * _ROWS * (_width(dim) + 3)


def _width(dim: int) -> int:
    """The columns of a head as the kernels round them."""
    unit = 32 if dim <= 128 else 64
    return -(-dim // unit) * unit

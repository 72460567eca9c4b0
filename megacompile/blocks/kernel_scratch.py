"""Memory that torch's CUDA kernels take beside their results, which a run on fake CPU tensors does not show.

In: an operator with its arguments, the device's number of multiprocessors. Out: the bytes that it holds
while it runs. The figures are those of ``mha_fwd`` and ``mha_bwd`` in torch's ``flash_api.cpp``, of
``attention_backward.cu``, ``Reduce.cuh`` and ``EmbeddingBackwardKernel.cu``; for sorts they are measured.
``tests/simulated/test_scratch.py`` compares them with what torch asks its allocator for.

What :mod:`~megacompile.kernels.sdpa` gives to torch's memory-efficient attention on CUDA runs as flash
attention on a CPU: it is told from the rest by its type and its mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megacompile.kernels.torch_sdpa import is_aligned

aten = torch.ops.aten
_QUERY_ROWS = 128  # the kernels' tiles of queries
_SPLIT_ROWS = 64  # and those of a forward that splits the keys
_MOST_SPLITS = 128
_NEARLY_FULL = 0.8  # of the multiprocessors: more splits do not pay
_GOOD_ENOUGH = 0.85  # of the best use of them
_COLUMNS = 16  # memory-efficient attention's masks have a multiple of these
_IN_REGISTERS = 128  # columns of a head whose sums memory-efficient attention holds in registers
SORTED_FROM = 3073  # indices from which on the gradient of an embedding sorts them
_ROWS_PER_SUM = 10  # of which it makes one partial sum
_SHORT_ROW = 4096  # elements that a sort holds in shared memory
_SORT_TABLES = 64 << 10  # bytes of a sort's histograms, beside a quarter for each element
_THREADS = 2048  # of a multiprocessor; smaller cards have fewer
_EFFICIENT_FORWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
)
_EFFICIENT_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
)


def scratch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], processors: int) -> int:
    """Bytes that a call holds on CUDA beside its arguments and results."""
    other = _OTHERS.get(func)
    if other is not None:
        return other(processors, *args)
    if func not in _EFFICIENT_FORWARD and func not in _EFFICIENT_BACKWARD:
        return 0
    mask = kwargs.get("attn_mask")
    if mask is None and args[0].element_size() == 2:
        return (_flash_forward if func in _EFFICIENT_FORWARD else _flash_backward)(processors, *args)
    return _aligned_mask(mask) + (_efficient_forward if func in _EFFICIENT_FORWARD else _efficient_backward)(
        *args
    )


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
    rows = batch * heads * -(-length // _QUERY_ROWS) * _QUERY_ROWS
    sums = -(-processors // (batch * heads)) * rows * _width(dim)
    copies = sum(x.nbytes for x in (grad, out) if not x.transpose(1, 2).is_contiguous())
    expanded = 2 * (k.nbytes // k.shape[1]) * heads if k.shape[1] != heads else 0
    return 4 * (rows + sums) + copies + expanded


def _aligned_mask(mask: Tensor | None) -> int:
    """A mask whose rows begin at odd places, or not side by side, once more."""
    if mask is None or (mask.shape[-1] % _COLUMNS == 0 and is_aligned(mask)):
        return 0
    rows = math.prod(n for n, stride in zip(mask.shape, mask.stride()[:-1], strict=False) if stride)
    stored = max(mask.untyped_storage().nbytes(), rows * mask.shape[-1] * mask.element_size())
    return stored // mask.shape[-1] * (mask.shape[-1] + _COLUMNS)


def _efficient_forward(q: Tensor, *_: Any) -> int:
    """Sums of wide heads, and log-sum-exps of whole tiles."""
    batch, heads, length, dim = q.shape
    return (
        4
        * batch
        * heads
        * -(-length // _QUERY_ROWS)
        * _QUERY_ROWS
        * (1 + (_width(dim) if dim > _IN_REGISTERS else 0))
    )


def _efficient_backward(grad: Tensor, q: Tensor, *_: Any) -> int:
    """FP32 sums of dq, or the products of which row sums are made; row sums and log-sum-exps; of wide heads a
    tile of dk and of dv."""
    batch, heads, length, dim = q.shape
    tiles = -(-length // _QUERY_ROWS) + (2 if dim > _IN_REGISTERS else 0)
    return 4 * batch * heads * tiles * _QUERY_ROWS * (_width(dim) + 3)


def _width(dim: int) -> int:
    """The columns of a head as the kernels round them."""
    unit = 32 if dim <= 128 else 64
    return -(-dim // unit) * unit


def _column_sums(processors: int, x: Tensor, dims: Sequence[int] | None = None, *_: Any) -> int:
    """Partial results of thread blocks that share a column: torch keeps room for all threads of each."""
    reduced = {d % x.dim() for d in dims or range(x.dim())} if x.dim() else set()
    long = [d for d in range(x.dim()) if x.shape[d] > 1]
    kept = [x.stride(d) for d in long if d not in reduced]
    summed = [x.stride(d) for d in long if d in reduced]
    if not kept or not summed or not x.numel() or min(kept) > min(summed):
        return 0  # of rows there are few
    inputs = math.prod(x.shape[d] for d in reduced)
    outputs = x.numel() // inputs
    vector = next(n for n in (4, 2, 1) if outputs % n == 0) if min(kept) == 1 else 1
    most = 512 // vector
    columns, rows = (min(most, _power(n)) for n in (outputs // vector, inputs))
    height = min(rows, most // min(columns, 32))
    width = min(columns, most // height)
    each, grid = -(-inputs // height), -(-outputs // (vector * width))
    wanted = processors * (_THREADS // (width * height))
    if inputs < 16 * height or each < 256 or grid > wanted:
        return 0
    sharing = max(min(-(-wanted // grid), -(-each // 16)), -(-each // 256))
    element = 4 if x.is_floating_point() and x.element_size() <= 4 else 8
    return element * outputs * sharing * width * vector + 4 * grid if sharing > 1 else 0


def _power(n: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << (n.bit_length() - 1)


def _embedding_backward(
    _: int, grad: Tensor, indices: Tensor, weights: int, padding: int = -1, by_count: bool = False
) -> int:
    """FP32 sums of ten rows at most, for each row that is looked up one at least, and sorted indices."""
    count = indices.numel()
    if count < SORTED_FROM:
        return 0
    sums = min(count, weights) + count // _ROWS_PER_SUM
    sorts = indices.element_size() * (6 + by_count) * count + count
    return 4 * sums * grad.shape[-1] + sorts + _SORT_TABLES


def _sort(_: int, x: Tensor, *rest: Any) -> int:
    """Keys and positions before and after, where a row is too long for shared memory."""
    dim = next((a for a in reversed(rest) if type(a) is int), -1)
    row = x.shape[dim] if x.dim() else 1
    if row <= _SHORT_ROW:
        return 8 * row
    each = 16 + x.element_size() if x.numel() == row else 24 + 2 * x.element_size()
    return x.numel() * each + x.numel() // 3 + _SORT_TABLES


def _index_put(_: int, x: Tensor, indices: Any, values: Tensor, accumulate: bool = False, *__: Any) -> int:
    """Count the scratch of rows that are added up: their places, sorted."""
    given = [i for i in indices if i is not None]
    if not accumulate:
        return 0
    places: tuple[int, ...] = torch.broadcast_shapes(*(i.shape for i in given))  # type: ignore[no-untyped-call]
    return (33 + 16 * len(given)) * math.prod(places) + _SORT_TABLES


_OTHERS: dict[Any, Callable[..., int]] = {
    **dict.fromkeys(
        (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default), _column_sums
    ),
    aten.embedding_dense_backward.default: _embedding_backward,
    **dict.fromkeys((aten.sort.default, aten.sort.stable), _sort),
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default), _index_put),
}

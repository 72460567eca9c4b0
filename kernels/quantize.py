# mypy: allow-untyped-defs, allow-incomplete-defs
"""Block-wise quantisation to 8 and 4 bits: a scale per block and a code book for all.

A block's elements are divided by its largest magnitude and take the nearest code of the book. Books
(``BOOKS``): ``dynamic8`` and ``dynamic8_unsigned``, the dynamic tree code of Dettmers et al. 2022
(arXiv:2110.02861) for moments, seven decades with more fractions in the larger ones; ``nf4``, the
quantiles of a normal distribution of Dettmers et al. 2023 (arXiv:2305.14314) for weights;
``dynamic4``, the dynamic tree over three decades, for first moments, and ``linear4_unsigned``,
evenly spaced without zero, for second moments (Li et al. 2023, arXiv:2309.01507).

x: any shape and float type, taken in row-major order; the last block may be short. codes: uint8,
one per element, or two in a byte (the even element in the low half) for 4 bits. scales: float32,
one per block. A block with a value that is not finite gets a scale that is not finite.

Both kernels compute in float32; a program takes 2048 elements (4096 to dequantise), or one block where
that is longer. Traffic per element: x, a code (1 or 1/2 byte) and 4 / size bytes of scale. The code is
found by bisection in a table of 1 KiB, which the first-level cache holds.
"""

import functools
import math
from functools import partial

import torch
from torch import Tensor

from megacompile.kernels._triton import AotCase, aot_cases, ceil_div, launch, runs_triton, tl, triton

TILE = 2048


def _dynamic(signed: bool, decades: int = 7) -> list[float]:
    """Per decade up to 10**0 twice as many bins over [0.1, 1] as before, by their centres."""
    codes = [0.0, 1.0]
    for decade in range(decades):
        bins = 2 ** (decade if signed else decade + 1)
        centres = [0.1 + 0.9 * (i + 0.5) / bins for i in range(bins)]
        magnitudes = [10.0 ** (decade + 1 - decades) * c for c in centres]
        codes += magnitudes + ([-m for m in magnitudes] if signed else [])
    return sorted(codes)


def _normal_float() -> list[float]:
    """Eight quantiles above zero, seven below, and zero, scaled to [-1, 1]."""
    ends = 0.5 * (1 / 32 + 1 / 30)

    def quantiles(count: int) -> list[float]:
        steps = torch.linspace(1.0 - ends, 0.5, count, dtype=torch.float64)[:-1]
        return (math.sqrt(2.0) * torch.erfinv(2.0 * steps - 1.0)).tolist()

    above, below = quantiles(9), quantiles(8)
    top = max(above)
    return sorted([0.0, *(q / top for q in above), *(-q / top for q in below)])


BOOKS = {
    "dynamic8": _dynamic(signed=True),
    "dynamic8_unsigned": _dynamic(signed=False),
    "nf4": _normal_float(),
    "dynamic4": _dynamic(signed=True, decades=3),
    "linear4_unsigned": [(i + 1) / 16 for i in range(16)],
}


@functools.cache
def book_tables(book: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """(codes, the midpoints between neighbours with an infinity behind), float32 on ``device``."""
    if book not in BOOKS:
        raise ValueError(f"code book must be one of {tuple(BOOKS)}, not {book!r}")
    codes = torch.tensor(BOOKS[book], dtype=torch.float64)
    middles = torch.cat(((codes[1:] + codes[:-1]) / 2, codes.new_tensor([float("inf")])))
    return codes.float().to(device), middles.float().to(device)


@triton.jit
def nearest(x, middles_ptr, BITS: tl.constexpr):
    """Index of the nearest code: how many midpoints lie below x, by bisection."""
    index = tl.zeros_like(x).to(tl.int32)
    for bit in tl.static_range(BITS):
        half = 1 << (BITS - 1 - bit)
        index += tl.where(x > tl.load(middles_ptr + index + half - 1), half, 0)
    return index


@triton.jit
def quantize_kernel(
    x_ptr, codes_ptr, scales_ptr, middles_ptr, count, blocks,
    BITS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: codes and scales of ROWS blocks of SIZE elements."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    broken = tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), axis=1) > 0
    scale = tl.where(broken, float("inf"), tl.max(tl.abs(x), axis=1))
    tl.store(scales_ptr + block, scale, mask=block < blocks)
    divisor = tl.where(scale > 0.0, scale, 1.0)[:, None]
    codes = nearest(tl.div_rn(x, tl.zeros_like(x) + divisor), middles_ptr, BITS)
    if BITS == 4:
        even, odd = tl.split(tl.reshape(codes, (ROWS, SIZE // 2, 2)))
        half = block[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
        tl.store(codes_ptr + half, (even | (odd << 4)).to(tl.uint8), mask=2 * half < count)
    else:
        tl.store(codes_ptr + at, codes.to(tl.uint8), mask=at < count)


@triton.jit
def dequantize_kernel(
    codes_ptr, scales_ptr, book_ptr, out_ptr, count,
    BITS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: TILE values, book[code] * scale."""
    start = tl.program_id(0).to(tl.int64) * TILE
    at = start + tl.arange(0, TILE)
    if BITS == 4:
        half = start // 2 + tl.arange(0, TILE // 2)
        packed = tl.load(codes_ptr + half, mask=2 * half < count, other=0).to(tl.int32)
        codes = tl.reshape(tl.join(packed & 15, packed >> 4), (TILE,))
    else:
        codes = tl.load(codes_ptr + at, mask=at < count, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + at // SIZE, mask=at < count, other=0.0)
    value = tl.load(book_ptr + codes) * scale
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=at < count)


def bits_of(book: str) -> int:
    """8 or 4."""
    return 8 if len(BOOKS[book]) > 16 else 4


def _empty(x: Tensor, book: str, size: int) -> tuple[Tensor, Tensor]:
    count = x.numel() if bits_of(book) == 8 else ceil_div(x.numel(), 2)
    codes = x.new_empty(count, dtype=torch.uint8)
    return codes, x.new_empty(ceil_div(x.numel(), size), dtype=torch.float32)


def quantize_triton(x: Tensor, middles: Tensor, book: str, size: int) -> tuple[Tensor, Tensor]:
    """(codes, scales) by the kernel."""
    codes, scales = _empty(x, book, size)
    rows = max(1, TILE // size)
    launch(
        quantize_kernel,
        (ceil_div(scales.numel(), rows),),
        *(x.contiguous(), codes, scales, middles, x.numel(), scales.numel()),
        BITS=bits_of(book),
        SIZE=size,
        ROWS=rows,
        num_warps=8,
    )
    return codes, scales


def dequantize_triton(
    codes: Tensor, scales: Tensor, table: Tensor, book: str, size: int, out: Tensor
) -> Tensor:
    """The values by the kernel, into ``out`` (contiguous)."""
    tile = 2 * TILE
    launch(
        dequantize_kernel,
        (ceil_div(out.numel(), tile),),
        *(codes.contiguous(), scales.contiguous(), table, out, out.numel()),
        BITS=bits_of(book),
        SIZE=size,
        TILE=tile,
    )
    return out


def quantize_reference(x: Tensor, middles: Tensor, book: str, size: int) -> tuple[Tensor, Tensor]:
    """(codes, scales) in plain torch."""
    values = x.flatten().float()
    values = torch.nn.functional.pad(values, (0, -values.numel() % size)).view(-1, size)
    broken = ~values.isfinite().all(1)
    scales = torch.where(broken, float("inf"), values.abs().amax(1))
    divisor = torch.where(scales > 0, scales, 1.0)[:, None]
    codes = torch.bucketize(values / divisor, middles[:-1]).flatten()[: x.numel()]
    if bits_of(book) == 4:
        even, odd = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2).unbind(1)
        if x.numel() % 2:
            odd[-1] = int(torch.bucketize(torch.zeros(1, dtype=torch.float32), middles[:-1].cpu()))
        codes = even | (odd << 4)
    return codes.to(torch.uint8), scales


def dequantize_reference(
    codes: Tensor, scales: Tensor, table: Tensor, book: str, size: int, out: Tensor
) -> Tensor:
    """The values in plain torch, into ``out``."""
    index = codes.long()
    if bits_of(book) == 4:
        index = torch.stack((index & 15, index >> 4), dim=1).flatten()[: out.numel()]
    block = torch.arange(out.numel(), device=out.device) // size
    return out.copy_((table[index] * scales[block]).view(out.shape))


@torch.library.custom_op("megacompile::quantize", mutates_args=())
def quantize(x: Tensor, book: str = "dynamic8", size: int = 256) -> tuple[Tensor, Tensor]:
    """(codes, scales); size: elements per block, a power of two from 16 to 4096."""
    if size not in [1 << n for n in range(4, 13)]:
        raise ValueError(f"block size must be a power of two from 16 to 4096, not {size}")
    if x.numel() == 0:
        return _empty(x, book, size)
    _, middles = book_tables(book, x.device)
    run = quantize_triton if runs_triton(x) else quantize_reference
    return run(x, middles, book, size)


@torch.library.custom_op("megacompile::dequantize", mutates_args=())
def dequantize(
    codes: Tensor,
    scales: Tensor,
    shape: list[int],
    dtype: torch.dtype,
    book: str = "dynamic8",
    size: int = 256,
) -> Tensor:
    """The values, ``shape`` of ``dtype``."""
    out = codes.new_empty(shape, dtype=dtype)
    if out.numel() == 0:
        return out
    table, _ = book_tables(book, codes.device)
    run = dequantize_triton if runs_triton(codes) else dequantize_reference
    return run(codes, scales, table, book, size, out)


@quantize.register_fake
def _(x: Tensor, book: str = "dynamic8", size: int = 256) -> tuple[Tensor, Tensor]:
    return _empty(x, book, size)


@dequantize.register_fake
def _(
    codes: Tensor,
    scales: Tensor,
    shape: list[int],
    dtype: torch.dtype,
    book: str = "dynamic8",
    size: int = 256,
) -> Tensor:
    return codes.new_empty(shape, dtype=dtype)


@aot_cases
def _aot() -> list[AotCase]:
    def case(book: str, size: int) -> None:
        x = torch.empty(1 << 20, dtype=torch.bfloat16, device="meta")
        table = torch.empty(256, device="meta")
        codes, scales = quantize_triton(x, table, book, size)
        dequantize_triton(codes, scales, table, book, size, x)

    return [("dynamic8 256", partial(case, "dynamic8", 256)), ("nf4 64", partial(case, "nf4", 64))]

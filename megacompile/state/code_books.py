"""Quantise block by block to 8 and 4 bits: a scale per block and a code book for all.

A block's elements are divided by its largest magnitude and take the nearest code of the book. Books
(``BOOKS``): ``dynamic8`` and ``dynamic8_unsigned``, the dynamic tree code of Dettmers et al. 2022
(arXiv:2110.02861) for moments, seven decades with more fractions in the larger ones; ``dynamic4``, the
dynamic tree over three decades, for first moments, and ``linear4_unsigned``, evenly spaced without zero,
for second moments (Li et al. 2023, arXiv:2309.01507).

In:  FP32 values on the CPU; the last block may be short. Out: codes, uint8, one per element, or two in a
byte (the even element in the low half) for 4 bits; scales, FP32, one per block. A block with a value that
is not finite gets a scale that is not finite.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def _dynamic(signed: bool, decades: int) -> list[float]:
    """Per decade up to 10**0 twice as many bins over [0.1, 1] as before, by their centres."""
    codes = [0.0, 1.0]
    for decade in range(decades):
        bins = 2 ** (decade if signed else decade + 1)
        centres = [0.1 + 0.9 * (i + 0.5) / bins for i in range(bins)]
        magnitudes = [10.0 ** (decade + 1 - decades) * c for c in centres]
        codes += magnitudes + ([-m for m in magnitudes] if signed else [])
    return sorted(codes)


BOOKS = {
    "dynamic8": _dynamic(signed=True, decades=7),
    "dynamic8_unsigned": _dynamic(signed=False, decades=7),
    "dynamic4": _dynamic(signed=True, decades=3),
    "linear4_unsigned": [(i + 1) / 16 for i in range(16)],
}


@functools.cache
def _tables(book: str) -> tuple[Tensor, Tensor]:
    """(codes, the midpoints between neighbours), FP32."""
    codes = torch.tensor(BOOKS[book], dtype=torch.float64)
    return codes.float(), ((codes[1:] + codes[:-1]) / 2).float()


def quantize(x: Tensor, book: str, size: int) -> tuple[Tensor, Tensor]:
    """(codes, scales) of ``x`` (n), in blocks of ``size`` elements."""
    _, middles = _tables(book)
    values = torch.nn.functional.pad(x, (0, -x.numel() % size)).view(-1, size)
    broken = ~values.isfinite().all(1)
    scales = torch.where(broken, float("inf"), values.abs().amax(1))
    divisor = torch.where(scales > 0, scales, 1.0)[:, None]
    codes = torch.bucketize(values / divisor, middles).flatten()[: x.numel()]
    if len(BOOKS[book]) == 16:
        even, odd = codes.view(-1, 2).unbind(1)
        codes = even | (odd << 4)
    return codes.to(torch.uint8), scales


def dequantize(codes: Tensor, scales: Tensor, book: str, size: int) -> Tensor:
    """The values, FP32."""
    table, _ = _tables(book)
    index = codes.long()
    if len(BOOKS[book]) == 16:
        index = torch.stack((index & 15, index >> 4), dim=1).flatten()
    return table[index] * scales[torch.arange(index.numel()) // size]

"""Step Adam on coded moments: decode, step, and code again in one pass, in place.

In:  weights and a gradient as in :mod:`~megacompile.state.adam`; each moment as :class:`Coded`. Out: the same
tensors, one optimizer step later.

The books are those of :mod:`~megacompile.state.code_books`: 8 bits with ``dynamic8`` and
``dynamic8_unsigned`` in blocks of 256, 4 bits with ``dynamic4`` and ``linear4_unsigned`` in blocks of 128. A
value takes the nearest code of its magnitude over the block's largest.

Invariant: a result does not depend on the thread count, nor on where buffers are cut between blocks. The C
kernel multiplies by a block's inverse scale where torch divides: for the same FP32 moment the two backends
make the same scale. Their codes differ, by one, only for a value within 1e-6 (relative) of the midpoint
between two codes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megacompile.state import adam
from megacompile.state.adam import AdamHyper, adamw_step
from megacompile.state.code_books import BOOKS, dequantize, quantize
from megacompile.state.moment_formats import MomentCoding


@dataclass(frozen=True)
class Coded:
    """A moment of n elements: uint8 ``codes`` (n, or n / 2) and fp32 ``scales``, one per block."""

    codes: Tensor
    scales: Tensor

    def part(self, start: int, stop: int, coding: MomentCoding) -> Coded:
        """Elements from ``start``, where a block begins, to ``stop``; views."""
        codes = self.codes[coding.code_bytes(start) : coding.code_bytes(stop)]
        return Coded(codes, self.scales[start // coding.block : coding.blocks(stop)])


def decode(moment: Coded, coding: MomentCoding, book: str) -> Tensor:
    """The fp32 values (n) of a moment."""
    return dequantize(moment.codes, moment.scales, book, coding.block)


def encode(values: Tensor, moment: Coded, coding: MomentCoding, book: str) -> None:
    """Write the codes and scales of fp32 ``values`` (n)."""
    codes, scales = quantize(values, book, coding.block)
    moment.codes.copy_(codes)
    moment.scales.copy_(scales)


@torch.no_grad()
def coded_adamw_step(
    master: Tensor | tuple[Tensor, Tensor],
    exp_avg: Coded,
    exp_avg_sq: Coded,
    grad: Tensor,
    hyper: AdamHyper,
    coding: MomentCoding,
    threads: int | None = None,
) -> None:
    """Take one Adam step in place; as :func:`~megacompile.state.adam.adamw_step` with coded moments.

    n must be a multiple of two for 4 bits. Memory traffic with a bf16 gradient and split weights: 14
    bytes per parameter in 8 bits, 12 in 4 bits, and the scales.
    """
    hi, lo = (master, None) if isinstance(master, Tensor) else master
    state = {"master": hi} if lo is None else {"hi": hi, "lo": lo}
    adam.check(**state, grad=grad)
    _check(exp_avg, exp_avg_sq, coding, hi.numel())
    threads = threads or torch.get_num_threads()
    kernel: adam.Kernel = "int8" if coding.bits == 8 else "int4"
    if adam.backend(kernel) == "torch":
        for tile in _tiles(hi, lo, exp_avg, exp_avg_sq, grad, coding):
            _torch_step(*tile, hyper, coding, threads)
        return
    flags = (grad.dtype == torch.bfloat16, hyper.decoupled, hyper.maximize)
    moments = (exp_avg.codes, exp_avg.scales, exp_avg_sq.codes, exp_avg_sq.scales)
    books = (_book(coding.first_book), _book(coding.second_book))
    arguments = (hi.numel(), hi, lo, *moments, *books, grad, adam.scalars(hyper), *flags, threads)
    adam.call_kernel("mc_adam_coded", *arguments, kernel=kernel)


def _check(first: Coded, second: Coded, coding: MomentCoding, elements: int) -> None:
    for name, moment in (("exp_avg", first), ("exp_avg_sq", second)):
        need = (coding.code_bytes(elements), coding.blocks(elements))
        have = (moment.codes.numel(), moment.scales.numel())
        if need != have or elements * coding.bits % 8:
            raise ValueError(f"{name} has {have} codes and scales; {elements} elements need {need}.")
        if (moment.codes.dtype, moment.scales.dtype) != (torch.uint8, torch.float32):
            raise ValueError(f"{name} must be uint8 codes with float32 scales.")
        if not (moment.codes.is_contiguous() and moment.scales.is_contiguous()):
            raise ValueError(f"{name} must be contiguous.")


@functools.cache
def _book(name: str) -> ctypes.Array[ctypes.c_double]:
    return (ctypes.c_double * len(BOOKS[name]))(*BOOKS[name])


Tile = tuple[Tensor | tuple[Tensor, Tensor], Coded, Coded, Tensor]


def _tiles(
    hi: Tensor, lo: Tensor | None, first: Coded, second: Coded, grad: Tensor, coding: MomentCoding
) -> Iterator[Tile]:
    """Views of whole blocks, few enough elements to stay in cache once decoded."""
    for start in range(0, hi.numel(), adam.TILE):
        stop = min(hi.numel(), start + adam.TILE)
        part = slice(start, stop)
        master = hi[part] if lo is None else (hi[part], lo[part])
        yield master, first.part(start, stop, coding), second.part(start, stop, coding), grad[part]


def _torch_step(
    master: Tensor | tuple[Tensor, Tensor],
    first: Coded,
    second: Coded,
    grad: Tensor,
    hyper: AdamHyper,
    coding: MomentCoding,
    threads: int,
) -> None:
    m = decode(first, coding, coding.first_book)
    v = decode(second, coding, coding.second_book)
    adamw_step(master, m, v, grad, hyper, threads)
    encode(m, first, coding, coding.first_book)
    encode(v, second, coding, coding.second_book)

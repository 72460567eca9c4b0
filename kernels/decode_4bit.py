# mypy: allow-untyped-defs, allow-incomplete-defs
"""A weight in 4-bit codes, decoded, as QLoRA keeps it (Dettmers et al. 2023, arXiv 2305.14314, section 3).

One uint8 tensor holds the code book, 16 values in FP32; the scale of each block of elements, FP32; then the
codes, two to a byte, the first in the high half. Element i is ``book[code i] * scale of its block``, a
product in FP32, rounded once, to the result's dtype: bitsandbytes' own, bit for bit. The kernel takes 1024
elements to a program; the two that share a byte each read it.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megacompile.kernels._triton import ceil_div, launch, runs_triton, tl, triton
from megacompile.kernels.eager_form import EagerForm, Shape
from megacompile.kernels.registry import OpSpec, declare

CHUNK = 1 << 18  # elements that a reference decodes at a time


BOOK_BYTES = 64
BLOCK_4BIT = 1024


def stored_4bit_bytes(elements: int, block: int) -> int:
    """Return the bytes of a weight of so many elements, ``block`` to a scale."""
    return BOOK_BYTES + 4 * ceil_div(elements, block) + ceil_div(elements, 2)


def parts_4bit(stored: Tensor, elements: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of a stored weight's book, scales and codes."""
    scales_end = BOOK_BYTES + 4 * ceil_div(elements, block)
    book, scales = stored[:BOOK_BYTES], stored[BOOK_BYTES:scales_end]
    return book.view(torch.float32), scales.view(torch.float32), stored[scales_end:]


def decode_4bit_reference(stored: Tensor, shape: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    """Decode in plain torch; scratch memory: 4 MiB, whatever the shape."""
    elements = prod(shape)
    book, scales, codes = parts_4bit(stored, elements, block)
    pairs = torch.stack((book.repeat_interleave(16), book.repeat(16)), dim=1)  # by byte
    out = torch.empty(elements, dtype=dtype, device=stored.device)
    blocks = max(1, CHUNK // block)
    for first in range(0, len(scales), blocks):
        start, stop = first * block, min((first + blocks) * block, elements)
        values = pairs[codes[start // 2 : ceil_div(stop, 2)].int()].view(-1)[: stop - start]
        own = scales[first : first + blocks, None]
        products = pad(values, (0, len(own) * block - len(values))).view(-1, block).mul_(own)
        out[start:stop] = products.view(-1)[: stop - start]
    return out.view(tuple(shape))


@triton.jit
def decode_4bit_kernel(
    book_ptr, scales_ptr, codes_ptr, out_ptr, count, PER_SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    """out = book[code] * scale."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + at // 2, mask=at < count, other=0).to(tl.int32)
    level = tl.load(book_ptr + ((codes >> (4 - at % 2 * 4).to(tl.int32)) & 15))
    scale = tl.load(scales_ptr + at // PER_SCALE, mask=at < count, other=0.0)
    tl.store(out_ptr + at, (level * scale).to(out_ptr.dtype.element_ty), mask=at < count)


def decode_4bit_triton(stored: Tensor, shape: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    """Decode by the kernel."""
    elements = prod(shape)
    out = torch.empty(tuple(shape), dtype=dtype, device=stored.device)
    launch(
        decode_4bit_kernel,
        (ceil_div(elements, BLOCK_4BIT),),
        *(*parts_4bit(stored, elements, block), out, elements),
        PER_SCALE=block,
        BLOCK=BLOCK_4BIT,
    )
    return out


def decode_weight(stored: Tensor, shape: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    """Decode a weight; it has no gradient.

    Args:
        stored: uint8 [n], its book, scales and codes (see ``stored_4bit_bytes``).
        shape: of the weight, row by row.
        block: elements that share a scale.
        dtype: of the result.

    Returns:
        The weight, contiguous. (Not a registered operator: the compiler's own is.)
    """
    decode = decode_4bit_triton if runs_triton(stored) else decode_4bit_reference
    return decode(stored, shape, block, dtype)


def _make_4bit(shape: Shape, generator: torch.Generator) -> list[Tensor]:
    """Draw a stored weight, and zeros of the decoded one's form."""
    count = prod(shape)
    options: dict[str, Any] = {"generator": generator, "device": generator.device}
    book = torch.randn(16, **options)
    scales = torch.rand(ceil_div(count, PER_SCALE), **options) + 0.5
    codes = torch.randint(0, 256, (ceil_div(count, 2),), dtype=torch.uint8, **options)
    stored = torch.cat((book.view(torch.uint8), scales.view(torch.uint8), codes))
    return [stored, torch.zeros(shape, dtype=torch.float64, device=generator.device)]


def _eager_4bit(stored: Tensor, like: Tensor) -> Tensor:
    book, scales, codes = parts_4bit(stored, like.numel(), PER_SCALE)
    wide = torch.promote_types(like.dtype, torch.float32)
    levels = book.to(wide)[torch.stack((codes >> 4, codes & 15), 1).int()].view(-1, PER_SCALE)
    return (levels * scales.to(wide)[:, None]).view(like.shape).to(like.dtype)


PER_SCALE = 64  # of the benchmark, and QLoRA's
EAGER_4BIT = EagerForm(
    "decode_4bit",
    ("inner", "width"),
    (4096, 14336),
    _make_4bit,
    0,
    _eager_4bit,
    lambda stored, like: decode_weight(stored, like.shape, PER_SCALE, like.dtype),
    lambda *_: None,
)


@torch.library.custom_op("megacompile::decode_4bit", mutates_args=())
def decode_4bit_op(stored: Tensor, shape: list[int], block: int, dtype: torch.dtype) -> Tensor:
    """Decode a weight of 4-bit codes; it has no gradient."""
    return decode_weight(stored, shape, block, dtype)


@decode_4bit_op.register_fake
def _(stored: Tensor, shape: list[int], block: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=stored.device)


declare(OpSpec("decode_4bit", eager=(EAGER_4BIT,)))

# mypy: allow-untyped-defs, allow-incomplete-defs
"""A weight in 8-bit codes with a scale for each row, decoded, as LLM.int8() keeps it (Dettmers et al. 2022,
arXiv 2208.07339, section 2.1).

One uint8 tensor holds the greatest magnitude of each row, FP32; then the codes, int8, row by row. An element
is ``code * (magnitude of its row * (1 / 127))``, two products in FP32, of which the last is rounded, to the
result's dtype: bitsandbytes' own in training, bit for bit.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import ceil_div, launch, runs_triton, tl, triton
from megacompile.kernels.eager_form import EagerForm, Shape
from megacompile.kernels.registry import OpSpec, declare

CHUNK = 1 << 18  # elements that a reference decodes at a time


BLOCK_8BIT = 2048
STEP = 1 / 127


def stored_8bit_bytes(rows: int, columns: int) -> int:
    """Return the bytes of a weight of this shape."""
    return rows * (4 + columns)


def parts_8bit(stored: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return views of a stored weight's magnitudes and, row by row, of its codes."""
    magnitudes, codes = stored[: 4 * rows], stored[4 * rows :]
    return magnitudes.view(torch.float32), codes.view(torch.int8).view(rows, -1)


def decode_8bit_reference(stored: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Decode in plain torch; scratch memory: a row or 1 MiB, whatever the shape."""
    magnitudes, codes = parts_8bit(stored, shape[0])
    out = torch.empty(tuple(shape), dtype=dtype, device=stored.device)
    rows = max(1, CHUNK // max(1, shape[1]))
    tensors = (out, magnitudes[:, None] * STEP, codes)
    for of, scales, own in zip(*(torch.split(x, rows) for x in tensors), strict=True):
        of.copy_(own * scales)
    return out


@triton.jit
def decode_8bit_kernel(
    magnitudes_ptr,
    codes_ptr,
    out_ptr,
    count,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = code * (magnitude * STEP)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + at, mask=at < count, other=0).to(tl.float32)
    scale = tl.load(magnitudes_ptr + at // COLUMNS, mask=at < count, other=0.0) * STEP
    tl.store(out_ptr + at, (codes * scale).to(out_ptr.dtype.element_ty), mask=at < count)


def decode_8bit_triton(stored: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Decode by the kernel."""
    out = torch.empty(tuple(shape), dtype=dtype, device=stored.device)
    count = out.numel()
    launch(
        decode_8bit_kernel,
        (ceil_div(count, BLOCK_8BIT),),
        *(*parts_8bit(stored, shape[0]), out, count),
        STEP=STEP,
        COLUMNS=shape[1],
        BLOCK=BLOCK_8BIT,
    )
    return out


def decode_rows(stored: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Decode a weight; it has no gradient.

    Args:
        stored: uint8 [n], its magnitudes and codes (see ``stored_8bit_bytes``).
        shape: of the weight, [rows, columns].
        dtype: of the result.

    Returns:
        The weight, contiguous. (Not a registered operator: the compiler's own is.)
    """
    decode = decode_8bit_triton if runs_triton(stored) else decode_8bit_reference
    return decode(stored, shape, dtype)


def _make_8bit(shape: Shape, generator: torch.Generator) -> list[Tensor]:
    """Draw a stored weight, and zeros of the decoded one's form."""
    options: dict[str, Any] = {"generator": generator, "device": generator.device}
    magnitudes = torch.rand(shape[0], **options) + 0.5
    codes = torch.randint(0, 256, (prod(shape),), dtype=torch.uint8, **options)
    stored = torch.cat((magnitudes.view(torch.uint8), codes))
    return [stored, torch.zeros(shape, dtype=torch.float64, device=generator.device)]


def _eager_8bit(stored: Tensor, like: Tensor) -> Tensor:
    magnitudes, codes = parts_8bit(stored, len(like))
    wide = torch.promote_types(like.dtype, torch.float32)
    return (codes * (magnitudes.to(wide) * STEP)[:, None]).to(like.dtype)


EAGER_8BIT = EagerForm(
    "decode_8bit",
    ("inner", "width"),
    (4096, 14336),
    _make_8bit,
    0,
    _eager_8bit,
    lambda stored, like: decode_rows(stored, like.shape, like.dtype),
    lambda *_: None,
)


@torch.library.custom_op("megacompile::decode_8bit", mutates_args=())
def decode_8bit_op(stored: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Decode a weight of 8-bit codes; it has no gradient."""
    return decode_rows(stored, shape, dtype)


@decode_8bit_op.register_fake
def _(stored: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=stored.device)


declare(OpSpec("decode_8bit", eager=(EAGER_8BIT,)))

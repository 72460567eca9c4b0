"""torch's own kernels of attention behind one interface: flash attention, and the memory-efficient one.

On CUDA torch's cuDNN attention is not used: its backward sums in an order that changes from run to run, and
equal seeds must give equal bits. The other two are asked to be deterministic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import on_gpu
from megacompile.kernels.grouped_heads import repeat_heads, sum_heads

aten = torch.ops.aten
ALIGNED = 16  # bytes that kernels load at once, and heads of the memory-efficient attention are a multiple of
_BIAS_COLUMNS = 16  # and elements that rows of its bias are
_DENSE = torch.contiguous_format
_LSE_ROWS = 32  # and rows that its log-sum-exps are


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of torch's flash attention; without a mask, causal or not."""
    if q.device.type != "cpu":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            *_readable_rows(q, k, v), 0.0, causal, False, scale=scale
        )
        return out, lse
    heads = q.shape[1]
    return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        *_readable_rows(q, repeat_heads(k, heads), repeat_heads(v, heads)), 0.0, causal and mask is None,
        attn_mask=mask, scale=scale,
    )  # fmt: skip


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of :func:`forward`, contiguous."""
    if q.device.type != "cpu":
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout: never read
        with _deterministic():
            dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                grad, *_readable_rows(q, k, v), out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal,
                seed, seed[:0], scale=scale,
            )  # fmt: skip
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    heads, groups = q.shape[1], k.shape[1]
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *_readable_rows(q, repeat_heads(k, heads), repeat_heads(v, heads), out), lse, 0.0,
        causal and mask is None, attn_mask=mask, scale=scale,
    )  # fmt: skip
    return dq.contiguous(), sum_heads(dk, groups), sum_heads(dv, groups)


def efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of torch's memory-efficient attention; ``causal`` where there is no mask."""
    heads = q.shape[1]
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        *_readable_rows(q, repeat_heads(k, heads), repeat_heads(v, heads)), _aligned_mask(mask), True, 0.0,
        causal and mask is None, scale=scale,
    )  # fmt: skip
    return out, lse[:, :, : q.shape[2]]


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    causal: bool, scale: float, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dmask) of :func:`efficient_forward`; dmask [B, H, S, T] where ``bias_grad``."""
    heads, groups = q.shape[1], k.shape[1]
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout: never read
    with _deterministic():
        dq, dk, dv, dmask = aten._scaled_dot_product_efficient_attention_backward(
            grad, *_readable_rows(q, repeat_heads(k, heads), repeat_heads(v, heads)), _aligned_mask(mask),
            _by_token(out), torch.nn.functional.pad(lse, (0, -q.shape[2] % _LSE_ROWS), value=float("inf")),
            seed, seed, 0.0, [True, True, True, bias_grad], causal and mask is None, scale=scale,
        )  # fmt: skip
    return dq.contiguous(), sum_heads(dk, groups), sum_heads(dv, groups), dmask if bias_grad else None


def is_aligned(mask: Tensor) -> bool:
    """Return whether each row of a mask begins at a multiple of 16 elements, side by side."""
    places = (mask.storage_offset(), *mask.stride()[:-1])
    return mask.stride(-1) == 1 and all(place % _BIAS_COLUMNS == 0 for place in places)


def _aligned_mask(mask: Tensor | None) -> Tensor | None:
    """The mask with rows that begin at multiples of 16 elements; dimensions that are shared stay so."""
    if mask is None or is_aligned(mask):
        return mask
    own = _own(mask, mask.dim() - 1)
    columns = mask.shape[-1]
    rows = mask.new_empty((*own.shape[:-1], -(-columns // _BIAS_COLUMNS) * _BIAS_COLUMNS))
    rows[..., :columns] = own
    return rows[..., :columns].expand_as(mask)


def _own(x: Tensor, dims: int) -> Tensor:
    """One entry of those of the first dimensions that share it."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()[:dims])]


def _readable_rows(*tensors: Tensor) -> list[Tensor]:
    """Queries, keys or values as kernels read them; in a copy batches and heads still share what they shared.

    torch's flash attention for the CPU takes the last stride to be one, and rows not to overlap; those for
    CUDA load 16 bytes at once. None of them looks.
    """
    return [x if _has_rows(x) else _own(x, 2).clone(memory_format=_DENSE).expand_as(x) for x in tensors]


def _has_rows(x: Tensor) -> bool:
    """Return whether a row's elements lie side by side, apart from others', on a GPU at a multiple of 16
    bytes."""
    length, width = x.shape[2:]
    if (width > 1 and x.stride(3) != 1) or (length > 1 and 0 < x.stride(2) < width):
        return False
    places = [
        x.storage_offset(),
        *(stride for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1),
    ]
    return not on_gpu(x) or all(place * x.element_size() % ALIGNED == 0 for place in places)


def _by_token(out: Tensor) -> Tensor:
    """Outputs as the memory-efficient attention's backward reads them: a token's heads side by side."""
    heads, _, width = out.shape[1:]
    return out if out.stride()[1:] == (width, heads * width, 1) else heads_inside(out)


def heads_inside(out: Tensor) -> Tensor:
    """Store [B, H, S, D] as [B, S, H, D], the order in which the model reads it next."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Ask for deterministic kernels, without torch's filling of fresh memory, for one call."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=warns)
        settings.fill_uninitialized_memory = fills

"""Which implementation of attention runs a call, torch's own behind one interface, the plain softmax.

``library`` is torch's flash attention (its own kernel on CPU, FlashAttention 2 on CUDA), ``triton`` our
kernel for windows, softcap, sinks, packed documents, and sequences so long that torch's would hold gigabytes
of sums, in 16-bit types, ``efficient`` torch's memory-efficient attention on CUDA (float32, additive bias and
its gradient), ``plain`` what :mod:`megacompile.capture.plain_attention` writes out. The choice
depends on shapes, dtypes, device and constants alone, so that a recomputed forward and the backward make the
same one.

On CUDA torch's cuDNN attention is not used: its backward sums in an order that changes from run to run,
and equal seeds must give equal bits. The other two are asked to be deterministic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from megacompile.kernels._triton import ceil_div, on_gpu, processors, runs_triton
from megacompile.kernels.attention import supports

aten = torch.ops.aten
Path = Literal["library", "triton", "efficient", "plain"]
LIBRARY_DIM = 256
ALIGNED = 16  # bytes that kernels load at once, and heads of the memory-efficient attention are a multiple of
_BIAS_COLUMNS = 16  # and elements that rows of its bias are
_MOST_SUMS = 1 << 30  # bytes of sums above which torch's attention leaves a call to ours
_DENSE = torch.contiguous_format
_LSE_ROWS = 32  # and rows that its log-sum-exps are


@dataclass(frozen=True)
class Features:
    """What a call of attention has beside q, k and v."""

    bias: bool
    bias_grad: bool
    sinks: bool
    dropout: bool
    causal: bool
    window: int
    softcap: float
    packed: bool = False

    @classmethod
    def of(
        cls, bias: Tensor | None, sinks: Tensor | None, causal: bool, window: int, softcap: float,
        dropout_p: float, bias_grad: bool, bounds: Tensor | None,
    ) -> Self:  # fmt: skip
        """Of the arguments of a call."""
        drops, packed = dropout_p > 0.0, bounds is not None
        return cls(bias is not None, bias_grad, sinks is not None, drops, causal, window, softcap, packed)

    def masked(self, k: Tensor) -> bool:
        """Whether a query does not look at all keys alike, or at those before it."""
        return self.bias or self.packed or 0 < self.window < k.shape[2]


def choose(q: Tensor, k: Tensor, v: Tensor, has: Features) -> Path:
    """The implementation that runs a call; all but "triton" are given packed documents as a bias."""
    if 0 in (*q.shape, *k.shape, *v.shape) or has.dropout or (has.bias_grad and not q.is_cuda):
        return "plain"
    same_lengths = q.shape[2] == k.shape[2]
    plain_scores = has.softcap == 0.0 and (not has.sinks or on_gpu(q))
    torchs = plain_scores and q.shape[-1] == v.shape[-1] and (same_lengths or not (has.causal or has.window))
    masked = has.masked(k)
    sees_all = same_lengths or (not has.window and not has.causal)
    ours = not has.bias and sees_all and runs_triton(q) and supports(q, k, v)
    covers = _library_covers(q, masked=masked) if q.is_cuda else not (masked and ours)
    if torchs and covers and not (ours and _sums_bytes(q) > _MOST_SUMS):
        return "library"
    if ours:
        return "triton"
    return "efficient" if torchs and _efficient_covers(q) else "plain"


def _sums_bytes(q: Tensor) -> int:
    """What torch's deterministic backward takes on a GPU beside its results: dq in FP32 for each of as many
    programs as a head has of the multiprocessors. Ours takes nothing."""
    if not on_gpu(q):
        return 0
    return 4 * q.numel() * ceil_div(processors(q.device), q.shape[0] * q.shape[1])


def _library_covers(q: Tensor, *, masked: bool) -> bool:
    """Whether torch's flash attention takes these on CUDA, where it knows no mask and 16-bit types alone."""
    return not masked and q.element_size() == 2 and q.shape[-1] <= LIBRARY_DIM and q.shape[-1] % 8 == 0


def _efficient_covers(q: Tensor) -> bool:
    """Whether torch's memory-efficient attention takes these, on CUDA alone."""
    rows = q.shape[-1] * q.element_size()
    return q.is_cuda and q.element_size() <= 4 and rows % ALIGNED == 0


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """Of scores and sums."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of torch's flash attention; without a mask, causal or not."""
    if q.device.type != "cpu":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            *_rows(q, k, v), 0.0, causal, False, scale=scale
        )
        return out, lse
    heads = q.shape[1]
    return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        *_rows(q, repeat_heads(k, heads), repeat_heads(v, heads)), 0.0, causal and mask is None,
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
                grad, *_rows(q, k, v), out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal,
                seed, seed[:0], scale=scale,
            )  # fmt: skip
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    heads, groups = q.shape[1], k.shape[1]
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *_rows(q, repeat_heads(k, heads), repeat_heads(v, heads), out), lse, 0.0,
        causal and mask is None, attn_mask=mask, scale=scale,
    )  # fmt: skip
    return dq.contiguous(), sum_heads(dk, groups), sum_heads(dv, groups)


def efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of torch's memory-efficient attention; ``causal`` where there is no mask."""
    heads = q.shape[1]
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        *_rows(q, repeat_heads(k, heads), repeat_heads(v, heads)), _aligned(mask), True, 0.0,
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
            grad, *_rows(q, repeat_heads(k, heads), repeat_heads(v, heads)), _aligned(mask), _by_token(out),
            torch.nn.functional.pad(lse, (0, -q.shape[2] % _LSE_ROWS), value=float("inf")), seed, seed, 0.0,
            [True, True, True, bias_grad], causal and mask is None, scale=scale,
        )  # fmt: skip
    return dq.contiguous(), sum_heads(dk, groups), sum_heads(dv, groups), dmask if bias_grad else None


def is_aligned(mask: Tensor) -> bool:
    """Whether each row of a mask begins at a multiple of 16 elements, side by side."""
    places = (mask.storage_offset(), *mask.stride()[:-1])
    return mask.stride(-1) == 1 and all(place % _BIAS_COLUMNS == 0 for place in places)


def _aligned(mask: Tensor | None) -> Tensor | None:
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


def _rows(*tensors: Tensor) -> list[Tensor]:
    """Queries, keys or values as kernels read them; in a copy batches and heads still share what they shared.

    torch's flash attention for the CPU takes the last stride to be one, and rows not to overlap; those for
    CUDA load 16 bytes at once. None of them looks.
    """
    return [x if _has_rows(x) else _own(x, 2).clone(memory_format=_DENSE).expand_as(x) for x in tensors]


def _has_rows(x: Tensor) -> bool:
    """Whether a row's elements lie side by side, apart from others', on a GPU at a multiple of 16 bytes."""
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


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Each of x's heads as often as it takes to have ``heads``."""
    batch, groups, length, dim = x.shape
    if groups == heads:
        return x
    each = x[:, :, None].expand(batch, groups, heads // groups, length, dim)
    return each.reshape(batch, heads, length, dim)


def sum_heads(x: Tensor, groups: int) -> Tensor:
    """The gradient of :func:`repeat_heads`."""
    batch, heads, length, dim = x.shape
    if heads == groups:
        return x.contiguous()
    return x.view(batch, groups, heads // groups, length, dim).sum(2)

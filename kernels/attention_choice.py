"""The choice of the implementation that runs a call of attention.

``library`` is torch's flash attention (its own kernel on CPU, FlashAttention 2 on CUDA), ``triton`` our
kernel for windows, softcap, sinks, packed documents, where it is faster, and for sequences so long that
torch's would hold gigabytes of sums, in 16-bit types, ``efficient`` torch's memory-efficient attention on
CUDA (float32, additive bias and its gradient), ``plain`` what :mod:`megacompile.kernels.plain_attention`
writes out. The choice depends on shapes, dtypes, device and constants alone, so that a recomputed forward and
the backward make the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from torch import Tensor

from megacompile.kernels._triton import arch_of, ceil_div, on_gpu, processors, runs_triton
from megacompile.kernels.attention import supports
from megacompile.kernels.torch_sdpa import ALIGNED

Path = Literal["library", "triton", "efficient", "plain"]
LIBRARY_DIM = 256
# Bytes of sums above which torch's attention leaves a call to ours: 14,000 tokens of an 8B model on an H100.
_MOST_SUMS = 1 << 30


@dataclass(frozen=True)
class Features:
    """The features of a call of attention beside q, k and v."""

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
        """Return the features of the arguments of a call."""
        drops, packed = dropout_p > 0.0, bounds is not None
        return cls(bias is not None, bias_grad, sinks is not None, drops, causal, window, softcap, packed)

    def masked(self, k: Tensor) -> bool:
        """Return whether a query does not look at all keys alike, or at those before it."""
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
    if torchs and covers and not (ours and (_is_faster(q) or _sums_bytes(q) > _MOST_SUMS)):
        return "library"
    if ours:
        return "triton"
    return "efficient" if torchs and _efficient_covers(q) else "plain"


def _is_faster(q: Tensor) -> bool:
    """Return whether our kernel was measured to be faster than torch's flash attention, whose backward is
    asked for equal bits: on Hopper, heads 128 wide."""
    return q.shape[-1] == 128 and arch_of(q) == 90


def _sums_bytes(q: Tensor) -> int:
    """Return the bytes that torch's deterministic backward takes on a GPU beside its results: dq in FP32 for
    each of as many programs as a head has of the multiprocessors. Ours takes nothing."""
    if not on_gpu(q):
        return 0
    return 4 * q.numel() * ceil_div(processors(q.device), q.shape[0] * q.shape[1])


def _library_covers(q: Tensor, *, masked: bool) -> bool:
    """Return whether torch's flash attention takes these on CUDA, where it knows no mask and 16-bit types
    alone."""
    return not masked and q.element_size() == 2 and q.shape[-1] <= LIBRARY_DIM and q.shape[-1] % 8 == 0


def _efficient_covers(q: Tensor) -> bool:
    """Return whether torch's memory-efficient attention takes these, on CUDA alone."""
    rows = q.shape[-1] * q.element_size()
    return q.is_cuda and q.element_size() <= 4 and rows % ALIGNED == 0

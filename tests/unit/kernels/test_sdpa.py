"""Which attention runs where, and torch's flash attention for CUDA, called on meta tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megacompile.kernels import attention_choice, sdpa, torch_sdpa
from megacompile.kernels.attention_choice import Features

PLAIN = Features(False, False, False, False, True, 0, 0.0)


@dataclass(frozen=True)
class OnCuda:
    """As much of a CUDA tensor as the choice looks at."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    is_cuda: bool = True
    device: str = "cuda:0"

    def element_size(self) -> int:
        return self.dtype.itemsize

    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "processors", lambda device: 132)
    monkeypatch.setattr(attention_choice, "arch_of", lambda x: 90)


def chosen(has: Features, *, dim: int = 64, keys: int = 32, dtype: torch.dtype = torch.bfloat16) -> str:
    q, k = OnCuda((1, 4, 32, dim), dtype), OnCuda((1, 2, keys, dim), dtype)
    return attention_choice.choose(cast(Tensor, q), cast(Tensor, k), cast(Tensor, k), has)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({}, "library"), ({"causal": False}, "library"), ({"window": 32}, "library"),
        ({"window": 31}, "triton"), ({"softcap": 5.0}, "triton"), ({"packed": True}, "triton"),
        ({"sinks": True}, "library"), ({"sinks": True, "window": 31}, "triton"),
        ({"bias": True}, "efficient"), ({"bias": True, "bias_grad": True}, "efficient"),
        ({"bias": True, "sinks": True}, "efficient"), ({"bias": True, "softcap": 5.0}, "plain"),
        ({"dropout": True}, "plain"), ({"dropout": True, "packed": True}, "plain"),
    ],
)  # fmt: skip
def test_choice_on_cuda(change: dict[str, Any], path: str) -> None:
    pytest.importorskip("triton", reason="triton is missing: pip install triton")
    assert chosen(replace(PLAIN, **change)) == path


def test_choice_on_cuda_by_shape_and_type() -> None:
    pytest.importorskip("triton", reason="triton is missing: pip install triton")
    assert chosen(PLAIN, dtype=torch.float32) == "efficient", "exact float32 products spill in our kernel"
    assert chosen(replace(PLAIN, window=9), dtype=torch.float32) == "efficient"
    assert chosen(replace(PLAIN, sinks=True), dtype=torch.float32) == "efficient"
    assert chosen(replace(PLAIN, packed=True), dtype=torch.float32) == "efficient"
    assert chosen(replace(PLAIN, softcap=5.0), dtype=torch.float32) == "plain"
    assert chosen(PLAIN, dtype=torch.float32, dim=62) == "plain" == chosen(PLAIN, dtype=torch.float64)
    assert chosen(replace(PLAIN, bias=True), dim=60) == "plain", "its rows are no multiple of 16 bytes"
    assert chosen(PLAIN, dim=60) == "triton" and chosen(PLAIN, dim=512) == "efficient"
    assert chosen(PLAIN, keys=40) == "plain" and chosen(replace(PLAIN, causal=False), keys=40) == "library"


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_torch_flash_attention_is_called_as_it_is_declared(groups: int, causal: bool) -> None:
    """Names, order and number of arguments and the shapes of results hold on every device."""
    q = torch.empty(2, 32, 4, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    k = torch.empty(2, 32, groups, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    out, lse = torch_sdpa.forward(q, k, k, None, causal, 0.1)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 4, 32), torch.float32)
    before = torch.are_deterministic_algorithms_enabled()
    grads = torch_sdpa.backward(out, q, k, k, out, lse, None, causal, 0.1)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape] and all(g.is_contiguous() for g in grads)
    assert torch.are_deterministic_algorithms_enabled() == before


def test_the_backward_is_asked_to_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        seen.append((torch.are_deterministic_algorithms_enabled(),
                     torch.utils.deterministic.fill_uninitialized_memory))  # fmt: skip
        raise RuntimeError("enough")

    monkeypatch.setattr(
        torch_sdpa, "aten", type("aten", (), {"_scaled_dot_product_flash_attention_backward": backward})
    )
    q = torch.empty(1, 2, 8, 64, device="meta")
    before = torch.utils.deterministic.fill_uninitialized_memory
    with pytest.raises(RuntimeError, match="enough"):
        torch_sdpa.backward(q, q, q, q, q, q[..., 0], None, True, 0.1)
    assert seen == [(True, False)]
    assert torch.utils.deterministic.fill_uninitialized_memory == before
    assert not torch.are_deterministic_algorithms_enabled()


class Efficient:
    """torch's memory-efficient attention as far as we rely on it: layouts are checked, values computed."""

    def __init__(self) -> None:
        self.calls = 0

    def _scores(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        self.calls += 1
        assert q.shape[:2] == k.shape[:2] and all(x.stride(-1) == 1 for x in (q, k))
        scores = (q @ k.mT).float() * scale
        if mask is not None:
            assert not causal and mask.shape == scores.shape and mask.dtype == q.dtype
            assert mask.stride(-1) == 1 and all(s % 16 == 0 for s in mask.stride()[:-1])
            scores = scores + mask
        if causal:
            length, keys = scores.shape[-2:]
            assert length == keys, "its causal mask begins at the first key"
            scores = scores.masked_fill(torch.ones(length, keys).triu(1).bool(), float("-inf"))
        return scores

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, wants_lse: bool, p: float, causal: bool,
        *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        scores = self._scores(q, k, mask, causal, scale)
        lse = torch.full((*q.shape[:2], -(-q.shape[2] // 32) * 32), float("inf"))
        lse[:, :, : q.shape[2]] = scores.logsumexp(-1)
        return scores.softmax(-1).to(v.dtype) @ v, lse, torch.empty(()), torch.empty(())

    def _scaled_dot_product_efficient_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor,
        seed: Tensor, offset: Tensor, p: float, wanted: list[bool], causal: bool, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert torch.are_deterministic_algorithms_enabled() and lse.shape[2] % 32 == 0
        probabilities = torch.exp(self._scores(q, k, mask, causal, scale) - lse[:, :, : q.shape[2], None])
        delta = (grad.float() * out.float()).sum(-1, keepdim=True)
        ds = probabilities * ((grad @ v.mT).float() - delta)
        dv = probabilities.to(v.dtype).mT @ grad
        narrow = (ds * scale).to(q.dtype)
        return narrow @ k, narrow.mT @ q, dv, ds.to(q.dtype) if wanted[3] else torch.empty(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "trained", "causal", "window"),
    [(None, False, True, 0), (None, False, True, 9), ((1, 4, 33, 33), True, False, 0),
     ((2, 1, 1, 33), False, True, 0), ((33, 33), True, True, 7)],
)  # fmt: skip
def test_the_memory_efficient_path_is_the_written_out_one(
    shape: tuple[int, ...] | None,
    trained: bool,
    causal: bool,
    window: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Grouped heads, aligned biases, their gradients, rows without keys; 33 rows are padded to 64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 33, 16, generator=generator).to(dtype) for heads in (4, 2, 2, 4))
    bias = None if shape is None else torch.randn(shape, generator=generator).to(dtype)
    if shape == (2, 1, 1, 33):
        assert bias is not None
        bias[:, :, :, :5] = -torch.inf  # causal: the first five queries see nothing
    found, efficient = [], Efficient()
    for path in ("plain", "efficient"):
        monkeypatch.setattr(sdpa, "choose", lambda *_, path=path: path)
        monkeypatch.setattr(torch_sdpa, "aten", efficient)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        leaf = None if bias is None else bias.clone().requires_grad_(trained)
        constants = 0.25, causal, window, 0.0, 0.0, 0, trained
        out, lse = torch.ops.megacompile.attention(*leaves, leaf, None, None, *constants)
        wanted = [*leaves, leaf] if trained else leaves
        found.append([out.detach(), lse, *torch.autograd.grad(out, wanted, grad)])
    assert efficient.calls == 2
    close = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    for ours, plain in zip(*reversed(found), strict=True):
        assert ours.shape == plain.shape and ours.dtype == plain.dtype
        torch.testing.assert_close(ours, plain, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["library", "efficient"])
@pytest.mark.parametrize("hidden", [False, True])
def test_sinks_by_the_log_sum_exp_are_those_written_out(
    path: str, hidden: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output, log-sum-exp and all gradients, by torch's flash attention of the CPU and by the stand-in."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 33, 16, generator=generator).to(dtype) for heads in (4, 2, 2, 4))
    sinks = torch.tensor([-20.0, 0.0, 1.5, 20.0]).to(dtype)  # from none to nearly all
    bias = torch.zeros(2, 1, 33, 33, dtype=dtype)
    bias[:, :, :, :5] = -torch.inf  # causal: the first five queries see the sink alone
    found = []
    for run in ("plain", path):
        monkeypatch.setattr(sdpa, "choose", lambda *_, run=run: run)
        if run == "efficient":
            monkeypatch.setattr(torch_sdpa, "aten", Efficient())
        leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
        constants = 0.25, True, 0, 0.0, 0.0, 0, False
        out, lse = torch.ops.megacompile.attention(
            *leaves[:3], bias if hidden else None, leaves[3], None, *constants
        )
        found.append([out.detach(), lse[:, :, 5:], *torch.autograd.grad(out, leaves, grad)])
    close = {torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]
    for ours, plain in zip(*reversed(found), strict=True):
        assert ours.shape == plain.shape and ours.dtype == plain.dtype
        torch.testing.assert_close(ours, plain, rtol=close, atol=close)


@pytest.mark.parametrize("bias_grad", [True, False])
def test_torch_memory_efficient_attention_is_called_as_it_is_declared(bias_grad: bool) -> None:
    q = torch.empty(2, 33, 4, 64, device="meta").transpose(1, 2)
    k = torch.empty(2, 33, 2, 64, device="meta").transpose(1, 2)
    mask = torch.empty(2, 4, 33, 33, device="meta")
    out, lse = torch_sdpa.efficient_forward(q, k, k, mask, True, 0.1)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, 33), torch.float32)
    *grads, dmask = torch_sdpa.efficient_backward(out, q, k, k, out, lse, mask, True, 0.1, bias_grad)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]
    assert (dmask.shape if dmask is not None else None) == (mask.shape if bias_grad else None)


@pytest.mark.parametrize(
    ("heads", "length", "path"), [(32, 13_000, "library"), (32, 14_000, "triton"), (132, 14_000, "library")]
)
def test_a_long_sequence_takes_the_kernel_that_holds_no_sums(
    heads: int, length: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's deterministic backward holds dq in FP32 five times for 32 heads, once for 132."""
    monkeypatch.setattr(attention_choice, "arch_of", lambda x: 80)
    q: Any = OnCuda((1, heads, length, 128))
    assert attention_choice.choose(q, q, q, PLAIN) == path


@pytest.mark.parametrize(
    ("arch", "dim", "path"), [(90, 128, "triton"), (90, 64, "library"), (80, 128, "library")]
)
def test_our_kernel_runs_where_it_was_measured_to_be_faster(
    arch: int, dim: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is missing: pip install triton")
    monkeypatch.setattr(attention_choice, "arch_of", lambda x: arch)
    assert chosen(PLAIN, dim=dim) == path

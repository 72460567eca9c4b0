"""Which attention runs where, and torch's flash attention for CUDA, called on meta tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megacompile.capture import sdpa
from megacompile.capture.sdpa import Features

PLAIN = Features(False, False, False, False, True, 0, 0.0)


@dataclass(frozen=True)
class OnCuda:
    """As much of a CUDA tensor as the choice looks at."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    is_cuda: bool = True

    def element_size(self) -> int:
        return self.dtype.itemsize

    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def chosen(has: Features, *, dim: int = 64, keys: int = 32, dtype: torch.dtype = torch.bfloat16) -> str:
    q, k = OnCuda((1, 4, 32, dim), dtype), OnCuda((1, 2, keys, dim), dtype)
    return sdpa.choose(cast(Tensor, q), cast(Tensor, k), cast(Tensor, k), has)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({}, "library"), ({"causal": False}, "library"), ({"window": 32}, "library"),
        ({"window": 31}, "triton"), ({"softcap": 5.0}, "triton"), ({"sinks": True}, "triton"),
        ({"bias": True}, "plain"), ({"bias": True, "bias_grad": True}, "plain"), ({"dropout": True}, "plain"),
    ],
)  # fmt: skip
def test_choice_on_cuda(change: dict[str, Any], path: str) -> None:
    pytest.importorskip("triton")
    assert chosen(replace(PLAIN, **change)) == path


def test_choice_on_cuda_by_shape_and_type() -> None:
    pytest.importorskip("triton")
    assert chosen(PLAIN, dtype=torch.float32) == "plain", "exact float32 products spill in our kernel"
    assert chosen(PLAIN, dim=60) == "triton" and chosen(PLAIN, dim=512) == "plain"
    assert chosen(PLAIN, keys=40) == "plain" and chosen(replace(PLAIN, causal=False), keys=40) == "library"


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_torch_flash_attention_is_called_as_it_is_declared(groups: int, causal: bool) -> None:
    """Names, order and number of arguments and the shapes of results hold on every device."""
    q = torch.empty(2, 32, 4, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    k = torch.empty(2, 32, groups, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    out, lse = sdpa.forward(q, k, k, None, causal, 0.1)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 4, 32), torch.float32)
    before = torch.are_deterministic_algorithms_enabled()
    grads = sdpa.backward(out, q, k, k, out, lse, None, causal, 0.1)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape] and all(g.is_contiguous() for g in grads)
    assert torch.are_deterministic_algorithms_enabled() == before


def test_the_backward_is_asked_to_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        seen.append((torch.are_deterministic_algorithms_enabled(),
                     torch.utils.deterministic.fill_uninitialized_memory))  # fmt: skip
        raise RuntimeError("enough")

    monkeypatch.setattr(
        sdpa, "aten", type("aten", (), {"_scaled_dot_product_flash_attention_backward": backward})
    )
    q = torch.empty(1, 2, 8, 64, device="meta")
    before = torch.utils.deterministic.fill_uninitialized_memory
    with pytest.raises(RuntimeError, match="enough"):
        sdpa.backward(q, q, q, q, q, q[..., 0], None, True, 0.1)
    assert seen == [(True, False)]
    assert torch.utils.deterministic.fill_uninitialized_memory == before
    assert not torch.are_deterministic_algorithms_enabled()

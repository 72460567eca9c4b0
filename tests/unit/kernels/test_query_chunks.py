"""Attention by chunks of queries: what all of them at once give, in memory that grows with the tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.blocks.memory_meter import StorageMeter
from megacompile.kernels import document_bounds, query_chunks

OURS = torch.ops.megacompile
LENGTH, HEADS, GROUPS, WIDTH = 50, 4, 2, 8
NOTHING = float("-inf")


class Case(NamedTuple):
    """What a call has beside q, k and v."""

    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    packed: bool = False
    bias: str = ""
    keys: int = LENGTH


CASES = {
    "window": Case(window=7),
    "window to both sides": Case(causal=False, window=7),
    "softcap": Case(softcap=3.0),
    "softcap, window, sinks": Case(softcap=3.0, window=20, sinks=True),
    "sinks": Case(sinks=True),
    "documents": Case(packed=True),
    "documents in windows": Case(packed=True, window=5),
    "documents, both directions": Case(causal=False, packed=True),
    "a bias that hides": Case(causal=False, bias="hides"),
    "a bias of one row": Case(causal=False, bias="one row"),
    "a bias that lowers whole rows": Case(bias="lowers"),
    "more keys": Case(window=7, keys=70),
    "fewer keys": Case(window=7, keys=30),
}


def bias_of(case: Case) -> Tensor | None:
    if case.bias == "hides":  # and some queries see nothing
        hidden = torch.rand(1, 1, LENGTH, case.keys) < 0.5
        hidden[..., 3:6, :] = True
        return torch.zeros(hidden.shape).masked_fill(hidden, NOTHING)
    if case.bias == "one row":
        return torch.randn(1, HEADS, 1, case.keys)
    if case.bias == "lowers":
        lowered = torch.zeros(1, 1, LENGTH, case.keys)
        lowered[..., 2:5, :] = torch.finfo(torch.float32).min
        return lowered
    return None


def results(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and all gradients."""
    torch.manual_seed(0)
    q, grad = (torch.randn(1, HEADS, LENGTH, WIDTH, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(1, GROUPS, case.keys, WIDTH, dtype=dtype) for _ in range(2))
    bias, sinks = bias_of(case), torch.randn(HEADS, dtype=dtype) if case.sinks else None
    bounds = document_bounds(torch.tensor([0, 11, 12, 40, LENGTH]), LENGTH) if case.packed else None
    constants: tuple[Any, ...] = (0.3, case.causal, case.window, case.softcap, 0.0, 0, False, bounds)
    out, lse = OURS.attention(q, k, v, bias, sinks, None, *constants)
    return out, lse, *OURS.attention_backward(grad, q, k, v, bias, sinks, None, out, lse, *constants)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_chunks_give_what_all_queries_at_once_do(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = results(case, dtype)
    cut, rows = query_chunks.chunks_of, []

    def seen(*given: Any) -> Any:
        rows.append(len(found := cut(*given)))
        return found

    monkeypatch.setattr("megacompile.kernels.sdpa.chunks_of", seen)
    monkeypatch.setattr(query_chunks, "LEAST_QUERIES", 8)
    monkeypatch.setattr(query_chunks, "MOST_BYTES", 1)
    for at_once, chunked in zip(whole, results(case, dtype), strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        scale = at_once[at_once.isfinite()].abs().max().item() if at_once.numel() else 0.0
        torch.testing.assert_close(chunked, at_once, rtol=0, atol=tolerance * scale)
    assert rows == [7, 7]  # forward and backward


@pytest.mark.slow_cases(r"0-")
@pytest.mark.parametrize(("window", "packed", "softcap"), [(64, False, 0.0), (0, True, 0.0), (64, True, 5.0)])
def test_memory_grows_with_the_tokens(window: int, packed: bool, softcap: float) -> None:
    peaks = []
    for tokens in (8192, 32768):
        meter = StorageMeter()
        with FakeTensorMode(), meter:
            q, k, v = (torch.empty(1, n, tokens, 64) for n in (4, 2, 2))
            bounds = torch.empty(2, 1, tokens, dtype=torch.int32) if packed else None
            constants: tuple[Any, ...] = (0.25, True, window, softcap, 0.0, 0, False, bounds)
            out, lse = OURS.attention(q, k, v, None, None, None, *constants)
            OURS.attention_backward(out, q, k, v, None, None, None, out, lse, *constants)
        peaks.append(meter.peak)
    assert peaks[1] < 4 * peaks[0] < 32768**2

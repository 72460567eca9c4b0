"""The sum of squares that clipping goes by: in FP64, with the same bits however it is shared out."""

from __future__ import annotations

import math

import pytest
import torch

from megacompile.state import adam
from megacompile.state.master_layout import sum_of_squares


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 3, 1000, 65536, 200_003])
def test_the_sum_is_that_of_fp64_on_any_number_of_threads(dtype: torch.dtype, size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    exact = math.fsum((x.double() ** 2).tolist())
    assert sum_of_squares(x) == pytest.approx(exact, rel=1e-14)
    assert len({sum_of_squares(x, threads) for threads in (1, 2, 7)}) == 1


def test_the_kernel_and_torch_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(100_001, generator=torch.Generator().manual_seed(0)) * 1e25  # beyond FP32 when squared
    by_kernel = sum_of_squares(x)
    assert adam.backend() == "c"
    monkeypatch.setattr(adam, "_choice", "torch")
    assert sum_of_squares(x) == pytest.approx(by_kernel, rel=1e-14)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_shows(bad: float) -> None:
    x = torch.ones(70_000)
    x[69_999] = bad
    assert not math.isfinite(sum_of_squares(x))

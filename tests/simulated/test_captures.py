"""Timing where a CUDA graph cannot be captured, which the simulated runtime cannot do."""

from __future__ import annotations

import pytest
import torch

from megacompile.bench.timing import FLUSH_BYTES, CudaTimer


def test_timing_goes_on_without_graphs() -> None:
    """Random numbers can be drawn again, and what is free is given back."""
    device = torch.device("cuda", 0)
    timer, x = CudaTimer(device), torch.ones(4, device=device)
    with pytest.warns(UserWarning, match="cannot be captured .*not supported"):
        times = timer.time(x.neg_)
    assert not times.graph and not timer.time(x.neg_).graph
    torch.randn(3, device=device)
    before = torch.cuda.memory_reserved()
    torch.empty(2 * FLUSH_BYTES, dtype=torch.uint8, device=device)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before

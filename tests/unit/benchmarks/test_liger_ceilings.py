"""Kernels of another library are recorded as its launchers would launch them."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megacompile.kernels._triton import tl, triton

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is missing: pip install triton"
)


@triton.jit
def scale_kernel(x_ptr, BLOCK: tl.constexpr, y_ptr, bias_ptr, count, step=16):  # type: ignore[no-untyped-def]
    pass


def test_a_launch_is_recorded_and_specialised_but_not_done() -> None:
    """Constants stand between arguments, pointers may be missing, arguments have defaults."""
    from benchmarks.kernel_gate import _specialise
    from benchmarks.liger_ceilings import launches

    x = torch.empty(40, dtype=torch.bfloat16, device="meta")
    run = triton.runtime.JITFunction.run
    with launches() as found:
        scale_kernel[(5,)](x, 8, bias_ptr=None, y_ptr=x, count=1, num_warps=8)
    assert triton.runtime.JITFunction.run is run
    (launch,) = found
    assert (launch.grid, launch.num_warps, launch.num_stages) == ((5,), 8, 3)
    assert launch.constants == {"BLOCK": 8, "bias_ptr": None}
    signature, constants, attributes = _specialise(launch)
    assert signature == {
        "x_ptr": "*bf16", "BLOCK": "constexpr", "y_ptr": "*bf16", "bias_ptr": "constexpr",
        "count": "constexpr", "step": "i32",
    }  # fmt: skip
    assert constants == {"BLOCK": 8, "bias_ptr": None, "count": 1}
    assert set(attributes) == {(0,), (2,), (5,)}

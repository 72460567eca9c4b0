"""The meter on fake tensors: to the byte what it measures of the same call on real ones, on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import megacompile.kernels  # noqa: F401  registers the operators
from megacompile.blocks.memory_meter import StorageMeter, implementation, tensors_of
from megacompile.kernels.row_chunks import chunks

ops = torch.ops.megacompile
Call = tuple[torch._ops.OpOverload, tuple[object, ...]]


def rows(width: int = 128) -> Tensor:
    return torch.randn(1000, width, dtype=torch.bfloat16)  # 14 chunks and a part of one


def rope_() -> Call:
    x = torch.randn(2, 4, 700, 32, dtype=torch.bfloat16)
    return ops.rope_.default, (x, *torch.randn(2, 1, 1, 700, 32, dtype=torch.bfloat16))


CALLS: dict[str, Callable[[], Call]] = {
    "rope_": rope_,
    "glu_backward_": lambda: (ops.glu_backward_.default, (rows(), rows(), rows(), "silu")),
    "rms_norm": lambda: (
        ops.rms_norm.default,
        (rows(), torch.ones(128, dtype=torch.bfloat16), 1e-5, 0.0, False),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_fake_tensors_takes_what_one_on_real_ones_does(name: str) -> None:
    """Also the second, which is remembered, and where the operator writes over its arguments."""
    func, args = CALLS[name]()
    assert len(list(chunks(tensors_of(args)[0].flatten(0, -2)))) > 2
    measured = peak(func, args)
    with FakeTensorMode() as mode:
        fakes = tuple(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args)
        assert [peak(func, fakes), peak(func, fakes)] == [measured, measured]


def peak(func: torch._ops.OpOverload, args: tuple[object, ...]) -> int:
    """The most bytes that a call takes beyond its arguments."""
    assert implementation(func) is not None
    meter = StorageMeter()
    for tensor in tensors_of(args):
        meter.ignore(tensor)
    with torch.no_grad(), meter:
        func(*args)
    return meter.peak

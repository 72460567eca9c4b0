"""Attention's layouts on CUDA: torch's kernels are given what they take, within what is planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.blocks.memory_meter import StorageMeter
from megacompile.kernels import _triton
from tests.simulated.numbers import Numbers
from tests.simulated.test_scratch import GPU, ROUNDING, asked_for

ours = torch.ops.megacompile
BATCH, HEADS, LENGTH, WIDTH = 2, 4, 48, 64
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "one row of the batch": lambda x: x[:1].expand_as(x),
    "one head": lambda x: x[:, :1].transpose(2, 3).contiguous().transpose(2, 3).expand_as(x),
    "one token": lambda x: x[:, :, :1].expand_as(x),
    "odd places": lambda x: torch.cat((x[..., :1], x), -1)[..., 1:],
    "odd rows": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :WIDTH],
}


def calls(x: list[Tensor], mask: Tensor | None, layout: str) -> list[Callable[[], Any]]:
    out, (q, k, v, grad) = x[4], map(LAYOUTS[layout], x[:4])
    given = mask, None, None
    constants = 0.125, False, 0, 0.0, 0.0, 0, False
    return [
        lambda: ours.attention(q, k, v, *given, *constants),
        lambda: ours.attention_backward(grad, q, k, v, *given, out, x[5], *constants),
    ]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_of_any_layout(layout: str, dtype: torch.dtype, masked: bool) -> None:
    torch.manual_seed(0)
    x = [torch.randn(BATCH, LENGTH, HEADS, WIDTH).to(dtype).transpose(1, 2) for _ in range(5)]
    x.append(torch.full((BATCH, HEADS, LENGTH), 9.0))
    mask = torch.randn(BATCH, 1, LENGTH, LENGTH).to(dtype).mT if masked else None
    wanted = [call() for call in calls(x, mask, layout)]
    with Numbers():
        found = [
            call() for call in calls([t.cuda() for t in x], mask if mask is None else mask.cuda(), layout)
        ]
        found = [[t.cpu() for t in results] for results in found]
    for mine, theirs in zip(found, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_for_kernels_are_planned(layout: str, dtype: torch.dtype, masked: bool) -> None:
    def on(device: str) -> list[Callable[[], Any]]:
        x = [
            torch.empty(BATCH, LENGTH, HEADS, WIDTH, dtype=dtype, device=device).transpose(1, 2)
            for _ in range(5)
        ]
        x.append(torch.empty(BATCH, HEADS, LENGTH, device=device))
        mask = torch.empty(BATCH, 1, LENGTH, LENGTH, dtype=dtype, device=device).mT if masked else None
        return calls(x, mask, layout)

    with FakeTensorMode() as mode:
        fakes = on("cpu")
    for real, fake in zip(on("cuda"), fakes, strict=True):
        meter = StorageMeter(gpu=GPU)
        with mode, _triton.recording(gpu=GPU), meter:
            fake()
        peak, _ = asked_for(real)
        assert peak <= meter.peak + ROUNDING

"""What a forward asks of its device, and tensors that it makes without one."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from megacompile.api.frontend import Compiled, Frontend
from megacompile.capture import refusals
from megacompile.capture.batch import read_batch


class Asks(nn.Module):
    """Another branch on a GPU, and a tensor that an operator makes where no device is named."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x)
        if y.is_cuda:
            y = 2 * y
        return (y * torch.ops.aten.arange.start(0, 8)).mean()


def compiled() -> Compiled:
    model = Asks()
    return next(Frontend(model, torch.float32).tilings(read_batch(torch.zeros(2, 8), model))).build()


def test_a_branch_on_the_device_is_told_of_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_has_gpu", lambda: True)
    with pytest.warns(UserWarning, match=r"asks at test_device.py:\d+ whether a tensor is on a GPU"):
        compiled()


def test_where_there_is_no_gpu_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled()


def test_every_tensor_is_made_on_the_device() -> None:
    (template,) = compiled().templates
    sources = [function.source for function in template.functions()]
    assert any("aten.arange.start(0, 8, device=DEVICE)" in source for source in sources)

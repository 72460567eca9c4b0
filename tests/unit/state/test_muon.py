"""Muon's passes on the host: the C kernels and tiled torch, bitwise as torch.optim.Muon."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from megacompile.blocks.memory_meter import StorageMeter
from megacompile.schedule.workload import MatrixUpdates
from megacompile.state import adam, muon

SHAPES = [(24, 100), (100, 24), (67, 67), (1, 40), (40, 1), (130, 200), (200, 130)]
SETTINGS: list[dict[str, Any]] = [
    {"lr": 0.02},
    {"lr": 0.02, "momentum": 0.3, "nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
]


@pytest.fixture(params=["c", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        adam.set_backend(request.param)
    except RuntimeError as error:
        pytest.skip(str(error))
    yield request.param
    adam.set_backend("auto")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("settings", SETTINGS, ids=["nesterov", "plain"])
@pytest.mark.parametrize("halves", [True, False], ids=["halves", "fp32"])
@pytest.mark.parametrize("columns", [False, True], ids=["by rows", "by columns"])
def test_three_steps_are_torchs(
    backend: str,
    shape: tuple[int, int],
    settings: dict[str, Any],
    halves: bool,
    columns: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Masters and momentum, of gradients in either dtype, clipped in the last step."""
    monkeypatch.setattr(muon, "CHUNK", 4096)
    generator = torch.Generator().manual_seed(0)

    def matrix() -> Tensor:
        made = torch.randn(shape[::-1] if columns else shape, generator=generator)
        return made.T if columns else made

    def flat(x: Tensor) -> Tensor:
        return (x.T if columns else x).reshape(-1).clone()

    parameter = nn.Parameter(matrix())
    plain = torch.optim.Muon([parameter], **settings)
    known, numel, stride = plain.param_groups[0], math.prod(shape), parameter.stride()
    masters = [flat(parameter.detach())]
    if halves:
        masters = [torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)]
        adam.split(flat(parameter.detach()), *masters)
    momentum, buffer = torch.zeros(numel), torch.empty(muon.scratch_bytes(shape) // 8)
    for scale in (1.0, 1.0, 0.37):
        gradient = matrix()
        grad = flat(gradient).to(torch.bfloat16 if halves else torch.float32)
        parameter.grad = grad.float().as_strided(shape, stride).clone(memory_format=torch.preserve_format)
        parameter.grad.mul_(scale)
        plain.step()
        muon.add_momentum(grad, momentum, known, scale, buffer[: muon.CHUNK], 1)
        factor = muon.orthogonalize([muon.updates_in(grad).as_strided(shape, stride).clone()], known)
        muon.step(masters, factor, shape, known, buffer, 1)
        assert torch.equal(momentum, flat(plain.state[parameter]["momentum_buffer"]))
    value = adam.join(*masters, torch.empty(numel)) if halves else masters[0]
    assert torch.equal(value, flat(parameter.detach()))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_iterations_are_torchs_and_take_what_is_planned(shape: tuple[int, int]) -> None:
    settings = torch.optim.Muon([nn.Parameter(torch.empty(shape))]).defaults
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    chosen = settings["ns_coefficients"], settings["ns_steps"], settings["eps"]
    expected = _zeropower_via_newtonschulz(update.float(), *chosen)
    meter, given, nbytes = StorageMeter(), [update], update.nbytes
    meter.ignore(update)  # whose place the last product takes
    del update
    with meter:
        factor = muon.orthogonalize(given, settings)
    assert torch.equal(factor.view(shape), expected)
    planned = MatrixUpdates((shape,), 5, 0).call
    assert meter.peak - nbytes <= planned.peak_bytes
    assert meter.peak == pytest.approx(planned.peak_bytes + nbytes, rel=0.01) or min(shape) == 1

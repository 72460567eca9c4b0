"""What a step asks an allocator for takes the bytes that its plan counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megacompile.api.frontend import Frontend
from megacompile.blocks.weight_groups import SEED_BYTES
from megacompile.capture.batch import read_batch
from megacompile.hardware.catalog import PROFILES
from megacompile.hardware.step_requests import step_requests
from megacompile.kernels._triton import Gpu
from megacompile.passes import lower
from megacompile.planner.min_feasible_budget import least
from megacompile.planner.search import search
from megacompile.schedule.plan import Mode
from megacompile.schedule.step import memory_curve
from megacompile.state.torch_optimizer import TorchOptimizer
from tests.support.models import batch_for, build

MACHINE = PROFILES["h100-sxm"].rates("bf16")


class Empty(nn.Module):
    """A layer that hands on a tensor without elements, as one that keeps a short past does at its length."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        return self.mix(torch.cat([past, x], 1)), 2 * x[:, :0]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Empty() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        past = 2 * x[:, :0]
        for layer in self.layers:
            x, past = layer(x, past)
        return x.square().mean()


def test_a_tensor_without_elements_is_asked_for_by_nobody() -> None:
    model = Layers()
    batch = read_batch({"x": torch.ones(2, 4, 8)}, model)
    compiled = next(Frontend(model, torch.float32, gpu=Gpu(132)).tilings(batch)).build()
    step = search(compiled.assembly.work, Mode("train", 1), MACHINE, 1 << 40).step
    requests = step_requests(step, compiled.part, compiled.templates, compiled.assembly)
    assert requests and len(requests) == 2 * len({number for number, _ in requests})  # each given back once


@pytest.mark.slow_cases(r"(.*gemma3|False-gpt2)")
@pytest.mark.parametrize("name", ["llama", "gpt2-dropout", "gemma3"])
@pytest.mark.parametrize("tight", [False, True])
def test_requests_take_what_the_plan_counts(name: str, tight: bool) -> None:
    """With all activations kept, and with those recomputed and offloaded that the least budget wants so."""
    model = build(name)
    batch = read_batch(batch_for(name), model)
    compiled = next(Frontend(model, torch.bfloat16, gpu=Gpu(132)).tilings(batch)).build()
    work, mode = compiled.assembly.work, Mode("train", 3, deferred=True)
    budget = int(1.05 * least(work, mode).nbytes) if tight else 1 << 40
    planned = search(work, mode, MACHINE, budget)
    step = planned.step
    most = most_of(step_requests(step, compiled.part, compiled.templates, compiled.assembly))
    counted = planned.peak_bytes - step.slab_bytes - step.constant_bytes
    assert counted <= most <= counted + SEED_BYTES  # which plans count with what stays


def test_updates_of_matrices_take_what_the_plan_counts() -> None:
    """Of wide layers over few rows they are the highest point of a step."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    batch = read_batch({"input": torch.ones(1, 64)}, model)
    optimizer = torch.optim.Muon(model.parameters())
    form = TorchOptimizer(optimizer)
    options = {"optimizer": optimizer, "form": form, "loss_fn": lambda out, batch: out.mean()}
    frontend = Frontend(model, torch.bfloat16, gpu=Gpu(132), **options)  # type: ignore[arg-type]
    compiled = next(frontend.tilings(batch)).build()
    work, mode = compiled.assembly.work, Mode("train", deferred=True)
    step = lower(work, least(work, mode).plan, mode)
    index, peak = max(memory_curve(step), key=lambda point: point[1])
    assert step.ops[index].kind == "orthogonalize"
    most = most_of(step_requests(step, compiled.part, compiled.templates, compiled.assembly))
    assert most == peak - step.slab_bytes - step.constant_bytes


def most_of(requests: list[tuple[int, int]]) -> int:
    """The most bytes that are held at one time; nothing may be left."""
    live = most = 0
    taken: dict[int, int] = {}
    for number, nbytes in requests:
        live += nbytes or -taken.pop(number)
        if nbytes:
            taken[number] = nbytes
        most = max(most, live)
    assert not taken
    return most

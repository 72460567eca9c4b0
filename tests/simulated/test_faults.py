"""Waits that are left out, memory that is not page-locked: each shows, or is borne."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.api.pipeline import Compiler
from megacompile.runtime import cuda
from megacompile.runtime.cuda_streams import CudaStreams, Mark
from megacompile.runtime.step_results import NonFiniteError
from megacompile.state.masters import HostState
from tests.simulated.numbers import runtime
from tests.support.cuda_programs import program

STEPS = 3
DELAY = 15_000  # microseconds by which copies are late: longer than what computes
LATE = 0.03  # seconds by which the host is


class Wide(nn.Module):
    """Layers of 2 MB, which are page-locked: smaller buffers are copied at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 1024) for _ in range(4))
        self.back = nn.ModuleList(nn.Linear(1024, 512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.layers, self.back, strict=True):
            x = x + down(torch.relu(up(x)))
        return x.square().mean()


@pytest.fixture(autouse=True)
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiler, "_may_reside", lambda *_: ())


def batch(number: int) -> Tensor:
    return torch.randn(4, 512, generator=torch.Generator().manual_seed(number))


def made(device: str, **options: Any) -> megacompile.Program:
    torch.manual_seed(0)
    return program(Wide(), device, "1GB", **({"planner": "double-buffer"} | options))


def losses(trained: megacompile.Program) -> list[float]:
    found = [float(trained.train_step(batch(i)).loss) for i in range(STEPS)]
    trained.close()
    return found


def unwaited(name: str) -> tuple[str, Callable[..., Any]]:
    """A method of the streams that leaves out what one of them waits for."""
    start = CudaStreams._start

    def compute(self: CudaStreams, after: Iterable[Any]) -> None:
        self.raise_failure()

    def copies(self: CudaStreams, stream: Any, needed: Iterable[Mark]) -> Any:
        return start(self, stream, () if stream is self._copies[name] else needed)

    def host(self: CudaStreams, needed: Iterable[Mark], pushed: Mark | None) -> bool:
        return True

    return {"compute": ("wait", compute), "host": ("_await", host)}.get(name, ("_start", copies))


def late(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        time.sleep(LATE)
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize("stream", ["", "compute", "h2d", "d2h", "host"])
def test_without_the_waits_of_a_stream_numbers_are_wrong(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies, updates and what lands on the host are late: whoever does not wait for them is too early."""
    expected = sums(made("cpu"))
    monkeypatch.setattr(HostState, "update", late(HostState.update))
    monkeypatch.setattr(cuda, "add_gradients", late(cuda.add_gradients))
    if stream:
        monkeypatch.setattr(CudaStreams, *unwaited(stream))
    runtime.set(copy_us=DELAY)
    try:
        found = sums(made("cuda"))
    except NonFiniteError:
        found = [math.nan]
    assert (found == expected) == (not stream)


def sums(trained: megacompile.Program) -> list[float]:
    """Losses, of two micro-batches each, and the sum of the weights."""
    found = [float(trained.train_step([(batch(i),), (batch(i + 1),)]).loss) for i in range(2)]
    found += [float(w.double().sum()) for w in trained.state_dict().values()]
    trained.close()
    return found


@pytest.mark.parametrize("locked", [0, 3 << 20])
def test_what_is_not_page_locked_passes_through_buffers(locked: int) -> None:
    """Nothing, or the first buffers alone: training is the same."""
    expected = losses(made("cpu"))
    runtime.set(lock_limit=locked + (256 << 20))  # the buffers themselves
    assert losses(made("cuda")) == expected


def test_two_hundred_steps_take_no_more_than_the_first_ten() -> None:
    runtime.set(lag_us=0)
    trained = made("cuda", max_grad_norm=1.0)
    held = []
    for i in range(200):
        trained.train_step(batch(i))
        trained.synchronize()
        held.append((torch.cuda.memory_reserved(), runtime.count("used"), runtime.count("page_locked")))
    trained.close()
    for most, later in zip(*(map(max, zip(*part, strict=True)) for part in (held[:10], held)), strict=True):
        assert later == most


def test_state_on_storage_trains_the_same(tmp_path: Path) -> None:
    on_storage = made("cuda", host_budget="48MB", offload_dir=tmp_path, planner=None, example_batch=batch(0))
    states = {group.state for group in on_storage._session.scheduled().planned.plan.groups}
    assert losses(on_storage) == losses(made("cpu"))
    assert any(state.startswith("nvme") for state in states)


def test_a_checkpoint_goes_on_on_the_device(tmp_path: Path) -> None:
    expected = losses(made("cuda"))
    first = made("cuda")
    first.train_step(batch(0))
    first.save(tmp_path)
    first.close()
    second = made("cuda", example_batch=batch(0))
    second.load(tmp_path)
    found = [float(second.train_step(batch(i)).loss) for i in (1, 2)]
    second.close()
    assert found == expected[1:]

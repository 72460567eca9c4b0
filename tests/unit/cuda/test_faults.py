"""What goes wrong on the device, or on the way there, reaches the caller: nothing hangs."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from megacompile.runtime.bounce_buffers import BOUNCE_BUFFERS, BounceBuffer
from megacompile.runtime.cuda import CudaDevice
from tests.support.cuda_programs import program, within
from tests.support.fake_cuda import FakeCuda, FakeEvent, FakeStream
from tests.support.models import Deep, batch_for, build

SECONDS = 120.0


def faulty(real: Any, thread: str) -> Any:
    """A call of the stream API that fails in one of the worker threads."""

    def call(self: Any, *args: Any) -> Any:
        if threading.current_thread().name == f"megacompile-{thread}":
            raise RuntimeError("CUDA error: device-side assert triggered")
        return real(self, *args)

    return call


@pytest.mark.parametrize(
    ("thread", "kind", "name"),
    [
        ("host", FakeEvent, "synchronize"),
        ("land", FakeEvent, "synchronize"),
        ("h2d", FakeEvent, "record"),
        ("d2h", FakeEvent, "record"),
        ("d2h", FakeStream, "wait_event"),
    ],
)
def test_an_error_of_the_device_that_a_worker_meets_reaches_the_caller(
    gpu: FakeCuda, thread: str, kind: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = program(build("plain"), "cuda", "1GB", max_grad_norm=1.0)
    batches = [batch_for("plain", 0), batch_for("plain", 1)]  # sums on the host: pushes have callbacks

    def step() -> None:
        trained.train_step(batches)
        trained.synchronize()

    step()
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, faulty(getattr(kind, name), thread))
        error = within(SECONDS, step)
        assert error is not None and "device-side assert" in str(error)
    assert within(SECONDS, trained.close) is None


def test_a_copy_that_fails_in_a_push_gives_its_buffer_back(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two that gradients pass through, each has been on its way when its copy failed."""
    trained = program(build("plain"), "cuda", "1GB", max_grad_norm=1.0)
    batches = [batch_for("plain", 0), batch_for("plain", 1)]
    trained.train_step(batches)
    trained.synchronize()
    copy, take, taken = CudaDevice.copy, BounceBuffer.take, [0]

    def counted(self: BounceBuffer) -> None:
        take(self)
        taken[0] += 1

    def broken(self: CudaDevice, targets: Any, sources: Any) -> Any:
        if taken[0] and threading.current_thread().name == "megacompile-d2h":
            taken[0] = 0
            raise OSError("planted fault")
        return copy(self, targets, sources)

    def step() -> None:
        trained.train_step(batches)
        trained.synchronize()

    with monkeypatch.context() as patch:
        patch.setattr(BounceBuffer, "take", counted)
        patch.setattr(CudaDevice, "copy", broken)
        for _ in range(2 * BOUNCE_BUFFERS):
            assert isinstance(within(SECONDS, step), OSError)
    assert within(SECONDS, step) is None
    trained.close()


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_page_locked_memory_is_unlocked_before_it_goes(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA takes what lies at an address that was locked for locked memory, and copies to what lay there."""
    locked: dict[int, int] = {}
    gone: list[int] = []

    def register(self: FakeCuda, tensor: torch.Tensor) -> list[int]:
        start = tensor.data_ptr()
        locked[start] = tensor.nbytes
        weakref.finalize(tensor.untyped_storage(), lambda: gone.append(start) if start in locked else None)
        return [tensor.nbytes]

    def unregister(self: FakeCuda, tensor: torch.Tensor) -> None:
        locked.pop(tensor.data_ptr(), None)

    monkeypatch.setattr(FakeCuda, "register", register)
    monkeypatch.setattr(FakeCuda, "unregister", unregister)
    monkeypatch.setattr(FakeCuda, "release", lambda self: locked.clear())
    trained = program(Deep(), "cuda", "1GB", planner="zero3-like")
    taken = []
    for rows in (256, 512, 256, 512, 1024, 1024, 512):
        trained.train_step(torch.ones(rows, 64))
        trained.train_step([(torch.ones(rows, 64),)] * 2)  # sums on the host
        trained.synchronize()
        taken.append(len(locked))
    assert not gone
    assert taken[3] == taken[1], "a length that was there before takes nothing new"
    assert trained.memory.host_bytes["offloaded"] > 0
    del trained
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("Thread-"):
            thread.join(0.2)
    assert not gone

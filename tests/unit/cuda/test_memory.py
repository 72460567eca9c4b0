"""What a program sets for the whole process, it undoes; what CUDA refuses leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch

from megacompile.errors import BudgetError
from megacompile.runtime import cuda_memory, pinned_memory
from megacompile.runtime.cuda import CudaDevice
from megacompile.runtime.cuda_memory import TorchCuda
from megacompile.runtime.pinned_memory import first_page
from megacompile.runtime.step_results import NonFiniteError
from megacompile.state.host_arena import HostArena
from tests.support.cuda_programs import program
from tests.support.fake_cuda import FakeCuda
from tests.support.models import batch_for, build


class Probe:
    """A tensor on a device whose last error is checked after a launch, as torch does."""

    def __init__(self) -> None:
        self.error = 0

    def neg_(self) -> None:
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(f"CUDA error: {error}")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> TorchCuda:
    """``TorchCuda`` as far as its memory goes, with no device."""
    api = TorchCuda.__new__(TorchCuda)
    api.device, api._refused, api._registered = torch.device("cpu"), False, {}
    api._probe = Probe()  # type: ignore[assignment]
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    monkeypatch.setattr(cuda_memory, "_drop_workspaces", lambda: None)
    return api


def test_a_refusal_is_not_the_error_of_the_next_launch(
    bare: TorchCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(tensor: torch.Tensor) -> tuple[list[tuple[int, int]], int]:
        bare._probe.error = 801  # type: ignore[attr-defined]
        return [], 801

    monkeypatch.setattr(cuda_memory, "page_lock", refuse)
    for _ in range(2):
        assert not bare.register(torch.empty(1 << 20, dtype=torch.uint8))
    assert capsys.readouterr().err.count("CUDA error 801") == 1
    bare._probe.neg_()


def test_what_was_locked_is_unlocked_once(bare: TorchCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    unlocked: list[int] = []
    runtime = type("Runtime", (), {"cudaHostRegister": lambda start, nbytes, flags: 0})
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(cuda_memory, "page_unlock", unlocked.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    # each on pages of its own, as torch's would not always be
    first, second, small = (HostArena(n << 10).tensor for n in (2048, 4096, 4))
    assert all(bare.register(x) == [x.nbytes] for x in (first, second, small))
    bare.unregister(first)
    bare.unregister(small)
    assert unlocked == [first_page(first)]
    bare.release()
    bare.release()
    assert unlocked == [first_page(first), first_page(second)]


def test_what_is_not_locked_as_a_whole_is_locked_in_pieces(
    bare: TorchCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the first piece that is refused; what is locked stays, and is unlocked with its tensor."""
    left, locked = [5], {}

    class Runtime:
        def cudaHostRegister(self, start: int, nbytes: int, flags: int) -> int:
            if nbytes > 1 << 20 or not left[0]:
                return 801
            left[0] -= 1
            locked[start] = nbytes
            return 0

    monkeypatch.setattr(pinned_memory, "_PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(cuda_memory, "page_unlock", locked.pop)
    first, second = (HostArena((n << 20) + 4096).tensor for n in (3, 4))
    assert bare.register(first) == [1 << 20, 2 << 20, 3 << 20, first.nbytes]
    assert not capsys.readouterr().err
    assert bare.register(second) == [1 << 20]
    assert bare.page_locked_bytes() == sum(locked.values()) == first.nbytes + (1 << 20)
    assert capsys.readouterr().err.count("CUDA error 801") == 1
    bare.unregister(first)
    assert list(locked) == [second.data_ptr()]


def test_memory_of_a_process_that_has_ended_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until no more is used than a context takes, or for two seconds: another process may stay."""
    waited: list[float] = []
    used = [5 << 30, 5 << 30, 600 << 20]
    clock = type("Clock", (), {"monotonic": lambda: sum(waited), "sleep": waited.append})
    monkeypatch.setattr(cuda_memory, "time", clock)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((80 << 30) - used.pop(0), 80 << 30))
    cuda_memory._await_leaving.__wrapped__(torch.device("cuda", 0))
    assert len(waited) == 2 and not used
    used += [5 << 30] * 1000
    cuda_memory._await_leaving.__wrapped__(torch.device("cuda", 0))
    assert 2.0 <= sum(waited) < 2.3


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The shares of a device of 1,000 bytes that the process was limited to, one after the other."""
    limits = [0.9]
    device = type("Properties", (), {"total_memory": 1000})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: limits[-1])
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: limits.append(fraction)
    )
    return limits


@pytest.mark.parametrize("first, left", [(0, 0.5), (1, 0.25)])
def test_the_limit_of_a_program_stays_as_long_as_it_is_open(
    first: int, left: float, bare: TorchCuda, limits: list[float]
) -> None:
    apis = [bare, copy.copy(bare)]
    for api, nbytes in zip(apis, (250, 500), strict=True):
        api.limit(nbytes)
    apis[first].release()
    assert limits[-1] == left
    apis[1 - first].release()
    assert limits[-1] == 0.9


def test_the_allocators_limit_ends_with_the_program(
    bare: TorchCuda, limits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare.limit(250)
    bare.limit(500)
    bare.release()
    bare.release()
    assert limits == [0.9, 0.25, 0.5, 0.9]
    monkeypatch.setattr(bare, "context_bytes", lambda: 1001)
    with pytest.raises(BudgetError, match="hold 1 kB of it"):
        bare.limit(-1)


def test_threads_that_start_later_take_the_callers_count() -> None:
    before, counts = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        device = CudaDevice(FakeCuda(), 10**9)
        thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        device.close()
    finally:
        torch.set_num_threads(before)
    assert counts == [3]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_program_that_is_dropped_ends_its_threads(gpu: FakeCuda, kind: str) -> None:
    before = set(threading.enumerate())
    trained: Any = program(build("plain"), kind)
    trained.train_step(batch_for("plain"))
    own = [t for t in set(threading.enumerate()) - before if t.name.startswith("megacompile-")]
    assert own
    del trained
    gc.collect()
    for thread in own:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in own)


class Clock:
    """A device whose clock is 10 ppm fast, and its events, which tell of milliseconds in float32."""

    now = 5.0

    class Event:
        def __init__(self, seconds: float = 0.0) -> None:
            self.seconds = seconds

        def record(self, stream: Any) -> None:
            self.seconds = Clock.now

        def synchronize(self) -> None:
            Clock.now += 1e-5

        def elapsed_time(self, later: Clock.Event) -> float:
            milliseconds = 1e3 * (1 + 1e-5) * (later.seconds - self.seconds)
            return torch.tensor(milliseconds, dtype=torch.float32).item()


def test_times_stay_exact_for_days(bare: TorchCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare, "event", Clock.Event)
    monkeypatch.setattr(bare, "stream", lambda name: None)
    monkeypatch.setattr(cuda_memory.time, "perf_counter", lambda: 1000.0 + Clock.now)
    bare._anchor()
    for _ in range(2 * 24 * 60):
        begun = Clock.now
        told = bare.host_seconds(Clock.Event(begun))
        assert abs(told - (1000.0 + begun)) < 2e-3
        assert abs(bare.host_seconds(Clock.Event(begun + 0.0123)) - told - 0.0123) < 2e-5
        Clock.now += 60.00037


def test_a_step_convolves_in_full_precision_and_leaves_the_callers_settings(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudnn: Any = torch.backends.cudnn

    def settings() -> tuple[Any, ...]:
        return cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, cudnn.deterministic, cudnn.benchmark

    seen, pin, before = [], gpu.pin, settings()
    monkeypatch.setattr(gpu, "pin", lambda tensor: (seen.append(settings()), pin(tensor))[1])
    trained = program(build("plain"), "cuda")
    trained.train_step(batch_for("plain"))
    with pytest.raises(NonFiniteError):
        trained.train_step({name: x * float("nan") for name, x in batch_for("plain").items()})
    trained.close()
    assert set(seen) == {("ieee", "ieee", True, False)}
    assert settings() == before

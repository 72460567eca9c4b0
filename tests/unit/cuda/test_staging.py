"""Copies through page-locked buffers, where the system page-locks nothing in place."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from megacompile.cli import doctor
from megacompile.runtime import pinned_memory, staging
from megacompile.runtime.cuda import CudaDevice
from megacompile.runtime.staging import Staging, StagingRing
from tests.support.fake_cuda import FakeCuda, FakeStream
from tests.support.recorded_cuda import RecordedApi, Recording, Uses, spread


def link(seed: int) -> FakeCuda:
    """A link whose copies run on a stream that lags."""
    fake = FakeCuda(refuses=True)
    fake.use(FakeStream(random.Random(seed)))
    return fake


def numbers(count: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [0, 1, 64, 65, 1000])
def test_bytes_arrive_whatever_their_number(count: int) -> None:
    fake = link(count)
    up, down = (StagingRing(fake, piece_bytes=64, pieces=3) for _ in range(2))
    host, device, back = numbers(count, 0), torch.zeros(count, dtype=torch.uint8), torch.zeros_like
    up.upload(device, host)
    there = back(host)
    down.download(there, device)()
    assert torch.equal(there, host)
    assert fake.through == 2 * -(-count // 64)


def test_downloads_overtake_no_one_and_wait_for_the_callback() -> None:
    """More pieces are under way than there are buffers, and no callback has run: nothing hangs or is lost."""
    fake = link(1)
    ring = StagingRing(fake, piece_bytes=64, pieces=3)
    sources = [numbers(200, seed) for seed in range(5)]
    places = [torch.zeros_like(s) for s in sources]
    callbacks = [ring.download(p, s) for p, s in zip(places, sources, strict=True)]
    for on_complete in reversed(callbacks):
        on_complete()
    assert all(torch.equal(p, s) for p, s in zip(places, sources, strict=True))


def test_an_upload_waits_for_what_is_on_its_way_to_its_source() -> None:
    fake = link(2)
    rings = Staging(fake, piece_bytes=64)
    host = torch.zeros(10, 30, dtype=torch.float32)
    rings.add(host.data_ptr(), host.data_ptr() + host.nbytes)
    assert rings.holds(host) and not rings.holds(torch.zeros(3)) and rings.nbytes == 2 * 4 * 64
    assert not rings.holds(host[:, ::2]), "what has gaps is left to the driver"
    source, target = torch.randn(10, 30), torch.zeros(10, 30)
    on_complete = rings.download(host, source)
    late = threading.Timer(0.05, on_complete)
    late.start()
    rings.upload(target, host)
    late.join()
    done = fake.event()
    done.record(fake.current())
    done.synchronize()
    assert torch.equal(target, source)


def test_what_a_failed_copy_left_in_a_buffer_is_not_landed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(refuses=True)
    device = CudaDevice(fake, 10**9)
    device.host._staging = Staging(fake, piece_bytes=64)
    first, second = torch.zeros(32), torch.zeros(32)  # two pieces each
    device.host.own([first, second])
    copy, calls = FakeCuda.copy, [0]

    def broken(self: FakeCuda, target: Tensor, source: Tensor) -> None:
        calls[0] += 1
        if calls[0] == 4:  # the second tensor's second piece
            raise OSError("planted fault")
        copy(self, target, source)

    monkeypatch.setattr(FakeCuda, "copy", broken)
    with pytest.raises(OSError, match="planted fault"):
        device.copy([first, second], [torch.ones(32), torch.ones(32)])
    for place in (second[:16], first[:16], second[16:], first[16:]):  # over every buffer
        on_complete = device.copy([place], [torch.full((16,), 2.0)])
        assert on_complete is not None
        on_complete()
        place.fill_(3.0)
    device.copy([torch.zeros(32)], [first])  # waits for nothing that will not come
    assert first.eq(3.0).all() and second.eq(3.0).all()
    device.close()


@pytest.mark.parametrize(("code", "said"), [(0, "page-locked in place"), (801, "CUDA error 801")])
def test_doctor_says_what_the_system_does(code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    released = []
    runtime = type("Runtime", (), {"cudaHostUnregister": released.append})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pinned_memory, "page_lock", lambda tensor: ([] if code else [(4096, 8192)], code))
    assert said in doctor._page_locking()
    assert released == ([4096] if code == 0 else [])


class Link:
    """Copies over the recorded stream API: each is a point of a stream, and a use of a buffer."""

    def __init__(self, api: RecordedApi) -> None:
        self.api, self.count = api, 0
        self.uses: Uses = defaultdict(list)
        self.names: list[int] = []

    def pinned(self, nbytes: int) -> Tensor:
        self.names.append(0)
        return Buffer(len(self.names), self)  # type: ignore[return-value]

    def event(self) -> Any:
        return self.api.event()

    def current(self) -> Any:
        return self.api.mine.stream

    def copy(self, target: Any, source: Any) -> None:
        self.count += 1
        self.api.launch(("copy", self.count))
        buffer = target if isinstance(target, Buffer) else source
        self.uses[buffer.name].append((self.api.log.points["copy", self.count], buffer is target))


class Buffer:
    """A page-locked buffer: what the host does with it is a point of the calling thread."""

    def __init__(self, name: int, link: Link) -> None:
        self.name, self.link = name, link

    def __getitem__(self, part: slice) -> Buffer:
        return self

    def touched(self, *, writes: bool) -> None:
        self.link.count += 1
        self.link.api.work(("host", self.link.count))
        self.link.uses[self.name].append((self.link.api.log.points["host", self.link.count], writes))

    def copy_(self, source: object) -> None:
        self.touched(writes=True)


class Place:
    """Flat bytes at one end of a copy."""

    def __init__(self, count: int) -> None:
        self.count = count

    def numel(self) -> int:
        return self.count

    def split(self, size: int) -> tuple[Place, ...]:
        return tuple(Place(min(size, self.count - start)) for start in range(0, self.count, size))

    def copy_(self, buffer: Buffer) -> None:
        buffer.touched(writes=False)


def unordered(pieces: int) -> list[tuple[int, int]]:
    """Pairs of conflicting uses of a buffer that nothing in the record orders."""
    log = Recording(0)
    api = RecordedApi(log)
    api.use(api.stream("d2h"))
    made = Link(api)
    up, down = (StagingRing(made, piece_bytes=64, pieces=pieces) for _ in range(2))  # type: ignore[arg-type]
    callbacks: list[Any] = []
    for count in (200, 64, 500):
        up.upload(Place(count), Place(count))  # type: ignore[arg-type]
        callbacks.append(down.download(Place(count), Place(count)))  # type: ignore[arg-type]
    for on_complete in callbacks:
        on_complete()
    reached = log.reached_from()
    pairs = spread(made.uses)
    assert pairs
    return sorted((a, b) for a, b in pairs if not reached[b] >> a & 1)


@pytest.mark.parametrize("pieces", [1, 3, 4])
def test_the_record_orders_every_use_of_a_buffer(pieces: int) -> None:
    assert unordered(pieces) == []


def test_the_record_shows_a_buffer_that_is_filled_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging._Piece, "ready", lambda self: None)
    assert unordered(3)

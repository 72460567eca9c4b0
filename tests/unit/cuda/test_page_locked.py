"""Page-locked pieces: used again once their copies are over, not before; ordinary memory where refused."""

from __future__ import annotations

import pytest
import torch

from megacompile.runtime.pinned_memory import PageLocked


class Event:
    """One whose copies are over when the test says so."""

    over = False

    def query(self) -> bool:
        return self.over


@pytest.fixture
def slabs(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Those that were locked, which no CPU build of torch can."""
    made: list[torch.Tensor] = []

    def locked(self: PageLocked, nbytes: int) -> torch.Tensor:
        made.append(torch.empty(nbytes, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr(PageLocked, "_locked", locked)
    return made


def test_a_piece_is_used_again_when_its_copies_are_over(slabs: list[torch.Tensor]) -> None:
    events: list[Event] = []
    pool = PageLocked(lambda: (events.append(Event()), events[-1])[1])
    first = pool.take(3 << 20)
    assert first.nbytes == 3 << 20
    view = first[5:].view(-1)
    del first
    pool.take(3 << 20)  # the view holds the first one
    assert len(slabs) == 2
    del view
    pool.take(3 << 20)  # both were dropped, and may still be read by copies
    assert len(slabs) == 3
    for event in events:
        event.over = True
    again = [pool.take(3 << 20) for _ in range(2)]
    assert {piece.data_ptr() for piece in again} == {slab.data_ptr() for slab in slabs[:2]}


def test_small_pieces_lie_side_by_side(slabs: list[torch.Tensor]) -> None:
    pool = PageLocked(Event)
    pieces = [pool.take(n) for n in (0, 1, 200, 256)]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert [piece.tolist() for piece in pieces] == [[], [1], [2] * 200, [3] * 256]
    assert len(slabs) == 1


def test_where_nothing_can_be_locked_ordinary_memory_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*size: int, pin_memory: bool = False, **options: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return torch.zeros(*size, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", refuse)
    pool = PageLocked(Event)
    assert [pool.take(n).nbytes for n in (8, 2 << 20)] == [8, 2 << 20]
    assert capsys.readouterr().err.count("ordinary memory") == 1

"""Host buffers: one room for all programs' offloaded activations, within the host budget."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import megacompile
from megacompile.runtime.host_memory import HostMemory
from megacompile.state.host_arena import HostArena, Room, padded
from tests.support.models import Deep


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20_000)), max_size=30))
def test_a_room_gives_no_byte_twice_and_gets_all_back(calls: list[tuple[int, int]]) -> None:
    """Each call gives the piece under its number back, and takes another one."""
    room = Room(HostArena(100_000).tensor)
    pieces: dict[int, torch.Tensor] = {}
    for number, nbytes in calls:
        if number in pieces:
            room.give(pieces.pop(number))
        piece = room.take(nbytes)
        if piece is not None:
            assert room.holds(piece) or not nbytes
            pieces[number] = piece
        spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in pieces.values() if p.nbytes)
        assert all(first[1] <= second[0] for first, second in pairwise(spans))
    for piece in pieces.values():
        room.give(piece)
    assert room.take(padded(100_000)) is not None


class Odd(nn.Module):
    """Weights whose buckets are padded, by elements and by pages."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(33, 65), nn.Linear(65, 33)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("host", [1_260_000, 1_300_000])
def test_what_the_search_takes_to_fit_the_host_is_laid_out(
    host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where 1.22 MB suffice, more do: the search and the arena count the same bytes."""
    taken: list[int] = []  # beside the arena
    monkeypatch.setattr(HostMemory, "empty", lambda self, nbytes: taken.append(nbytes))
    model = nn.Sequential(*(Odd() for _ in range(8)))
    program = megacompile.compile(
        model, "850kB", optimizer=torch.optim.AdamW(model.parameters()), host_budget=f"{host}B",
        loss_fn=lambda out, batch: out.square().mean(), compute_dtype=torch.float32,
    )  # fmt: skip
    program.train_step([(torch.ones(512, 33),)] * 2)
    program.synchronize()
    assert sum(program.memory.host_bytes.values()) <= host
    assert not taken and program.memory.host_bytes["offloaded"]
    program.close()


def trainer(**options: Any) -> megacompile.Program:
    model = Deep(10)
    optimizer = torch.optim.AdamW(model.parameters())
    options |= {"optimizer": optimizer, "compute_dtype": torch.float32, "planner": "zero3-like"}
    return megacompile.compile(model, "1GB", **options)


def step(program: megacompile.Program, rows: int) -> float:
    loss = float(program.train_step(torch.ones(rows, 64)).loss)
    program.synchronize()
    return loss


@pytest.mark.filterwarnings("ignore:Compiling another")
def test_lengths_that_alternate_use_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    empty = HostMemory.empty

    def counted(self: HostMemory, nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return empty(self, nbytes)

    monkeypatch.setattr(HostMemory, "empty", counted)
    program = trainer()
    step(program, 64)
    few = program.memory.host_bytes
    step(program, 1024)
    calls, many = len(taken), program.memory.host_bytes
    assert calls <= 2, "one buffer more for offloaded activations; the ring may grow"
    for rows in (64, 1024, 512, 64, 1024):
        step(program, rows)
    assert len(taken) == calls
    assert many["offloaded"] > 8 * few["offloaded"] > 0
    assert program.memory.host_bytes == many
    program.close()


@pytest.mark.filterwarnings("ignore:Compiling another")
def test_a_later_program_is_held_to_the_host_budget() -> None:
    program = trainer(host_budget="3MB")
    alone = trainer()
    step(program, 64), step(alone, 64)
    with pytest.raises(megacompile.BudgetError, match=r"host_budget=3 MB is too small for this batch"):
        step(program, 2048)
    assert step(program, 64) == step(alone, 64), "nothing changed"
    assert sum(program.memory.host_bytes.values()) < 3e6
    program.close()
    alone.close()

"""Snapshots: what a reader is given is what was there, whoever changes the state meanwhile."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megacompile.blocks.weight_groups import GroupLayout, Parameter, Slot
from megacompile.errors import BudgetError
from megacompile.state import snapshot as snapshot_module
from megacompile.state.adam import AdamHyper
from megacompile.state.host_arena import HostArena
from megacompile.state.masters import HostState
from megacompile.state.snapshot import Snapshot

ELEMENTS = 64
ROOM = 3 * mmap.PAGESIZE  # for a copy of a group: pages of weights and two moments
Parts = Iterator[dict[str, dict[str, Tensor]]]


def state_of(groups: int) -> HostState:
    layouts = []
    for index in range(groups):
        parameter = Parameter(f"p{index}", (ELEMENTS,), (1,), torch.float32, 0)
        layouts.append(GroupLayout(index, f"g{index}", torch.float32, True, (Slot(parameter, 0),), ELEMENTS))
    state = HostState(layouts)
    for index, arrays in enumerate(state.arrays):
        for array in arrays.values():
            array.fill_(index)
    return state


def update(state: HostState, group: int) -> None:
    state.update(group, torch.ones(ELEMENTS), [AdamHyper(lr=0.1)], [0], threads=1)


def values(parts: Parts) -> float:
    """The one value of all arrays of the next group."""
    ((_, arrays),) = next(parts).items()
    found = {float(x) for array in arrays.values() for x in array}
    assert len(arrays) == 3 and len(found) == 1
    return found.pop()


def taken(state: HostState, updated: list[int], room_bytes: int) -> tuple[Snapshot, Parts]:
    snapshot = state.snapshot(updated, room_bytes)
    state.guard(snapshot)
    assert snapshot.begin()
    return snapshot, snapshot.parts()


def test_groups_come_as_they_were_in_the_order_of_updates() -> None:
    state = state_of(4)
    snapshot, parts = taken(state, [2, 1], 2 * ROOM)
    update(state, 3)
    assert values(parts) == 2
    snapshot.written(1)
    update(state, 2)  # it was read: no copy
    update(state, 1)
    assert [values(parts) for _ in range(3)] == [1, 0, 3]
    assert snapshot.copied == 2
    assert next(parts, None) is None


def test_room_comes_back_with_what_was_read() -> None:
    state = state_of(3)
    snapshot, parts = taken(state, [], ROOM)
    update(state, 0)
    assert values(parts) == 0
    snapshot.written(1)
    update(state, 2)
    assert [values(parts), values(parts)] == [1, 2]
    assert snapshot.copied == 2


@pytest.mark.parametrize("room", ["none", "taken", "refused"])
def test_a_change_waits_where_no_copy_can_be_made(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> HostArena:
        raise BudgetError("The system refuses to map it.")

    state = state_of(2)
    snapshot, parts = taken(state, [], 0 if room == "none" else 10 * ROOM)
    if room == "refused":
        monkeypatch.setattr(snapshot_module, "HostArena", refuse)
    if room == "taken":
        assert values(parts) == 0
    waiting, wait_for = threading.Event(), snapshot._changed.wait_for

    def noted(*given: object) -> bool:
        waiting.set()
        return wait_for(*given)  # type: ignore[arg-type]

    snapshot._changed.wait_for = noted  # type: ignore[method-assign,assignment]
    thread = threading.Thread(target=update, args=(state, 0))
    thread.start()
    waiting.wait()
    assert bool((state.arrays[0]["weights"] == 0).all())
    if room != "taken":
        assert values(parts) == 0
    snapshot.written(1)
    thread.join()
    assert bool((state.arrays[0]["weights"] != 0).all()) and snapshot.copied == 0


def test_a_writer_that_fails_lets_all_go_on() -> None:
    state = state_of(2)
    snapshot, _ = taken(state, [], 0)
    snapshot.end()
    update(state, 0)
    again = state.snapshot([], 0)
    state.guard(again)
    again.cancel()
    update(state, 1)
    assert not again.begin()


def test_state_on_a_device_is_fetched_and_updated_without_copies() -> None:
    state = state_of(2)
    home = state._homes[0] = state.arrays[0]
    state.arrays[0] = {name: array + 5 for name, array in home.items()}
    snapshot, parts = taken(state, [], 0)
    update(state, 0)  # on the device
    assert [values(parts), values(parts)] == [5, 1]
    assert bool((home["weights"] == 5).all()) and snapshot.copied == 0


@pytest.mark.parametrize("change", ["move", "write"])
def test_changes_between_steps_are_noticed(change: str) -> None:
    state = state_of(1)
    snapshot, parts = taken(state, [], ROOM)
    if change == "write":
        state.write((0, 0), torch.full((ELEMENTS,), 7.0))
    else:  # back from a device, where a step changed it
        home = state._homes[0] = state.arrays[0]
        state.arrays[0] = {name: array + 7 for name, array in home.items()}
        state.move(0, torch.device("cpu"))
    assert bool((state.arrays[0]["weights"] == 7).all())
    assert values(parts) == 0 and snapshot.copied == 1


def test_memory_of_copies_serves_the_next_snapshot_until_it_is_freed() -> None:
    state, made = state_of(2), []
    for _ in range(2):
        snapshot, _ = taken(state, [], 2 * ROOM)
        update(state, 0)
        made.append(snapshot._arrays[0]["weights"].data_ptr())
        snapshot.end()
    assert made[0] == made[1] and state.nbytes()["copies"] == 2 * ROOM
    state.copies.free()
    assert state.nbytes()["copies"] == 0

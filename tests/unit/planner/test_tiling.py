"""How far weights are cut: what is tried, and what the choice among it is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megacompile.errors import MegacompileError
from megacompile.planner import tiling
from megacompile.planner.lowest_bytes import activations_bytes, lowest_bytes
from megacompile.planner.min_feasible_budget import least
from megacompile.planner.plan_program import first_that_fits
from megacompile.planner.too_small import TooSmall
from megacompile.schedule.plan import Mode
from tests.support.problems import chain

MODE = Mode("train")


def tiling_of(name: str, need: int, seconds: float, state: str, readers: tuple[int, ...] = ()) -> Any:
    """A way of cutting: the bytes that it needs, what planning it gives, and who reads its one group."""
    plan = SimpleNamespace(groups=(SimpleNamespace(state=state),))
    planned = SimpleNamespace(plan=plan, seconds=seconds)
    groups = (SimpleNamespace(nbytes=80, state_bytes=80),)
    work = SimpleNamespace(contributions={0: readers}, groups=groups, used=frozenset({0}))
    return SimpleNamespace(name=name, need=need, planned=planned, assembly=SimpleNamespace(work=work))


@pytest.mark.parametrize(
    ("state", "resides", "halves", "chosen"),
    [
        ("host", False, 0.5, "whole"),  # room for twice what it needs: finer cuts are not tried
        ("host", True, 0.5, "halves"),  # but where they may leave room for state
        ("host", True, 0.99, "whole"),  # and gain something
        ("device", True, 0.5, "whole"),  # and not all state has room already
    ],
)
def test_finer_cuts_are_tried_where_they_may_leave_room_for_state(
    state: str, resides: bool, halves: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tilings = [tiling_of("whole", 10, 1.0, state), tiling_of("halves", 8, halves, "device")]
    monkeypatch.setattr(tiling, "tried", lambda tilings, *_, **__: ((r, r.need) for r in tilings))
    found, planned = tiling.choose(tilings, MODE, 100, lambda r: r.planned, resides=resides)
    assert found.name == chosen and planned is found.planned


@pytest.mark.parametrize(
    ("readers", "rows", "chosen"), [((0, 3), 0.9, "rows"), ((0, 3), 1.1, "whole"), ((0,), 1.1, "rows")]
)
def test_a_table_that_others_read_is_planned_whole_too(
    readers: tuple[int, ...], rows: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state may be on the device then; rows of any other are gathered where not all state has room."""
    tilings = [
        tiling_of(n, 10, s, "host", readers) for n, s in (("whole", 1.0), ("rows", rows), ("cut", 0.1))
    ]
    monkeypatch.setattr(tiling, "tried", lambda tilings, *_, **__: ((r, r.need) for r in tilings))
    found, _ = tiling.choose(tilings, MODE, 100, lambda r: r.planned, gathers=True, resides=True)
    assert found.name == chosen


def test_no_smaller_pieces_where_activations_alone_are_too_much() -> None:
    work = chain(4)
    work = replace(work, groups=tuple(replace(group, nbytes=10) for group in work.groups))
    tiling_of_work = SimpleNamespace(assembly=SimpleNamespace(work=work))
    tilings = [tiling.TilingCandidate(0, lambda: tiling_of_work) for _ in range(2)]
    alone = activations_bytes(work, MODE)
    assert 0 < alone < lowest_bytes(work, MODE) <= least(work, MODE).nbytes
    for most, count in ((alone, 2), (alone - 1, 1)):
        assert len(list(tiling.tried(tilings, MODE, most, enough=0, most=most))) == count


@pytest.mark.parametrize(("held", "count"), [(0, 2), (10**9, 1)])
def test_what_holds_too_much_is_not_built(held: int, count: int) -> None:
    work = chain(4)
    built = []

    def build() -> SimpleNamespace:
        built.append(held)
        return SimpleNamespace(assembly=SimpleNamespace(work=work))

    found = tiling.tried(
        [tiling.TilingCandidate(0, build), tiling.TilingCandidate(held, build)], MODE, 1, enough=0
    )
    assert len(list(found)) == len(built) == count


def test_where_no_chunk_fits_the_least_of_all_is_named() -> None:
    asked = []

    def plan(chunk: int, most: int) -> TooSmall:
        """Finer cuts help the chunks whose activations leave room for that, and are tried there alone."""
        asked.append((chunk, most))
        first, activations, finest = {0: (9, 7, 7), 32: (6, 4, 3), 16: (6, 4, 3), 8: (5, 2, 4)}[chunk]
        return TooSmall(f"in {chunk}", first if activations > most else finest)

    assert first_that_fits((0, 32, 16, 8), 1, plan) == TooSmall("in 32", 3)
    assert asked == [(0, 1), (32, 1), (16, 1), (8, 1), (0, 5), (32, 5), (8, 3)]


@pytest.mark.parametrize("own", [0, 16])
def test_a_given_plan_that_does_not_fit_is_said_to_be_too_large(own: int) -> None:
    def plan(chunk: int, most: int) -> TooSmall:
        if chunk != own:
            raise MegacompileError("The plan was made for another model.")
        return TooSmall("it needs more", 3)

    assert first_that_fits((0, 32, 16), 1, plan) == TooSmall("it needs more", 3)
    with pytest.raises(MegacompileError, match="for another model"):
        first_that_fits((32, 8), 1, plan)

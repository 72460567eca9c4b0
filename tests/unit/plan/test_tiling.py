"""How far weights are cut: what is tried, and what the choice among it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megacompile.assemble.plan import Mode
from megacompile.plan import tiling

MODE = Mode("train")


def tiling_of(name: str, need: int, seconds: float, state: str) -> Any:
    """A way of cutting: the bytes that it needs, and what planning it gives."""
    plan = SimpleNamespace(groups=(SimpleNamespace(state=state),))
    planned = SimpleNamespace(plan=plan, timeline=SimpleNamespace(step_seconds=seconds))
    work = SimpleNamespace(contributions={0: ()})
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
    monkeypatch.setattr(tiling, "tried", lambda tilings, mode, enough: ((r, r.need) for r in tilings))
    found, planned = tiling.choose(tilings, MODE, 100, lambda r: r.planned, resides=resides)
    assert found.name == chosen and planned is found.planned

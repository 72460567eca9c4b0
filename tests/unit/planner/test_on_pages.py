"""Plans that lack bytes on the allocator's pages are made again within less."""

from __future__ import annotations

import pytest

from megacompile.planner.plan_on_pages import plan_on_pages
from megacompile.planner.too_small import TooSmall

LEAST = 100


def plan(budget: int) -> int | TooSmall:
    """One that takes all it may."""
    return TooSmall("too small", LEAST) if budget < LEAST else budget


def pages(found: int, budget: int) -> int:
    """Each plan takes 30 bytes more than it knows of."""
    return max(0, found + 30 - budget)


def test_what_is_missing_is_left_free() -> None:
    assert plan_on_pages(plan, pages, 200) == 170


def test_the_least_plan_is_the_last_that_is_tried() -> None:
    tried = []

    def noted(budget: int) -> int | TooSmall:
        tried.append(budget)
        return plan(budget)

    assert plan_on_pages(noted, lambda found, budget: 0 if found == LEAST else 60, 150) == LEAST
    assert tried == [150, 90, LEAST]


@pytest.mark.parametrize("budget", [50, 110])
def test_the_least_budget_that_is_named_has_room_for_its_pages(budget: int) -> None:
    found = plan_on_pages(plan, pages, budget)
    assert isinstance(found, TooSmall) and found.least_bytes == LEAST + 30
    assert plan_on_pages(plan, pages, LEAST + 30) == LEAST

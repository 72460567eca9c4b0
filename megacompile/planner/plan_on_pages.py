"""Find plans that also fit as a device's allocator lays their tensors, on pages that no plan counts.

In: what plans within a number of bytes, and what tells by how much a device would be too small for a plan.
Out: a plan that it is large enough for, or the least budget of one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from megacompile.planner.too_small import TooSmall
from megacompile.units import format_bytes

T = TypeVar("T")
_LOG = logging.getLogger("megacompile.compiler.allocator")


def plan_on_pages(
    plan: Callable[[int], T | TooSmall], lacking: Callable[[T, int], int], budget_bytes: int
) -> T | TooSmall:
    """The plan within the budget; as long as ``lacking(plan, budget)`` bytes are missing, one within so much
    less, last the one of the least bytes that there is.

    Where nothing fits, the least budget has room for that plan's pages.
    """
    within, last = budget_bytes, False
    while True:
        found = plan(within)
        if isinstance(found, TooSmall):
            least = found.least_bytes
            if last or least is None:
                return found
            if least > budget_bytes:
                return replace(found, least_bytes=least + _at(least, plan, lacking))
            within, last = least, True
            continue
        missing = lacking(found, budget_bytes)
        if not missing:
            return found
        if last:
            return TooSmall(
                f"hbm_budget is {format_bytes(missing)} too small for the pages of the device's allocator, "
                "on which this program's tensors do not lie side by side.",
                least_bytes=budget_bytes + missing,
            )
        _LOG.info("planning again within %s less, for the allocator's pages", format_bytes(missing))
        within -= missing


def _at(least: int, plan: Callable[[int], T | TooSmall], lacking: Callable[[T, int], int]) -> int:
    """Return what the plan of the least bytes takes beside them."""
    found = plan(least)  # too small: a planner of one's own may need more still
    return 0 if isinstance(found, TooSmall) else lacking(found, least)

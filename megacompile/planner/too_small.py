"""Say that a device budget is too small for a program: a result of planning, not an exception.

In: a plan, or the least budget and a sentence. Out: the plan, or at the public face a
:class:`~megacompile.errors.BudgetError`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from megacompile.errors import BudgetError

T = TypeVar("T")


@dataclass(frozen=True)
class TooSmall:
    """The reason why nothing fits a device budget, in sentences, and the least bytes that suffice; None:
    unknown."""

    why: str
    least_bytes: int | None = None

    def saying(self, *sentences: str) -> TooSmall:
        """Return it with more sentences after its own."""
        return replace(self, why=" ".join([self.why, *sentences]))

    def is_less_than(self, other: TooSmall) -> bool:
        """Return whether less suffices here; an unknown number counts as none."""
        return (self.least_bytes or 0) < (other.least_bytes or 0)

    @property
    def error(self) -> BudgetError:
        """The same as an error for the user."""
        return BudgetError(self.why, least_bytes=self.least_bytes)


def fitting(found: T | TooSmall) -> T:
    """Return what fits a budget; raise :class:`~megacompile.errors.BudgetError` where nothing does."""
    if isinstance(found, TooSmall):
        raise found.error
    return found

"""Room: what plans may use of a device, beside what its driver, libraries and allocator take.

In: a device's backend and its budget, on every rank. Out: :class:`Room`, the same on all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megacompile.errors import BudgetError
from megacompile.runtime.backends import Backend, Lacking
from megacompile.units import format_bytes
from megacompile.world.control import World

_MORE_BYTES, _MORE_SHARE = 64 << 20, 16  # left where the allocator ran out; the latter, a part of the budget


@dataclass(frozen=True)
class Room:
    """``budget_bytes`` are a plan's; the device's driver and libraries hold ``reserved_bytes`` beside.

    ``lacking_bytes`` tells by how much a budget is too small for the device's allocator, which lays tensors
    on pages: plans then get less.
    """

    budget_bytes: int
    reserved_bytes: int = 0
    lacking_bytes: Lacking | None = None

    def less(self) -> Room:
        """With more left to the device's allocator."""
        more = max(_MORE_BYTES, self.budget_bytes // _MORE_SHARE)
        return replace(self, budget_bytes=self.budget_bytes - more, reserved_bytes=self.reserved_bytes + more)

    @contextlib.contextmanager
    def naming_reserved(self) -> Iterator[None]:
        """A least budget that an error inside names is one to give."""
        try:
            yield
        except BudgetError as error:
            if error.least_bytes is None or not self.reserved_bytes:
                raise
            least = error.least_bytes + self.reserved_bytes
            raise BudgetError(
                f"{error} The CUDA context and libraries take {format_bytes(self.reserved_bytes)} beside: "
                f"hbm_budget has to be at least {least} bytes ({format_bytes(least)}).",
                least_bytes=least,
            ) from error


def room_of(backend: Backend, budget_bytes: int, world: World) -> Room:
    """What a budget leaves now; of several ranks where least is left."""
    own, lacking = 0, backend.lacking_bytes

    def say() -> bytes:
        nonlocal own
        own = backend.plan_bytes(budget_bytes)
        return str(own).encode()

    with world.together():
        least = min(map(int, world.exchange(say)))
    if lacking is None or own == least:
        return Room(least, budget_bytes - least, lacking)
    return Room(least, budget_bytes - least, lambda nbytes, *asked: lacking(nbytes - (own - least), *asked))

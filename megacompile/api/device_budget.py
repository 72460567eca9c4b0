"""Measure the device memory that plans may use, beside what its driver, libraries and allocator take.

In: a device's backend and its budget, on every rank. Out: :class:`DeviceRoom`, the same on all. Where the
device ran out of memory, :meth:`DeviceRoom.less` leaves more of it free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megacompile.distributed.world import World
from megacompile.planner.too_small import TooSmall
from megacompile.runtime.backends import Backend, Lacking, nothing_spare
from megacompile.units import format_bytes

_MORE_BYTES, _MORE_SHARE = 64 << 20, 16  # left where the allocator ran out; the latter, a part of the budget


@dataclass(frozen=True)
class DeviceRoom:
    """``budget_bytes`` are a plan's; the device's driver and libraries hold ``reserved_bytes`` beside.

    The allocator may hold ``loose_bytes`` of these on pages beside a plan's. ``spare_bytes`` gives the part
    of a device's budget that the driver may take later. ``lacking_bytes`` tells by how much bytes are too few
    for the device's allocator, which lays tensors on pages: plans then get less.
    """

    budget_bytes: int
    reserved_bytes: int = 0
    loose_bytes: int = 0
    spare_bytes: Callable[[int], int] = nothing_spare
    lacking_bytes: Lacking | None = None

    def less(self) -> DeviceRoom:
        """With more left to the device's allocator."""
        more = max(_MORE_BYTES, self.budget_bytes // _MORE_SHARE)
        return replace(
            self,
            budget_bytes=self.budget_bytes - more,
            reserved_bytes=self.reserved_bytes + more,
            loose_bytes=self.loose_bytes + more,
        )

    def within(self, device_bytes: int) -> DeviceRoom:
        """Return the room that another budget of the device would give."""
        beside = self._reserved_beside_spare
        reserved = beside + self.spare_bytes(device_bytes)
        return replace(self, budget_bytes=device_bytes - reserved, reserved_bytes=reserved)

    def short_of(self, planned: DeviceRoom) -> bool:
        """Return whether the driver has taken more since ``planned`` was measured than was left to it."""
        spare = self.spare_bytes(self.device_bytes)
        return planned.budget_bytes - self.budget_bytes > spare

    def with_reserved(self, small: TooSmall) -> TooSmall:
        """Return a plan's least bytes as the least budget that a user has to give."""
        if small.least_bytes is None or not self.reserved_bytes:
            return small
        least = self._device_budget(small.least_bytes)
        why = (
            f"The CUDA context and libraries take {format_bytes(self.reserved_bytes)} beside: "
            f"hbm_budget has to be at least {least} bytes ({format_bytes(least)})."
        )
        return replace(small.saying(why), least_bytes=least)

    @property
    def device_bytes(self) -> int:
        """The device's budget."""
        return self.budget_bytes + self.reserved_bytes

    @property
    def _reserved_beside_spare(self) -> int:
        return self.reserved_bytes - self.spare_bytes(self.device_bytes)

    def _device_budget(self, plan_bytes: int) -> int:
        """The device's budget that leaves a plan so many bytes, of which the spare ones are a part."""
        beside = self._reserved_beside_spare
        budget = plan_bytes + beside
        while (more := plan_bytes + beside + self.spare_bytes(budget)) > budget:
            budget = more
        return budget


def room_of(backend: Backend, budget_bytes: int, world: World) -> DeviceRoom:
    """Measure what a budget leaves now; of several ranks where least is left."""
    with world.together():
        said = world.exchange(lambda: str(backend.plan_bytes(budget_bytes)).encode())
    least = min(map(int, said))
    return DeviceRoom(
        least, budget_bytes - least, backend.loose_bytes, backend.spare_bytes, backend.lacking_bytes
    )

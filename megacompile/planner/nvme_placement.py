"""Tiers: which weight groups' state goes to NVMe, so that what a step takes of the host fits beside the rest.

In:  group layouts, a state format, a host budget. Out: :class:`Drive`, which gives any plan a ``state`` per
group: the placement with the fewest bytes over the drive, of those that leave the step its host bytes. Where
none leaves enough, offloaded activations go there too.

Last groups go first: in a step they are updated first and wanted again last.
"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megacompile.blocks.weight_groups import GroupLayout
from megacompile.schedule.plan import Plan
from megacompile.schedule.step import Step, offloads, spilled_bytes
from megacompile.state.host_arena import padded
from megacompile.state.moment_formats import Form
from megacompile.state.nvme_offload import (
    GroupPlace,
    buffer_bytes,
    host_state_bytes,
    place_group,
    place_groups,
    scratch_bytes,
)
from megacompile.units import format_bytes

WINDOWS = (3, 2, 1)
_HOST_STATES = ("host", "nvme", "nvme-all")
RATED_BYTES = 1200 * 10**12  # what a usual 2 TB consumer drive is warranted for, written


@dataclass(frozen=True)
class Tiers:
    """The facts that the choice depends on beside the plan; ``stored`` says whether there is an offload_dir,
    and ``nvme_budget_bytes`` bounds what lies there, offloaded activations included."""

    form: Form
    host_budget_bytes: int
    stored: bool
    nvme_budget_bytes: int = sys.maxsize


class _Placement(NamedTuple):
    """A placement: host bytes that it leaves to a step, the states, and the bytes on the drive."""

    left: int
    states: tuple[str, ...]
    stored: int = 0


class Drive:
    """Placements to choose from. ``room`` is the most host bytes that any placement leaves to a step,
    ``spare`` the bytes under the placement with the least traffic: a step that takes more displaces state to
    the drive. ``takes_activations`` says whether offloaded activations may go there.
    """

    def __init__(
        self,
        placements: dict[int, list[_Placement]],
        *,
        nvme_budget_bytes: int = sys.maxsize,
        decided: bool = False,
        takes_activations: bool = True,
    ) -> None:
        self._placements = placements  # per number of buffers, by rising bytes moved
        self._nvme_budget_bytes = nvme_budget_bytes
        self.decided, self.takes_activations = decided, takes_activations
        self.room = max(found[-1].left for found in placements.values())
        self.spare = min(placements.items())[1][0].left

    @staticmethod
    def of(layouts: Sequence[GroupLayout], tiers: Tiers) -> Drive:
        """All that can be done with this state within the budgets."""
        limit = tiers.nvme_budget_bytes
        candidates = sorted(
            candidate for candidate in _placement_candidates(layouts, tiers.form) if candidate.stored <= limit
        )
        placements = {window: _worth(candidates, layouts, tiers, window) for window in WINDOWS}
        return Drive(placements, nvme_budget_bytes=limit)

    @staticmethod
    def fixed(layouts: Sequence[GroupLayout], tiers: Tiers, states: tuple[str, ...], window: int) -> Drive:
        """State that has been allocated stays where it is."""
        left = tiers.host_budget_bytes - host_state_bytes(place_groups(layouts, tiers.form, states), window)
        return Drive(
            {max(1, window): [_Placement(left, states)]}, decided=window > 0, takes_activations=window > 0
        )

    @property
    def digest(self) -> str:
        """Equal for drives that place all plans equally."""
        key = repr((self._placements, self._nvme_budget_bytes, self.decided, self.takes_activations))
        return hashlib.sha256(key.encode()).hexdigest()

    def place(self, plan: Plan, taken_bytes: int) -> Plan:
        """Return the plan over the placement that moves least while it leaves a step ``taken_bytes``, with as
        many buffers as the plan asks for, or nearly; if none leaves so much, over the one that leaves most.
        """
        for window in sorted(self._placements, key=lambda w: abs(w - plan.window)):
            placements = self._placements[window]
            found = bisect_left(placements, taken_bytes, key=lambda placement: placement.left)
            if found < len(placements):
                return _with_states(plan, placements[found].states, window)
        window, placements = min(self._placements.items())
        return _with_states(plan, placements[-1].states, window)

    def spill(self, plan: Plan, step: Step, taken_bytes: int) -> Plan | None:
        """The plan over the placement that leaves most, with as many offloaded activations on the drive as it
        then takes; None where all are too few. Those of the first blocks go first, which wait longest.

        ``step`` is the plan's, ``taken_bytes`` its host bytes.
        """
        waiting = offloads(step)
        for window in sorted(self._placements, key=lambda w: abs(w - plan.window)):
            left, states, stored = self._placements[window][-1]
            largest = padded(spilled_bytes(step))
            taken = taken_bytes - step.window * largest
            blocks = list(plan.blocks)
            for block in sorted({home.block for home in waiting}):
                moved = [padded(nbytes) for home, nbytes in waiting.items() if home.block == block]
                taken, largest = taken - sum(moved), max(largest, *moved)
                stored += sum(moved)
                blocks[block] = replace(blocks[block], saved_on="nvme")
                if stored > self._nvme_budget_bytes:
                    break
                if taken + window * largest <= left:
                    return _with_states(replace(plan, blocks=tuple(blocks)), states, window)
        return None


def _with_states(plan: Plan, states: Sequence[str], window: int) -> Plan:
    if all(g.state == state for g, state in zip(plan.groups, states, strict=True)):
        return plan if plan.window == window else replace(plan, window=window)
    groups = tuple(
        g if g.state == state else replace(g, state=state)  # type: ignore[arg-type]
        for g, state in zip(plan.groups, states, strict=True)
    )
    return replace(plan, groups=groups, window=window)


class _PlacementCandidate(NamedTuple):
    """A placement: groups of at most ``limit`` bytes at ``first``, the ``last`` of them at ``then``."""

    moved: int
    stored: int
    ram: int
    buffers: int
    limit: int
    first: str
    then: str
    last: int


def _placement_candidates(layouts: Sequence[GroupLayout], form: Form) -> Iterator[_PlacementCandidate]:
    """All in RAM; then masters' low halves and moments leave, group by group; then streamed weights too."""
    places = {state: place_groups(layouts, form, (state,) * len(layouts)) for state in _HOST_STATES}
    sizes = [p.storage_bytes for p in places["nvme-all"]]
    scratch = scratch_bytes(places["host"])
    yield _PlacementCandidate(
        0, 0, sum(p.ram_bytes for p in places["host"]) + scratch, 0, 0, "host", "host", 0
    )
    for limit in sorted(set(sizes)):
        small = [i for i, nbytes in enumerate(sizes) if nbytes <= limit]
        for first, then in (("host", "nvme"), ("nvme", "nvme-all")):
            now = list(places["host"])
            for i in small:
                now[i] = places[first][i]
            moved = sum(_traffic(p, g.trainable) for p, g in zip(now, layouts, strict=True))
            stored, ram = sum(p.storage_bytes for p in now), sum(p.ram_bytes for p in now) + scratch
            state, weights = buffer_bytes(now)
            for last, i in enumerate(reversed(small), 1):
                before, after = now[i], places[then][i]
                moved += _traffic(after, layouts[i].trainable) - _traffic(before, layouts[i].trainable)
                stored += after.storage_bytes - before.storage_bytes
                ram += after.ram_bytes - before.ram_bytes
                ours = buffer_bytes([after])
                state, weights = max(state, ours[0]), max(weights, ours[1])
                yield _PlacementCandidate(moved, stored, ram, state + weights, limit, first, then, last)


def _worth(
    candidates: Sequence[_PlacementCandidate], layouts: Sequence[GroupLayout], tiers: Tiers, window: int
) -> list[_Placement]:
    """Each candidate that leaves more than all that move less."""
    sizes = [place_group(g, tiers.form, "nvme-all").storage_bytes for g in layouts]
    found: list[_Placement] = []
    for candidate in candidates:
        left = tiers.host_budget_bytes - candidate.ram - window * candidate.buffers
        if not found or left > found[-1].left:
            small = [i for i, nbytes in enumerate(sizes) if nbytes <= candidate.limit]
            gone = set(small[len(small) - candidate.last :])
            states = tuple(
                candidate.then if i in gone else candidate.first if size <= candidate.limit else "host"
                for i, size in enumerate(sizes)
            )
            found.append(_Placement(left, states, candidate.stored))
    return found


def _traffic(place: GroupPlace, trained: bool) -> int:
    """Bytes read and written in a step: weights for forward and backward, all of it for an update."""
    return 2 * place.weight_bytes + (2 * place.storage_bytes if trained else 0)


def storage_traffic(step: Step) -> tuple[int, int]:
    """Bytes (read, written) on NVMe in a step."""
    return (
        sum(op.nbytes for op in step.on("nvme_read")),
        sum(op.nbytes for op in step.on("nvme_write")),
    )


def describe_traffic(step: Step, step_seconds: float, ranks: int = 1) -> str:
    """Say what a step of a machine's ``ranks`` moves over its drive, and what that means for its endurance;
    "" where nothing moves."""
    read, written = (ranks * nbytes for nbytes in storage_traffic(step))
    if not read:
        return ""
    text = f"NVMe: {format_bytes(read)} read and {format_bytes(written)} written per step"
    if not written:
        return text
    per_day = written / step_seconds * 86400
    return (
        f"{text}; at {step_seconds:.3g} s a step {format_bytes(per_day)} written a day, "
        f"so that a drive rated for {RATED_BYTES / 10**12:.0f} TB lasts {RATED_BYTES / per_day:.3g} days"
    )

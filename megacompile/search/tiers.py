"""Tiers: which weight groups' state goes to NVMe so that the rest fits the host budget.

In:  a plan of the device side, group layouts, a state format, a host budget. Out: the same plan with a
``state`` per group and a window, or None where even all on NVMe is too much. Of the ways that fit, the
one that moves the fewest bytes; over 3, 2 or 1 buffers, whichever the simulator finds fastest.

Last groups go first: in a step they are updated first and wanted again last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megacompile.host.formats import StateFormat
from megacompile.host.offload import GroupPlace, buffer_bytes, place_group
from megacompile.machine.rates import Machine
from megacompile.machine.simulate import simulate
from megacompile.passes import lower
from megacompile.plan.assemble import GroupLayout
from megacompile.plan.plan import Mode
from megacompile.plan.workload import Workload
from megacompile.search.planner import Planned
from megacompile.step.operations import Step, kept_gradients
from megacompile.units import format_bytes

_WINDOWS = (3, 2, 1)
RATED_BYTES = 1200 * 10**12  # what a usual 2 TB consumer drive is warranted for, written


@dataclass(frozen=True)
class Tiers:
    """What the choice depends on beside the plan; ``stored`` says whether there is an offload_dir."""

    form: StateFormat
    host_budget_bytes: int
    stored: bool


def choose_tiers(
    planned: Planned,
    work: Workload,
    mode: Mode,
    machine: Machine,
    layouts: Sequence[GroupLayout],
    tiers: Tiers,
) -> Planned | None:
    """The plan with as much state on NVMe as the host budget demands."""
    spare = tiers.host_budget_bytes - host_transient_bytes(planned.step, layouts)
    if sum(place_group(g, tiers.form, "host").ram_bytes for g in layouts) <= spare:
        return planned
    if not tiers.stored:
        return None
    found = [
        with_states(planned, work, mode, machine, states, window)
        for window in _WINDOWS
        if (states := _fewest_bytes(layouts, tiers.form, spare, window)) is not None
    ]
    return min(found, key=lambda p: p.timeline.step_seconds, default=None)


def with_states(
    planned: Planned, work: Workload, mode: Mode, machine: Machine, states: Sequence[str], window: int
) -> Planned:
    """The plan over another placement of the state, lowered and simulated again; its peak is the same."""
    groups = tuple(
        replace(group, state=state)  # type: ignore[arg-type]
        for group, state in zip(planned.plan.groups, states, strict=True)
    )
    plan = replace(planned.plan, groups=groups, window=max(window, 1))
    if plan == planned.plan:
        return planned
    step = lower(work, plan, mode)
    return replace(planned, plan=plan, step=step, timeline=simulate(step, machine))


def _fewest_bytes(
    layouts: Sequence[GroupLayout], form: StateFormat, spare_bytes: int, window: int
) -> tuple[str, ...] | None:
    """Of all prefixes that fit, the states that move the fewest bytes in a step."""
    best: tuple[int, tuple[str, ...]] | None = None
    whole = [place_group(g, form, "nvme-all").storage_bytes for g in layouts]
    for limit in sorted(set(whole)):
        order = [i for i in reversed(range(len(layouts))) if whole[i] <= limit]
        for first, then in (("host", "nvme"), ("nvme", "nvme-all")):
            states = [first if nbytes <= limit else "host" for nbytes in whole]
            for moved, ram, places in _moving(layouts, form, states, order, then):
                if ram + window * sum(buffer_bytes(places)) <= spare_bytes:
                    if best is None or moved < best[0]:
                        best = moved, tuple(states)
                    break
    return best[1] if best else None


def _moving(
    layouts: Sequence[GroupLayout], form: StateFormat, states: list[str], order: Sequence[int], then: str
) -> Iterator[tuple[int, int, list[GroupPlace]]]:
    """(bytes moved in a step, bytes that stay in RAM, places) as group after group moves on."""
    places = [place_group(g, form, s) for g, s in zip(layouts, states, strict=True)]
    moved = sum(_traffic(p, g.trainable) for p, g in zip(places, layouts, strict=True))
    ram = sum(p.ram_bytes for p in places)
    for index in order:
        before, after = places[index], place_group(layouts[index], form, then)
        trained = layouts[index].trainable
        moved += _traffic(after, trained) - _traffic(before, trained)
        ram += after.ram_bytes - before.ram_bytes
        states[index], places[index] = then, after
        yield moved, ram, places


def _traffic(place: GroupPlace, trained: bool) -> int:
    """Bytes read and written in a step: weights for forward and backward, all of it for an update."""
    return 2 * place.weight_bytes + (2 * place.storage_bytes if trained else 0)


def host_transient_bytes(step: Step, layouts: Sequence[GroupLayout]) -> int:
    """Host bytes that a step needs besides the state: kept gradients, the ring, offloaded stashes."""
    kept = sum(
        (layouts[g].dtype.itemsize if own else 4) * layouts[g].elements
        for g, own in kept_gradients(step).items()
    )
    stashes = sum(op.nbytes for op in step.ops if op.kind == "offload")
    return kept + sum(step.ring) + stashes


def storage_traffic(step: Step) -> tuple[int, int]:
    """Bytes (read, written) on NVMe in a step."""
    return (
        sum(op.nbytes for op in step.ops if op.kind == "read"),
        sum(op.nbytes for op in step.ops if op.kind == "write"),
    )


def describe_traffic(step: Step, step_seconds: float) -> str:
    """What a step moves over the drive, and what that means for its endurance; "" where nothing moves."""
    read, written = storage_traffic(step)
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

"""Explain why a block or weight group is planned as it is, and what every other choice for it would cost.

In: a schedule and a name. Each alternative changes that block or group alone; the step it leads to is
lowered by the real passes and simulated, so the differences are those that the search saw.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar, get_args, get_type_hints

from megacompile.errors import MegacompileError
from megacompile.hardware.simulate import simulate
from megacompile.passes import lower
from megacompile.schedule.op_table import Offloaded
from megacompile.schedule.plan import LONGEST_WINDOW, BlockPlan, GroupPlan, Plan
from megacompile.schedule.plan_text import block_text, group_text
from megacompile.schedule.step import Step, peak_bytes, spilled_bytes
from megacompile.units import format_bytes

if TYPE_CHECKING:
    from megacompile.report.schedule import Schedule


_T = TypeVar("_T")
_HEAD = f"{'step':>23}{'device peak':>14}{'offloaded':>13}"
_TIE = 1e-5  # of a step: below this, two plans take the same time


@dataclass(frozen=True)
class Alternative:
    """One other choice: what it changes, and the step's time, device peak and offloaded bytes with it."""

    change: str
    seconds: float
    peak_bytes: int
    offloaded_bytes: int


def explain(schedule: Schedule, name: str) -> str:
    """The choice, the alternatives as a table, and in a sentence why none of them was taken."""
    blocks, groups = _find(schedule, name)
    chosen = Alternative(
        "as planned", schedule.predicted_seconds, schedule.peak_bytes, most_offloaded(schedule.step)
    )
    found = sorted(_alternatives(schedule, blocks, groups), key=lambda a: (a.seconds, a.peak_bytes))
    width = max(len(a.change) for a in (chosen, *found))
    lines = [_title(schedule, blocks, groups), "", f"  {'':<{width}}{_HEAD}"]
    lines.append(
        f"  {chosen.change:<{width}}{_time_text(chosen.seconds):>23}{format_bytes(chosen.peak_bytes):>14}"
        f"{format_bytes(chosen.offloaded_bytes):>13}"
    )
    lines += [_row(schedule, chosen, other, width) for other in found]
    return "\n".join([*lines, "", *_why(schedule, chosen, found)])


def _find(schedule: Schedule, name: str) -> tuple[list[int], list[int]]:
    """Blocks and groups of that name; a name may leave out what all begin with."""

    def called(full: str) -> bool:
        return full == name or full.endswith(f".{name}")

    blocks = [i for i, b in enumerate(schedule.work.blocks) if called(b.name)]
    groups = [i for i, g in enumerate(schedule.work.groups) if called(g.name)]
    if blocks or groups:
        return blocks[:1], groups[:1]
    names = [b.name for b in schedule.work.blocks] + [g.name for g in schedule.work.groups]
    short = {n.removeprefix("model."): n for n in names}
    near = difflib.get_close_matches(name, [*short, *names], n=3, cutoff=0.4)
    hint = (
        f"did you mean {' or '.join(dict.fromkeys(near))}?"
        if near
        else f"there are {', '.join(names[:4])}, …"
    )
    raise MegacompileError(f"No block and no weight group is called {name!r}: {hint}")


def _title(schedule: Schedule, blocks: list[int], groups: list[int]) -> str:
    plan, work = schedule.plan, schedule.work
    lines = [f"{work.blocks[b].name}: {block_text(plan.blocks[b])}" for b in blocks]
    for g in groups:
        size = format_bytes(work.groups[g].nbytes)
        lines.append(f"weights of {work.groups[g].name}, {size}: {group_text(plan.groups[g], work.ranks)}")
    return "\n".join(lines)


def _alternatives(schedule: Schedule, blocks: list[int], groups: list[int]) -> Iterator[Alternative]:
    seen = {schedule.step.ops}
    for change, plan in _alternative_plans(schedule, blocks, groups):
        step = lower(schedule.work, plan, schedule.mode)
        if step.ops in seen:
            continue  # another name for a step that was already looked at
        seen.add(step.ops)
        seconds = simulate(step, schedule.machine).step_seconds
        yield Alternative(change, seconds, peak_bytes(step), most_offloaded(step))


def _alternative_plans(
    schedule: Schedule, blocks: list[int], groups: list[int]
) -> Iterator[tuple[str, Plan]]:
    plan, work = schedule.plan, schedule.work
    for b in blocks:
        chosen = plan.blocks[b]
        # NVMe is a budget's matter
        host = chosen if chosen.saved_on == "host" else BlockPlan("", "host")
        windows = [BlockPlan("", "host"), BlockPlan("", "host", LONGEST_WINDOW, LONGEST_WINDOW)]
        for policy in work.blocks[b].policies:
            places = [BlockPlan("", "device"), host]
            if (policy.name, "host") == (chosen.checkpoint, chosen.saved_on):
                places += windows
            for place in places:
                other = replace(place, checkpoint=policy.name)
                yield block_text(other), replace(plan, blocks=_with(plan.blocks, b, other))
    for g in groups:
        here = plan.groups[g]
        others = [replace(here, prefetch_depth=n) for n in range(5)]
        for name, hint in get_type_hints(GroupPlan).items():
            if (
                getattr(hint, "__origin__", None) is Literal and name != "state"
            ):  # whose tier is a budget's matter
                others += [replace(here, **{name: value}) for value in get_args(hint)]
        for changed in others:
            yield group_text(changed, work.ranks), replace(plan, groups=_with(plan.groups, g, changed))


def _with(items: tuple[_T, ...], index: int, item: _T) -> tuple[_T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _row(schedule: Schedule, chosen: Alternative, other: Alternative, width: int) -> str:
    seconds = _change(other.seconds - chosen.seconds, chosen.seconds)
    peak, offloaded = other.peak_bytes - chosen.peak_bytes, other.offloaded_bytes - chosen.offloaded_bytes
    over = other.peak_bytes - schedule.budget_bytes
    note = f"  {format_bytes(over)} over the budget" if over > 0 else ""
    return f"  {other.change:<{width}}{seconds:>23}{_signed(peak):>14}{_signed(offloaded):>13}{note}"


def _why(schedule: Schedule, chosen: Alternative, found: list[Alternative]) -> list[str]:
    fitting = [a for a in found if a.peak_bytes <= schedule.budget_bytes]
    tie = _TIE * chosen.seconds
    faster = [a for a in fitting if a.seconds < chosen.seconds - tie]
    equal = [a for a in fitting if abs(a.seconds - chosen.seconds) <= tie]
    slower = [a for a in fitting if a.seconds > chosen.seconds + tie]
    barred = [a for a in found if a not in fitting and a.seconds < chosen.seconds - tie]
    lines = []
    if faster:
        gain = _change(faster[0].seconds - chosen.seconds, chosen.seconds)
        lines.append(f"By itself, “{faster[0].change}” would be better, {gain}: the search did not find it.")
    else:
        lines.append(f"No other choice for it alone is faster and fits: {len(found)} were simulated.")
    if equal:
        lines.append(f"{len(equal)} take the same time; the first is “{equal[0].change}”.")
    if slower:
        cost = _change(slower[0].seconds - chosen.seconds, chosen.seconds)
        peak = _signed(slower[0].peak_bytes - chosen.peak_bytes)
        offloaded = _signed(slower[0].offloaded_bytes - chosen.offloaded_bytes)
        lines.append(
            f"The next best is “{slower[0].change}”: {cost}; device peak {peak}, offloaded {offloaded}."
        )
    if barred:
        gain = _change(barred[0].seconds - chosen.seconds, chosen.seconds)
        over = format_bytes(barred[0].peak_bytes - schedule.budget_bytes)
        lines.append(f"“{barred[0].change}” would be {gain}, but exceeds the budget by {over}.")
    return lines


def most_offloaded(step: Step) -> int:
    """Most bytes of saved tensors that wait in host memory at one time, in program order."""
    waiting = high = 0
    for op in step.ops:
        if op.kind == "offload" and isinstance(op.writes[0], Offloaded):
            waiting += op.nbytes
        elif op.kind == "reload" and isinstance(op.reads[0], Offloaded):
            waiting -= op.nbytes
        high = max(high, waiting)
    return high + step.window * spilled_bytes(step)


def _time_text(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _change(seconds: float, whole: float) -> str:
    if abs(seconds) <= _TIE * whole:
        return "same"
    return f"{'+' if seconds > 0 else '−'}{_time_text(abs(seconds))} ({seconds / whole:+.2%})".replace(
        "(-", "(−"
    )


def _signed(nbytes: int) -> str:
    return "same" if nbytes == 0 else f"{'+' if nbytes > 0 else '−'}{format_bytes(abs(nbytes))}"

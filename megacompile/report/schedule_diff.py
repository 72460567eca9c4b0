"""Compare two plans, equal layers folded, and what the change does to the predicted step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from megacompile.errors import MegacompileError
from megacompile.report.explain import most_offloaded
from megacompile.schedule.op_table import STREAMS
from megacompile.schedule.plan import Plan
from megacompile.schedule.plan_text import block_text, folded, group_text
from megacompile.units import format_bytes

if TYPE_CHECKING:
    from megacompile.report.schedule import Schedule


def diff_schedules(a: Schedule, b: Schedule) -> str:
    """The change of plan, and of predicted time, memory and the work of each stream."""
    names = [[item.name for item in items] for items in (a.work.blocks, a.work.groups)]
    others = [[item.name for item in items] for items in (b.work.blocks, b.work.groups)]
    if names != others:
        raise MegacompileError(f"These are schedules of different models: {a.title} – {b.title}")
    lines = [
        text
        for text in (_difference("model", a.title, b.title), _difference("batch and sizes", *_works(a, b)))
        if text
    ]
    lines += diff_plans(a.plan, b.plan, *names)
    if not lines:
        return "no difference"
    pairs = [
        ("machine", a.machine.name, b.machine.name),
        ("budget", format_bytes(a.budget_bytes), format_bytes(b.budget_bytes)),
        ("mode", str(a.mode), str(b.mode)),
    ]
    lines += [text for pair in pairs if (text := _difference(*pair))]
    return "\n".join([*lines, "", *_effects(a, b)])


def _works(a: Schedule, b: Schedule) -> tuple[str, str]:
    return ("as in the first", "as in the first" if a.work == b.work else "others in the second")


def diff_plans(a: Plan, b: Plan, blocks: Sequence[str] = (), groups: Sequence[str] = ()) -> list[str]:
    """One line per change; without names, blocks and groups are numbered."""
    if (len(a.blocks), len(a.groups)) != (len(b.blocks), len(b.groups)):
        sizes = [f"{len(p.blocks)} blocks and {len(p.groups)} weight groups" for p in (a, b)]
        raise MegacompileError(f"These are plans of different models: {sizes[0]}, and {sizes[1]}.")
    blocks = blocks or [f"block {i}" for i in range(len(a.blocks))]
    groups = groups or [f"group {i}" for i in range(len(a.groups))]
    rows = [
        (name, f"{block_text(x)} → {block_text(y)}")
        for name, x, y in zip(blocks, a.blocks, b.blocks, strict=True)
        if x != y
    ]
    rows += [
        (f"weights {name}", f"{group_text(x)} → {group_text(y)}".replace("weights ", ""))
        for name, x, y in zip(groups, a.groups, b.groups, strict=True)
        if group_text(x) != group_text(y)
    ]
    lines = [f"{row.title}  {row.text}" for row in folded(rows)]
    for item in fields(a):
        if item.name not in ("blocks", "groups", "names", "loops"):
            lines += [t for t in [_difference(item.name, getattr(a, item.name), getattr(b, item.name))] if t]
    return lines


def _difference(name: str, old: object, new: object) -> str:
    return f"{name}  {old} → {new}" if old != new else ""


def _effects(a: Schedule, b: Schedule) -> Iterator[str]:
    yield f"{'':<16}{'first':>12}{'second':>12}{'change':>10}"
    rows = [("step", a.predicted_seconds, b.predicted_seconds, "s")]
    rows += [(f"{s} busy", a.timeline.busy[s], b.timeline.busy[s], "s") for s in STREAMS]
    rows += [
        ("device peak", a.peak_bytes, b.peak_bytes, "B"),
        ("offloaded", most_offloaded(a.step), most_offloaded(b.step), "B"),
        ("operations", len(a.step.ops), len(b.step.ops), ""),
    ]
    for name, old, new, unit in rows:
        if old or new:
            cells = [_cell(value, unit) for value in (old, new)]
            share = "same" if old == new else f"{new / old - 1:+.1%}".replace("-", "−") if old else "new"
            yield f"{name:<16}{cells[0]:>12}{cells[1]:>12}{share:>10}"


def _cell(value: float, unit: str) -> str:
    if unit == "B":
        return format_bytes(int(value))
    if unit == "s":
        return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
    return f"{value:,}"

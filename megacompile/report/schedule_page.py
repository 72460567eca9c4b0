"""Render a schedule as one self-contained HTML page: timeline, memory curve and code, linked to each other.

In: a :class:`~megacompile.report.schedule.Schedule`. Out: the text of a page that needs no network. The data
are columns, one entry per operation; the scripts beside this module draw them. Everything that comes from a
model is embedded as JSON and shown as text, so no name can become markup.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from megacompile.hardware.measured_step import compare
from megacompile.report.chrome_trace import step_begin
from megacompile.report.plots import kept_before
from megacompile.schedule.emit import line_of_each
from megacompile.schedule.op_table import STREAMS
from megacompile.schedule.plan_text import block_text, group_text, plan_rows, whole_step
from megacompile.schedule.step import Event, Step, memory_curve, peak_bytes
from megacompile.units import format_bytes

if TYPE_CHECKING:
    from megacompile.report.schedule import Schedule

_SCRIPTS = ("page_model.js", "page_draw.js", "page_panels.js", "page_input.js")  # one scope, in this order
_STREAM_NAMES = {
    "compute": "compute",
    "h2d": "host → device",
    "d2h": "device → host",
    "host": "host Adam",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe write",
    "comm": "device ↔ device",
}


def render_page(schedule: Schedule) -> str:
    """The page's text."""
    data = json.dumps(page_data(schedule), allow_nan=False, separators=(",", ":"))
    page = _asset("page.html")
    for mark, text in (
        ("/*style*/", _asset("page.css")),
        ("/*script*/", "\n".join(_asset(name) for name in _SCRIPTS)),
        ("/*data*/", data.replace("<", "\\u003c")),
    ):
        before, after = page.split(mark)
        page = f"{before}{text}{after}"
    return page


def _asset(name: str) -> str:
    return resources.files("megacompile.report").joinpath(name).read_text(encoding="utf-8")


def page_data(schedule: Schedule) -> dict[str, Any]:
    """Return what the page shows, as plain values: seconds, bytes, indices."""
    step, timeline, work = schedule.step, schedule.timeline, schedule.work
    seconds = timeline.step_seconds
    begin = step_begin(step, timeline.ends, seconds)
    streams = [s for s in STREAMS if any(op.stream == s for op in step.ops)]
    kinds = list(dict.fromkeys(op.kind for op in step.ops))
    lines = schedule.source.splitlines()
    body = lines.index("def step(rt):") + 2  # the number, from 1, of the body's first line
    return {
        "title": schedule.title,
        "facts": _facts(schedule),
        "streams": [
            {"name": _STREAM_NAMES[s], "busy": timeline.busy[s], "share": timeline.busy[s] / _over(seconds)}
            for s in streams
        ],
        "stepSeconds": seconds,
        "budget": schedule.budget_bytes,
        "peak": peak_bytes(step),
        "stays": step.constant_bytes,
        "slots": step.slab_bytes,
        "microBatches": schedule.mode.micro_batches,
        "kinds": kinds,
        "blocks": [
            {"name": b.name, "text": block_text(p)}
            for b, p in zip(work.blocks, schedule.plan.blocks, strict=True)
        ],
        "groups": [
            {"name": g.name, "bytes": g.nbytes, "text": group_text(p, work.ranks)}
            for g, p in zip(work.groups, schedule.plan.groups, strict=True)
        ],
        "ops": _columns(schedule, streams, kinds, begin, body),
        "memory": memory_curve(step),
        "measured": _measured_columns(schedule),
        "plan": _plan(schedule),
        "source": lines,
    }


def _columns(
    schedule: Schedule, streams: Sequence[str], kinds: Sequence[str], begin: float, body: int
) -> dict[str, Any]:
    """One entry per operation; streams and kinds by index, times from ``begin``, lines from ``body``."""
    step, timeline = schedule.step, schedule.timeline
    places = line_of_each(step)
    return {
        "kind": [kinds.index(op.kind) for op in step.ops],
        "stream": [streams.index(op.stream) for op in step.ops],
        "block": [op.block for op in step.ops],
        "group": [op.group for op in step.ops],
        "micro": [op.micro for op in step.ops],
        "bytes": [op.nbytes for op in step.ops],
        "flops": [op.flops for op in step.ops],
        "start": _rounded([t - begin for t in timeline.starts]),
        "end": _rounded([t - begin for t in timeline.ends]),
        "line": [body + line for line, _ in places],
        "turn": [turn for _, turn in places],
        "waits": _causes(step),
        "kept": kept_before(step),
    }


def _over(seconds: float) -> float:
    return seconds or 1.0


def _rounded(seconds: Sequence[float | None]) -> list[float | None]:
    return [t if t is None else round(t, 9) for t in seconds]


def _causes(step: Step) -> list[list[int]]:
    """Per operation those it waits for; one of the step before is given as its complement (~index)."""
    latest: dict[Event, int] = {op.event: ~index for index, op in enumerate(step.ops)}
    found = []
    for index, op in enumerate(step.ops):
        found.append([latest[e] for e in op.waits if e in latest])
        latest[op.event] = index
    return found


def _facts(schedule: Schedule) -> list[list[str]]:
    """(name, value, note) of the tiles on top."""
    seconds, measured = schedule.predicted_seconds, schedule.measured
    peak, budget = schedule.peak_bytes, schedule.budget_bytes
    facts = [["step, predicted", _time(seconds), f"on {schedule.machine.name}"]]
    if measured is not None:
        facts.append(
            [
                "step, measured",
                _time(measured.step_seconds),
                f"{measured.step_seconds / _over(seconds):.2f} × predicted",
            ]
        )
    if schedule.tokens:
        facts.append(
            ["tokens per second", f"{schedule.tokens / _over(seconds):,.0f}", f"{schedule.tokens:,} per step"]
        )
    facts += [
        ["device peak", format_bytes(peak), f"of {format_bytes(budget)}, {peak / budget:.0%}"],
        ["weight groups", format_bytes(sum(g.nbytes for g in schedule.work.groups)),
         f"{_count(schedule.work.parameters)} parameters in {len(schedule.work.groups)}"],
        ["blocks", f"{len(schedule.work.blocks)}", f"{schedule.mode.micro_batches} micro-batches"
         if schedule.mode.micro_batches > 1 else "one micro-batch"],
        ["operations", f"{len(schedule.step.ops):,}", f"{schedule.mode.kind} step"],
    ]  # fmt: skip
    return facts


def _count(number: int) -> str:
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _measured_columns(schedule: Schedule) -> dict[str, Any] | None:
    measured = schedule.measured
    if measured is None:
        return None
    rows = compare(schedule.step, schedule.timeline, measured)
    return {
        "start": _rounded(measured.starts),
        "end": _rounded(measured.ends),
        "stepSeconds": measured.step_seconds,
        "rows": [[r.kind, r.count, r.predicted, r.measured, r.worst] for r in rows],
    }


def _plan(schedule: Schedule) -> dict[str, Any]:
    work = schedule.work
    names = [b.name for b in work.blocks], [g.name for g in work.groups]
    rows = plan_rows(schedule.plan, *names, [g.nbytes for g in work.groups], work.ranks)
    own = [i for i, g in enumerate(work.groups) if g.name not in set(names[0])]
    blocks = len(work.blocks)
    return {
        "rows": [
            [
                row.title,
                row.text,
                [m for m in row.members if m < blocks],
                [own[m - blocks] for m in row.members if m >= blocks],
            ]
            for row in rows
        ],
        "whole": whole_step(schedule.plan),
    }

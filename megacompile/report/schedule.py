"""The schedule as people and tools look at it: printed, as a page, a trace, JSON, a ``torch.fx`` graph.

A :class:`Schedule` holds a plan and what it was made for. Everything else, the step, its predicted
times, its source, is derived by the same passes, simulator and emitter that made the program.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from torch import fx

from megacompile.errors import MegacompileError
from megacompile.hardware.catalog import check_figures
from megacompile.hardware.machine import Machine
from megacompile.hardware.measured_step import Measured, compare, comparison_table
from megacompile.hardware.simulate import Timeline, simulate
from megacompile.json_codec import from_plain, parse_json, sealed, to_plain, unsealed
from megacompile.passes import lower
from megacompile.planner.lower_bound import Bound, lower_bound
from megacompile.planner.min_feasible_budget import highest_point
from megacompile.planner.nvme_placement import describe_traffic
from megacompile.printable import is_printable, printable
from megacompile.report.explain import explain
from megacompile.report.plots import kept_before
from megacompile.schedule.emit import emit_step, line_of_each, statement
from megacompile.schedule.op_table import STREAMS
from megacompile.schedule.plan import Mode, Plan, check_counts
from megacompile.schedule.plan_text import block_text, folded, group_text, plan_rows, plan_table, whole_step
from megacompile.schedule.step import Event, Op, Step, memory_curve, peak_bytes
from megacompile.schedule.verify import verify
from megacompile.schedule.workload import Workload
from megacompile.units import format_bytes, format_seconds

SCHEDULE_VERSION = 2
_LONGEST_SECONDS = 1e9
_MOST_PLACES = 1 << 20  # blocks and weight groups, times micro-batches: each is several operations


@dataclass(frozen=True)
class Schedule:
    """One program's schedule: ``print`` it, open it as a page, or give it to other tools.

    ``tokens`` of one step are 0 where they are not known; ``measured`` is None before the first run.
    """

    title: str
    work: Workload
    plan: Plan
    mode: Mode
    machine: Machine
    budget_bytes: int
    tokens: int = 0
    measured: Measured | None = None

    @cached_property
    def step(self) -> Step:
        """The light step that the plan lowers to; equal to the one that runs."""
        return lower(self.work, self.plan, self.mode)

    @cached_property
    def timeline(self) -> Timeline:
        """Predicted start and end of each operation."""
        return simulate(self.step, self.machine)

    @cached_property
    def source(self) -> str:
        """The emitted Python."""
        return emit_step(self.step, self.work, title=self.title)

    @property
    def peak_bytes(self) -> int:
        return peak_bytes(self.step)

    @property
    def predicted_seconds(self) -> float:
        """Simulated seconds from one step to the next."""
        return self.timeline.step_seconds

    @property
    def bound(self) -> Bound:
        """Seconds that no training step gets below with state where the plan has it."""
        return lower_bound(self.work, self.mode, self.machine, plan=self.plan)

    @property
    def graph(self) -> fx.Graph:
        """The step as an fx graph: one node per operation, edges where an operation waits."""
        return to_fx(self.step)

    def explain(self, name: str) -> str:
        """Say why the block or weight group of that name is planned so, and what the next best would cost."""
        return explain(self, printable(name))

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained page: timeline, memory and code, linked to each other."""
        return _write(path, render_page(self))

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write predicted (and measured) times in the trace event format, which Perfetto opens."""
        return _write(path, json.dumps(chrome_trace(self), allow_nan=False) + "\n")

    def to_json(self) -> str:
        """Plan, workload and machine; :meth:`from_json` is the exact inverse."""
        fields = {"version": SCHEDULE_VERSION, "lowered": self._lowered(), **to_plain(self)}
        return json.dumps(sealed(fields), allow_nan=False, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Schedule:
        """Read :meth:`to_json`; :class:`MegacompileError` for anything else, nothing is executed."""
        what = "The schedule file"
        given = parse_json(text, what)
        if not isinstance(given, dict) or "digest" not in given:
            raise MegacompileError("This is no schedule file: it has no digest.")
        if given.get("version") != SCHEDULE_VERSION:
            raise MegacompileError(f"{what} is not of version {SCHEDULE_VERSION}: make it again.")
        fields = unsealed(given, what)
        del fields["version"]
        lowered = fields.pop("lowered", None)
        found: Schedule = from_plain(Schedule, fields, "schedule")
        _check_names(found)
        _check_counts(found, what)
        try:
            same = found._lowered() == lowered
        except (LookupError, ArithmeticError, ValueError, AssertionError, TypeError, StopIteration) as error:
            raise MegacompileError(f"{what} does not hang together: {error!r}.") from error
        if not same:
            raise MegacompileError(
                f"{what} was made by another version of megacompile, whose passes lead from its plan to "
                "another step: make it again."
            )
        _check_times(found, what)
        return found

    def _lowered(self) -> str:
        """A digest of the operations that the plan leads to."""
        lines = [f"{statement(op)} {op.nbytes} {op.offset}" for op in self.step.ops]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def traffic(self) -> str:
        """Say what a step moves over NVMe and what that does to the drive; "" where nothing is there."""
        seconds = self.measured.step_seconds if self.measured else self.predicted_seconds
        return describe_traffic(self.step, seconds)

    def __str__(self) -> str:
        busy = [f"{s} {format_seconds(self.timeline.busy[s])}" for s in STREAMS if self.timeline.busy[s]]
        groups = [group for group in self.work.groups if group.trainable]
        trained = sum(group.elements for group in groups)
        lines = [
            f"{self.mode.kind} step, {len(self.step.ops)} operations; {trained:,} of "
            f"{self.work.parameters:,} parameters are trained",
        ]
        if trained < self.work.parameters:
            names = ", ".join(row.title for row in folded((group.name, "") for group in groups))
            nbytes = sum(group.nbytes + group.state_bytes * group.ranks for group in groups)
            lines.append(f"  trained   of {names}: {format_bytes(nbytes)} of weights, masters and moments")
        lines += [
            f"  predicted {format_seconds(self.predicted_seconds)} per step on {self.machine.name} "
            f"({', '.join(busy)})",
        ]
        if self.measured is not None:
            lines.append(f"  measured  {format_seconds(self.measured.step_seconds)} in the last step")
        if self.mode.kind == "train":
            lines.append(f"  at least  {format_seconds(self.bound.seconds)}: {self.bound.binding}")
        lines.append(f"  {verify(self.step, self.work, budget_bytes=self.budget_bytes)}")
        lines += [f"  {self.traffic}"] if self.traffic else []
        lines += ["", *self._memory()]
        if self.measured is not None:
            rows = compare(self.step, self.timeline, self.measured)
            lines += ["", "measured beside predicted", *_indent(comparison_table(rows))]
        return "\n".join([*lines, "", "plan", *_indent(plan_table(self.plan, self.work)), "", self.source])

    def _memory(self) -> list[str]:
        """Return the device's bytes at the highest point, to the last, so that they can be added up."""
        where, parts = highest_point(self.step, self.work)
        rows = [*parts.items(), ("peak", self.peak_bytes), ("budget", self.budget_bytes)]
        width = max(len(f"{nbytes:,}") for _, nbytes in rows)
        return [
            f"bytes of the device at the highest point, {where}",
            *(f"  {name:<28}  {nbytes:>{width},}  {format_bytes(nbytes):>8}" for name, nbytes in rows),
        ]


def _write(path: str | os.PathLike[str], text: str) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target


def _indent(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def _check_names(schedule: Schedule) -> None:
    """Refuse names that :func:`printable` would change: a schedule's own are as it leaves them."""
    work = schedule.work
    names = [schedule.title, schedule.machine.name, *(b.checkpoint for b in schedule.plan.blocks)]
    names += [b.name for b in work.blocks] + [g.name for g in work.groups]
    names += [policy.name for b in work.blocks for policy in b.policies]
    for name in names:
        if not is_printable(name):
            raise MegacompileError(f"The schedule file holds a name that no model has: {name[:40]!r}.")


def _check_counts(schedule: Schedule, what: str) -> None:
    """Refuse counts of which no step could be made, before one is."""
    micro, work = schedule.mode.micro_batches, schedule.work
    places = len(work.blocks) + len(work.groups)
    if not 1 <= micro <= _MOST_PLACES // max(1, places):
        raise MegacompileError(
            f"{what} has {micro:,} micro-batches over {places:,} blocks and weight groups, of which no step "
            "can be made."
        )
    if schedule.budget_bytes < 0 or schedule.tokens < 0:
        raise MegacompileError(f"{what} has a budget or a number of tokens below 0.")
    check_counts(schedule.plan, f"{what}: plan")
    check_figures(schedule.machine, f"{what}: machine")


def _check_times(schedule: Schedule, what: str) -> None:
    """Refuse times that cannot be drawn, and measured ones of another step."""
    times: list[float | None] = [schedule.predicted_seconds]
    if schedule.measured is not None:
        starts, ends = schedule.measured.starts, schedule.measured.ends
        times += [schedule.measured.step_seconds, *starts, *ends]
        if not len(starts) == len(ends) == len(schedule.step.ops):
            raise MegacompileError(f"{what} has measured times of another number of operations than it has.")
    if not all(abs(t) < _LONGEST_SECONDS for t in times if t is not None):
        raise MegacompileError(f"{what} has times of more than {_LONGEST_SECONDS:.0e} s.")


def to_fx(step: Step) -> fx.Graph:
    """Materialise a light step; every node is a side effect, so no clean-up removes it."""
    graph = fx.Graph()
    latest: dict[tuple[object, ...], fx.Node] = {}
    for op in step.ops:
        waits = tuple(latest[e] for e in op.waits if e in latest)
        node = graph.call_function(_operation(op.kind), waits, name="_".join(map(str, op.event)))
        node.meta["op"] = op
        latest[op.event] = node
    graph.output(())
    return graph


_OPERATIONS: dict[str, Callable[..., Any]] = {}


def _operation(kind: str) -> Callable[..., Any]:
    """The function that stands for a kind of operation; one object per kind."""

    def run(*waits: object) -> Op:
        raise AssertionError("operations of a schedule run through the emitted source")

    if kind not in _OPERATIONS:
        run.__name__ = run.__qualname__ = kind
        fx.node.has_side_effect(run)
        _OPERATIONS[kind] = run
    return _OPERATIONS[kind]


# ------------------------------------------------------------------------------------------------------------
# A schedule as one self-contained HTML page: timeline, memory curve and code, linked to each other.
#
# In: a :class:`Schedule`. Out: the text of a page that needs no network. The data are columns, one entry per
# operation; the scripts beside this module draw them. Everything that comes from a model is embedded as JSON
# and shown as text, so no name can become markup.


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
    begin = _step_begin(step, timeline.ends, seconds)
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
        "measured": _measured(schedule),
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


def _measured(schedule: Schedule) -> dict[str, Any] | None:
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


# ------------------------------------------------------------------------------------------------------------
# A schedule in the trace event format that Perfetto and ``chrome://tracing`` open.
#
# Process 0 is the predicted step, process 1 the measured one where a run was recorded; each stream is a
# thread. Device memory is a counter over the predicted times. Times are in microseconds from the begin of the
# step, or of its first operation where that begins before it, so that none is negative: readers may drop what
# is. They are whole eighths: exact as floats, so that slices of a thread, which must not overlap, do not
# overlap in a reader that turns start and duration into whole nanoseconds one by one.


def chrome_trace(schedule: Schedule) -> dict[str, Any]:
    """The trace as plain values."""
    step, timeline = schedule.step, schedule.timeline
    begin = min(_step_begin(step, timeline.ends, timeline.step_seconds), *timeline.starts)
    starts = [t - begin for t in timeline.starts]
    ends = [t - begin for t in timeline.ends]
    events = _named(0, f"predicted for {schedule.machine.name}") + _spans(schedule, 0, starts, ends)
    events += [
        {
            "name": "device memory",
            "ph": "C",
            "pid": 0,
            "tid": 0,
            "ts": _micro(starts[i]),
            "args": {"bytes": total},
        }
        for i, total in sorted(memory_curve(step), key=lambda point: starts[point[0]])
    ]
    if schedule.measured is not None:
        events += _named(1, "measured")
        events += _spans(schedule, 1, schedule.measured.starts, schedule.measured.ends)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": schedule.title}}


def _step_begin(step: Step, ends: Sequence[float], step_seconds: float) -> float:
    """Return when the step begins on the simulator's clock: a period before its last compute operation
    ends."""
    compute = [end for op, end in zip(step.ops, ends, strict=True) if op.stream == "compute"]
    return max(0.0, max(compute, default=step_seconds) - step_seconds)


def _spans(
    schedule: Schedule, process: int, starts: Sequence[float | None], ends: Sequence[float | None]
) -> list[dict[str, Any]]:
    return [
        {"name": _label(op, schedule), "cat": op.kind, "ph": "X", "pid": process,
         "tid": STREAMS.index(op.stream),
         "ts": _micro(start), "dur": _micro(end) - _micro(start),
         "args": {"event": " ".join(map(str, op.event)), "bytes": op.nbytes, "flops": op.flops}}
        for op, start, end in zip(schedule.step.ops, starts, ends, strict=True)
        if start is not None and end is not None and end > start
    ]  # fmt: skip


def _label(op: Op, schedule: Schedule) -> str:
    """The operation in words: ``backward model.layers.3, micro-batch 1``."""
    work = schedule.work
    name = work.blocks[op.block].name if op.block >= 0 else ""
    if op.group >= 0:
        name = work.groups[op.group].name
    micro = f", micro-batch {op.micro}" if schedule.mode.micro_batches > 1 and op.block >= 0 else ""
    return f"{op.kind} {name}{micro}".strip()


def _named(process: int, name: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
    ]
    for index, stream in enumerate(STREAMS):
        events.append(
            {"name": "thread_name", "ph": "M", "pid": process, "tid": index, "args": {"name": stream}}
        )
        events.append(
            {
                "name": "thread_sort_index",
                "ph": "M",
                "pid": process,
                "tid": index,
                "args": {"sort_index": index},
            }
        )
    return events


def _micro(seconds: float) -> float:
    return math.floor(seconds * 8e6) / 8

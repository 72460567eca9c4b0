"""Write a schedule in the trace event format that Perfetto and ``chrome://tracing`` open.

Process 0 is the predicted step, process 1 the measured one where a run was recorded; each stream is a thread.
Device memory is a counter over the predicted times. Times are in microseconds from the begin of the step, or
of its first operation if that is earlier, because readers may drop negative times. They are whole eighths,
which are exact as floats. So slices of a thread do not overlap in a reader that turns start and duration into
whole nanoseconds one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megacompile.schedule.op_table import STREAMS
from megacompile.schedule.step import Op, Step, memory_curve

if TYPE_CHECKING:
    from megacompile.report.schedule import Schedule


def chrome_trace(schedule: Schedule) -> dict[str, Any]:
    """The trace as plain values."""
    step, timeline = schedule.step, schedule.timeline
    begin = min(step_begin(step, timeline.ends, timeline.step_seconds), *timeline.starts)
    starts = [t - begin for t in timeline.starts]
    ends = [t - begin for t in timeline.ends]
    events = _named(0, f"predicted for {schedule.machine.name}") + _slices(schedule, 0, starts, ends)
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
        events += _slices(schedule, 1, schedule.measured.starts, schedule.measured.ends)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": schedule.title}}


def step_begin(step: Step, ends: Sequence[float], step_seconds: float) -> float:
    """Return when the step begins on the simulator's clock: a period before its last compute operation
    ends."""
    compute = [end for op, end in zip(step.ops, ends, strict=True) if op.stream == "compute"]
    return max(0.0, max(compute, default=step_seconds) - step_seconds)


def _slices(
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

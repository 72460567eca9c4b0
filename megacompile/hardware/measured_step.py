"""Compare a step as it ran with what was predicted of it.

In:  a step and the traces that a runtime keeps of its last runs. Out: :class:`Measured`, one start and end
per operation, and a table that says by how much the estimates of each kind of operation were off.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megacompile.hardware.simulate import Timeline
from megacompile.schedule.op_table import Kind
from megacompile.schedule.step import Event, Step
from megacompile.units import format_seconds

RUN: Event = ("run",)  # the entry of a trace that tells when the run began


@dataclass(frozen=True)
class Measured:
    """Start and end of each operation in seconds from the begin of the run; None where it is not timed.

    ``step_seconds`` ends with the last operation on the compute stream; updates may go on after it.
    """

    starts: tuple[float | None, ...]
    ends: tuple[float | None, ...]
    step_seconds: float


def align(step: Step, trace: Iterable[tuple[Event, float, float]]) -> Measured | None:
    """Give each operation its entry of a trace: the n-th of an event is its n-th operation."""
    entries: dict[Event, deque[tuple[float, float]]] = defaultdict(deque)
    for event, start, end in sorted(trace, key=lambda entry: entry[1]):
        entries[event].append((start, end))
    found = [entries[op.event].popleft() if entries[op.event] else None for op in step.ops]
    timed = [span for span in found if span is not None]
    if not timed:
        return None
    begin = entries[RUN][0][0] if entries[RUN] else min(start for start, _ in timed)
    compute = [s[1] for s, op in zip(found, step.ops, strict=True) if s and op.stream == "compute"]
    return Measured(
        tuple(s and s[0] - begin for s in found),
        tuple(s and s[1] - begin for s in found),
        max(compute, default=begin) - begin,
    )


@dataclass(frozen=True)
class Comparison:
    """Seconds of all operations of one kind, predicted and measured; ``worst`` was off the most."""

    kind: Kind
    count: int
    predicted: float
    measured: float
    worst: int

    @property
    def ratio(self) -> float:
        """Measured over predicted; above 1, the estimate was too low."""
        return self.measured / self.predicted if self.predicted else float("inf")


def compare(step: Step, timeline: Timeline, measured: Measured) -> list[Comparison]:
    """Per kind of operation, largest difference first; kinds that were not timed are left out."""
    pairs: dict[Kind, list[tuple[float, float, int]]] = defaultdict(list)
    for index, (op, start, end) in enumerate(zip(step.ops, measured.starts, measured.ends, strict=True)):
        if start is not None and end is not None:
            predicted = timeline.ends[index] - timeline.starts[index]
            pairs[op.kind].append((predicted, end - start, index))
    rows = []
    for kind, found in pairs.items():
        worst = max(found, key=lambda pair: abs(pair[1] - pair[0]))[2]
        rows.append(
            Comparison(kind, len(found), sum(p for p, _, _ in found), sum(m for _, m, _ in found), worst)
        )
    return sorted(rows, key=lambda row: -abs(row.measured - row.predicted))


def comparison_table(rows: Sequence[Comparison]) -> str:
    """The comparison as text."""
    lines = [f"{'operation':<12}{'count':>6}{'predicted':>14}{'measured':>14}{'ratio':>10}"]
    for row in rows:
        ratio = f"{row.ratio:.2f}" if row.predicted else "–"
        times = "".join(f"{format_seconds(seconds):>14}" for seconds in (row.predicted, row.measured))
        lines.append(f"{row.kind:<12}{row.count:>6}{times}{ratio:>10}")
    return "\n".join(lines)

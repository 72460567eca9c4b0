"""The schedule as people and tools look at it: printed, as a page, a trace, JSON, a ``torch.fx`` graph.

A :class:`Schedule` holds a plan and what it was made for. Everything else, the step, its predicted
times, its source, is derived by the same passes, simulator and emitter that made the program.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
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
from megacompile.report.chrome_trace import chrome_trace
from megacompile.report.explain import explain
from megacompile.report.schedule_page import render_page
from megacompile.schedule.emit import emit_step, statement
from megacompile.schedule.op_table import STREAMS
from megacompile.schedule.plan import Mode, Plan, check_counts
from megacompile.schedule.plan_text import folded, plan_table
from megacompile.schedule.step import Op, Step, peak_bytes
from megacompile.schedule.verify import verify
from megacompile.schedule.workload import Workload
from megacompile.units import format_bytes, format_seconds

SCHEDULE_VERSION = 3
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
        """The light step that the plan lowers to, equal to the running one."""
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
        """Least seconds of any training step with the state in the plan's places."""
        return lower_bound(self.work, self.mode, self.machine, self.step)

    @property
    def graph(self) -> fx.Graph:
        """The step as an fx graph: one node per operation, edges where an operation waits."""
        return to_fx(self.step)

    def explain(self, name: str) -> str:
        """Say why the block or weight group of that name is planned so, and what the next best would cost."""
        return explain(self, printable(name))

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained page: timeline, memory and code, linked to each other."""
        return _write_file(path, render_page(self))

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write predicted (and measured) times in the trace event format, which Perfetto opens."""
        return _write_file(path, json.dumps(chrome_trace(self), allow_nan=False) + "\n")

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
        """Describe a step's traffic over NVMe and the wear of the drive; "" without state there."""
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


def _write_file(path: str | os.PathLike[str], text: str) -> Path:
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

"""A step with nothing decided: the relaxation's variables, and the seconds and bytes that its rows are of.

In: a workload, a mode, a machine, an order of micro-batches. Out: :class:`RelaxedStep`.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.linear import LinearProgram, Row, times, total
from benchmarks.relaxed_memory import BlockShare
from benchmarks.relaxed_slots import Span
from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import duration
from megacompile.planner.step_costs import StepCosts
from megacompile.planner.treatments import Order
from megacompile.schedule.op_table import SPECS, Kind
from megacompile.schedule.plan import Mode, norm_bytes
from megacompile.schedule.step import Op
from megacompile.schedule.workload import CheckpointPolicy, Workload


class RelaxedStep:
    """Variables for times in seconds, for shares of checkpoint policies, and for shares of groups that are
    held; ``spans`` is all compute of a step in program order."""

    def __init__(self, work: Workload, mode: Mode, machine: Machine, order: Order) -> None:
        self.work, self.mode, self.machine, self.order = work, mode, machine, order
        self.program = LinearProgram()
        self.period = self.program.variable()
        costs = StepCosts(work, mode, machine)
        self.shares = [
            [
                BlockShare(self.program.variable(1.0), policy, host, _offloaded_bytes(costs, b, policy))
                for policy in {c.name: c for c in block.policies}.values()
                for host in (False, True)
            ]
            for b, block in enumerate(work.blocks)
        ]
        self.held = [self.program.variable(1.0) for _ in work.groups]
        self.spans = self._spans()
        for shares in self.shares:
            self.program.equal({o.share: 1.0 for o in shares}, 1.0)

    def _spans(self) -> list[Span]:
        """All compute of a step in program order."""
        blocks, micros = range(len(self.work.blocks)), range(self.mode.micro_batches)
        back = [b for b in reversed(blocks) if self.work.blocks[b].policies[0].backward is not None]
        once = [(b, False) for b in blocks], [(b, True) for b in back]
        if self.order == "depth":
            places = [place for _ in micros for part in once for place in part]
        else:
            places = [place for part in once for place in part for _ in micros]
        variable = self.program.variable
        return [Span(b, variable(), variable(), backward) for b, backward in places]

    def next(self, span: Span) -> Row:
        """When an operation of the next step starts."""
        return {self.period: 1.0, span.start: 1.0}

    def seconds(self, kind: Kind, nbytes: float) -> float:
        return duration(Op(kind, SPECS[kind].stream, nbytes=nbytes), self.machine)  # type: ignore[arg-type]

    def fetch(self, group: int) -> float:
        return self.seconds("prefetch", self.work.groups[group].nbytes)

    def moved(self, block: int, kind: Kind) -> Row:
        """Seconds of moving a block's offloaded activations, by the shares that wait on the host."""
        return {
            o.share: self.seconds(kind, o.offloaded) for o in self.shares[block] if o.host and o.offloaded
        }

    def offloaded_bytes(self, block: int) -> Row:
        return {o.share: float(o.offloaded) for o in self.shares[block] if o.host}

    def host_moves(self, interval: Row, nbytes: float, shares: Row) -> None:
        """In this interval host memory moves so many bytes, and those of shares of offloaded activations and
        groups."""
        if self.machine.shared_memory:
            rate = self.machine.host_bandwidth
            self.program.at_least(total(interval, times(-1 / rate, shares)), nbytes / rate)

    def norm_bytes(self, groups: Iterable[int]) -> int:
        return sum(norm_bytes(self.work, self.mode, g) for g in groups)

    def beside(self, kind: Kind, sizes: list[float]) -> tuple[float, float]:
        """Return the seconds of large copies, and the share of host memory that each draws beyond the rest of
        an update or a norm. These slow down by at least that share beside the copies."""
        if not self.machine.shared_memory:
            return 0.0, 0.0
        rate = self.machine.host_bandwidth
        left = rate - self.machine.update_bandwidth
        draws = [max(0.0, n / self.seconds(kind, n) - left) / rate for n in sizes]
        least = min(1.0, 0.97 * max(draws, default=0.0))
        large = (self.seconds(kind, n) for n, d in zip(sizes, draws, strict=True) if d >= least)
        return sum(large), least


def _offloaded_bytes(costs: StepCosts, block: int, policy: CheckpointPolicy) -> int:
    """Bytes that wait from a block's forward for its own backward alone."""
    moves = costs.offload(block, policy.name)
    return moves[0].nbytes if moves else 0

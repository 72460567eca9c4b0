"""A lower bound for any plan: the linear relaxation of the whole-step problem, with times.

Blocks may split between their checkpoint policies and places of saved activations, and weight groups between
being held and being fetched again; whatever is not said to follow something may run at any time. What stays
of the problem:

- compute: every forward and backward has a start and an end, in the plan's order, as its policies take;
- each stream's work in a step, and what copies, norms and updates move through shared host memory;
- gradients leave after their backward, one after the other; updates come after their group's last gradient
  (with clipping, after all norms), and before the next step's first use of the group, with a fetch between.
  So all these updates lie between a gradient's arrival and the forward on its update and all later ones, with
  all traffic of host memory meanwhile;
- what waits on the host has left before the second operation after its forward starts, and comes
  back after the second operation before its backward has ended;
- device bytes at every forward, recompute and backward, where weight slots are a slab of fixed size;
- between two operations the link brings all weights that had no room in the slab when the first ended.

State is on the host, as in all plans that are compared with this bound. Steps follow each other at a fixed
period, as they do in the simulator after the first.
"""

from __future__ import annotations

from itertools import pairwise

from benchmarks.linear import Row, times, total
from benchmarks.relaxed_memory import GB, limit_memory
from benchmarks.relaxed_slots import Span, limit_fetches
from benchmarks.relaxed_step import RelaxedStep
from benchmarks.relaxed_updates import limit_updates
from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import call_seconds
from megacompile.planner.treatments import Order
from megacompile.schedule.plan import LONGEST_WINDOW, Mode
from megacompile.schedule.workload import Workload


def relaxed_seconds(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> float:
    """Seconds below which no plan of this mode's step gets; inf where the relaxation is infeasible."""
    orders: tuple[Order, ...] = ("depth", "breadth")
    return min(
        _Relaxation(work, mode, machine, budget_bytes, order).solve()
        for order in orders[: 1 + (mode.micro_batches > 1)]
    )


class _Relaxation(RelaxedStep):
    """The whole program: the step's variables, and all rows."""

    def __init__(self, work: Workload, mode: Mode, machine: Machine, budget: int, order: Order) -> None:
        super().__init__(work, mode, machine, order)
        self.slab = limit_memory(self.program, work, mode, order, budget, self.shares, self.held)
        self.unused = self.program.variable()  # GB beside the slab
        self.room = budget - work.constant_bytes
        self.program.equal({self.unused: 1.0, self.slab: 1.0}, GB * self.room)

    def solve(self) -> float:
        unused, _ = self.program.minimise(self.unused)
        if unused == float("inf"):
            return unused
        most = (self.room - unused / GB) * (1 + 1e-6)
        limit_fetches(self.program, self.work, self.machine, self.spans, self.period, self.slab, most)
        self._compute()
        self._pushes()
        self._offloads()
        self._reloads()
        self._work()
        limit_updates(self, self.pushed)
        return self.program.minimise(self.period)[0]

    def _compute(self) -> None:
        for span in self.spans:
            whole = {span.end: 1.0, span.start: -1.0}
            self.program.at_least(total(whole, times(-1, self._compute_row(span))), 0.0)
        for before, after in pairwise(self.spans):
            self.program.at_least({after.start: 1.0, before.end: -1.0}, 0.0)
        self.program.at_least(total(self.next(self.spans[0]), {self.spans[-1].end: -1.0}), 0.0)

    def _pushes(self) -> None:
        """``pushed``: per backward when its gradients have left, and their bytes."""
        self.pushed: dict[int, tuple[int, int]] = {}
        last: int | None = None
        for index, span in enumerate(self.spans):
            given = self.work.blocks[span.block].grad_groups if span.backward else ()
            if given:
                seconds = sum(self.seconds("push_grad", n) for _, n in given)
                left = self.program.variable()
                self.program.at_least({left: 1.0, span.end: -1.0}, seconds)
                if last is not None:
                    self.program.at_least({left: 1.0, last: -1.0}, seconds)
                self.pushed[index] = left, sum(n for _, n in given)
                last = left
        if last is not None:  # compute gives the last gradient's memory back before the next step
            self.program.at_least(total(self.next(self.spans[0]), {last: -1.0}), 0.0)

    def _offloads(self) -> None:
        """One after the other; while one runs, compute gets no further than the end of its window."""
        over: int | None = None
        for index, span in enumerate(self.spans):
            if not span.backward and index + 1 + LONGEST_WINDOW < len(self.spans):
                then = self.spans[index + 1 + LONGEST_WINDOW]
                over = self._queue(over, {span.end: 1.0}, self.moved(span.block, "offload"), then)

    def _reloads(self) -> None:
        """As for offloads: a reload starts no sooner than its window."""
        over: int | None = None
        for index, span in enumerate(self.spans):
            if span.backward and index > LONGEST_WINDOW:
                earlier = self.spans[index - 1 - LONGEST_WINDOW]
                over = self._queue(over, {earlier.end: 1.0}, self.moved(span.block, "reload"), span)

    def _queue(self, last: int | None, ready: Row, seconds: Row, wanted: Span) -> int:
        """The end of what starts when it is ready and the one before is over; something waits for it."""
        over = self.program.variable()
        self.program.at_least(total({over: 1.0}, times(-1, total(ready, seconds))), 0.0)
        if last is not None:
            self.program.at_least(total({over: 1.0, last: -1.0}, times(-1, seconds)), 0.0)
        self.program.at_least({wanted.start: 1.0, over: -1.0}, 0.0)
        return over

    def _compute_row(self, span: Span) -> Row:
        """Seconds of an operation by its block's shares."""
        shares, machine = self.shares[span.block], self.machine
        if not span.backward:
            return {o.share: call_seconds(o.policy.forward, machine) for o in shares}
        return {
            o.share: call_seconds(o.policy.recompute, machine) + call_seconds(o.policy.backward, machine)
            for o in shares
        }

    def _fetches(self) -> tuple[Row, list[int]]:
        """Per group the fetches of a step where it is not held; those beyond the first, in seconds."""
        again = {g for b in self.work.blocks for c in b.policies for call in (c.recompute, c.backward)
                 if call is not None for g in call.groups}  # fmt: skip
        last = len(self.work.blocks) - 1
        counts = []
        for g in range(len(self.work.groups)):
            users = self._users(g)
            each = 1 if g not in again or last in users else 2
            breadth = self.order == "breadth"
            counts.append(each if breadth else each * self.mode.micro_batches)
        return {self.held[g]: (1 - n) * self.fetch(g) for g, n in enumerate(counts)}, counts

    def _users(self, group: int) -> list[int]:
        return [
            i for i, b in enumerate(self.work.blocks) if any(group in c.forward.groups for c in b.policies)
        ]

    def _work(self) -> None:
        """Each stream's work fits the period; so does what moves through host memory."""
        held, counts = self._fetches()
        micros, groups = self.mode.micro_batches, self.work.groups
        trained = [groups[g] for g in self.work.contributions]
        blocks = range(len(self.work.blocks))
        pushes = [n for b in self.work.blocks for _, n in b.grad_groups for _ in range(micros)]
        norms = self.norm_bytes(self.work.contributions)
        updates = sum(g.update_bytes for g in trained)
        down = total(held, *(times(micros, self.moved(b, "reload")) for b in blocks))
        up = total(*(times(micros, self.moved(b, "offload")) for b in blocks))
        for seconds, row in (
            (sum(n * self.fetch(g) for g, n in enumerate(counts)), down),
            (sum(self.seconds("push_grad", n) for n in pushes), up),
            (self.seconds("adam", updates) + self.seconds("norm", norms), {}),
        ):
            self.program.at_least(total({self.period: 1.0}, times(-1, row)), seconds)
        host = self.seconds("adam", updates) + self.seconds("norm", norms)
        for kind, sizes in (("push_grad", pushes), ("prefetch", [g.nbytes for g in groups])):
            seconds, draw = self.beside(kind, sizes)  # type: ignore[arg-type]
            self.program.at_least({self.period: 1.0}, seconds + draw * host)
        fixed = sum(n * groups[g].nbytes for g, n in enumerate(counts)) + sum(pushes) + norms + updates
        saved = {self.held[g]: float((1 - n) * groups[g].nbytes) for g, n in enumerate(counts)}
        offloaded = total(*(times(2 * micros, self.offloaded_bytes(b)) for b in blocks))
        self.host_moves({self.period: 1.0}, fixed, total(saved, offloaded))

"""A lower bound for any plan: the linear relaxation of the whole-step problem, with times.

Blocks may split between their checkpoint policies and places of saved activations, and weight groups between
being held and being fetched again; whatever is not said to follow something may run at any time. What stays
of the problem:

- compute: every forward and backward has a start and an end, in the plan's order, as its policies take;
- each stream's work in a step, and what copies, norms and updates move through shared host memory;
- gradients leave after their backward, one after the other; updates come after their group's last gradient
  (with clipping, after all norms), and before the next step's first use of the group, with a fetch between.
  So between a gradient's arrival and the forward that wants what comes of it and of all gradients that
  arrive later lie those updates, and all that host memory moves meanwhile;
- what waits on the host has left before the second operation after its forward starts, and comes
  back after the second operation before its backward has ended;
- device bytes at every forward, recompute and backward, where weight slots are a slab of fixed size;
- between two operations the link brings all weights that had no room in the slab when the first ended.

State is on the host, as in all plans that are compared with this bound. Steps follow each other at a fixed
period, as they do in the simulator after the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise

from benchmarks.linear import LinearProgram, Row, times, total
from benchmarks.relaxed_memory import GB, BlockShare, limit_memory
from benchmarks.relaxed_slots import Span, limit_fetches
from megacompile.assemble.plan import Mode, norm_bytes
from megacompile.assemble.workload import Workload
from megacompile.machine.rates import Machine
from megacompile.machine.simulate import call_seconds, duration
from megacompile.plan.takes import Order, Treatments
from megacompile.step.operations import Op
from megacompile.step.spec import SPECS, Kind


def relaxed_seconds(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> float:
    """Seconds below which no plan of this mode's step gets; inf where the relaxation is infeasible."""
    orders: tuple[Order, ...] = ("depth", "breadth")
    return min(
        _Relaxation(work, mode, machine, budget_bytes, order).solve()
        for order in orders[: 1 + (mode.micro_batches > 1)]
    )


class _Relaxation:
    """Variables for times in seconds, for shares of checkpoint policies, and for shares of groups that are
    held."""

    def __init__(self, work: Workload, mode: Mode, machine: Machine, budget: int, order: Order) -> None:
        self.work, self.mode, self.machine, self.order = work, mode, machine, order
        self.program = LinearProgram()
        self.period = self.program.variable()
        mixer = Treatments(work, mode, machine, order)
        self.shares = [
            [
                BlockShare(self.program.variable(1.0), policy, host, mixer.offloaded_bytes(b, policy))
                for policy in {c.name: c for c in block.policies}.values()
                for host in (False, True)
            ]
            for b, block in enumerate(work.blocks)
        ]
        self.held = [self.program.variable(1.0) for _ in work.groups]
        self.spans = self._spans()
        for shares in self.shares:
            self.program.equal({o.share: 1.0 for o in shares}, 1.0)
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
        if self.mode.keeps_gradients:
            self._deferred()
        else:
            self._immediate()
        return self.program.minimise(self.period)[0]

    # ---- compute ----------------------------------------------------------------------------------

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

    def _compute(self) -> None:
        for span in self.spans:
            whole = {span.end: 1.0, span.start: -1.0}
            self.program.at_least(total(whole, times(-1, self._compute_row(span))), 0.0)
        for before, after in pairwise(self.spans):
            self.program.at_least({after.start: 1.0, before.end: -1.0}, 0.0)
        self.program.at_least(total(self._next(self.spans[0]), {self.spans[-1].end: -1.0}), 0.0)

    def _next(self, span: Span) -> Row:
        """When an operation of the next step starts."""
        return {self.period: 1.0, span.start: 1.0}

    # ---- transfers --------------------------------------------------------------------------------

    def _seconds(self, kind: Kind, nbytes: float) -> float:
        return duration(Op(kind, SPECS[kind].stream, nbytes=nbytes), self.machine)  # type: ignore[arg-type]

    def _fetch(self, group: int) -> float:
        return self._seconds("prefetch", self.work.groups[group].nbytes)

    def _pushes(self) -> None:
        """``pushed``: per backward when its gradients have left, and their bytes."""
        self.pushed: dict[int, tuple[int, int]] = {}
        last: int | None = None
        for index, span in enumerate(self.spans):
            given = self.work.blocks[span.block].grad_groups if span.backward else ()
            if given:
                seconds = sum(self._seconds("push_grad", n) for _, n in given)
                left = self.program.variable()
                self.program.at_least({left: 1.0, span.end: -1.0}, seconds)
                if last is not None:
                    self.program.at_least({left: 1.0, last: -1.0}, seconds)
                self.pushed[index] = left, sum(n for _, n in given)
                last = left
        if last is not None:  # compute gives the last gradient's memory back before the next step
            self.program.at_least(total(self._next(self.spans[0]), {last: -1.0}), 0.0)

    def _moved(self, block: int, kind: Kind) -> Row:
        """Seconds of moving a block's offloaded activations, by the shares that wait on the host."""
        return {
            o.share: self._seconds(kind, o.offloaded) for o in self.shares[block] if o.host and o.offloaded
        }

    def _offloaded_bytes(self, block: int) -> Row:
        return {o.share: float(o.offloaded) for o in self.shares[block] if o.host}

    def _offloads(self) -> None:
        """One after the other; while one runs, compute gets no further than the end of the next operation."""
        over: int | None = None
        behind: int | None = None
        for index, span in enumerate(self.spans):
            if span.backward or index + 2 >= len(self.spans):
                continue
            after, then = self.spans[index + 1], self.spans[index + 2]
            seconds = self._moved(span.block, "offload")
            over = self._queue(over, {span.end: 1.0}, seconds, then)
            stall = total(self._compute_row(after), self._stalls(span.block, "offload", self._longest(after)))
            behind = self._queue(behind, total({span.start: 1.0}, self._compute_row(span)), stall, then)

    def _reloads(self) -> None:
        """As for offloads: a reload starts no sooner than the backward before its block's."""
        over: int | None = None
        behind: int | None = None
        for index, span in enumerate(self.spans):
            if not span.backward or not self.spans[index - 1].backward:
                continue
            before, earlier = self.spans[index - 1], self.spans[index - 2]
            again = {o.share: call_seconds(o.policy.recompute, self.machine)
                     for o in self.shares[before.block]}  # fmt: skip
            seconds = self._moved(span.block, "reload")
            over = self._queue(over, total({earlier.end: 1.0}, again), seconds, span)
            stall = total(
                self._compute_row(before), self._stalls(span.block, "reload", self._longest(before))
            )
            behind = self._queue(behind, {before.start: 1.0}, stall, span)

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

    def _longest(self, span: Span) -> float:
        """The longest that a forward or backward may take, without a recompute."""
        policies = [o.policy for o in self.shares[span.block]]
        return max(call_seconds(c.backward if span.backward else c.forward, self.machine) for c in policies)

    def _stalls(self, block: int, kind: Kind, beside: float) -> Row:
        """What a block's offloaded activations takes to move beyond the one operation that may run
        meanwhile."""
        return {share: max(0.0, t - beside) for share, t in self._moved(block, kind).items()}

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
        return {self.held[g]: (1 - n) * self._fetch(g) for g, n in enumerate(counts)}, counts

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
        norms = self._norm_bytes(self.work.contributions)
        updates = sum(g.update_bytes for g in trained)
        down = total(held, *(times(micros, self._moved(b, "reload")) for b in blocks))
        up = total(*(times(micros, self._moved(b, "offload")) for b in blocks))
        for seconds, row in (
            (sum(n * self._fetch(g) for g, n in enumerate(counts)), down),
            (sum(self._seconds("push_grad", n) for n in pushes), up),
            (self._seconds("adam", updates) + self._seconds("norm", norms), {}),
        ):
            self.program.at_least(total({self.period: 1.0}, times(-1, row)), seconds)
        host = self._seconds("adam", updates) + self._seconds("norm", norms)
        for kind, sizes in (("push_grad", pushes), ("prefetch", [g.nbytes for g in groups])):
            seconds, draw = self._beside(kind, sizes)  # type: ignore[arg-type]
            self.program.at_least({self.period: 1.0}, seconds + draw * host)
        fixed = sum(n * groups[g].nbytes for g, n in enumerate(counts)) + sum(pushes) + norms + updates
        saved = {self.held[g]: float((1 - n) * groups[g].nbytes) for g, n in enumerate(counts)}
        offloaded = total(*(times(2 * micros, self._offloaded_bytes(b)) for b in blocks))
        self._host_moves({self.period: 1.0}, fixed, total(saved, offloaded))

    def _host_moves(self, interval: Row, nbytes: float, shares: Row) -> None:
        """In this interval host memory moves so many bytes, and those of shares of offloaded activations and
        groups."""
        if self.machine.shared_memory:
            rate = self.machine.host_bandwidth
            self.program.at_least(total(interval, times(-1 / rate, shares)), nbytes / rate)

    # ---- updates ----------------------------------------------------------------------------------

    @cached_property
    def _first_use(self) -> dict[int, int]:
        """Per trained group the first operation of a step that wants it."""
        found: dict[int, int] = {}
        for index, span in enumerate(self.spans):
            if not span.backward:
                policies = self.work.blocks[span.block].policies
                for g in set.intersection(*(set(c.forward.groups) for c in policies)):
                    if g in self.work.contributions:
                        found.setdefault(g, index)
        return found

    @cached_property
    def _last_given(self) -> dict[int, list[int]]:
        """Per backward the groups whose gradient is whole with it."""
        last: dict[int, int] = {}
        for index in self.pushed:
            last |= {g: index for g, _ in self.work.blocks[self.spans[index].block].grad_groups}
        found: dict[int, list[int]] = defaultdict(list)
        for g, index in last.items():
            found[index].append(g)
        return found

    def _left_behind(self, use: int) -> Row:
        """Bytes of offloaded activations that have left when an operation starts."""
        return total(
            *(self._offloaded_bytes(s.block) for s in self.spans[: max(0, use - 1)] if not s.backward)
        )

    def _way(self, group: int, use: int) -> float:
        """Seconds from a group's update to an operation after its first use: its fetch, forwards between."""
        between = self.spans[self._first_use[group] : use]
        policies = (self.work.blocks[s.block].policies for s in between)
        return self._fetch(group) + sum(
            min(call_seconds(c.forward, self.machine) for c in cs) for cs in policies
        )

    def _immediate(self) -> None:
        """Between a gradient's arrival and the forward that wants the last of what comes after it."""
        groups: list[int] = []
        after = 0.0  # bytes of gradients that leave later
        reloads: Row = {}  # of operations that come after the next one
        order = sorted(self.pushed, reverse=True)
        for index in order:
            pushed, nbytes = self.pushed[index]
            groups += [g for g in self._last_given[index] if g in self._first_use]
            if groups:
                use = max(self._first_use[g] for g in groups)
                wanted = self._next(self.spans[use])
                interval = total(wanted, {pushed: -1.0})
                updates = sum(self.work.groups[g].update_bytes for g in groups)
                fetched = sum(self.work.groups[g].nbytes for g in groups)
                self.program.at_least(
                    interval, self._seconds("adam", updates) + min(self._way(g, use) for g in groups)
                )
                self._host_moves(interval, updates + fetched + after, self._left_behind(use))
                whole = total(wanted, {self.spans[index].end: -1.0})
                self._host_moves(
                    whole, updates + fetched + after + nbytes, total(self._left_behind(use), reloads)
                )
            after += nbytes
            if index + 1 < len(self.spans) and self.spans[index + 1].backward:
                reloads = total(reloads, self._offloaded_bytes(self.spans[index + 1].block))

    def _deferred(self) -> None:
        """All norms, then all updates in the order of the groups, then what wants them."""
        normed: int | None = None
        for index in sorted(self.pushed):
            pushed, _ = self.pushed[index]
            nbytes = self._norm_bytes(self._last_given[index])
            over, seconds = self.program.variable(), self._seconds("norm", nbytes)
            self.program.at_least({over: 1.0, pushed: -1.0}, seconds)
            if normed is not None:
                self.program.at_least({over: 1.0, normed: -1.0}, seconds)
            normed = over
        if normed is None:
            return
        updates = fetched = 0
        for g in sorted(self.work.contributions):
            updates += self.work.groups[g].update_bytes
            fetched += self.work.groups[g].nbytes
            if g in self._first_use:
                use = self._first_use[g]
                interval = total(self._next(self.spans[use]), {normed: -1.0})
                self.program.at_least(interval, self._seconds("adam", updates) + self._fetch(g))
                self._host_moves(interval, updates + fetched, self._left_behind(use))
        self._before_norms(normed)

    def _before_norms(self, normed: int) -> None:
        """From each backward on that completes gradients: those and the later ones leave and are normed."""
        begin = max(i for i, s in enumerate(self.spans) if not s.backward) if self.order == "depth" else 0
        pushes: list[float] = []
        normed_bytes = 0
        reloads: Row = {}  # of operations that come after the next one
        for index in sorted((i for i in self.pushed if i > begin), reverse=True):
            block = self.work.blocks[self.spans[index].block]
            pushes += [n for _, n in block.grad_groups]
            normed_bytes += self._norm_bytes(self._last_given[index])
            interval = {normed: 1.0, self.spans[index].end: -1.0}
            self._host_moves(interval, sum(pushes) + normed_bytes, reloads)
            seconds, draw = self._beside("push_grad", pushes)
            self.program.at_least(interval, seconds + draw * self._seconds("norm", normed_bytes))
            if index + 1 < len(self.spans):
                reloads = total(reloads, self._offloaded_bytes(self.spans[index + 1].block))

    def _norm_bytes(self, groups: Iterable[int]) -> int:
        return sum(norm_bytes(self.work, self.mode, g) for g in groups)

    def _beside(self, kind: Kind, sizes: list[float]) -> tuple[float, float]:
        """Seconds of the large ones of some copies, and the share of host memory that each draws.

        Whatever runs beside an update or a norm, which draw all of it, is slowed by at least that share.
        """
        if not self.machine.shared_memory:
            return 0.0, 0.0
        rate = self.machine.host_bandwidth
        draws = [n / self._seconds(kind, n) / rate for n in sizes]
        least = min(1.0, 0.97 * max(draws, default=0.0))
        large = (self._seconds(kind, n) for n, d in zip(sizes, draws, strict=True) if d >= least)
        return sum(large), least

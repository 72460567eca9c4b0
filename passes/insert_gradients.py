"""Send gradients to the host and update the masters there.

Immediate updates (one micro-batch, no clipping): adam follows the last contribution to its gradient. A single
contribution streams through a small ring of host buffers. If the plan says "deferred", adam follows the
backward, and the gradient is kept. Deferred updates: gradients are kept per group, norms are taken as they
land, and adam runs after the backward in the order in which the next forward will want the groups. Either way
adam follows the last prefetch of its group: a step computes with the weights that it began with.

A gradient's memory is given back as late as the next operation allows: after the slots that are let go and
filled again in between, which need not wait until the gradient has left.

Rows of a gathered table that the step does not name have gradient zero. Their update, adam_rest, need not
wait for one: immediate ones follow the loss, behind the first backward, deferred ones come last, beside the
next step, whose gather brings the rows that it reads up to date.

Gradients of groups with state on the device stay there, in a buffer of their own if they wait for their
update, and adam runs on the compute stream. Where ranks share them, norms and updates come at the end:
before, compute would wait for the exchange of each gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacompile.blocks.weight_groups import SQUARED
from megacompile.passes.compute_order import known_losses
from megacompile.passes.keep_state import gradients_that_wait
from megacompile.schedule.op_table import (
    HostGrad,
    Kind,
    Loss,
    Master,
    Norm,
    OtherRows,
    PassingGrad,
    Resident,
    ResidentGrad,
    Ring,
    Scale,
    Token,
    WeightGrad,
)
from megacompile.schedule.plan import Mode, Plan, named_bytes, norm_bytes, updated_groups
from megacompile.schedule.step import Op, Step
from megacompile.schedule.workload import Workload


def insert_gradients(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Insert push_grad and its free after each backward, then norm, clip_scale and adam."""
    if mode.kind == "evaluate":
        return step
    inserter = _Inserter(step, work, plan, mode)
    for index, op in enumerate(step.ops):
        inserter.pass_by(index, op)
    inserter.finish()
    return step.with_(ops=tuple(inserter.ops))


class _Inserter:
    def __init__(self, step: Step, work: Workload, plan: Plan, mode: Mode) -> None:
        self.work = work
        self.plan = plan
        self.mode = mode
        self.ops: list[Op] = []
        self.frees: list[tuple[int, Op]] = []  # (backwards still to pass, free of a gradient)
        self.due: list[Op] = []  # frees that come after the slots that are let go and filled meanwhile
        self.left = {g: len(b) * mode.micro_batches for g, b in work.contributions.items()}
        self.pushes = 0
        self.fetched: dict[int, int] = {}  # last prefetch of each group
        last: dict[int, int] = {}  # last contribution to each group
        for index, op in enumerate(step.ops):
            if op.kind == "prefetch":
                self.fetched[op.group] = index
            elif op.kind == "backward":
                last.update(dict.fromkeys(work.given(op.block), index))
        self.resident = set(step.resident)
        self.waiting = gradients_that_wait(step.ops, work, mode) & self.resident
        self.kept: set[int] = set()  # groups whose adam waits for the end of the backward
        self.after_fetch: set[int] = set()  # groups whose adam waits for a prefetch after the last of them
        if not mode.keeps_gradients:
            self.kept = {g for g in last if plan.groups[g].update == "deferred"} - self.resident
            late = {g for g, i in last.items() if self.fetched.get(g, -1) > i}
            self.after_fetch = late - self.kept - self.resident
        named = {g: named_bytes(work, mode, g) for g in work.lookups if plan.groups[g].state == "host"}
        self.named = {g: nbytes for g, nbytes in named.items() if nbytes}
        self.last = set(self.named) if mode.keeps_gradients else self.kept & self.named.keys()
        self.rest = {g: work.groups[g].nbytes - nbytes for g, nbytes in self.named.items()}
        self.caught: dict[
            int, int
        ] = {}  # bytes of rows, as streamed, that a gather brings up to date, at most
        for group in self.last:
            gathered = [op.nbytes for op in step.ops if group in _tables(op)]
            self.caught[group] = min(max(gathered), self.rest[group] // len(gathered))
            self.rest[group] -= self.caught[group] * len(gathered)
        self.losses = known_losses(step, work) if self.named and not mode.keeps_gradients else []
        self.begun = False  # whether a backward came

    def pass_by(self, index: int, op: Op) -> None:
        if op.kind not in ("evict", "prefetch", "free_offloaded"):
            self.ops += self.due
            self.due = []
        if op.kind == "gather":
            update = sum(self._update_bytes(g, self.caught[g]) for g in _tables(op) & self.last)
            op = op.with_(moved_bytes=op.moved_bytes + update)
        elif index in self.losses:
            op = op.with_(writes=(*op.writes, Loss(op.micro)))
        self.ops.append(op)
        if op.kind == "backward":
            if not self.begun:  # behind it, as who issues operations waits for the loss there
                self.ops += [self._rest(g, Loss(0)) for g in sorted(self.named.keys() - self.last)]
            self.begun = True
            self.frees = [(lag - 1, free) for lag, free in self.frees]
            self.due += [free for lag, free in self.frees if lag <= 0]
            self.frees = [(lag, free) for lag, free in self.frees if lag > 0]
            for group, nbytes in self.work.blocks[op.block].grad_groups:
                if group in self.resident and self.work.ranks == 1:
                    self._accumulate(op, group, nbytes)
                else:
                    self._push(op, group, nbytes)
        elif op.group in self.after_fetch and index == self.fetched[op.group]:
            self.ops.append(self._adam(op.group, HostGrad(op.group)))

    def _push(self, op: Op, group: int, nbytes: int) -> None:
        """Push one gradient: of a group, or of gathered rows, which lands in all groups of their table."""
        table = self.work.gathered.get(op.block)
        homes: tuple[Token, ...] = tuple(HostGrad(g) for g in table) if table else (self._home(group),)
        self.pushes += isinstance(homes[0], Ring)
        token = WeightGrad(group, op.block, op.micro)
        kind: Kind = "push_rows" if table else "push_grad"
        added = self._added_bytes(table, nbytes) if table else 0
        push = Op(kind, "d2h", op.block, group, op.micro, reads=(token,), writes=homes, nbytes=nbytes,
                  moved_bytes=added)  # fmt: skip
        free = Op("free", "compute", op.block, group, op.micro, frees=(token,))
        self.ops.append(push)
        if self.plan.grad_lag:
            self.frees.append((self.plan.grad_lag, free))
        else:
            self.due.append(free)
        for landed, home in zip(table or (group,), homes, strict=True):
            self.left[landed] -= 1
            if not self.left[landed]:
                self._use(landed, home)

    def _added_bytes(self, table: tuple[int, ...], nbytes: int) -> int:
        """Bytes of host memory that adding a gradient of rows to those of its table moves: it is read, each
        row's sum is read and written, and a whole table is zeroed first."""
        moved, groups = nbytes, set(table)
        for group in groups:
            work, lookups = self.work.groups[group], len(self.work.contributions[group])
            alone = self.mode.kind == "train" and self.mode.micro_batches * lookups == 1
            whole = work.nbytes if alone else 4 * work.elements
            moved += 2 * nbytes * whole // work.nbytes // len(groups)
            if group not in self.named and self.left[group] == lookups * self.mode.micro_batches:
                moved += whole
        return moved

    def _use(self, group: int, home: Token) -> None:
        """Insert what follows the last contribution to a gradient that went to the host."""
        if group in self.resident:
            return
        if self.mode.kind == "train" and self.mode.keeps_gradients:
            self.ops.append(self._norm(group))
        elif not self.mode.keeps_gradients and group not in self.after_fetch | self.kept:
            self.ops.append(self._adam(group, home))

    def _accumulate(self, op: Op, group: int, nbytes: int) -> None:
        home = ResidentGrad(group) if group in self.waiting else PassingGrad(0)
        token = WeightGrad(group, op.block, op.micro)
        self.ops.append(
            Op("accumulate", "compute", op.block, group, op.micro, reads=(token,), writes=(home,),
               frees=(token,), nbytes=nbytes)
        )  # fmt: skip
        self.left[group] -= 1
        if self.left[group]:
            return
        if self.mode.kind == "train" and self.mode.keeps_gradients:
            self.ops.append(self._norm(group))
        elif isinstance(home, PassingGrad):
            self.ops.append(self._adam(group, home))

    def _home(self, group: int) -> Token:
        if group in self.resident:
            return ResidentGrad(group)
        shared = len(self.work.contributions[group]) > 1
        if self.mode.keeps_gradients or shared or group in self.after_fetch | self.kept:
            return HostGrad(group)
        return Ring(self.pushes % self.plan.ring)

    def finish(self) -> None:
        """Norms and updates that wait for the end of the backward; those of the host are issued first."""
        self.ops += self.due + [free for _, free in self.frees]
        groups = sorted(updated_groups(self.work, self.mode), key=lambda g: g in self.resident)
        if self.mode.kind == "update":
            self.ops += [self._norm(group) for group in reversed(groups)]
        elif self.mode.kind == "train" and self.mode.keeps_gradients and self.work.ranks > 1:
            self.ops += [self._norm(group) for group in reversed(groups) if group in self.resident]
        if self.mode.kind == "update" or (self.mode.kind == "train" and self.mode.keeps_gradients):
            self.ops += self._updates(groups)
        elif self.mode.kind == "train":
            waiting = self.kept | self.waiting
            self.ops += [self._adam(g, self._kept_home(g)) for g in groups if g in waiting]
        if self.mode.kind == "train":
            known = Scale() if self.mode.keeps_gradients else Loss(0)
            self.ops += [self._rest(group, known) for group in sorted(self.last)]

    def _kept_home(self, group: int) -> Token:
        return ResidentGrad(group) if group in self.resident else HostGrad(group)

    def _norm(self, group: int) -> Op:
        there, ranks = group in self.resident, self.work.ranks
        nbytes, squares = norm_bytes(self.work, self.mode, group), 0
        if there and ranks == 1:  # in FP32, as all gradients that wait on the device
            nbytes = 4 * self.work.groups[group].elements
        elif there:
            squares = 8 * min(SQUARED, nbytes // 4)
        return Op("norm", "compute" if there else "host", group=group, nbytes=nbytes, peak_bytes=squares,
                  reads=(self._kept_home(group),), writes=(Norm(group),))  # fmt: skip

    def _adam(self, group: int, home: Token, *extra: Token) -> Op:
        on_device = group in self.resident
        state: tuple[Token, ...] = (Resident(group) if on_device else Master(group),)
        nbytes = self.work.groups[group].update_bytes
        if group in self.named:
            state, nbytes = (*state, OtherRows(group)), self._update_bytes(group, self.named[group])
        return Op("adam", "compute" if on_device else "host", group=group, reads=(home, *extra),
                  writes=state, nbytes=nbytes, flops=self.work.groups[group].update_flops)  # fmt: skip

    def _rest(self, group: int, known: Token) -> Op:
        """The update of the rows that the step does not name; ``known`` tells that it updates at all."""
        nbytes = self._update_bytes(group, self.rest[group])
        return Op("adam_rest", "host", group=group, reads=(known,), writes=(OtherRows(group),), nbytes=nbytes)

    def _update_bytes(self, group: int, part: int) -> int:
        """Bytes that the update of a part of a group moves, given as weights are streamed."""
        work = self.work.groups[group]
        return work.update_bytes * part // work.nbytes

    def _updates(self, groups: list[int]) -> Iterator[Op]:
        """The clipping coefficient, then updates in the order of first use."""
        yield Op("clip_scale", "host", reads=tuple(Norm(g) for g in groups), writes=(Scale(),))
        for group in groups:
            yield self._adam(group, self._kept_home(group), Scale())


def _tables(op: Op) -> set[int]:
    """The weight groups of whose tables an operation gathers rows."""
    return {t.group for t in op.reads if isinstance(t, Master)} if op.kind == "gather" else set()

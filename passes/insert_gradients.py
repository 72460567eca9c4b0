"""Send gradients to the host and update the masters there.

Immediate updates (one micro-batch, no clipping): adam follows the last contribution to its gradient,
which streams through a small ring of host buffers where it is the only one; where the plan says
"late", it follows the backward, and the gradient is kept. Deferred updates:
gradients are kept per group, norms are taken as they land, and adam runs after the backward in the
order in which the next forward will want the groups. Either way adam follows the last prefetch of its
group: a step computes with the weights that it began with.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacompile.plan import Mode, Plan
from megacompile.step import Op, Step, Token
from megacompile.workload import Workload


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
        self.left = {g: len(b) * mode.micro_batches for g, b in work.contributions.items()}
        self.pushes = 0
        self.fetched: dict[int, int] = {}  # last prefetch of each group
        last: dict[int, int] = {}  # last contribution to each group
        for index, op in enumerate(step.ops):
            if op.kind == "prefetch":
                self.fetched[op.group] = index
            elif op.kind == "backward":
                last.update({g: index for g, _ in work.blocks[op.block].grad_groups})
        self.kept: set[int] = set()  # groups whose adam waits for the end of the backward
        self.late: set[int] = set()  # groups whose adam waits for a prefetch after the last of them
        if not mode.keeps_gradients:
            self.kept = {g for g in last if plan.groups[g].update == "late"}
            self.late = {g for g, i in last.items() if self.fetched.get(g, -1) > i} - self.kept

    def pass_by(self, index: int, op: Op) -> None:
        self.ops.append(op)
        if op.kind == "backward":
            self.frees = [(lag - 1, free) for lag, free in self.frees]
            self.ops += [free for lag, free in self.frees if lag <= 0]
            self.frees = [(lag, free) for lag, free in self.frees if lag > 0]
            for group, nbytes in self.work.blocks[op.block].grad_groups:
                self._push(op, group, nbytes)
        elif op.group in self.late and index == self.fetched[op.group]:
            self.ops.append(_adam(self.work, op.group, ("hgrad", op.group)))

    def _push(self, op: Op, group: int, nbytes: int) -> None:
        home = self._home(group)
        self.pushes += home[0] == "ring"
        token: Token = ("wg", group, op.block, op.micro)
        self.ops.append(
            Op("push_grad", "d2h", block=op.block, group=group, micro=op.micro,
               reads=(token,), writes=(home,), nbytes=nbytes)
        )  # fmt: skip
        free = Op("evict", "compute", frees=(token,))
        if self.plan.grad_lag:
            self.frees.append((self.plan.grad_lag, free))
        else:
            self.ops.append(free)
        self.left[group] -= 1
        if self.left[group]:
            return
        if self.mode.kind == "train" and self.mode.keeps_gradients:
            self.ops.append(_norm(self.work, group))
        elif not self.mode.keeps_gradients and group not in self.late | self.kept:
            self.ops.append(_adam(self.work, group, home))

    def _home(self, group: int) -> Token:
        shared = len(self.work.contributions[group]) > 1
        if self.mode.keeps_gradients or shared or group in self.late | self.kept:
            return ("hgrad", group)
        return ("ring", self.pushes % self.plan.ring)

    def finish(self) -> None:
        self.ops += [free for _, free in self.frees]
        groups = list(self.work.contributions)
        if self.mode.kind == "update":
            self.ops += [_norm(self.work, group) for group in reversed(groups)]
        if self.mode.kind == "update" or (self.mode.kind == "train" and self.mode.keeps_gradients):
            self.ops += _updates(self.work, groups)
        else:
            self.ops += [_adam(self.work, g, ("hgrad", g)) for g in groups if g in self.kept]


def _norm(work: Workload, group: int) -> Op:
    return Op("norm", "host", group=group, reads=(("hgrad", group),), writes=(("norm", group),),
              nbytes=work.groups[group].elements * 4)  # fmt: skip


def _adam(work: Workload, group: int, home: Token, *extra: Token) -> Op:
    return Op("adam", "host", group=group, reads=(home, *extra), writes=(("master", group),),
              nbytes=work.groups[group].elements * 28)  # fmt: skip


def _updates(work: Workload, groups: list[int]) -> Iterator[Op]:
    """The clipping coefficient, then updates in the order of first use."""
    yield Op("clip_scale", "host", reads=tuple(("norm", g) for g in groups),
             writes=(("scale",),))  # fmt: skip
    for group in groups:
        yield _adam(work, group, ("hgrad", group), ("scale",))

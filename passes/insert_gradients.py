"""Send gradients to the host and update the masters there.

Immediate updates (one contribution, no clipping): adam follows its gradient through a small ring of
host buffers. Deferred updates: gradients are kept per group, norms are taken as they land, and adam
runs after the backward in the order in which the next forward will want the groups.
"""

from __future__ import annotations

from megacompile.plan import Mode, Plan
from megacompile.step import Op, Step, Token
from megacompile.workload import Workload


def insert_gradients(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Insert push_grad and its free after each backward, then norm, clip_scale and adam."""
    if mode.kind == "evaluate":
        return step
    ops: list[Op] = []
    left = _contributions_left(work, mode)
    pending: list[tuple[int, Op]] = []  # (compute operations still to pass, free of a gradient)
    pushes = 0
    for op in step.ops:
        ops.append(op)
        if op.kind == "backward":
            pending = [(lag - 1, free) for lag, free in pending]
            ops += [free for lag, free in pending if lag <= 0]
            pending = [(lag, free) for lag, free in pending if lag > 0]
            for group, nbytes in work.blocks[op.block].grad_groups:
                home = _home(work, plan, mode, group, pushes)
                pushes += home[0] == "ring"
                token: Token = ("wg", group, op.block, op.micro)
                ops.append(
                    Op("push_grad", "d2h", block=op.block, group=group, micro=op.micro,
                       reads=(token,), writes=(home,), nbytes=nbytes)
                )  # fmt: skip
                free = Op("evict", "compute", frees=(token,))
                if plan.grad_lag:
                    pending.append((plan.grad_lag, free))
                else:
                    ops.append(free)
                left[group] -= 1
                if left[group] == 0 and not mode.keeps_gradients:
                    ops.append(_adam(work, group, home))
    ops += [free for _, free in pending]
    if mode.kind == "update" or (mode.kind == "train" and mode.keeps_gradients):
        ops += _deferred(work, mode)
    return step.with_(ops=tuple(ops))


def _contributions_left(work: Workload, mode: Mode) -> dict[int, int]:
    return {g: len(blocks) * mode.micro_batches for g, blocks in work.contributions.items()}


def _home(work: Workload, plan: Plan, mode: Mode, group: int, pushes: int) -> Token:
    if mode.keeps_gradients or len(work.contributions[group]) > 1:
        return ("hgrad", group)
    return ("ring", pushes % plan.ring)


def _adam(work: Workload, group: int, home: Token, *extra: Token) -> Op:
    return Op("adam", "host", group=group, reads=(home, *extra), writes=(("master", group),),
              nbytes=work.groups[group].elements * 28)  # fmt: skip


def _deferred(work: Workload, mode: Mode) -> list[Op]:
    """Norms in landing order, the clipping coefficient, then updates in the order of first use."""
    ops: list[Op] = []
    groups = list(work.contributions)
    for group in reversed(groups):
        ops.append(Op("norm", "host", group=group, reads=(("hgrad", group),),
                      writes=(("norm", group),), nbytes=work.groups[group].elements * 4))  # fmt: skip
    ops.append(Op("clip_scale", "host", reads=tuple(("norm", g) for g in groups),
                  writes=(("scale",),)))  # fmt: skip
    ops += [_adam(work, group, ("hgrad", group), ("scale",)) for group in groups]
    return ops

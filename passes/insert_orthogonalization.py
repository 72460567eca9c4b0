"""Insert the device's orthogonalization of matrix updates, between two passes of the host over their state.

In the place of an update of a group with such matrices come its stages: the host's momentum leaves the
updates, in bf16, where the gradients were; they go to the device, are made orthogonal there, and come back to
the same buffer; what was an update by gradients is one by these.

Compute would wait for the host if all stages of a group came at once. So each update of the step, of a group
without matrices too, is a turn: the stages of a group are spread over a few, and while one is made
orthogonal, the next one's updates come and the last one's leave. Updates stay in their order. A group keeps
its buffer, of the ring or of the host window, until its last stage: no more turns later than there are
others.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacompile.schedule.op_table import Direction, HostGrad, Ring, Update
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step
from megacompile.schedule.workload import Workload

_TURNS = 3  # between a group's momentum and its last stage, at most


def insert_orthogonalization(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Replace adam of groups with matrices by its stages, and move all adams so many turns later."""
    updates = [op for op in step.ops if op.kind == "adam"]
    if not any(work.groups[op.group].matrices for op in updates):
        return step
    late = _TURNS
    if any(isinstance(op.reads[0], Ring) for op in updates):
        late = min(late, plan.ring - 1)
    if any(plan.groups[op.group].state.startswith("nvme") for op in updates):
        late = min(late, plan.window - 1)
    ops: list[Op] = []
    turn = 0
    for op in step.ops:
        if op.kind != "adam":
            ops.append(op)
            continue
        ops += _turn(updates, turn, late, work)
        turn += 1
        if turn == len(updates):
            for last in range(turn, turn + late + 2):
                ops += _turn(updates, last, late, work)
    sizes = {g: matrices.nbytes for g, group in enumerate(work.groups) if (matrices := group.matrices)}
    tokens = {token(g): n for g, n in sizes.items() for token in (Update, Direction)}
    return step.with_(ops=tuple(ops), token_bytes=step.token_bytes | tokens)


def _turn(updates: list[Op], turn: int, late: int, work: Workload) -> Iterator[Op]:
    """The stages that a turn has: the first of one update, later ones of those before."""
    behind = min(1, late)

    def at(distance: int, kind: str) -> Iterator[Op]:
        if 0 <= turn - distance < len(updates):
            op = updates[turn - distance]
            if work.groups[op.group].matrices or kind == "adam":
                yield _stage(kind, op, work)

    yield from at(0, "momentum")
    yield from at(0, "load_update")
    yield from at(behind, "orthogonalize")
    yield from at(behind, "push_update")
    yield from at(2 * behind, "free_update")
    yield from at(late, "adam")


def _stage(kind: str, adam: Op, work: Workload) -> Op:
    g, home = adam.group, adam.reads[0]
    matrices = work.groups[g].matrices
    if matrices is None:
        return adam
    assert isinstance(home, HostGrad | Ring), "their state is on the host"
    call, nbytes = matrices.call, matrices.nbytes
    match kind:
        case "momentum":
            return Op("momentum", "host", group=g, reads=adam.reads, writes=(*adam.writes, home),
                      nbytes=matrices.momentum_bytes)  # fmt: skip
        case "load_update":
            return Op("load_update", "h2d", group=g, reads=(home,), writes=(Update(g),), nbytes=nbytes)
        case "orthogonalize":
            return Op("orthogonalize", "compute", group=g, reads=(Update(g),), writes=(Direction(g),),
                      donates=(Update(g),), nbytes=nbytes, peak_bytes=call.peak_bytes, flops=call.flops,
                      moved_bytes=call.moved_bytes, launches=call.launches)  # fmt: skip
        case "push_update":
            return Op("push_update", "d2h", group=g, reads=(Direction(g),), writes=(home,), nbytes=nbytes)
        case "free_update":
            return Op("free_update", "compute", group=g, frees=(Direction(g),))
    return adam.with_(nbytes=adam.nbytes - matrices.momentum_bytes)

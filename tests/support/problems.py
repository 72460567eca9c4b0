"""Made-up scheduling problems: a readable chain, and hypothesis strategies for anything else.

The numbers of a random workload are consistent with each other, as those of a measured model are: what
a function leaves behind is what it returns less what it was given to consume, and it never peaks below
that.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from hypothesis import strategies as st

from megacompile.hardware.machine import Machine
from megacompile.passes import lower
from megacompile.schedule.plan import BlockPlan, GroupPlan, Mode, Plan
from megacompile.schedule.step import Op, Step
from megacompile.schedule.workload import (
    BlockWork,
    Call,
    CheckpointPolicy,
    GroupWork,
    MatrixUpdates,
    ValueWork,
    Workload,
)

LOSS_BYTES = 4


def chain(blocks: int, *, tied: bool = False, frozen: frozenset[int] = frozenset()) -> Workload:
    """Equal blocks in a row, each with its own weight group; ``tied`` gives the last the first's."""
    values = [ValueWork(64, False, True)] + [ValueWork(100, True)] * (blocks - 1)
    values.append(ValueWork(LOSS_BYTES, True))
    owner = [0 if tied and b == blocks - 1 else b for b in range(blocks)]
    groups = [GroupWork(f"layers.{g}", 1000, 250, g not in frozen, 2000, 1000) for g in range(max(owner) + 1)]
    works = []
    for b in range(blocks):
        out, g = values[b + 1].nbytes, owner[b]
        tangents = () if b == blocks - 1 else (b + 1,)
        grads = () if b == 0 else (b,)
        grad_groups = () if g in frozen else ((g, 1000),)
        returned = sum(values[v].nbytes for v in grads) + 1000 * len(grad_groups)
        end = returned - 300 - sum(values[v].nbytes for v in tangents)
        back = Call((b,), (g,), max(0, end) + 50, end, 2000, 2000)
        keep = Call((b,), (g,), out + 350, out + 300, 1000, 1000)
        plain = Call((b,), (g,), out + 50, out, 1000, 1000)
        again = Call((b,), (g,), 350, 300, 1000, 1000)
        policies = (
            CheckpointPolicy("all", keep, None, back, 300),
            CheckpointPolicy("none", plain, again, back, 300),
        )
        works.append(BlockWork(f"layers.{b}", 0, (b + 1,), tangents, grads, grad_groups, policies))
    return Workload(tuple(works), tuple(values), tuple(groups), loss=blocks)


def uniform(
    work: Workload,
    checkpoint: str = "none",
    *,
    saved_on: str = "device",
    residency: str = "stream",
    prefetch_depth: int = 2,
    state: str = "host",
    **whole: object,
) -> Plan:
    """The same decision for every block and every weight group."""
    return Plan(
        blocks=tuple(BlockPlan(checkpoint, saved_on) for _ in work.blocks),  # type: ignore[arg-type]
        groups=tuple(GroupPlan(residency, prefetch_depth, state) for _ in work.groups),  # type: ignore[arg-type]
        **whole,  # type: ignore[arg-type]
    )


def find(step: Step, kind: str, *, nth: int = 0, **fields: object) -> int:
    """Index of the nth operation of that kind whose fields are as given."""
    return [
        i
        for i, op in enumerate(step.ops)
        if op.kind == kind and all(getattr(op, k) == v for k, v in fields.items())
    ][nth]


def with_op(step: Step, index: int, *replacement: Op) -> Step:
    """The step with one operation replaced by none, one or several others."""
    return step.with_(ops=(*step.ops[:index], *replacement, *step.ops[index + 1 :]))


MODES = [
    Mode("train"),
    Mode("train", deferred=True),
    Mode("train", micro_batches=2),
    Mode("train", micro_batches=3, deferred=True),
    Mode("accumulate"),
    Mode("update"),
    Mode("evaluate"),
]
modes = st.sampled_from(MODES)
# Each is made once: making and checking strategies anew took half the time of the tests that draw from them.
integers = functools.cache(st.integers)
booleans = st.booleans()
sizes = integers(1, 2000)
costs = integers(0, 5000)
saved_bytes = st.one_of(st.just(0), sizes)
sides = st.tuples(integers(1, 20), integers(20, 40))


@functools.cache
def some_of(numbers: tuple[int, ...], most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(numbers), unique=True, max_size=most)


@functools.cache
def some_below(count: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, count - 1), unique=True, max_size=most)


block_plans = st.builds(
    BlockPlan,
    checkpoint=st.sampled_from(["all", "some", "narrow", "attention", "none", "least"]),
    saved_on=st.sampled_from(["device", "host", "nvme"]),
    reload=integers(0, 4),
    free_after=integers(1, 4),
)
group_plans, matrix_plans = (
    st.builds(
        GroupPlan,
        residency=st.sampled_from(["stream", "micro", "step"]),
        prefetch_depth=integers(0, 4),
        state=st.sampled_from(["host", "host", "nvme", "nvme-all", *more]),
        update=st.sampled_from(["immediate", "deferred"]),
    )
    for more in (["device"], [])
)
orders = st.sampled_from(["depth", "breadth"])


@st.composite
def workloads(draw: st.DrawFn, max_blocks: int = 5) -> Workload:
    """Any dataflow that a partition may produce: skips, shared and frozen groups, detached uses."""
    count = draw(integers(1, max_blocks))
    groups = [
        GroupWork(f"group.{g}", draw(sizes), draw(sizes), draw(integers(0, 3)) > 0, draw(sizes), draw(sizes))
        for g in range(draw(integers(1, count + 1)))
    ]
    values = [ValueWork(draw(sizes), False, True) for _ in range(draw(integers(1, 2)))]
    blocks = []
    for index in range(count):
        blocks.append(_block(draw, index, last=index == count - 1, values=values, groups=groups))
    return Workload(
        tuple(blocks),
        tuple(values),
        tuple(groups),
        loss=len(values) - 1,
        constant_bytes=draw(integers(0, 100)),
    )


@st.composite
def with_matrices(draw: st.DrawFn, work: Workload) -> Workload:
    """A workload of which Muon updates matrices of some groups."""
    groups = (_with_matrices(draw, g) if g.trainable and draw(booleans) else g for g in work.groups)
    return replace(work, groups=tuple(groups))


def _with_matrices(draw: st.DrawFn, group: GroupWork) -> GroupWork:
    """The group with some matrices that Muon updates."""
    matrices = MatrixUpdates(tuple(draw(st.lists(sides, min_size=1, max_size=3))), 5, draw(sizes))
    return replace(group, update_moved=matrices.momentum_bytes + draw(sizes), matrices=matrices)


def _block(
    draw: st.DrawFn, index: int, *, last: bool, values: list[ValueWork], groups: list[GroupWork]
) -> BlockWork:
    older = draw(some_below(len(values), 2))
    reads = tuple(dict.fromkeys([len(values) - 1, *older]))
    uses = draw(some_below(len(groups), 3))
    given = tuple(g for g in uses if groups[g].trainable and draw(integers(0, 4)) > 0)
    grads = tuple(v for v in reads if values[v].requires_grad)
    trained = bool(given or grads)
    outputs = tuple(range(len(values), len(values) + (1 if last else draw(integers(1, 2)))))
    for _ in outputs:
        values.append(ValueWork(LOSS_BYTES if last else draw(sizes), trained))
    tangents = () if last or not trained else outputs
    weights = {g: draw(sizes) for g in given}
    subset = some_of(tuple(sorted({*reads, *outputs})), 2)
    shape = _Shape(
        draw=draw,
        reads=reads,
        uses=tuple(uses),
        back_reads=tuple(draw(subset)),
        back_uses=tuple(g for g in uses if draw(booleans)),
        out=sum(values[v].nbytes for v in outputs),
        gained=sum(values[v].nbytes for v in grads) + sum(weights.values()),
        given=sum(values[v].nbytes for v in tangents) + LOSS_BYTES * (last and trained),
    )
    return BlockWork(
        name=f"block.{index}",
        template=index,
        outputs=outputs,
        tangents=tangents,
        grad_values=grads if trained else (),
        grad_groups=tuple(weights.items()),
        policies=shape.policies(trained),
    )


class _Shape:
    """What all policies of one random block have in common."""

    def __init__(
        self,
        *,
        draw: st.DrawFn,
        reads: tuple[int, ...],
        uses: tuple[int, ...],
        back_reads: tuple[int, ...],
        back_uses: tuple[int, ...],
        out: int,
        gained: int,
        given: int,
    ) -> None:
        self.draw, self.reads, self.uses = draw, reads, uses
        self.back_reads, self.back_uses = back_reads, back_uses
        self.out, self.gained, self.given = out, gained, given

    def policies(self, trained: bool) -> tuple[CheckpointPolicy, ...]:
        """Keeping less never saves work: a recompute comes on top, and "some" derives the rest."""
        forward, extra = self.draw(costs), 0
        plain = self.call(self.reads, self.uses, self.out, forward)
        if not trained:
            return tuple(CheckpointPolicy(n, plain, None, None, 0) for n in ("all", "some", "none", "least"))
        backward = self.draw(costs)
        found = []
        for keep, again in (("all", "none"), ("some", "least")):
            if keep == "some":
                if self.draw(booleans):
                    break
                extra = self.draw(costs)
            saved = self.draw(saved_bytes)
            end = self.gained - self.given - saved
            back = self.call(self.back_reads, self.back_uses, end, backward + extra)
            full = self.call(self.reads, self.uses, self.out + saved, forward)
            found.append(CheckpointPolicy(keep, full, None, back, saved))
            free = saved == 0 and self.draw(booleans)
            recompute = None if free else self.call(self.reads, self.uses, saved, self.draw(costs))
            found.append(CheckpointPolicy(again, plain, recompute, back, saved))
        return tuple(found)

    def call(self, reads: tuple[int, ...], uses: tuple[int, ...], end: int, work: int) -> Call:
        return Call(reads, uses, max(0, end) + self.draw(integers(0, 500)), end, work, work)


@st.composite
def plans(draw: st.DrawFn, work: Workload) -> Plan:
    """Any plan for a workload, sensible or not."""
    return Plan(
        blocks=tuple(draw(block_plans) for _ in work.blocks),
        groups=tuple(draw(matrix_plans if g.matrices else group_plans) for g in work.groups),
        order=draw(orders),
        grad_lag=draw(integers(0, 3)),
        ring=draw(integers(1, 3)),
        window=draw(integers(1, 3)),
    )


@st.composite
def scheduled(
    draw: st.DrawFn,
    max_blocks: int = 5,
    modes: st.SearchStrategy[Mode] = modes,
    *,
    matrices: bool = False,
) -> tuple[Workload, Plan, Mode, Step]:
    """A random workload, a plan and a mode, with the step that they lower to; of some groups Muon updates
    ``matrices``."""
    work = draw(workloads(max_blocks))
    if matrices:
        work = draw(with_matrices(work))
    plan, mode = draw(plans(work)), draw(modes)
    return work, plan, mode, lower(work, plan, mode)


rates = st.integers(1, 1000).map(float)
delays = st.sampled_from([0.0, 1.0])


@st.composite
def machines(draw: st.DrawFn, *, shared_cores: bool = False) -> Machine:
    return Machine(
        "made up", draw(rates), draw(rates), draw(rates), draw(rates), draw(rates),
        launch_seconds=draw(delays),
        copy_seconds=draw(delays),
        shared_cores=shared_cores,
        nvme_read_bandwidth=draw(rates),
        nvme_write_bandwidth=draw(rates),
    )  # fmt: skip

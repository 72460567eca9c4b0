"""Each pass alone, on a chain that a person can follow, and the order that the passes declare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacompile import passes
from megacompile.passes import PASSES, lower
from megacompile.schedule.emit import statement
from megacompile.schedule.op_table import Disk, Saved, Spill, Value, ValueGrad, WeightGrad, Weights
from megacompile.schedule.plan import BlockPlan, GroupPlan, Mode, Plan
from megacompile.schedule.step import Event, Op, Step, kept_gradients, memory_curve, peak_bytes
from megacompile.schedule.verify import verify
from megacompile.schedule.workload import GroupWork, MatrixUpdates, Workload
from tests.support.problems import chain, find, uniform

TRAIN, DEFERRED = Mode("train"), Mode("train", deferred=True)
CHAIN = chain(3)


def run(names: str, work: Workload, plan: Plan, mode: Mode = TRAIN) -> Step:
    """The step after the named passes only, in their order."""
    step = Step((), {}, mode.micro_batches)
    for item in PASSES:
        if item.name in names.split():
            step = item.run(step, work=work, plan=plan, mode=mode)
    return step


def shown(step: Step) -> list[str]:
    """Statements of a step, without ``rt.``, micro-batch 0, and what the blocks keep."""
    text = [statement(op).removeprefix("rt.") for op in step.ops]
    for noise in (", micro=0", ', checkpoint="all"', ', checkpoint="none"', ", offset=OFFSETS[0]"):
        text = [line.replace(noise, "") for line in text]
    return text


def test_compute_order_depth() -> None:
    assert shown(run("compute_order", CHAIN, uniform(CHAIN))) == [
        "load(value=0)",
        "forward(block=0)",
        "forward(block=1)",
        "forward(block=2)",
        "backward(block=2)",
        "backward(block=1)",
        "backward(block=0)",
    ]


def test_compute_order_breadth_takes_all_micro_batches_through_a_block() -> None:
    work = chain(2)
    step = run("compute_order", work, uniform(work, order="breadth"), Mode("train", 2))
    assert shown(step) == [
        "load(value=0)",
        "load(value=0, micro=1)",
        "forward(block=0)",
        "forward(block=0, micro=1)",
        "forward(block=1)",
        "forward(block=1, micro=1)",
        "backward(block=1)",
        "backward(block=1, micro=1)",
        "backward(block=0)",
        "backward(block=0, micro=1)",
    ]


def test_compute_order_of_evaluation_and_update() -> None:
    evaluation = shown(run("compute_order", CHAIN, uniform(CHAIN, "all"), Mode("evaluate")))
    forwards = [f"forward(block={b})" for b in range(3)]
    assert evaluation == ["load(value=0)", *forwards, "copy_result(value=3)"]
    assert run("compute_order", CHAIN, uniform(CHAIN), Mode("update")).ops == ()


def test_compute_order_tells_what_each_operation_consumes() -> None:
    step = run("compute_order", CHAIN, uniform(CHAIN, "all"))
    backward = step.ops[find(step, "backward", block=1)]
    assert backward.reads == (Value(1, 0), Weights(1), ValueGrad(2, 0), Saved(1, 0))
    assert backward.donates == (ValueGrad(2, 0), Saved(1, 0))
    assert backward.writes == (ValueGrad(1, 0), WeightGrad(1, 1, 0))
    assert step.token_bytes["saved", 1, 0] == 300
    assert step.ops[find(step, "backward", block=0)].writes == (WeightGrad(0, 0, 0),)


def test_a_gradient_that_nobody_made_is_zeros_that_the_backward_makes() -> None:
    """Block 0's second output is never read, so its tangent takes memory inside the backward."""
    block = replace(CHAIN.blocks[0], outputs=(1, 4), tangents=(1, 4))
    work = replace(
        CHAIN,
        blocks=(block, *CHAIN.blocks[1:]),
        values=(*CHAIN.values, replace(CHAIN.values[1], nbytes=77)),
    )
    plan = uniform(work, "all")
    plain, more = (run("compute_order", w, plan) for w in (CHAIN, work))
    old, new = (s.ops[find(s, "backward", block=0)] for s in (plain, more))
    assert new.donates == old.donates
    assert (new.peak_bytes, new.end_bytes) == (old.peak_bytes + 77, old.end_bytes + 77)


def test_insert_recompute_only_where_a_block_keeps_nothing() -> None:
    plan = replace(uniform(CHAIN, "all"), blocks=tuple(map(BlockPlan, ["none", "all", "none"])))
    step = run("compute_order insert_recompute", CHAIN, plan)
    assert shown(step)[4:] == [
        "recompute(block=2)",
        "backward(block=2)",
        "backward(block=1)",
        "recompute(block=0)",
        "backward(block=0)",
    ]
    assert step.ops[find(step, "recompute", block=0)].writes == (Saved(0, 0),)


def test_saved_tensors_of_no_bytes_stay_until_their_backward() -> None:
    block = CHAIN.blocks[1]
    empty = tuple(replace(c, saved_bytes=0) for c in block.policies)
    blocks = (CHAIN.blocks[0], replace(block, policies=empty), CHAIN.blocks[2])
    step = lower(replace(CHAIN, blocks=blocks), uniform(CHAIN), TRAIN)
    assert step.ops[find(step, "recompute", block=1)].frees == ()
    assert ("saved", 1, 0) in step.ops[find(step, "backward", block=1)].donates


def test_insert_offload_goes_with_the_next_block_and_returns_one_ahead() -> None:
    work = chain(4)
    step = run("compute_order insert_recompute insert_offload", work, uniform(work, "all", saved_on="host"))
    first, second = '[("saved", 0, 0)]', '[("x", 1, 0), ("saved", 1, 0)]'  # the batch itself stays
    assert shown(step) == [
        "load(value=0)",
        "forward(block=0)",
        f"offload(block=0, saved={first})",
        "forward(block=1)",
        f"free_offloaded(block=0, saved={first})",
        f"offload(block=1, saved={second})",
        "forward(block=2)",
        f"free_offloaded(block=1, saved={second})",
        "forward(block=3)",
        "backward(block=3)",
        f"reload(block=1, saved={second})",
        "backward(block=2)",
        f"reload(block=0, saved={first})",
        "backward(block=1)",
        "backward(block=0)",
    ]


def test_insert_offload_returns_just_in_time_where_the_plan_says_so() -> None:
    work, plan = chain(4), uniform(chain(4), "all", saved_on="host")
    plan = replace(plan, blocks=tuple(replace(block, reload=0) for block in plan.blocks))
    lines = shown(run("compute_order insert_recompute insert_offload", work, plan))
    for block in (0, 1):
        assert lines[lines.index(f"backward(block={block})") - 1].startswith(f"reload(block={block},")


def test_insert_offload_takes_as_many_operations_as_the_plan_says() -> None:
    """The last blocks, which would be back as soon as they were gone, stay."""
    work, plan = chain(6), uniform(chain(6), "all", saved_on="host")
    plan = replace(plan, blocks=tuple(replace(block, reload=2, free_after=3) for block in plan.blocks))
    step = run("compute_order insert_recompute insert_offload", work, plan)
    assert [op.block for op in step.ops if op.kind == "offload"] == [0, 1, 2]
    lines = [line.split(",")[0].split(")")[0] for line in shown(step)]
    for block in (0, 1, 2):
        away, freed, back = (
            lines.index(f"{kind}(block={block}") for kind in ("offload", "free_offloaded", "reload")
        )
        assert sum(line.startswith("forward") for line in lines[away:freed]) == 3
        between = lines[back : lines.index(f"backward(block={block}")]
        assert sum(line.startswith("backward") for line in between) == 2


def test_insert_offload_leaves_what_other_blocks_read_again() -> None:
    """Block 3 reads value 1 too: it is no longer block 1's own."""
    work = chain(5)
    calls = work.blocks[3].policies[0]
    reading = replace(
        calls,
        forward=replace(calls.forward, reads=(3, 1)),
        backward=calls.backward and replace(calls.backward, reads=(3, 1)),
    )
    block = replace(work.blocks[3], policies=(reading, work.blocks[3].policies[1]))
    work = replace(work, blocks=(*work.blocks[:3], block, work.blocks[4]))
    step = run("compute_order insert_offload", work, uniform(work, "all", saved_on="host"))
    assert step.ops[find(step, "offload", block=1)].reads == (Saved(1, 0),)
    assert step.ops[find(step, "offload", block=0)].reads == (Saved(0, 0),)


def test_insert_offload_follows_each_blocks_plan() -> None:
    plan = uniform(chain(4), "all", saved_on="host")
    plan = replace(plan, blocks=(plan.blocks[0], *(BlockPlan("all"),) * 3))
    step = run("compute_order insert_offload", chain(4), plan)
    assert [op.block for op in step.ops if op.kind == "offload"] == [0]


def test_insert_prefetch_one_ahead() -> None:
    step = run("compute_order insert_recompute insert_prefetch", CHAIN, uniform(CHAIN, prefetch_depth=1))
    assert shown(step) == [
        "load(value=0)",
        "prefetch(group=0)",
        "prefetch(group=1)",
        "forward(block=0)",
        "evict(group=0)",
        "prefetch(group=2)",
        "forward(block=1)",
        "evict(group=1)",
        "forward(block=2)",
        "recompute(block=2)",
        "prefetch(group=1)",
        "backward(block=2)",
        "evict(group=2)",
        "recompute(block=1)",
        "prefetch(group=0)",
        "backward(block=1)",
        "evict(group=1)",
        "recompute(block=0)",
        "backward(block=0)",
        "evict(group=0)",
    ]


def test_insert_prefetch_for_the_whole_step() -> None:
    step = run(
        "compute_order insert_prefetch", CHAIN, uniform(CHAIN, "all", residency="step", prefetch_depth=0)
    )
    assert shown(step) == [
        "load(value=0)",
        "prefetch(group=0)",
        "forward(block=0)",
        "prefetch(group=1)",
        "forward(block=1)",
        "prefetch(group=2)",
        "forward(block=2)",
        "backward(block=2)",
        "evict(group=2)",
        "backward(block=1)",
        "evict(group=1)",
        "backward(block=0)",
        "evict(group=0)",
    ]


def test_insert_prefetch_from_a_micro_batchs_forward_to_its_backward() -> None:
    """Depth first a group comes once per micro-batch, breadth first once for all of them."""
    counts = {}
    for order in ("depth", "breadth"):
        plan = uniform(CHAIN, "all", residency="micro", prefetch_depth=0, order=order)
        step = run("compute_order insert_prefetch", CHAIN, plan, Mode("train", 3))
        counts[order] = [op.group for op in step.ops if op.kind == "prefetch"]
    assert counts["depth"] == [0, 1, 2, 1, 2, 1, 2]  # group 0 is needed again at once
    assert counts["breadth"] == [0, 1, 2]


def test_insert_prefetch_per_group() -> None:
    plan = replace(
        uniform(CHAIN, "all"),
        groups=(GroupPlan("step", 0), GroupPlan("stream", 0), GroupPlan("stream", 4)),
    )
    step = run("compute_order insert_prefetch", CHAIN, plan)
    assert [line for line in shown(step) if "prefetch" in line or "evict" in line] == [
        "prefetch(group=0)",
        "prefetch(group=2)",
        "prefetch(group=1)",
        "evict(group=1)",
        "evict(group=2)",
        "prefetch(group=1)",
        "evict(group=1)",
        "evict(group=0)",
    ]


def test_insert_gradients_immediate() -> None:
    step = run("compute_order insert_gradients", CHAIN, uniform(CHAIN, "all"))
    assert shown(step)[4:] == [
        "backward(block=2)",
        'push_grad(group=2, block=2, to=("ring", 0))',
        'adam(group=2, grad=("ring", 0))',
        "backward(block=1)",
        'push_grad(group=1, block=1, to=("ring", 1))',
        'adam(group=1, grad=("ring", 1))',
        'free([("wg", 2, 2, 0)])',
        "backward(block=0)",
        'push_grad(group=0, block=0, to=("ring", 0))',
        'adam(group=0, grad=("ring", 0))',
        'free([("wg", 1, 1, 0)])',
        'free([("wg", 0, 0, 0)])',
    ]


def test_insert_gradients_deferred() -> None:
    plan = uniform(CHAIN, "all", grad_lag=0)
    step = run("compute_order insert_gradients", CHAIN, plan, Mode("train", deferred=True))
    assert shown(step)[4:] == [
        "backward(block=2)",
        'push_grad(group=2, block=2, to=("hgrad", 2))',
        "norm(group=2)",
        'free([("wg", 2, 2, 0)])',
        "backward(block=1)",
        'push_grad(group=1, block=1, to=("hgrad", 1))',
        "norm(group=1)",
        'free([("wg", 1, 1, 0)])',
        "backward(block=0)",
        'push_grad(group=0, block=0, to=("hgrad", 0))',
        "norm(group=0)",
        'free([("wg", 0, 0, 0)])',
        "clip_scale()",
        'adam(group=0, grad=("hgrad", 0))',
        'adam(group=1, grad=("hgrad", 1))',
        'adam(group=2, grad=("hgrad", 2))',
    ]


def test_insert_gradients_of_a_shared_group_meet_on_the_host() -> None:
    """The tied group's adam waits for the first block, and its contributions pass no ring."""
    work = chain(3, tied=True)
    step = run("compute_order insert_gradients", work, uniform(work, "all", grad_lag=0))
    assert [line for line in shown(step)[4:] if "free" not in line] == [
        "backward(block=2)",
        'push_grad(group=0, block=2, to=("hgrad", 0))',
        "backward(block=1)",
        'push_grad(group=1, block=1, to=("ring", 0))',
        'adam(group=1, grad=("ring", 0))',
        "backward(block=0)",
        'push_grad(group=0, block=0, to=("hgrad", 0))',
        'adam(group=0, grad=("hgrad", 0))',
    ]


def test_insert_gradients_accumulated_and_applied_in_two_programs() -> None:
    plan = uniform(CHAIN, "all", grad_lag=0)
    gathered = shown(run("compute_order insert_gradients", CHAIN, plan, Mode("accumulate")))
    assert not [line for line in gathered if line.startswith(("adam", "norm", "clip"))]
    assert shown(run("compute_order insert_gradients", CHAIN, plan, Mode("update"))) == [
        "norm(group=2)",
        "norm(group=1)",
        "norm(group=0)",
        "clip_scale()",
        'adam(group=0, grad=("hgrad", 0))',
        'adam(group=1, grad=("hgrad", 1))',
        'adam(group=2, grad=("hgrad", 2))',
    ]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_norms_read_gradients_as_they_wait_on_the_host(micro_batches: int, tied: bool) -> None:
    work = chain(3, tied=tied)
    work = replace(work, groups=tuple(replace(g, elements=500) for g in work.groups))  # as in bf16
    step = lower(work, uniform(work), Mode("train", micro_batches, deferred=True))
    own = kept_gradients(step)
    assert any(own.values()) == (micro_batches == 1)
    found = {op.group: op.nbytes for op in step.ops if op.kind == "norm"}
    assert found == {g: 1000 if own[g] else 2000 for g in range(len(work.groups))}


def test_insert_gradients_leaves_frozen_groups_alone() -> None:
    work = chain(3, frozen=frozenset({1}))
    step = run("compute_order insert_gradients", work, uniform(work, "all"))
    assert [op.group for op in step.ops if op.kind in ("push_grad", "adam")] == [2, 2, 0, 0]


def test_gradients_may_take_longer_to_leave() -> None:
    step = run("compute_order insert_gradients", CHAIN, uniform(CHAIN, "all", grad_lag=2))
    lines = shown(step)
    frees = [lines.index(f'free([("wg", {g}, {g}, 0)])') for g in (2, 1, 0)]
    assert lines.index("backward(block=0)") < frees[0] < frees[1] < frees[2]


def test_a_slot_is_filled_again_while_the_gradient_leaves() -> None:
    step = run(
        "compute_order insert_prefetch insert_gradients",
        CHAIN,
        uniform(CHAIN, "all", prefetch_depth=0, grad_lag=0),
    )
    lines = shown(step)
    free = lines.index('free([("wg", 2, 2, 0)])')
    assert [line.split("(")[0] for line in lines[free - 2 : free + 2]] == [
        "evict",
        "prefetch",
        "free",
        "backward",
    ]


def with_matrices(work: Workload, groups: tuple[int, ...]) -> Workload:
    matrices = MatrixUpdates(((10, 20), (5, 10)), 5, 900)
    changed = {g: replace(work.groups[g], update_moved=2000, matrices=matrices) for g in groups}
    return replace(work, groups=tuple(changed.get(g, group) for g, group in enumerate(work.groups)))


def test_insert_orthogonalization_overlaps_the_stages_of_updates() -> None:
    """One update is made orthogonal while the next one's comes, and the last one's leaves."""
    work = with_matrices(CHAIN, (0, 1))
    plan = uniform(CHAIN, "all")
    step = run("compute_order insert_gradients insert_orthogonalization", work, plan, DEFERRED)
    stages = [op for op in step.ops if op.group >= 0 and op.kind not in ("push_grad", "free", "norm")]
    assert [(op.kind, op.group) for op in stages] == [
        ("momentum", 0),
        ("load_update", 0),
        ("momentum", 1),
        ("load_update", 1),
        ("orthogonalize", 0),
        ("push_update", 0),
        ("orthogonalize", 1),
        ("push_update", 1),
        ("free_update", 0),
        ("free_update", 1),
        ("adam", 0),
        ("adam", 1),
        ("adam", 2),
    ]
    nbytes = {op.kind: op.nbytes for op in stages if op.group == 0}
    assert nbytes == {"momentum": 900, "adam": 1100, "free_update": 0} | dict.fromkeys(
        ("load_update", "orthogonalize", "push_update"), 500
    )
    (first, _) = (op for op in stages if op.kind == "orthogonalize")
    assert first.peak_bytes == 2 * 10 * 20 + 2 * 10 * 10  # beside the update itself, which goes
    assert first.flops == sum(20 * m * m * n + 10 * m**3 for m, n in ((10, 20), (5, 10)))
    assert kept_gradients(step) == {0: True, 1: True, 2: True}


@pytest.mark.parametrize(("ring", "between"), [(1, 0), (2, 1), (4, 3), (9, 3)])
def test_updates_wait_no_longer_than_the_ring_has_buffers(ring: int, between: int) -> None:
    work = with_matrices(chain(8), tuple(range(8)))
    step = lower(work, uniform(work, "all", ring=ring), TRAIN)
    verify(step, work, mode=TRAIN)
    kinds = [(op.kind, op.group) for op in step.ops if op.kind in ("momentum", "adam")]
    first = kinds[: kinds.index(("adam", 7))]
    assert sum(kind == "momentum" for kind, _ in first) == 1 + between


def test_a_step_without_matrices_stays_as_it_is() -> None:
    names = "compute_order insert_gradients"
    plain = run(names, CHAIN, uniform(CHAIN))
    assert run(f"{names} insert_orthogonalization", CHAIN, uniform(CHAIN)) == plain


def buffer_of(op: Op) -> int:
    assert isinstance(op.buffer, Spill)
    return op.buffer.slot


def test_insert_offloaded_io_passes_them_through_two_buffers() -> None:
    """A read starts when its buffer has done its duty; what a drive moves is whole pages."""
    work = chain(5)
    plan = uniform(work, "all", saved_on="nvme", window=2)
    step = run("compute_order insert_recompute insert_offload insert_offloaded_io", work, plan)
    moves = [op for op in step.ops if op.kind in ("offload", "write_offloaded", "read_offloaded", "reload")]
    assert [(op.kind, op.block, buffer_of(op)) for op in moves] == [
        ("offload", 0, 0),
        ("write_offloaded", 0, 0),
        ("offload", 1, 1),
        ("write_offloaded", 1, 1),
        ("offload", 2, 0),
        ("write_offloaded", 2, 0),
        ("read_offloaded", 2, 1),
        ("read_offloaded", 1, 0),
        ("reload", 2, 1),
        ("read_offloaded", 0, 1),
        ("reload", 1, 0),
        ("reload", 0, 1),
    ]
    assert {op.nbytes for op in step.ops if op.kind in ("read_offloaded", "write_offloaded")} == {4096}


def test_insert_state_io_passes_state_through_two_buffers() -> None:
    """A read starts when the buffer that it fills has been written back."""
    plan = uniform(CHAIN, "all", state="nvme", prefetch_depth=0)
    step = run("compute_order insert_prefetch insert_gradients insert_state_io", CHAIN, plan)
    start = shown(step).index("backward(block=2)")
    assert [line for line in shown(step)[start - 2 :] if line.startswith(("read", "adam", "write"))] == [
        "read_state(group=2, slot=0)",
        "read_state(group=1, slot=1)",
        'adam(group=2, grad=("ring", 0), slot=0)',
        "write(group=2, slot=0)",
        "read_state(group=0, slot=0)",
        'adam(group=1, grad=("ring", 1), slot=1)',
        "write(group=1, slot=1)",
        'adam(group=0, grad=("ring", 0), slot=0)',
        "write(group=0, slot=0)",
    ]
    assert {op.nbytes for op in step.ops if op.kind in ("read_state", "write")} == {2000}


def test_insert_state_io_stages_weights_and_does_not_read_twice_what_is_still_there() -> None:
    plan = uniform(CHAIN, "all", state="nvme-all", prefetch_depth=0)
    step = run("compute_order insert_prefetch insert_state_io", CHAIN, plan)
    assert [line for line in shown(step) if line.startswith(("read", "prefetch"))] == [
        "read_weights(group=0, slot=0)",
        "read_weights(group=1, slot=1)",
        "prefetch(group=0, slot=0)",
        "read_weights(group=2, slot=0)",
        "prefetch(group=1, slot=1)",
        "prefetch(group=2, slot=0)",
        "prefetch(group=1, slot=1)",  # on the way back, too
        "read_weights(group=0, slot=1)",
        "prefetch(group=0, slot=1)",
    ]


def test_insert_state_io_moves_weights_with_the_state_that_they_belong_to() -> None:
    plan = uniform(CHAIN, "all", state="nvme-all")
    step = lower(CHAIN, plan, TRAIN)
    write = step.ops[find(step, "write", group=1)]
    assert write.writes == (Disk(1, 0), Disk(1, 1)) and write.nbytes == 3000
    assert ("master", 1) not in {t for op in step.ops for t in (*op.reads, *op.writes)}


def test_insert_state_io_leaves_frozen_groups_where_they_are_and_reads_their_weights() -> None:
    work = chain(3, frozen=frozenset({1}))
    step = lower(work, uniform(work, "all", state="nvme-all"), TRAIN)
    assert {op.group for op in step.ops if op.kind == "write"} == {0, 2}
    assert {op.group for op in step.ops if op.kind == "read_weights"} == {0, 1, 2}


def test_insert_frees_after_the_last_use() -> None:
    step = run("compute_order insert_gradients insert_frees", CHAIN, uniform(CHAIN, "all"))
    assert [line for line in shown(step) if "free=" in line] == [
        'forward(block=2, free=[("x", 3, 0)])',
        'backward(block=2, free=[("x", 2, 0)])',
        'backward(block=1, free=[("x", 1, 0)])',
        'backward(block=0, free=[("x", 0, 0)])',
    ]


def slots(work: Workload, plan: Plan) -> tuple[list[int], int]:
    step = run("compute_order insert_prefetch assign_slots", work, plan)
    return [op.offset for op in step.ops if op.kind == "prefetch"], step.slab_bytes


def test_assign_slots_uses_as_many_slots_as_stays_overlap() -> None:
    work = chain(5)
    assert slots(work, uniform(work, "all", prefetch_depth=0)) == ([0] * 9, 1024)
    assert slots(work, uniform(work, "all", prefetch_depth=1))[1] == 2 * 1024
    assert slots(work, uniform(work, "all", prefetch_depth=2))[1] == 3 * 1024
    assert slots(work, uniform(work, "all", residency="step"))[1] == 5 * 1024


def test_assign_slots_fits_small_stays_into_the_gaps_that_large_ones_leave() -> None:
    work = chain(4)
    sizes = [512, 2048, 512, 2048]
    groups = tuple(GroupWork(f"g{i}", n, 1) for i, n in enumerate(sizes))
    offsets, slab = slots(replace(work, groups=groups), uniform(work, "all", prefetch_depth=1))
    assert slab == 2048 + 512
    assert set(offsets) == {0, 2048}


def test_assign_slots_sizes_the_ring_for_the_largest_gradient_that_passes() -> None:
    groups = tuple(GroupWork(f"g{i}", 1000 * (i + 1), 1) for i in range(3))
    step = lower(replace(CHAIN, groups=groups), uniform(CHAIN, "all"), TRAIN)
    assert step.ring == (3000, 2000)


def test_synchronize_waits_for_what_is_needed_and_no_more() -> None:
    work = chain(2)
    step = lower(work, uniform(work, "all", prefetch_depth=0, grad_lag=0, ring=1), TRAIN)
    assert [(op.event, op.waits) for op in step.ops if op.waits] == [
        (("prefetch", 0), (("adam", 0), ("evict", 0))),  # both of the step before
        (("forward", 0, 0), (("prefetch", 0),)),
        (("prefetch", 1), (("evict", 0),)),  # its adam came before that of group 0
        (("forward", 1, 0), (("prefetch", 1),)),
        (("push_grad", 1, 1, 0), (("backward", 1, 0),)),  # backward 1 finds its weights there
        (("adam", 1), (("push_grad", 1, 1, 0),)),
        (("prefetch", 0), (("evict", 1),)),  # while the gradient leaves
        (("free", 1, 1, 0), (("push_grad", 1, 1, 0),)),
        (("backward", 0, 0), (("prefetch", 0),)),
        (("push_grad", 0, 0, 0), (("backward", 0, 0), ("adam", 1))),  # the ring has one buffer
        (("adam", 0), (("push_grad", 0, 0, 0),)),
        (("free", 0, 0, 0), (("push_grad", 0, 0, 0),)),
    ]


def all_waits() -> list[tuple[Event, ...]]:
    """Of many schedules, in which several waits often reach equally far."""
    steps = [
        lower(work, uniform(work, "all", saved_on=saved_on, ring=1, grad_lag=lag), TRAIN)
        for work in (chain(3), chain(6, tied=True))
        for saved_on in ("device", "host")
        for lag in (1, 2)
    ]
    return [op.waits for step in steps for op in step.ops]


def test_every_pass_finds_what_it_requires() -> None:
    done: set[str] = set()
    for item in PASSES:
        assert item.requires <= done, item.name
        assert item.provides and not item.provides & done, item.name
        done |= item.provides
    assert lower(CHAIN, uniform(CHAIN), TRAIN).done == done


@pytest.mark.parametrize("late", [p.name for p in PASSES[:-1]])
def test_a_pass_that_comes_too_late_is_noticed(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [p for p in PASSES if p.name != late]
    moved = next(p for p in PASSES if p.name == late)
    monkeypatch.setattr(passes, "PASSES", (*others, moved))
    with pytest.raises(AssertionError, match=r"runs before .* are provided"):
        lower(CHAIN, uniform(CHAIN), TRAIN)


def test_memory_curve_of_a_chain() -> None:
    """Slab 1024 and, forward by forward, what is kept; backward, what is given back."""
    work = chain(2)
    step = lower(work, uniform(work, "all", prefetch_depth=0, grad_lag=0), TRAIN)
    points = [(step.ops[i].kind, b - 1024) for i, b in memory_curve(step) if step.ops[i].nbytes == 0]
    batch, saved, x = 64, 300, 100
    before = batch + x + saved + saved  # the loss is freed at once
    assert points == [
        ("forward", batch + x + saved + 50),
        ("forward", batch + x + saved + 4 + saved + 50),
        ("backward", before + (x + 1000 - saved) + 50),
        ("free", batch + x + saved + x + 1000 - x),
        ("backward", batch + saved + x + (1000 - saved - x) + 50),
        ("free", batch + 1000 - batch),
    ]
    assert peak_bytes(step) == 1024 + max(b for _, b in points)


def test_memory_of_a_sum_of_gradients_holds_both_and_the_result() -> None:
    sizes = {ValueGrad(1, 0): 100, Value(0, 0): 7}
    first = Op("backward", "compute", block=2, writes=(ValueGrad(1, 0),), peak_bytes=100, end_bytes=100)
    second = first.with_(block=1)
    last = Op("backward", "compute", reads=(ValueGrad(1, 0),), donates=(ValueGrad(1, 0),), end_bytes=-100)
    step = Step((first, second, last), sizes, 1, constant_bytes=5)
    assert [b for _, b in memory_curve(step)] == [5 + 100, 5 + 300, 5 + 100]


def test_memory_that_is_consumed_is_not_counted_beside_what_replaces_it() -> None:
    """A backward that turns 300 saved bytes into 300 of gradients and measured a peak of 20."""
    sizes = {Saved(0, 0): 300, WeightGrad(0, 0, 0): 300}
    forward = Op("forward", "compute", block=0, writes=(Saved(0, 0),), peak_bytes=300)
    backward = Op("backward", "compute", block=0, reads=(Saved(0, 0),),
                  donates=(Saved(0, 0),), writes=(WeightGrad(0, 0, 0),), peak_bytes=20)  # fmt: skip
    free = Op("free", "compute", frees=(WeightGrad(0, 0, 0),))
    assert peak_bytes(Step((forward, backward, free), sizes, 1)) == 320

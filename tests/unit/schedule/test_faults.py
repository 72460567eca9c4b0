"""Planted faults: a good schedule with one thing wrong, and what verify says about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacompile.errors import ScheduleError
from megacompile.passes import lower
from megacompile.passes.synchronize import synchronize
from megacompile.schedule.op_table import (
    HostGrad,
    Loss,
    Master,
    Result,
    Ring,
    Scale,
    Spill,
    Staged,
    Value,
    WeightGrad,
)
from megacompile.schedule.plan import Mode
from megacompile.schedule.step import Event, Op, Step, peak_bytes
from megacompile.schedule.verify import verify
from megacompile.schedule.workload import (
    BlockWork,
    Call,
    CheckpointPolicy,
    GroupWork,
    MatrixUpdates,
    ValueWork,
    Workload,
)
from tests.support.problems import chain, find, uniform, with_op

WORK = chain(5)
IMMEDIATE = lower(WORK, uniform(WORK), Mode("train"))
DEFERRED = lower(WORK, uniform(WORK), Mode("train", deferred=True))
OFFLOADED = lower(WORK, uniform(WORK, "all", saved_on="host"), Mode("train"))
HELD = lower(WORK, uniform(WORK, "all", saved_on="host", residency="step"), Mode("train"))
TIED_WORK = chain(4, tied=True)
TIED = lower(TIED_WORK, uniform(TIED_WORK), Mode("train"))


def refuse(step: Step, work: Workload, *words: str) -> None:
    """verify rejects the step with a message in which all words appear."""
    with pytest.raises(ScheduleError) as caught:
        verify(step, work)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def without_wait(step: Step, index: int, event: Event) -> Step:
    op = step.ops[index]
    assert event in op.waits, op.waits
    return with_op(step, index, op.with_(waits=tuple(e for e in op.waits if e != event)))


def moved(step: Step, index: int, to: int) -> Step:
    """The operation at ``index`` issued right before the one that now stands at ``to``."""
    ops = list(step.ops)
    op = ops.pop(index)
    ops.insert(to - (index < to), op)
    return step.with_(ops=tuple(ops))


def waiting_again(step: Step) -> Step:
    """The step with new waits for its new order: no race is left, only what is wrong in itself."""
    bare = step.with_(ops=tuple(op.with_(waits=()) for op in step.ops))
    return synchronize(bare, work=WORK, plan=uniform(WORK), mode=Mode("train"))


def reading_from(step: Step, index: int, buffer: type[Staged] | type[Spill]) -> Step:
    """The operation reads the other one of two buffers."""
    op = step.ops[index]
    return waiting_again(with_op(step, index, op.with_(reads=(buffer(1 - op.reads[0][1]),))))


@pytest.mark.parametrize("step", [IMMEDIATE, DEFERRED, OFFLOADED])
def test_the_schedules_are_good_before_anything_is_planted(step: Step) -> None:
    assert verify(step, WORK).operations == len(step.ops)


def test_proof_says_what_was_proven() -> None:
    proof = verify(IMMEDIATE, WORK)
    assert proof.ordered_pairs > len(IMMEDIATE.ops)
    assert "in every order" in str(proof)


LEFT_OUT = {
    "use before its prefetch": (
        IMMEDIATE, {"kind": "forward", "block": 2}, ("prefetch", 2),
        ("forward of block 2", "before prefetch of group 2", "a wait is missing")),
    "backward before its reload": (
        OFFLOADED, {"kind": "backward", "block": 1}, ("reload", 1, 0),
        ("backward of block 1", "before reload of block 1")),
    "slot taken before the evict is reached": (
        IMMEDIATE, {"kind": "prefetch", "group": 3}, ("evict", 0),
        ("prefetch of group 3", "slot that evict of group 0")),
    "gradient pushed before the backward is over": (
        IMMEDIATE, {"kind": "push_grad", "group": 4}, ("backward", 4, 0),
        ("push_grad of group 4", "before backward of block 4")),
    "free while the gradient still leaves": (
        IMMEDIATE, {"kind": "free", "frees": (WeightGrad(3, 3, 0),)}, ("push_grad", 3, 3, 0),
        ("free of group 3 of block 3 (compute)", "while push_grad of group 3 of block 3")),
    "free while the offload still leaves": (
        OFFLOADED, {"kind": "free_offloaded", "block": 0}, ("offload", 0, 0),
        ("free_offloaded of block 0", "while offload of block 0")),
    "reload into bytes that are not yet given back": (
        HELD, {"kind": "reload", "block": 1}, ("free", 4, 4, 0),
        ("reload of block 1", "may take device memory before free")),
    "adam before its gradient": (
        IMMEDIATE, {"kind": "adam", "group": 2}, ("push_grad", 2, 2, 0),
        ("adam of group 2", "before push_grad of group 2")),
    "adam that races the prefetch of the next step": (
        IMMEDIATE, {"kind": "prefetch", "group": 0}, ("adam", 0),
        ("prefetch of group 0", "before adam of group 0 (host) is over")),
    "ring buffer reused while adam reads it": (
        IMMEDIATE, {"kind": "push_grad", "group": 2}, ("adam", 4),
        ("push_grad of group 2", "('ring', 0) while adam of group 4")),
}  # fmt: skip


@pytest.mark.parametrize("fault", LEFT_OUT)
def test_a_wait_left_out(fault: str) -> None:
    step, operation, event, words = LEFT_OUT[fault]
    refuse(without_wait(step, find(step, **operation), event), WORK, *words)


def test_wait_for_what_nothing_records() -> None:
    op = IMMEDIATE.ops[0]
    bad = with_op(IMMEDIATE, 0, op.with_(waits=(("reload", 7, 0),)))
    refuse(bad, WORK, "load", "('reload', 7, 0), which nothing records")


@pytest.mark.parametrize(("held", "group", "beyond"), [(0, 1, 999), (1, 3, -999)], ids=["end", "begin"])
def test_slot_of_a_group_that_is_still_there(held: int, group: int, beyond: int) -> None:
    """The last byte of the slot, or its first, by one that begins before it."""
    first, index = (
        IMMEDIATE.ops[find(IMMEDIATE, "prefetch", group=held)],
        find(IMMEDIATE, "prefetch", group=group),
    )
    bad = with_op(IMMEDIATE, index, IMMEDIATE.ops[index].with_(offset=first.offset + beyond))
    refuse(bad, WORK, f"prefetch of group {group}", f"slot that group {held} still holds")


def test_slot_outside_the_slab() -> None:
    index = find(IMMEDIATE, "prefetch", group=1)
    offset = IMMEDIATE.slab_bytes - 1
    bad = with_op(IMMEDIATE, index, IMMEDIATE.ops[index].with_(offset=offset))
    refuse(bad, WORK, "prefetch of group 1", "outside the slab")


def test_ring_buffer_overwritten_before_adam_was_issued() -> None:
    push, adam = find(IMMEDIATE, "push_grad", group=3), find(IMMEDIATE, "adam", group=3)
    bad = IMMEDIATE
    bad = with_op(bad, push, bad.ops[push].with_(writes=(Ring(0),)))
    bad = with_op(bad, adam, bad.ops[adam].with_(reads=(Ring(0),)))
    bad = waiting_again(moved(bad, find(bad, "adam", group=4), adam))
    refuse(bad, WORK, "push_grad of group 3", "push_grad of group 4", "left for adam")


def test_adam_that_reads_another_groups_gradient() -> None:
    index = find(IMMEDIATE, "adam", group=3)
    bad = with_op(IMMEDIATE, index, IMMEDIATE.ops[index].with_(reads=(Ring(0),)))
    bad = waiting_again(bad)
    refuse(bad, WORK, "adam of group 3", "0 of 1 contributions")


def test_use_after_evict() -> None:
    bad = moved(IMMEDIATE, find(IMMEDIATE, "evict", group=1), find(IMMEDIATE, "forward", block=1))
    bad = waiting_again(bad)
    refuse(bad, WORK, "forward of block 1", "('w', 1) after evict of group 1")


def test_use_after_free() -> None:
    index = find(OFFLOADED, "reload", block=2)
    bad = waiting_again(with_op(OFFLOADED, index))
    refuse(bad, WORK, "backward of block 2", "after free_offloaded of block 2")


def test_use_of_what_was_never_brought() -> None:
    bad = waiting_again(with_op(DEFERRED, find(DEFERRED, "norm", group=1)))
    refuse(bad, WORK, "clip_scale", "('norm', 1), which nothing has written")


def test_missing_evict() -> None:
    keep = lower(WORK, uniform(WORK, residency="step"), Mode("train"))
    bad = waiting_again(with_op(keep, find(keep, "evict", group=4)))
    refuse(bad, WORK, "prefetch of group 4", "was not evicted")


def test_missing_free_of_a_gradient() -> None:
    index = find(IMMEDIATE, "free", frees=(WeightGrad(3, 3, 0),))
    refuse(with_op(IMMEDIATE, index), WORK, "('wg', 3, 3, 0)", "a missing evict")


def test_missing_free_of_an_activation() -> None:
    index = find(IMMEDIATE, "backward", block=3)
    bad = with_op(IMMEDIATE, index, IMMEDIATE.ops[index].with_(frees=()))
    refuse(bad, WORK, "('x', 3, 0)", "forward of block 2", "a missing evict")


def test_missing_free_after_an_offload() -> None:
    bad = with_op(OFFLOADED, find(OFFLOADED, "free_offloaded", block=0))
    refuse(bad, WORK, "reload of block 0", "a missing evict")


def test_double_free() -> None:
    index = find(IMMEDIATE, "free", frees=(WeightGrad(3, 3, 0),))
    free = IMMEDIATE.ops[index]
    refuse(
        with_op(IMMEDIATE, index, free, free),
        WORK,
        "free of group 3",
        "('wg', 3, 3, 0) after free of group 3",
    )


def test_free_outside_the_compute_stream() -> None:
    index = find(IMMEDIATE, "free", frees=(WeightGrad(3, 3, 0),))
    bad = with_op(IMMEDIATE, index, IMMEDIATE.ops[index].with_(stream="d2h"))
    refuse(bad, WORK, "free of group 3 of block 3 (d2h)", "outside the compute stream")


def test_adam_before_the_last_contribution_to_a_shared_weight() -> None:
    first = find(TIED, "push_grad", group=0, block=3)
    bad = waiting_again(moved(TIED, find(TIED, "adam", group=0), first + 1))
    refuse(bad, TIED_WORK, "adam of group 0", "1 of 2 contributions")


def test_adam_that_waits_for_one_contribution_only() -> None:
    index = find(TIED, "adam", group=0)
    bad = without_wait(TIED, index, ("push_grad", 0, 0, 0))
    refuse(bad, TIED_WORK, "adam of group 0", "before push_grad of group 0 of block 0")


def test_norm_before_the_last_contribution() -> None:
    step = lower(TIED_WORK, uniform(TIED_WORK), Mode("train", deferred=True))
    bad = moved(step, find(step, "norm", group=0), find(step, "push_grad", group=0, block=0))
    bad = waiting_again(bad)
    refuse(bad, TIED_WORK, "norm of group 0", "1 of 2 contributions")


def test_adam_before_the_clipping_coefficient() -> None:
    bad = moved(DEFERRED, find(DEFERRED, "adam", group=0), find(DEFERRED, "clip_scale"))
    bad = waiting_again(bad)
    refuse(bad, WORK, "adam of group 0", "('scale',), which nothing has written")


def test_missing_adam() -> None:
    bad = waiting_again(with_op(DEFERRED, find(DEFERRED, "adam", group=4)))
    refuse(bad, WORK, "Groups [4] get gradients and are never updated")


def test_update_of_weights_that_the_step_fetches_again() -> None:
    """Block 0 uses the group without a gradient; its backward must see the old weights."""
    work = detached_use()
    step = lower(work, uniform(work, prefetch_depth=0), Mode("train"))
    verify(step, work)
    adam = find(step, "adam", group=0)
    assert adam > find(step, "prefetch", group=0, nth=-1)
    bad = waiting_again(moved(step, adam, find(step, "push_grad", group=0) + 1))
    refuse(bad, work, "prefetch of group 0", "this step has updated already")


def detached_use() -> Workload:
    """Blocks 0 and 2 use group 0; block 0 detaches it, and trains group 1."""
    plain = chain(3)

    def block(b: int, uses: tuple[int, ...], given: tuple[int, ...]) -> BlockWork:
        old = plain.blocks[b]
        policies = tuple(
            CheckpointPolicy(
                c.name, *(_uses(call, uses) for call in (c.forward, c.recompute, c.backward)), 300
            )
            for c in old.policies
        )
        return replace(old, grad_groups=tuple((g, 1000) for g in given), policies=policies)

    return replace(
        plain,
        blocks=(block(0, (0, 1), (1,)), block(1, (2,), (2,)), block(2, (0,), (0,))),
        groups=tuple(GroupWork(f"g{i}", 1000, 250) for i in range(3)),
        values=(ValueWork(64, False, True), *plain.values[1:]),
    )


def _uses(call: Call | None, groups: tuple[int, ...]) -> Call | None:
    return call and replace(call, groups=groups)


STORED = lower(WORK, uniform(WORK, state="nvme-all", prefetch_depth=0), Mode("train"))


def test_the_schedule_over_nvme_is_good() -> None:
    assert verify(STORED, WORK).operations == len(STORED.ops)


def test_adam_before_its_state_was_read() -> None:
    step = lower(WORK, uniform(WORK, state="nvme"), Mode("train"))
    bad = without_wait(step, find(step, "adam", group=2), ("read_state", 2))
    refuse(bad, WORK, "adam of group 2", "before read_state of group 2")


def test_buffer_filled_again_before_it_was_written_back() -> None:
    bad = without_wait(STORED, find(STORED, "read_state", group=2), ("write", 4))
    refuse(bad, WORK, "read_state of group 2 (nvme_read)", "('window', 0) while adam of group 4")


def test_read_that_overtakes_the_write_of_the_step_before() -> None:
    index = find(STORED, "read_weights", group=0)
    bad = without_wait(STORED, index, ("write", 0))
    refuse(bad, WORK, "read_weights of group 0", "('disk', 0, 0) before write of group 0")


def test_missing_write() -> None:
    bad = waiting_again(with_op(STORED, find(STORED, "write", group=0)))
    refuse(bad, WORK, "adam of group 0", "never written: write is missing")


def test_missing_read() -> None:
    bad = waiting_again(with_op(STORED, find(STORED, "read_state", group=2)))
    refuse(bad, WORK, "adam of group 2 (host) finds in ('window', 0) what write of group 4")


def test_update_that_is_overwritten_in_the_window() -> None:
    bad = moved(STORED, find(STORED, "write", group=4), find(STORED, "read_state", group=2) + 1)
    refuse(waiting_again(bad), WORK, "read_state of group 2", "overwrites what adam of group 4")


def test_prefetch_out_of_a_buffer_that_holds_another_group() -> None:
    bad = reading_from(STORED, find(STORED, "prefetch", group=3), Staged)
    refuse(bad, WORK, "prefetch of group 3", "finds in", "what read_weights of group")


def test_weights_read_after_their_update() -> None:
    again = STORED.ops[find(STORED, "read_weights", group=0)]
    bad = waiting_again(with_op(STORED, len(STORED.ops) - 1, STORED.ops[-1], again))
    refuse(bad, WORK, "read_weights of group 0", "this step has updated already")


SPILLED = lower(WORK, uniform(WORK, "all", saved_on="nvme", window=2), Mode("train"))


def test_the_schedule_that_offloads_to_nvme_is_good() -> None:
    assert (
        [op.kind for op in SPILLED.ops].count("write_offloaded")
        == [op.kind for op in SPILLED.ops].count("reload")
        == 3
    )
    assert verify(SPILLED, WORK).operations == len(SPILLED.ops)


def test_offload_that_overwrites_one_on_its_way_to_the_drive() -> None:
    bad = without_wait(SPILLED, find(SPILLED, "offload", block=2), ("write_offloaded", 0, 0))
    refuse(bad, WORK, "offload of block 2", "('spill', 0) while write_offloaded of block 0")


def test_offload_read_before_it_was_written() -> None:
    index = find(SPILLED, "read_offloaded", block=2)
    bad = without_wait(SPILLED, index, ("write_offloaded", 2, 0))
    refuse(bad, WORK, "read_offloaded of block 2", "before write_offloaded of block 2")


def test_reload_out_of_a_buffer_that_holds_another_offload() -> None:
    bad = reading_from(SPILLED, find(SPILLED, "reload", block=1), Spill)
    refuse(bad, WORK, "reload of block 1", "finds in", "what read_offloaded of block")


def test_offload_that_is_never_written() -> None:
    bad = waiting_again(with_op(SPILLED, find(SPILLED, "write_offloaded", block=0)))
    refuse(bad, WORK, "read_offloaded of block 0", "('offloaded', 0, 0), which nothing has written")


def test_offload_that_is_overwritten_in_its_buffer() -> None:
    write, read = find(SPILLED, "write_offloaded", block=0), find(SPILLED, "read_offloaded", block=0)
    bad = moved(SPILLED, write, find(SPILLED, "write_offloaded", block=2))
    assert write < read
    refuse(waiting_again(bad), WORK, "offload of block 2", "overwrites what offload of block 0")


def test_offload_that_is_read_and_not_taken() -> None:
    bad = waiting_again(with_op(SPILLED, find(SPILLED, "reload", block=0)))
    with pytest.raises(ScheduleError):
        verify(bad, WORK)


@pytest.mark.parametrize("step", [IMMEDIATE, DEFERRED, OFFLOADED])
def test_budget_exceeded_by_one_byte(step: Step) -> None:
    verify(step, WORK, budget_bytes=peak_bytes(step))
    with pytest.raises(ScheduleError, match=r"of block \d+.* holds up to \d+ device bytes"):
        verify(step, WORK, budget_bytes=peak_bytes(step) - 1)


def test_budget_counts_a_gradient_that_leaves_later() -> None:
    """The same operations with the free of a gradient at the end hold more, and verify sees it."""
    index = find(IMMEDIATE, "free", frees=(WeightGrad(4, 4, 0),))
    late = moved(IMMEDIATE, index, len(IMMEDIATE.ops))
    verify(late, WORK)
    with pytest.raises(ScheduleError, match="holds up to"):
        verify(late, WORK, budget_bytes=peak_bytes(IMMEDIATE))


def test_nothing_is_said_about_an_operation_that_is_alone() -> None:
    only = Step((Op("adam", "host", group=0, reads=(HostGrad(0),)),), {}, 1)
    assert verify(only, WORK).ordered_pairs == 0


def looked_up() -> Workload:
    """A chain whose first block is given rows of two pieces of a table, which its last block reads too."""
    chained = chain(4)
    values = (ValueWork(64, True, True, rows=(0, 3)), *chained.values[1:])
    first, *rest = chained.blocks
    back = Call((), (), 64 - 100 + 50, 64 - 100, 0, 10)
    copies = CheckpointPolicy("all", Call((0,), (), 150, 100, 0, 10), None, back, 0)
    first = replace(
        first, tangents=(1,), grad_groups=((0, 64),), policies=(copies, replace(copies, name="none"))
    )

    def reads_both(call: Call) -> Call:
        return replace(call, groups=(0, 3))

    last = rest[-1]
    policies = tuple(
        replace(
            c, forward=reads_both(c.forward), recompute=c.recompute and reads_both(c.recompute),
            backward=c.backward and reads_both(c.backward),
        )
        for c in last.policies
    )  # fmt: skip
    given = ((0, 500), (3, 500))
    blocks = (first, *rest[:-1], replace(last, grad_groups=given, policies=policies))
    return replace(chained, blocks=blocks, values=values)


def named_by_a_batch() -> Workload:
    """A chain whose first block is given rows of a table that nothing else reads, of three in ten rows."""
    work = looked_up()
    table, *groups = work.groups
    table = replace(table, nbytes=500, elements=250, state_bytes=2500)  # bf16, moments in FP32
    values = (replace(work.values[0], rows=(0,)), *work.values[1:])
    blocks = (replace(work.blocks[0], grad_groups=((0, 150),)), *chain(4).blocks[1:])
    return replace(work, groups=(table, *groups), values=values, blocks=blocks)


NAMED_WORK = named_by_a_batch()
NAMED = {
    deferred: lower(NAMED_WORK, uniform(NAMED_WORK), Mode("train", 1, deferred)) for deferred in (False, True)
}


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("deferred", [False, True])
def test_the_rest_of_a_table_waits_for_the_loss_or_for_the_norms(deferred: bool, micro: int) -> None:
    step = lower(NAMED_WORK, uniform(NAMED_WORK), Mode("train", micro, deferred))
    verify(step, NAMED_WORK)
    rest, named = (step.ops[find(step, kind, group=0)] for kind in ("adam_rest", "adam"))
    late = deferred or micro > 1
    assert rest.reads == ((Scale(),) if late else (Loss(0),))
    assert (step.ops.index(rest) > step.ops.index(named)) is late
    if late:
        assert step.ops[-1] == rest
        assert step.ops[find(step, "gather")].waits == (("adam", 0),)
    else:
        assert step.ops[find(step, "backward") + 1] == rest
        assert rest.waits == (("forward", 3, 0),)
    whole = NAMED_WORK.groups[0].update_bytes
    caught = step.ops[find(step, "gather")].moved_bytes - 2 * NAMED_WORK.values[0].nbytes
    assert named.nbytes == whole * 150 * micro // 500
    assert named.nbytes + rest.nbytes + micro * caught == pytest.approx(whole, abs=3)
    assert (caught > 0) is late


@pytest.mark.parametrize("deferred", [False, True])
def test_an_update_of_named_rows_without_that_of_the_rest(deferred: bool) -> None:
    step = NAMED[deferred]
    bad = waiting_again(with_op(step, find(step, "adam_rest")))
    refuse(bad, NAMED_WORK, "adam of group 0", "adam_rest is missing")


def test_the_rest_of_a_table_updated_twice() -> None:
    step, index = NAMED[True], find(NAMED[True], "adam_rest")
    bad = waiting_again(with_op(step, index, step.ops[index], step.ops[index]))
    refuse(bad, NAMED_WORK, "adam_rest of group 0", "is to come once")


def test_the_rest_of_a_table_updated_before_it_is_known_whether_the_step_updates() -> None:
    index = find(NAMED[True], "adam_rest")
    bad = with_op(NAMED[True], index, NAMED[True].ops[index].with_(reads=()))
    refuse(bad, NAMED_WORK, "adam_rest of group 0", "before it is known")
    index = find(NAMED[False], "adam_rest")
    early = with_op(NAMED[False], index, NAMED[False].ops[index].with_(waits=()))
    refuse(early, NAMED_WORK, "adam_rest of group 0", "before forward of block 3")


def test_rows_gathered_after_the_update_of_the_rest_of_their_table() -> None:
    step = NAMED[False]
    gather, rest = find(step, "gather"), find(step, "adam_rest")
    late = step.ops[gather].with_(writes=(Value(9, 0),), frees=(Value(9, 0),))
    bad = step.with_(ops=(*step.ops[: rest + 1], late, *step.ops[rest + 1 :]))
    refuse(waiting_again(bad), NAMED_WORK, "gather (compute)", "updated already")


def test_the_rest_of_a_table_that_a_block_reads() -> None:
    last = NAMED_WORK.blocks[-1]
    policies = tuple(replace(p, forward=replace(p.forward, groups=(0, 3))) for p in last.policies)
    work = replace(NAMED_WORK, blocks=(*NAMED_WORK.blocks[:-1], replace(last, policies=policies)))
    refuse(NAMED[True], work, "adam_rest of group 0", "which a block may give")


ROWS_WORK = looked_up()
ROWS = {
    deferred: lower(ROWS_WORK, uniform(ROWS_WORK), Mode("train", 1, deferred)) for deferred in (False, True)
}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("order", ["depth", "breadth"])
def test_rows_are_gathered_per_micro_batch_and_their_gradient_lands_in_each_piece(
    deferred: bool, micro: int, order: str
) -> None:
    assert ROWS_WORK.contributions == {0: (0, 3), 3: (0, 3), 1: (1,), 2: (2,)}
    step = lower(ROWS_WORK, uniform(ROWS_WORK, order=order), Mode("train", micro, deferred))
    verify(step, ROWS_WORK)
    loads = [op for op in step.ops if op.kind == "gather"]
    assert [op.reads for op in loads] == [(Master(0), Master(3))] * micro
    pushes = [op for op in step.ops if op.kind == "push_rows"]
    assert [op.writes for op in pushes] == [(HostGrad(0), HostGrad(3))] * micro
    assert sum(op.kind == "adam" for op in step.ops) == 4


def test_rows_gathered_while_their_table_is_updated() -> None:
    index = find(ROWS[False], "gather")
    waits = ROWS[False].ops[index].waits
    assert waits
    refuse(with_op(ROWS[False], index, ROWS[False].ops[index].with_(waits=())), ROWS_WORK, "gather (compute)")


def test_rows_gathered_after_the_update_of_their_table() -> None:
    step, (index, update) = ROWS[False], (find(ROWS[False], "gather"), find(ROWS[False], "adam", group=0))
    op = step.ops[index]
    late = op.with_(writes=(Value(9, 0),), frees=(Value(9, 0),))
    bad = step.with_(ops=(*step.ops[: update + 1], late, *step.ops[update + 1 :]))
    refuse(waiting_again(bad), ROWS_WORK, "gather (compute)", "updated already")


def test_a_gradient_of_rows_that_misses_a_piece() -> None:
    index = find(ROWS[True], "push_rows")
    op = ROWS[True].ops[index]
    bad = with_op(ROWS[True], index, op.with_(writes=op.writes[:1]))
    refuse(bad, ROWS_WORK, "norm of group 3", "1 of 2 contributions")


def test_rows_of_a_table_whose_state_is_on_the_device() -> None:
    bad = ROWS[True].with_(resident=(3,))
    refuse(bad, ROWS_WORK, "gather (compute)", "state is on the device")


RESULTS_WORK = replace(WORK, results=(3, 5))  # of a block in the middle, and of the last
FORWARD = lower(RESULTS_WORK, uniform(RESULTS_WORK), Mode("evaluate"))


def refuse_forward(step: Step, *words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(step, RESULTS_WORK, mode=Mode("evaluate"))
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_forward_alone_copies_each_result_once_while_it_is_alive() -> None:
    verify(FORWARD, RESULTS_WORK, mode=Mode("evaluate"))
    first, second = (i for i, op in enumerate(FORWARD.ops) if op.kind == "copy_result")
    assert find(FORWARD, "forward", block=2) < first < find(FORWARD, "forward", block=3)
    assert Value(3, 0) in FORWARD.ops[find(FORWARD, "forward", block=3)].frees  # its last reader
    assert find(FORWARD, "forward", block=4) < second
    assert FORWARD.ops[second].frees == (Value(5, 0),)


@pytest.mark.parametrize("place", [0, 1])
def test_a_result_that_is_never_copied(place: int) -> None:
    index = [i for i, op in enumerate(FORWARD.ops) if op.kind == "copy_result"][place]
    bad = list(FORWARD.ops)
    gone = bad.pop(index)
    bad[index - 1] = bad[index - 1].with_(frees=(*bad[index - 1].frees, *gone.frees))
    refuse_forward(FORWARD.with_(ops=tuple(bad)), f"value {gone.value}", "0 times, where 1 is due")


def test_no_result_at_all() -> None:
    nothing = lower(replace(WORK, results=(3,)), uniform(WORK), Mode("evaluate"))
    refuse_forward(nothing, "value 5", "0 times, where 1 is due")


def test_a_result_that_is_copied_twice() -> None:
    index = find(FORWARD, "copy_result", micro=0)
    ops = list(FORWARD.ops)
    ops.insert(index, ops[index].with_(frees=()))
    refuse_forward(FORWARD.with_(ops=tuple(ops)), "value 3", "2 times, where 1 is due")


def test_a_copy_of_what_is_no_result() -> None:
    step = lower(replace(WORK, results=(2, 3, 5)), uniform(WORK), Mode("evaluate"))
    refuse_forward(step, "value 2", "1 times, where 0 is due")


def test_a_copy_of_another_value() -> None:
    index = find(FORWARD, "copy_result", micro=0)
    wrong = FORWARD.ops[index].with_(writes=(Result(5, 0),))
    refuse_forward(with_op(FORWARD, index, wrong), "('x', 3, 0)", "for the value 5")


def test_a_result_that_is_copied_before_it_is_made() -> None:
    index = find(FORWARD, "copy_result", micro=0)
    refuse_forward(
        moved(FORWARD, index, find(FORWARD, "forward", block=2)), "copy_result", "nothing has written"
    )


def test_a_result_that_is_copied_after_it_was_freed() -> None:
    index = find(FORWARD, "copy_result", micro=0)
    after = find(FORWARD, "forward", block=3) + 1
    refuse_forward(moved(FORWARD, index, after), "copy_result", "after forward of block 3")


OUTSIDE_WORK = replace(
    WORK, blocks=(*WORK.blocks[:-1], replace(WORK.blocks[-1], tangents=(5,))), results=(5,), outside=True
)
OUTSIDE = lower(OUTSIDE_WORK, uniform(OUTSIDE_WORK), Mode("train", 2))


def test_gradients_of_results_come_between_forward_and_backward() -> None:
    verify(OUTSIDE, OUTSIDE_WORK, mode=Mode("train", 2))
    for micro in (0, 1):
        copied, given = (find(OUTSIDE, kind, micro=micro) for kind in ("copy_result", "load_grad"))
        assert find(OUTSIDE, "forward", block=4, micro=micro) < copied < given
        assert given < find(OUTSIDE, "backward", block=4, micro=micro)


def test_a_gradient_that_comes_before_its_result() -> None:
    bad = moved(OUTSIDE, find(OUTSIDE, "load_grad"), find(OUTSIDE, "copy_result"))
    refuse(bad, OUTSIDE_WORK, "load_grad", "('result', 5, 0), which nothing has written")


def test_a_gradient_that_never_comes() -> None:
    ops = [op for op in OUTSIDE.ops if op.kind != "load_grad"]
    refuse(OUTSIDE.with_(ops=tuple(ops)), OUTSIDE_WORK, "backward of block 4", "('g', 5, 0)")


def test_a_gradient_that_comes_twice() -> None:
    ops, index = list(OUTSIDE.ops), find(OUTSIDE, "load_grad")
    ops.insert(index, ops[index])
    refuse(OUTSIDE.with_(ops=tuple(ops)), OUTSIDE_WORK, "the value 5 of micro-batch 0", "not due")


def test_a_gradient_by_what_is_no_result() -> None:
    refuse(OUTSIDE, replace(OUTSIDE_WORK, results=(3,)), "the value 5", "not due")


def test_a_step_that_gives_the_loss_no_result() -> None:
    inside = lower(WORK, uniform(WORK), Mode("train", 2))
    refuse(inside, OUTSIDE_WORK, "value 5", "0 times, where 1 is due")


MATRICES_WORK = replace(
    WORK,
    groups=tuple(
        replace(g, update_moved=2000, matrices=MatrixUpdates(((10, 20),), 5, 900)) for g in WORK.groups
    ),
)
MATRICES = lower(MATRICES_WORK, uniform(WORK, ring=4), Mode("train"))


def test_an_update_of_matrices_has_all_its_stages_in_order() -> None:
    verify(MATRICES, MATRICES_WORK, mode=Mode("train"))
    for kind in ("momentum", "adam"):
        bad = waiting_again(with_op(MATRICES, find(MATRICES, kind, group=2)))
        refuse(
            bad,
            MATRICES_WORK,
            "group 2" if kind == "momentum" else "adam",
            "missing" if kind == "adam" else "due",
        )
    bare = lower(WORK, uniform(WORK), Mode("train"))
    refuse(bare, MATRICES_WORK, "adam of group 4", "momentum is due")
    refuse(MATRICES, WORK, "momentum of group 4", "if it has any")


def test_momentum_of_a_part_of_a_tied_gradient() -> None:
    work = replace(TIED_WORK, groups=MATRICES_WORK.groups[: len(TIED_WORK.groups)])
    step = lower(work, uniform(TIED_WORK, ring=4), Mode("train"))
    verify(step, work, mode=Mode("train"))
    last = max(i for i, op in enumerate(step.ops) if op.kind == "push_grad" and op.group == 0)
    early = moved(step, find(step, "momentum", group=0), last)
    refuse(waiting_again(early), work, "momentum of group 0", "after 1 of 2 contributions")


def test_the_stages_of_an_update_wait_for_each_other() -> None:
    for kind, event in (
        ("load_update", ("momentum", 2)),
        ("orthogonalize", ("load_update", 2)),
        ("push_update", ("orthogonalize", 2)),
        ("free_update", ("push_update", 2)),
    ):
        step = without_wait(MATRICES, find(MATRICES, kind, group=2), event)
        refuse(step, MATRICES_WORK, "group 2")


def test_updates_of_matrices_stay_in_the_buffer_of_their_gradient() -> None:
    index = find(MATRICES, "push_update", group=2)
    op = MATRICES.ops[index]
    other = Ring((op.writes[0][1] + 1) % 4)
    refuse(
        waiting_again(with_op(MATRICES, index, op.with_(writes=(other,)))),
        MATRICES_WORK,
        "the updates are in",
    )

"""Steps of several ranks: proven, and refused where a collective is missing, moved, or meets another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacompile.errors import ScheduleError
from megacompile.hardware.simulate import duration, simulate
from megacompile.passes import lower
from megacompile.passes.insert_collectives import PIECE_BYTES, insert_collectives
from megacompile.passes.synchronize import synchronize
from megacompile.planner.lower_bound import lower_bound
from megacompile.schedule.emit import emit_step
from megacompile.schedule.op_table import COLLECTIVES, Agreed, Resident, Shard, Weights
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step, peak_bytes
from megacompile.schedule.verify import verify
from megacompile.schedule.verify_collectives import check_collectives
from megacompile.schedule.workload import MatrixUpdates, Workload
from tests.support.oracle import execute, sees_garbage, unordered
from tests.support.problems import MODES, chain, find, plans, uniform, with_matrices, with_op, workloads
from tests.unit.hardware.test_simulate import UNIT


def shared(work: Workload, ranks: int, replicas: int = 1) -> Workload:
    """The workload, its groups shared by so many ranks, in each of the replicas."""
    groups = tuple(
        replace(
            g,
            ranks=ranks,
            state_bytes=-(-g.state_bytes // ranks),
            gradient_bytes=-(-g.gradient_bytes // ranks),
        )
        for g in work.groups
    )
    return replace(work, groups=groups, replicas=replicas)


WORK = shared(chain(5), 2)
PLAN = uniform(WORK)
STEP = lower(WORK, PLAN, Mode("train"))
DEFERRED = lower(WORK, PLAN, Mode("train", deferred=True))
ON_DEVICE = uniform(WORK, state="device")
RESIDENT = lower(WORK, ON_DEVICE, Mode("train"))
CLIPPED = lower(WORK, ON_DEVICE, Mode("train", deferred=True))
ON_MESH = shared(chain(5), 2, replicas=3)
REPLICATED = lower(ON_MESH, PLAN, Mode("train"))


def refuse(step: Step, *words: str, work: Workload = WORK) -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(step, work)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def refuse_collectives(step: Step, *words: str, work: Workload = WORK) -> None:
    """As :func:`refuse`, by the rule on collectives, where another one speaks first."""
    refuse(step, work=work)
    with pytest.raises(ScheduleError) as caught:
        check_collectives(step, work)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def waiting_again(step: Step) -> Step:
    """The step with waits for what it now is: no race is left, only what is wrong in itself."""
    bare = step.with_(ops=tuple(op.with_(waits=()) for op in step.ops))
    return synchronize(bare, work=WORK, plan=PLAN, mode=Mode("train"))


def moved(step: Step, index: int, to: int) -> Step:
    ops = list(step.ops)
    op = ops.pop(index)
    ops.insert(to - (index < to), op)
    return waiting_again(step.with_(ops=tuple(ops)))


@st.composite
def several(draw: st.DrawFn) -> tuple[Workload, Step]:
    """A random workload of two to four ranks in one to three replicas, with a step that trains it or computes
    its loss."""
    work = draw(workloads(4))
    if draw(st.booleans()):
        work = draw(with_matrices(work))
    work = shared(work, draw(st.integers(2, 4)), draw(st.integers(1, 3)))
    plan: Plan = draw(plans(work))
    blocks = tuple(replace(b, saved_on="device" if b.saved_on == "nvme" else b.saved_on) for b in plan.blocks)
    groups = tuple(replace(g, state="device" if g.state == "device" else "host") for g in plan.groups)
    mode = draw(st.sampled_from([m for m in MODES if m.kind in ("train", "evaluate")]))
    return work, lower(work, replace(plan, blocks=blocks, groups=groups), mode)


@settings(max_examples=60)
@given(several(), st.integers(0, 2**32))
def test_steps_of_several_ranks_are_proven_and_safe_in_every_order(
    problem: tuple[Workload, Step], seed: int
) -> None:
    work, step = problem
    assert verify(step, work).peak_bytes == peak_bytes(step)
    assert unordered(step) == [] and not sees_garbage(step)
    assert execute(step, seed) <= peak_bytes(step)


@settings(max_examples=30)
@given(several())
def test_every_missing_collective_and_wait_is_refused(problem: tuple[Workload, Step]) -> None:
    work, step = problem
    for index, op in enumerate(step.ops):
        if op.kind in (*COLLECTIVES, "push_shard", "add_shard", "agree"):
            refuse(with_op(step, index), work=work)
        for event in op.waits:
            refuse(with_op(step, index, op.with_(waits=tuple(e for e in op.waits if e != event))), work=work)


def test_one_rank_has_no_collectives() -> None:
    work = chain(5)
    step = lower(work, uniform(work), Mode("train"))
    assert {op.stream for op in step.ops} == {"compute", "h2d", "d2h", "host"}
    assert insert_collectives(step, work=work, plan=uniform(work), mode=Mode("train")) is step
    gather = STEP.ops[find(STEP, "all_gather")]
    bad = with_op(step, 0, gather.with_(waits=()), step.ops[0])
    refuse_collectives(bad, "all_gather of group 0", "is for several ranks", work=work)


def test_buffers_are_counted_with_the_constants() -> None:
    shard = max(g.shard_bytes for g in WORK.groups)
    piece = min(PIECE_BYTES, max(g.nbytes for g in WORK.groups) // 2)
    assert STEP.shards == (shard, shard) and STEP.exchange_bytes == 2 * piece
    assert STEP.constant_bytes == WORK.constant_bytes + 2 * shard + 2 * STEP.exchange_bytes
    assert STEP.ring == (shard, shard)


def test_a_rank_moves_its_part_over_its_link_and_the_rest_between_devices() -> None:
    machine = replace(UNIT, fabric_bandwidth=100.0, fabric_seconds=3.0)
    ops = [Op(kind, "comm", nbytes=600, ranks=3) for kind in ("all_gather", "reduce")]
    assert [duration(op, machine) for op in ops] == [7.0, 7.0]
    fetch = Op("prefetch", "h2d", nbytes=600, ranks=3)
    assert duration(fetch, machine) == 200 / machine.h2d_bandwidth
    assert duration(fetch.with_(stream="comm"), machine) == 400 / machine.memory_bandwidth  # read and written
    assert simulate(STEP, machine).busy["comm"] > 0
    without = replace(machine, fabric_bandwidth=None, d2h_bandwidth=2.0).shared_by(3, 3, 1)
    assert duration(ops[0], without) == 3.0 + 400 / 2.0, "over the links to the host"


def test_weights_enter_a_machine_once_and_gradients_once_for_each_of_its_devices() -> None:
    machine = replace(UNIT, fabric_bandwidth=100.0, fabric_seconds=0.0, nodes=2, network_bandwidth=30.0)
    ops = [Op(kind, "comm", nbytes=600, ranks=6) for kind in ("all_gather", "reduce")]
    assert [duration(op, machine) for op in ops] == [10.0, 30.0]
    fast = replace(machine, network_bandwidth=1000.0)
    assert [duration(op, fast) for op in ops] == [5.0, 5.0]


def test_sums_of_replicas_cross_the_network_and_weights_do_not() -> None:
    machine = replace(UNIT, fabric_bandwidth=100.0, fabric_seconds=3.0, network_bandwidth=50.0)
    (shard,) = {g.shard_bytes for g in ON_MESH.groups}
    crossing = 2 * shard * 2 // 3
    op = REPLICATED.ops[find(REPLICATED, "all_reduce", group=2)]
    assert (op.nbytes, op.ranks) == (crossing, 2)
    assert duration(op, machine) == 6.0 + 2 * crossing / 50.0  # of both devices of the machine
    gathers = [op for op in REPLICATED.ops if op.kind == "all_gather"]
    assert [duration(op, machine) for op in gathers] == [
        duration(op, replace(machine, network_bandwidth=1e9)) for op in gathers
    ]
    assert REPLICATED.shards == (-(-shard // 12) * 12,) * 2
    train, plan = Mode("train"), uniform(WORK)
    bound, alone = (
        lower_bound(work, train, machine, lower(work, plan, train)).sums for work in (ON_MESH, WORK)
    )
    assert bound == pytest.approx(alone + 5 * duration(op, machine))


def test_replicas_on_one_machine_exchange_sums_over_its_fabric() -> None:
    machine = replace(UNIT, fabric_bandwidth=100.0, fabric_seconds=3.0, network_bandwidth=50.0)
    op = REPLICATED.ops[find(REPLICATED, "all_reduce", group=2)]
    assert duration(op, machine.shared_by(6, 2, 3)) == 6.0 + op.nbytes / 100.0
    assert (
        duration(op, machine.shared_by(4, 2, 3)) == 6.0 + op.nbytes / 2 * 4 / 50.0
    )  # the third is elsewhere
    assert duration(op, machine.shared_by(2, 2, 3)) == duration(op, machine)
    assert machine.shared_by(2, 4, 3).nodes == 2


def test_emitted_source_numbers_buffers_in_turn() -> None:
    source = emit_step(STEP, WORK, title="a step")
    assert "comm exchanges with the other 1 of 2 ranks." in source
    assert source.count("rt.reduce(") < 5, "equal blocks are not in a loop"
    assert 'shard=("shard", ' in source and " % 2)" in source
    replicated = emit_step(REPLICATED, ON_MESH, title="a step")
    assert "There are 3 replicas" in replicated and replicated.count("rt.all_reduce(") < 5


def test_state_on_the_devices_crosses_no_link_and_each_rank_holds_its_shards() -> None:
    kinds = {(op.kind, op.stream) for op in RESIDENT.ops}
    assert {stream for _, stream in kinds} == {"compute", "comm", "host"}
    assert {stream for kind, stream in kinds if kind == "prefetch"} == {"comm"}
    (shard,) = {g.shard_bytes for g in WORK.groups}
    held = sum(g.nbytes // 2 + g.state_bytes + shard for g in WORK.groups)  # with gradients, which wait
    assert RESIDENT.constant_bytes == WORK.constant_bytes + held + 2 * shard + 2 * RESIDENT.exchange_bytes
    assert RESIDENT.slab_bytes == STEP.slab_bytes and RESIDENT.ring == ()


def test_compute_waits_for_the_exchange_of_gradients_after_the_last_backward() -> None:
    """But where it gives back a gradient, as late as the plan allows."""
    for step in (RESIDENT, CLIPPED):
        last = [i for i, op in enumerate(step.ops) if op.kind == "backward"][-1]
        first = next(i for i, op in enumerate(step.ops) if op.kind in ("norm", "adam"))
        assert first > last
        early = [op for op in step.ops[:last] if op.stream == "compute" and op.kind not in ("free", "evict")]
        assert not [event for op in early for event in op.waits if event[0] in ("reduce", "add_shard")]


def test_weights_that_are_never_gathered() -> None:
    bad = waiting_again(with_op(STEP, find(STEP, "all_gather", group=2)))
    refuse(bad, "forward of block 2", "reads ('w', 2) before its all_gather")


def test_weights_that_are_gathered_after_their_use() -> None:
    bad = moved(STEP, find(STEP, "all_gather", group=2), find(STEP, "forward", block=2) + 1)
    refuse(bad, "forward of block 2", "before its all_gather")


def test_weights_that_are_gathered_twice() -> None:
    index = find(STEP, "all_gather", group=1)
    refuse(
        waiting_again(with_op(STEP, index, *[STEP.ops[index]] * 2)), "gathers weights that are whole already"
    )


def test_a_gather_into_a_slot_that_was_given_back() -> None:
    bad = moved(STEP, find(STEP, "all_gather", group=2), find(STEP, "evict", group=2) + 1)
    refuse(bad, "all_gather of group 2")


def test_a_slot_taken_while_a_gather_still_fills_it() -> None:
    """The next stay waits for the evict alone, which then need not wait for the gather."""
    index = find(STEP, "forward", block=2)
    op = STEP.ops[index]
    bad = with_op(STEP, index, op.with_(waits=tuple(e for e in op.waits if e[0] != "all_gather")))
    refuse(bad, "before all_gather of group 2", "a wait is missing")


def test_a_gradient_that_is_not_summed() -> None:
    index = find(STEP, "reduce", group=3)
    reduce, push = STEP.ops[index : index + 2]
    alone = push.with_(kind="push_grad", reads=reduce.reads)
    ops = (*STEP.ops[:index], alone, *STEP.ops[index + 2 :])
    refuse(waiting_again(STEP.with_(ops=ops)), "push_grad of group 3", "reduce is missing")


def test_a_sum_that_never_leaves() -> None:
    refuse(waiting_again(with_op(STEP, find(STEP, "push_shard", group=0))), "adam of group 0")


def test_a_sum_that_another_overwrites() -> None:
    ops = tuple(
        op.with_(
            reads=tuple(Shard(0) if isinstance(t, Shard) else t for t in op.reads),
            writes=tuple(Shard(0) if isinstance(t, Shard) else t for t in op.writes),
        )
        for op in STEP.ops
    )
    late = moved(STEP.with_(ops=ops), find(STEP, "push_shard", group=4), find(STEP, "reduce", group=3) + 1)
    refuse_collectives(late, "reduce of group 3", "overwrites what reduce of group 4")


def test_a_sum_of_another_gradient() -> None:
    first, second = find(STEP, "push_shard", group=4), find(STEP, "push_shard", group=3)
    ops = list(STEP.ops)
    ops[first] = ops[first].with_(reads=ops[second].reads)
    bad = waiting_again(STEP.with_(ops=tuple(ops)))
    refuse_collectives(bad, "push_shard of group 4", "finds in ('shard', 1)")


def test_a_sum_of_one_replica_alone() -> None:
    """Never added to those of the others, added twice, to another's, or too late; and where there is one."""
    index = find(REPLICATED, "all_reduce", group=3)
    op = REPLICATED.ops[index]
    missing = waiting_again(with_op(REPLICATED, index))
    refuse_collectives(missing, "push_shard of group 3", "all_reduce is missing", work=ON_MESH)
    twice = waiting_again(with_op(REPLICATED, index, op, op))
    refuse_collectives(twice, "all_reduce of group 3", "finds", work=ON_MESH)
    late = moved(REPLICATED, index, find(REPLICATED, "push_shard", group=3) + 1)
    refuse_collectives(late, "push_shard of group 3", "all_reduce is missing", work=ON_MESH)
    other = with_op(REPLICATED, index, op.with_(group=2))
    refuse_collectives(other, "all_reduce of group 2", "what reduce of group 3", work=ON_MESH)
    refuse_collectives(REPLICATED, "all_reduce of group 4", "for several replicas", work=WORK)


def test_a_shard_on_the_device_read_for_whole_weights() -> None:
    index = find(RESIDENT, "forward", block=2)
    op = RESIDENT.ops[index]
    reads = tuple(Resident(2) if t == Weights(2) else t for t in op.reads)
    bad = waiting_again(with_op(RESIDENT, index, op.with_(reads=reads)))
    refuse(bad, "forward of block 2", "('resident', 2), which is one shard")


def test_a_shard_fetched_from_the_device_that_is_kept_on_the_host() -> None:
    bad = RESIDENT.with_(resident=RESIDENT.resident[1:])
    refuse(bad, "prefetch of group 0", "reads on the device what is kept on the host")


def test_a_shard_fetched_after_its_update() -> None:
    late = moved(RESIDENT, find(RESIDENT, "adam", group=0), find(RESIDENT, "prefetch", group=0, nth=1))
    refuse(late, "adam of group 0", "0 of 1 contributions")
    gradient = find(RESIDENT, "evict", group=0, nth=-1) + 1
    again = [RESIDENT.ops[find(RESIDENT, kind, group=0)] for kind in ("prefetch", "all_gather", "evict")]
    end = len(RESIDENT.ops)
    assert gradient < end
    bad = waiting_again(RESIDENT.with_(ops=(*RESIDENT.ops, *again)))
    refuse(bad, "prefetch of group 0", "reads weights that this step has updated already")


def test_a_sum_on_the_device_that_is_never_added() -> None:
    bad = waiting_again(with_op(RESIDENT, find(RESIDENT, "add_shard", group=1)))
    refuse_collectives(bad, "What reduce of group 1", "goes nowhere")


def test_a_slot_filled_from_the_device_while_a_gather_still_fills_it() -> None:
    """In the order of one stream, but for compute, which reads it until the stay ends."""
    index = find(RESIDENT, "prefetch", group=0, nth=1)
    op = RESIDENT.ops[index]
    evicts = tuple(e for e in op.waits if e[0] == "evict")
    assert evicts
    bad = with_op(RESIDENT, index, op.with_(waits=tuple(e for e in op.waits if e not in evicts)))
    refuse(bad, "prefetch of group 0", "may")


def test_a_link_where_none_is_needed() -> None:
    index = find(RESIDENT, "prefetch", group=1)
    bad = waiting_again(with_op(RESIDENT, index, RESIDENT.ops[index].with_(stream="h2d")))
    refuse(bad, "prefetch of group 1", "a stream that is not its own")


def test_an_update_before_the_losses_are_agreed_on() -> None:
    bad = moved(STEP, find(STEP, "agree"), find(STEP, "adam", group=4) + 1)
    refuse(bad, "adam of group 4")
    index = find(DEFERRED, "adam", group=0)
    op = DEFERRED.ops[index]
    careless = with_op(DEFERRED, index, op.with_(reads=tuple(t for t in op.reads if t != Agreed())))
    refuse(careless, "adam of group 0", "before all ranks' losses are known")
    matrices = MatrixUpdates.of([((10, 20),), ()], 5, 900)
    groups = (replace(g, update_moved=2000, matrices=matrices) for g in WORK.groups)
    work = replace(WORK, groups=tuple(groups))
    step = lower(work, PLAN, Mode("train"))
    verify(step, work)
    index = find(step, "momentum", group=0)
    op = step.ops[index]
    careless = with_op(step, index, op.with_(reads=tuple(t for t in op.reads if t != Agreed())))
    refuse_collectives(careless, "momentum of group 0", "before all ranks' losses are known", work=work)


def test_matrices_of_ranks_take_the_memory_of_one_and_the_work_of_the_mean() -> None:
    owners = [((4, 5), (4, 4)), (), ((6, 8),)]
    shared, alone = MatrixUpdates.of(owners, 5, 900), [MatrixUpdates.of([own], 5, 900) for own in owners]
    assert shared.sides == owners[2] and shared.others == (owners[0], owners[1])
    assert shared.nbytes == max(own.nbytes for own in alone) == 2 * 6 * 8
    assert shared.call.peak_bytes == max(own.call.peak_bytes for own in alone) == 2 * 6 * 8 + 2 * 6 * 6
    assert shared.call.flops == -(-sum(own.call.flops for own in alone) // 3)


def test_an_agreement_that_leaves_a_loss_out() -> None:
    step = lower(WORK, PLAN, Mode("train", micro_batches=2))
    index = find(step, "agree")
    refuse(with_op(step, index, step.ops[index].with_(reads=step.ops[index].reads[:1])), "for all 2 losses")


def test_a_collective_on_another_stream() -> None:
    index = find(STEP, "reduce", group=2)
    bad = waiting_again(with_op(STEP, index, STEP.ops[index].with_(stream="d2h")))
    refuse(bad, "reduce of group 2", "a stream that is not its own")

"""The CUDA streams against a recorded API: every edge of the step is there, whatever the threads do."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacompile.passes import lower
from megacompile.runtime import cuda_streams
from megacompile.runtime.cuda_streams import CudaStreams
from megacompile.schedule.op_table import Token
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step
from megacompile.schedule.workload import Workload
from tests.support.oracle import _pairs, takes_memory, touches
from tests.support.problems import chain, scheduled, uniform
from tests.support.recorded_cuda import RecordedApi, RecordedFlag, Recording, Uses, spread
from tests.unit.schedule.test_collectives import shared

REPEATS = 2
Problem = tuple[Workload, Plan, Mode, Step]


def record(step: Step, seed: int) -> Recording:
    """Issue a repeated step as a runtime does; pushes that add leave a callback, others may."""
    log = Recording(seed)
    RecordedFlag.log = log
    before, cuda_streams.Flag = cuda_streams.Flag, RecordedFlag  # type: ignore[misc]
    try:
        api = RecordedApi(log)
        comm = any(op.stream == "comm" for op in step.ops)
        streams = CudaStreams(api, lambda name: None, comm=comm)
        api.use(streams.compute)
        chance = random.Random(seed)
        waited = frozenset(e for op in step.ops for e in op.waits)
        landed: set[Token] = set()
        for repeat in range(REPEATS):
            streams.begin([], waited)
            for index, op in enumerate(step.ops):
                adds = op.kind == "push_grad" and op.writes[0] in landed
                issue(streams, api, op, (repeat, index), with_callback=adds or chance.random() < 0.5)
                landed |= set(op.writes) if op.kind == "push_grad" else set()
                landed -= set(op.reads) if op.kind == "adam" else set()
        streams.synchronize()
        streams.close()
    finally:
        cuda_streams.Flag = before  # type: ignore[misc]
    return log


def issue(
    streams: CudaStreams, api: RecordedApi, op: Op, name: tuple[int, int], *, with_callback: bool
) -> None:
    if op.stream == "compute":
        streams.wait(op.waits)
        api.launch(name)
        streams.reached(op.event)
        return

    def run() -> cuda_streams.OnComplete | None:
        if op.stream in ("host", "nvme_read", "nvme_write"):
            api.work(name)
            return None
        api.launch(name)
        return (
            (lambda: api.work(("on_complete", *name))) if with_callback and op.kind == "push_grad" else None
        )

    streams.submit(op.stream, op.event, op.waits, run)


def unordered(step: Step, log: Recording) -> list[tuple[int, int]]:
    """Pairs of conflicting accesses that nothing in the record orders."""
    names = [(repeat, index) for repeat in range(REPEATS) for index in range(len(step.ops))]
    ops = step.ops * REPEATS
    uses: Uses = defaultdict(list)
    for op, touch, name in zip(ops, touches(ops), names, strict=True):
        for token in touch.reads | touch.changes:
            lands = op.kind == "push_grad" and token in op.writes
            point = log.points[
                ("on_complete", *name) if lands and ("on_complete", *name) in log.points else name
            ]
            uses[token].append((point, token in touch.changes))
    pairs = spread(uses)
    for i, j in _pairs(ops):  # bytes of the slab, and memory taken outside the compute stream
        if "prefetch" in (ops[i].kind, ops[j].kind) or takes_memory(ops[j]):
            pairs.add((log.points[names[i]], log.points[names[j]]))
    reached = log.reached_from()
    return sorted((a, b) for a, b in pairs if not reached[b] >> a & 1)


@settings(max_examples=25, deadline=None)
@given(scheduled(4), st.integers(0, 2**32))
def test_streams_waits_and_records_imply_every_edge_of_the_step(problem: Problem, seed: int) -> None:
    step = problem[3]
    assert unordered(step, record(step, seed)) == []


def test_collectives_follow_and_are_followed_as_the_step_says() -> None:
    work = shared(chain(4), 2)
    for mode in (Mode("train"), Mode("train", deferred=True)):
        step = lower(work, uniform(work), mode)
        assert unordered(step, record(step, 0)) == []


def offloaded() -> Step:
    work = chain(5)
    return lower(work, uniform(work, "all", saved_on="host"), Mode("train"))


def test_the_proof_finds_a_wait_that_the_step_lacks() -> None:
    step = offloaded()
    index = next(i for i, op in enumerate(step.ops) if op.kind == "prefetch" and op.waits)
    ops = (*step.ops[:index], step.ops[index].with_(waits=()), *step.ops[index + 1 :])
    bad = step.with_(ops=ops)
    assert unordered(bad, record(bad, 0))


def test_the_proof_finds_a_wait_for_what_was_not_issued_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """In CUDA such a wait is for nothing; without the hosts' flags it happens."""

    def follow(self: CudaStreams, stream: object, mark: cuda_streams.Mark) -> None:
        if mark.event is not None:
            stream.wait_event(mark.event)  # type: ignore[attr-defined]

    monkeypatch.setattr(CudaStreams, "_follow", follow)
    step = offloaded()
    assert unordered(step, record(step, 0))


def test_the_proof_finds_an_update_that_does_not_wait_for_the_callback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CudaStreams, "_await_callbacks", lambda self, pushed: None)
    step = lower(chain(4), uniform(chain(4)), Mode("train", deferred=True))
    assert unordered(step, record(step, 1))

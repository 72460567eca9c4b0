"""What a run records of itself: every operation of the step, once, in the order of its stream."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch

import megacompile
from megacompile.schedule.op_table import Stream
from tests.support.models import batch_for, build


@pytest.fixture(scope="module")
def program() -> Any:
    """At a budget at which all streams have work to do."""
    model = build("llama")
    adamw = torch.optim.AdamW(model.parameters())
    program = megacompile.compile(
        model, "1200kB", optimizer=adamw, compute_dtype=torch.float32, max_grad_norm=1.0, seed=1,
        example_batch=batch_for("llama", size=4, length=64),
    )  # fmt: skip
    yield program
    program.close()


def test_every_operation_is_recorded_once_and_in_order(program: megacompile.Program) -> None:
    for _ in range(3):
        program.train_step(batch_for("llama", size=4, length=64))
    program.synchronize()
    runtime = program._session.runtime
    assert runtime is not None
    (earlier, before), (step, trace) = runtime.traces
    assert step is earlier and step == program.schedule.step
    untimed = (
        "load",
        "evict",
        "free",
        "free_offloaded",
    )  # they take no time: names are dropped, tensors handed over
    expected = Counter(op.event for op in step.ops if op.kind not in untimed)
    assert trace.pop(0)[0] == ("run",)
    assert Counter(event for event, _, _ in trace) == expected
    streams = {op.event: op.stream for op in step.ops}
    lanes: dict[Stream, list[tuple[float, float]]] = defaultdict(list)
    for event, start, end in sorted(trace, key=lambda entry: entry[1]):
        assert start <= end
        lanes[streams[event]].append((start, end))
    assert set(lanes) == {"compute", "h2d", "d2h", "host"}
    for spans in lanes.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "a stream runs in order"
    ends = {event: end for event, _, end in before}
    assert min(start for event, start, _ in trace if event[0] == "forward") > ends["backward", 0, 0]

"""The emitted source, run against a runtime that only writes down what it is asked to do."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacompile.passes import lower
from megacompile.printable import is_printable
from megacompile.schedule.emit import emit_step, fold
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step
from megacompile.schedule.workload import Workload
from tests.support.problems import chain, scheduled, uniform

Called = tuple[str, dict[str, Any]]


class Recorder:
    """A runtime that records every call."""

    def __init__(self) -> None:
        self.calls: list[Called] = []

    def __getattr__(self, kind: str) -> Callable[..., None]:
        def call(*tokens: Any, **arguments: Any) -> None:
            self.calls.append((kind, {"tokens": tokens[0]} | arguments if tokens else arguments))

        return call


def run(source: str) -> list[Called]:
    namespace: dict[str, Any] = {}
    exec(compile(source, "<emitted>", "exec"), namespace)
    recorder = Recorder()
    namespace["step"](recorder)
    return recorder.calls


def meant(op: Op) -> Called:
    """The call that an operation stands for."""
    kind = op.kind
    arguments: dict[str, Any] = {}
    if kind in ("load", "gather", "copy_result"):
        arguments = {"value": op.writes[0][1], "micro": op.micro}
    elif kind == "prefetch":
        arguments = {"group": op.group, "offset": op.offset}
    elif kind == "free":
        arguments = {"tokens": list(op.frees)}
    elif kind == "free_offloaded":
        arguments = {"block": op.block, "micro": op.micro, "saved": list(op.frees)}
    elif kind in ("read_offloaded", "write_offloaded"):
        arguments = {"block": op.block, "micro": op.micro}
    elif kind in ("momentum", "load_update"):
        arguments = {"group": op.group, "grad": op.reads[0]}
    elif kind == "push_update":
        arguments = {"group": op.group, "to": op.writes[0]}
    elif kind == "free_update":
        arguments = {"group": op.group, "free": list(op.frees)}
    elif kind in ("evict", "norm", "orthogonalize", "adam_rest", "read_weights", "read_state", "write"):
        arguments = {"group": op.group}
    elif kind in ("forward", "recompute", "backward"):
        arguments = {"block": op.block, "micro": op.micro, "checkpoint": op.policy}
    elif kind in ("offload", "reload"):
        saved = op.reads if kind == "offload" else op.writes
        arguments = {"block": op.block, "micro": op.micro, "saved": list(saved)}
    elif kind == "push_rows":
        arguments = {"group": op.group, "block": op.block, "micro": op.micro, "to": list(op.writes)}
    elif kind in ("push_grad", "accumulate"):
        arguments = {"group": op.group, "block": op.block, "micro": op.micro, "to": op.writes[0]}
    elif kind == "adam":
        arguments = {"group": op.group, "grad": op.reads[0]}
    for token in (*op.reads, *op.writes):
        if token[0] in ("window", "staged", "spill"):
            arguments["slot"] = token[1]
    if op.waits:
        arguments["after"] = list(op.waits)
    if op.frees and not op.kind.startswith("free"):
        arguments["free"] = list(op.frees)
    return kind, arguments


@settings(max_examples=150)
@given(scheduled() | scheduled(matrices=True))
def test_source_runs_the_step(problem: tuple[Workload, Plan, Mode, Step]) -> None:
    work, _, _, step = problem
    source = emit_step(step, work, title="A step.")
    assert run(source) == [meant(op) for op in step.ops]


numbers = st.integers(8, 11)
simple = st.one_of(
    st.builds(lambda g, o: Op("prefetch", "h2d", group=g, offset=o * 512), numbers, numbers),
    st.builds(
        lambda g, w: Op("evict", "compute", group=g, waits=tuple(("prefetch", e) for e in w)),
        numbers,
        st.lists(numbers, max_size=2),
    ),
    st.builds(lambda b, m: Op("forward", "compute", block=b, micro=m, policy="all"), numbers, numbers),
)


def _shifted(op: Op, by: int) -> Op:
    waits = tuple((e[0], e[1] + by) for e in op.waits)
    if op.kind == "forward":
        return op.with_(block=op.block + by, waits=waits)
    return op.with_(group=op.group + by, waits=waits)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.lists(simple, min_size=1, max_size=4), st.integers(1, 5), st.integers(-2, 2)),
        max_size=4,
    )
)
def test_loops_are_exact(parts: list[tuple[list[Op], int, int]]) -> None:
    """Any sequence with repetitions, counting up or down, fast or not at all, prints as itself."""
    ops = [_shifted(op, i * slope) for body, count, slope in parts for i in range(count) for op in body]
    step = Step(tuple(ops), {}, 1)
    assert run(emit_step(step, chain(1), title="Any.")) == [meant(op) for op in ops]


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        (Mode("train"), {}),
        (Mode("train"), {"checkpoint": "all", "saved_on": "host"}),
        (Mode("train"), {"checkpoint": "all", "residency": "step"}),
        (Mode("train", deferred=True), {}),
        (Mode("train", micro_batches=2), {}),
        (Mode("train", micro_batches=4), {"order": "breadth"}),
        (Mode("evaluate"), {}),
        (Mode("update"), {}),
    ],
)
def test_a_hundred_blocks_fit_on_a_few_pages(mode: Mode, fields: dict[str, Any]) -> None:
    work = chain(100)
    step = lower(work, uniform(work, **fields), mode)
    source = emit_step(step, work, title="A hundred blocks.")
    assert len(source.splitlines()) < 120, source
    assert run(source) == [meant(op) for op in step.ops]


def test_source_is_the_same_every_time() -> None:
    work = chain(12, tied=True)
    plan = uniform(work, "all", saved_on="host")
    sources = {emit_step(lower(work, plan, Mode("train")), work, title="T.") for _ in range(3)}
    assert len(sources) == 1


def test_an_empty_step_is_a_function_that_does_nothing() -> None:
    assert run(emit_step(Step((), {}, 1), chain(1), title="Nothing.")) == []


def test_source_of_six_blocks() -> None:
    work = chain(6)
    step = lower(work, uniform(work, "all", prefetch_depth=0, grad_lag=0), Mode("train", deferred=True))
    source = emit_step(step, work, title="Six blocks.")
    assert source.splitlines()[-len(SIX_BLOCKS) :] == SIX_BLOCKS
    assert "OFFSETS = (*(0,) * 11,)" in source


SIX_BLOCKS = """\
def step(rt):
    rt.load(value=0, micro=0)
    rt.prefetch(group=0, offset=OFFSETS[0], after=[("adam", 0), ("evict", 0)])
    for i in range(0, 5):
        rt.forward(block=i, micro=0, checkpoint="all", after=[("prefetch", i)])
        rt.evict(group=i)
        rt.prefetch(group=i + 1, offset=OFFSETS[i + 1], after=[("evict", i), ("adam", i + 1)])
    rt.forward(block=5, micro=0, checkpoint="all", after=[("prefetch", 5)], free=[("x", 6, 0)])
    rt.backward(block=5, micro=0, checkpoint="all", free=[("x", 5, 0)])
    rt.push_grad(group=5, block=5, micro=0, to=("hgrad", 5), after=[("backward", 5, 0)])
    rt.norm(group=5, after=[("push_grad", 5, 5, 0)])
    rt.evict(group=5)
    for i in range(4, -1, -1):
        rt.prefetch(group=i, offset=OFFSETS[10 - i], after=[("evict", i + 1)])
        rt.free([("wg", i + 1, i + 1, 0)], after=[("push_grad", i + 1, i + 1, 0)])
        rt.backward(block=i, micro=0, checkpoint="all", after=[("prefetch", i)], free=[("x", i, 0)])
        rt.push_grad(group=i, block=i, micro=0, to=("hgrad", i), after=[("backward", i, 0)])
        rt.norm(group=i, after=[("push_grad", i, i, 0)])
        rt.evict(group=i)
    rt.free([("wg", 0, 0, 0)], after=[("push_grad", 0, 0, 0)])
    rt.clip_scale()
    for i in range(0, 6):
        rt.adam(group=i, grad=("hgrad", i))
""".splitlines()


names = st.text(min_size=1) | st.sampled_from(
    ['a"""\nprint("run")\n"""', 'a"', "a\\", "\\N{x}", "\x00", "\r", "\x1b[2J", "\u2028", "\ud800", "é"]
)


@given(st.lists(names, min_size=4, max_size=4), names)
def test_no_name_gets_out_of_the_text_that_it_stands_in(given: list[str], title: str) -> None:
    work = chain(4)
    blocks = tuple(replace(b, name=name) for b, name in zip(work.blocks, given, strict=True))
    groups = tuple(replace(g, name=name) for g, name in zip(work.groups, given, strict=False))
    odd = replace(work, blocks=blocks, groups=groups)
    step = lower(work, uniform(work), Mode("train"))
    plain, found = (ast.parse(emit_step(step, w, title=t).encode()) for w, t in ((work, "A."), (odd, title)))
    assert list(map(ast.dump, found.body[1:])) == list(map(ast.dump, plain.body[1:]))
    assert all(is_printable(line) for line in (ast.get_docstring(found, clean=False) or "").split("\n"))


def test_fold_counts_equal_names_together() -> None:
    assert fold(["embed", "layers.0", "layers.1", "layers.2", "head"]) == [
        "0  embed",
        "1-3  layers.0-2",
        "4  head",
    ]
    assert fold(["layers.0", "layers.2", "layers.4"]) == ["0  layers.0", "1  layers.2", "2  layers.4"]
    assert fold(["a", "a"]) == ["0  a", "1  a"]
    assert fold([]) == []

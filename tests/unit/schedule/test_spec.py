"""The table of operations: every kind has its row, its cost, its statement, its method, and own tokens."""

from __future__ import annotations

import inspect
import pickle
from itertools import combinations
from typing import Any, get_args

import pytest

from megacompile.hardware.simulate import duration
from megacompile.runtime.executor import StepRun
from megacompile.schedule.emit import statement
from megacompile.schedule.op_table import (
    SPECS,
    STREAMS,
    Cost,
    HostGrad,
    Kind,
    Master,
    Norm,
    Part,
    Ring,
    Saved,
    Spill,
    Stream,
    Token,
    Value,
    Weights,
    typed,
)
from megacompile.schedule.step import Op, Step
from tests.support.problems import find, with_op
from tests.unit.hardware.test_simulate import FREE
from tests.unit.schedule.test_faults import DEFERRED, WORK, refuse, waiting_again

KINDS: tuple[Kind, ...] = get_args(Kind)
TOKENS = [c for family in Token.__subclasses__() for c in (family, *family.__subclasses__()) if c.tag]


def example(kind: Kind) -> Op:
    """An operation of the kind with whatever its statement prints."""
    spec, frees = SPECS[kind], (Saved(1, 3),)
    held: tuple[Token, ...] = (Value(0, 0), Spill(0)) if spec.stream.startswith("nvme") else (Value(0, 0),)
    freed = frees if "frees" in spec.arguments else ()
    return Op(kind, spec.stream, 1, 2, 3, "all", reads=held, writes=held, frees=freed, nbytes=8)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_all_that_it_needs(kind: Kind) -> None:
    op, spec = example(kind), SPECS[kind]
    assert spec.meaning and duration(op, FREE) >= 0
    assert op.event == (kind, *(getattr(op, name) for name in spec.place.split()))
    calls: list[tuple[str, dict[str, Any]]] = []

    class Runtime:
        def __getattr__(self, name: str) -> Any:
            method = inspect.signature(getattr(StepRun, name).__get__(object.__new__(StepRun)))
            return lambda *given, **named: calls.append((name, method.bind(*given, **named).arguments))

    exec(statement(op), {"rt": Runtime(), "OFFSETS": (0,)})
    assert [name for name, _ in calls] == [kind]


def test_the_table_lists_each_kind_stream_and_cost_once() -> None:
    assert tuple(SPECS) == KINDS
    assert {spec.stream for spec in SPECS.values()} == set(STREAMS) == set(get_args(Stream))
    assert {spec.cost for spec in SPECS.values()} == set(get_args(Cost))
    assert {spec.part for spec in SPECS.values()} == set(get_args(Part))
    known = {name for name, value in vars(StepRun).items() if callable(value) and name[0] != "_"}
    known |= {name for name in dir(StepRun) if not name.startswith("_") and callable(getattr(StepRun, name))}
    assert known == set(KINDS), "a method that no operation calls"


def test_tokens_are_the_tuples_that_source_prints_and_different_kinds_are_never_equal() -> None:
    assert len(TOKENS) == len({c.tag for c in TOKENS}) > 20
    tokens = [c(*range(1, 1 + len(c.numbers))) for c in TOKENS]
    for token in tokens:
        plain = (token.tag, *range(1, len(token)))
        assert token == plain and hash(token) == hash(plain) and str(token) == str(plain)
        assert type(typed(plain)) is type(token) and pickle.loads(pickle.dumps(token)) == token
        assert [getattr(token, name) for name in token.numbers] == list(plain[1:])
    assert all(a != b for a, b in combinations(tokens, 2))
    assert Value(1, 2) != Saved(1, 2) and Master(1) != Weights(1) and Ring(0) != HostGrad(0)


def test_an_operation_that_does_what_its_kind_does_not_is_refused() -> None:
    def planted(kind: str, **changes: object) -> Step:
        index = find(DEFERRED, kind)
        return waiting_again(with_op(DEFERRED, index, DEFERRED.ops[index].with_(**changes)))

    refuse(planted("norm", stream="nvme_read"), WORK, "norm of group 4", "a stream that is not its own")
    scale = DEFERRED.ops[find(DEFERRED, "clip_scale")]
    refuse(
        planted("clip_scale", reads=(*scale.reads, Master(2))), WORK, "touches ('master', 2), which no clip"
    )
    refuse(planted("evict", writes=(Weights(0), Norm(9))), WORK, "evict of group 0", "('norm', 9)")

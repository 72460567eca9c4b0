"""A program's own profile: block functions timed on this machine, in place of rates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import megacompile
from megacompile.api import block_timer
from megacompile.report.schedule import Schedule
from tests.support.models import batch_for, build


def compiled(model: nn.Module, **options: Any) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters())
    return megacompile.compile(model, "1GB", compute_dtype=torch.float32, optimizer=optimizer, **options)


@pytest.fixture
def program() -> megacompile.Program:
    return compiled(build("llama", layers=1), example_batch=batch_for("llama"))


def test_every_block_function_is_timed_and_the_step_stays_the_same(
    program: megacompile.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_timer, "_CACHES", 1 << 20)  # no figure is looked at that cold caches change
    profiled = program.profile()
    computes = [op for op in profiled.step.ops if op.kind in ("forward", "recompute", "backward")]
    assert computes
    for index, op in enumerate(profiled.step.ops):
        if op in computes:
            length = profiled.timeline.ends[index] - profiled.timeline.starts[index]
            assert 0 < op.seconds <= length + 1e-9  # alone, and beside what runs meanwhile
    assert profiled.source == program.schedule.source
    assert profiled.machine.compute_beside >= 1 and profiled.machine.others_beside >= 1
    assert Schedule.from_json(profiled.to_json()) == profiled
    program.close()


@pytest.mark.slow
def test_profiling_changes_nothing_that_is_trained() -> None:
    torch.manual_seed(0)
    model, batch = build("gpt2"), batch_for("gpt2")
    states = []
    for profile in (False, True):
        program = compiled(copy.deepcopy(model))
        for _ in range(2):
            program.train_step(batch)
            if profile:
                program.profile()
        states.append(program.state_dict())
        program.close()
    assert [n for n, value in states[0].items() if not torch.equal(value, states[1][n])] == []


def test_before_anything_is_compiled_there_is_nothing_to_time() -> None:
    program = compiled(build("llama"))
    with pytest.raises(megacompile.errors.ProgramError, match="Nothing is compiled yet"):
        program.profile()
    program.close()

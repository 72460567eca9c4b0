"""Plans that are given: baselines by name, plan files, a planner of one's own; each trains the same."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megacompile
from megacompile.hardware.machine import Machine
from megacompile.planner.arrangements import with_deferred
from megacompile.schedule.plan import BlockPlan, GroupPlan, Mode, Plan
from megacompile.schedule.workload import Workload
from tests.support.models import batch_for, build


def trained(
    steps: int = 2, kind: str = "plain", **options: Any
) -> tuple[megacompile.Program, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    program = megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, **options)
    for _ in range(steps):
        program.train_step(batch_for(kind))
    return program, {k: v for k, v in program.state_dict().items() if isinstance(v, Tensor)}


@functools.cache
def by_search() -> dict[str, Tensor]:
    return trained()[1]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("planner", ["full-recompute", "double-buffer", "zero3-like"])
def test_a_baseline_trains_bitwise_as_the_search_does(planner: str) -> None:
    program, found = trained(planner=planner)
    assert same(found, by_search())
    assert {b.checkpoint for b in program.plan.blocks} == {"none"}


def test_a_planner_of_ones_own_sees_the_problem() -> None:
    asked: list[tuple[int, str, int]] = []

    def mine(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
        asked.append((len(work.blocks), mode.kind, budget_bytes))
        blocks = tuple(BlockPlan("some" if i % 2 else "all", "host") for i in range(len(work.blocks)))
        return with_deferred(Plan(blocks, (GroupPlan("step", 0),) * len(work.groups)), work, 0.5)

    program, found = trained(planner=mine)
    assert asked and asked[0][1:] == ("train", 10**9)
    assert any(g.update == "deferred" for g in program.plan.groups)
    assert same(found, by_search())


def test_a_dumped_plan_runs_again_and_edited(tmp_path: Path) -> None:
    program, expected = trained(dump=tmp_path)
    path = tmp_path / "train" / "plan.json"
    again, found = trained(plan=path)
    assert again.plan == program.plan and same(found, expected)
    fields = json.loads(path.read_text())
    fields["blocks"][1] = {"checkpoint": "none", "saved_on": "host", "reload": 0}
    path.write_text(json.dumps(fields))
    edited, found = trained(plan=str(path))
    assert edited.plan.blocks[1] == BlockPlan("none", "host", 0) and same(found, expected)


def test_plans_that_do_not_belong_are_refused(tmp_path: Path) -> None:
    program, _ = trained(1)
    plan = program.plan
    refusals: list[tuple[Any, str, dict[str, Any]]] = [
        (plan, "another model", {"kind": "llama"}),
        (replace(plan, workload="", blocks=plan.blocks[:-1]), "blocks and", {}),
        (replace(plan, workload="", blocks=(BlockPlan("most"), *plan.blocks[1:])), "choose from", {}),
        (tmp_path / "missing.json", "cannot be read", {}),
        (plan, "not both", {"planner": "zero3-like"}),
    ]
    for given, words, options in refusals:
        with pytest.raises(megacompile.MegacompileError, match=words):
            trained(1, plan=given, **options)
    with pytest.raises(megacompile.MegacompileError, match="did you mean 'zero3-like'"):
        trained(1, planner="zero-like")


def test_a_plan_beyond_the_budget_is_refused_with_what_it_needs() -> None:
    plan = trained(1)[0].plan
    with pytest.raises(megacompile.BudgetError, match="given plan holds") as caught:
        torch.manual_seed(0)
        model = build("plain")
        adamw = torch.optim.AdamW(model.parameters())
        program = megacompile.compile(model, "60kB", optimizer=adamw, compute_dtype=torch.float32, plan=plan)
        program.train_step(batch_for("plain"))
    assert caught.value.least_bytes is not None and caught.value.least_bytes > 60_000


def test_attention_alone_is_kept_where_it_is_much_of_the_work() -> None:
    """At 64 tokens attention is a sixth of a layer's FLOPs: its results are offered, at 24 they are not."""

    def by_policy(checkpoint: str, *windows: int) -> tuple[list[float], dict[str, Any], megacompile.Program]:
        def plan(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
            block = BlockPlan(checkpoint, "host", *windows)
            return Plan((block,) * len(work.blocks), (GroupPlan("stream", 0),) * len(work.groups))

        model = build("llama")
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        program = megacompile.compile(
            model, "1GB", optimizer=adamw, compute_dtype=torch.float32, planner=plan
        )
        losses = [float(program.train_step(batch_for("llama", i, length=64)).loss) for i in range(2)]
        return losses, program.state_dict(), program

    losses, weights, _ = by_policy("all", 1)
    for reload in (0, 1):
        found, state, program = by_policy("attention", reload)
        assert found == losses and same(state, weights)
        assert program.memory.device_peak_bytes == program.memory.predicted_peak_bytes
        layer = program.schedule.work.blocks[1]
        names = [policy.name for policy in layer.policies]
        assert names == ["all", "some", "attention", "none", "least"]
        kept = {policy.name: policy.saved_bytes for policy in layer.policies}
        assert kept["attention"] == 2 * 64 * (32 + 4) * 4  # out and log-sum-exp of four heads
        attention = layer.policy("attention")
        assert attention.recompute is None and attention.backward is not None
        assert attention.backward.attention_flops[0] == 0
    model = build("llama")
    adamw = torch.optim.AdamW(model.parameters())
    program = megacompile.compile(model, "1GB", optimizer=adamw, compute_dtype=torch.float32)
    program.prepare(batch_for("llama"))
    assert "attention" not in {p.name for b in program.schedule.work.blocks for p in b.policies}


def test_gate_and_up_may_be_formed_again() -> None:
    """What they take of a layer is not kept, whatever the windows, and the step has the same bits."""

    def by_policy(checkpoint: str, saved_on: str, *windows: int) -> tuple[Any, ...]:
        def plan(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
            block = BlockPlan(checkpoint, saved_on, *windows)  # type: ignore[arg-type]
            return Plan((block,) * len(work.blocks), (GroupPlan("stream", 0),) * len(work.groups))

        model = build("llama", layers=6)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        program = megacompile.compile(
            model, "1GB", optimizer=adamw, compute_dtype=torch.float32, planner=plan, kernels=True
        )
        losses = [float(program.train_step(batch_for("llama", i)).loss) for i in range(2)]
        assert program.memory.device_peak_bytes == program.memory.predicted_peak_bytes
        return losses, program.state_dict(), program

    losses, weights, program = by_policy("some", "device")
    layer = program.schedule.work.blocks[1]
    some, narrow = layer.policy("some"), layer.policy("narrow")
    tokens, width = batch_for("llama")["input_ids"].numel(), build("llama").config.intermediate_size
    assert some.saved_bytes - narrow.saved_bytes == 2 * tokens * width * 4
    assert narrow.recompute is None and narrow.backward is not None and some.backward is not None
    hidden = build("llama").config.hidden_size
    assert narrow.backward.flops - some.backward.flops == 2 * 2 * tokens * width * hidden
    for saved_on, *windows in (("device",), ("host", 1, 1), ("host", 2, 3), ("host", 0, 4)):
        found, state, _ = by_policy("narrow", saved_on, *windows)  # type: ignore[misc]
        assert found == losses and same(state, weights), (saved_on, windows)
    model = build("gpt2")
    plain = megacompile.compile(model, "1GB", optimizer=torch.optim.AdamW(model.parameters()), kernels=True)
    plain.prepare(batch_for("gpt2"))
    assert "narrow" not in {p.name for b in plain.schedule.work.blocks for p in b.policies}

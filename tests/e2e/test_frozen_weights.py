"""Weights that are not trained are kept on the host as they are streamed, where that loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import megacompile
from megacompile.errors import BudgetError
from megacompile.state.model_export import describe
from megacompile.state.model_values import ModelValues
from megacompile.state.saved_values import saved_values
from tests.support.models import batch_for, build

STEPS = 3
NORM = "model.norm.weight"


def half(layers: int = 1) -> nn.Module:
    """As a checkpoint in bf16 is loaded."""
    return partly_frozen(layers, torch.bfloat16)


def rounded() -> nn.Module:
    """As it is loaded in FP32."""
    return partly_frozen(1, torch.bfloat16, torch.float32)


def single() -> nn.Module:
    """FP32 values that bf16 does not hold."""
    return partly_frozen(1)


def partly_frozen(layers: int, *dtypes: torch.dtype) -> nn.Module:
    model = build("llama", layers=layers)
    for name, parameter in model.named_parameters():
        for dtype in dtypes:  # buffers keep theirs
            parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_("q_proj" in name)
    return model


def compiled(model: nn.Module, budget: str = "1MB", **options: Any) -> megacompile.Program:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return megacompile.compile(model, budget, optimizer=optimizer, seed=1, **options)


def train(program: megacompile.Program, first: int = 0) -> list[float]:
    return [float(program.train_step(batch_for("llama", first + i)).loss) for i in range(STEPS)]


@pytest.fixture
def all_masters(monkeypatch: pytest.MonkeyPatch) -> Callable[..., megacompile.Program]:
    """Compiles a model, takes one step and keeps FP32 masters of all weights, as older versions did."""

    def prepared(model: nn.Module, **options: Any) -> megacompile.Program:
        with monkeypatch.context() as patch:
            patch.setattr(ModelValues, "exact", lambda self, names: [])
            program = compiled(model, **options)
            program.prepare(batch_for("llama"))
        return program

    return prepared


def masters(program: megacompile.Program, per_frozen: int) -> range:
    """The bytes that masters may take, with what aligns parameters."""
    named = [*program.model.named_parameters()]
    least = sum((4 if p.requires_grad else per_frozen) * p.numel() for _, p in named)
    return range(least, least + 4 * 64 * len(named))


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(v, theirs[n]) for n, v in ours.items())


@pytest.mark.slow_cases(r"(1MB-(half|single)|350kB-(rounded|half))")
@pytest.mark.parametrize(("make", "per_frozen"), [(half, 2), (rounded, 2), (single, 4)])
@pytest.mark.parametrize("budget", ["1MB", "350kB"])
def test_training_is_that_with_masters_of_all(
    make: Callable[[], nn.Module], per_frozen: int, budget: str, all_masters: Any
) -> None:
    model = make()
    frozen = {n: p.detach().float() for n, p in model.named_parameters() if not p.requires_grad}
    program, other = compiled(model, budget), all_masters(make(), budget=budget)
    assert train(program) == train(other)
    state = program.state_dict()
    assert equal(state, other.state_dict())
    assert all(torch.equal(state[name], value) for name, value in frozen.items())
    assert program.memory.host_bytes["masters"] in masters(program, per_frozen)
    assert other.memory.host_bytes["masters"] in masters(other, 4)
    for group in program.schedule.work.groups:
        if not group.trainable and per_frozen == 2:
            assert group.resident_bytes == group.nbytes
    program.sync_to(model)
    program.close()
    other.close()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.float(), state[name].to(parameter.dtype).float()), name


def test_a_host_budget_that_all_masters_do_not_fit_suffices(tmp_path: Path, all_masters: Any) -> None:
    with pytest.raises(BudgetError, match="host_budget=120 kB is too small"):
        all_masters(half(2), host_budget="120kB")
    with pytest.raises(BudgetError, match="casting the frozen weights to bfloat16 saves"):
        compiled(single(), host_budget="50kB").prepare(batch_for("llama"))
    program = compiled(half(2), host_budget="120kB")
    losses = train(program)
    program.close()
    program = compiled(half(2), "250kB", host_budget="80kB", offload_dir=tmp_path)
    assert train(program) == losses
    assert any(group.state == "nvme-all" for group in program.plan.groups)
    assert sum(program.memory.host_bytes.values()) <= 80_000
    program.close()


def test_checkpoints_with_and_without_masters_of_frozen_weights_go_on(
    tmp_path: Path, all_masters: Any
) -> None:
    """Those of older versions have all low halves; a program for other values of the model has too."""
    old, new = all_masters(half()), compiled(half())
    for name, program in (("old", old), ("new", new)):
        train(program)
        program.save(tmp_path / name)
    expected = train(old, 7)
    described = describe(new.model)
    new.close()
    old.close()
    for name, make in (("old", half), ("new", half), ("new", single)):
        program = compiled(make())
        program.prepare(batch_for("llama"))
        program.load(tmp_path / name)
        assert train(program, 7) == expected
        program.close()
    old_values, new_values = (dict(saved_values(tmp_path / name, described)) for name in ("old", "new"))
    assert equal(old_values, new_values)
    assert all(value.dtype == torch.float32 for value in new_values.values() if value.is_floating_point())


def test_a_checkpoint_that_would_be_rounded_is_refused_before_anything_changes(tmp_path: Path) -> None:
    program = compiled(single())
    program.prepare(batch_for("llama"))
    program.save(tmp_path / "single")
    program.close()
    program = compiled(half())
    program.prepare(batch_for("llama"))
    before = program.state_dict()
    with pytest.raises(megacompile.MegacompileError, match=r"is frozen .* would be rounded: give the model"):
        program.load(tmp_path / "single")
    assert equal(program.state_dict(), before)
    train(program)
    program.close()


def test_values_that_would_be_rounded_are_refused_before_anything_changes() -> None:
    program = compiled(half())
    train(program)
    before = program.state_dict()
    changed = {name: value + 1 if value.is_floating_point() else value for name, value in before.items()}
    for name, parameter in program.model.named_parameters():
        if not parameter.requires_grad:
            changed[name] = changed[name].bfloat16()
    program.load_state_dict(changed)
    assert equal(
        program.state_dict(), {name: value.to(before[name].dtype) for name, value in changed.items()}
    )
    with pytest.raises(megacompile.MegacompileError, match=f"{NORM} is frozen .* the value to be set"):
        program.load_state_dict(before | {NORM: before[NORM] + 1e-6})
    with pytest.raises(megacompile.MegacompileError, match="would be rounded"):
        program.load_state_dict({name: 0.3 * value for name, value in before.items()})
    assert equal(
        program.state_dict(), {name: value.to(before[name].dtype) for name, value in changed.items()}
    )
    program.close()


@pytest.mark.slow_cases(r"(half|single)")
@pytest.mark.parametrize("make", [half, rounded, single])
def test_weights_of_another_program_are_mixed_in_as_torch_does(make: Callable[[], nn.Module]) -> None:
    """In the model's dtype; in FP32 also where bf16 held what the frozen ones were."""
    reference, policy = compiled(make()), compiled(make())
    reference.expect_mixing()
    reference.prepare(batch_for("llama"))
    train(policy)
    reference.mix(policy, 0.6)
    loss, expected, other = reference.evaluate(batch_for("llama")), make(), policy.release()
    for mine, theirs in zip(expected.parameters(), other.parameters(), strict=True):
        mine.data.mul_(0.4).add_(theirs.data, alpha=0.6)
    mixed = reference.release()
    for (name, value), wanted in zip(mixed.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(value, wanted), name
    assert loss == compiled(expected).evaluate(batch_for("llama"))


def test_the_values_of_the_first_step_decide() -> None:
    """What a model is given between compilation and its first step counts."""
    program = compiled(rounded())
    weights = single().state_dict()
    program.model.load_state_dict(weights)
    train(program)
    assert program.memory.host_bytes["masters"] in masters(program, 4)
    assert torch.equal(
        program.state_dict()["model.embed_tokens.weight"], weights["model.embed_tokens.weight"]
    )
    program.close()


@pytest.mark.slow_cases(r"dtype1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_are_read_from_files_and_written_again(dtype: torch.dtype, tmp_path: Path) -> None:
    """All but the last parameter, which alone the optimizer holds."""
    model = build("llama", layers=1)
    for parameter in model.parameters():
        parameter.data += 0.001  # norms are ones
    model.to(dtype).save_pretrained(tmp_path / "in")  # type: ignore[operator]
    program = megacompile.from_pretrained(
        tmp_path / "in", "1MB", optimizer=lambda parameters: torch.optim.AdamW([*parameters][-1:], lr=1e-2)
    )
    train(program)
    trained = program.optimizer.param_groups[0]["params"][0]
    for parameter in program.model.parameters():
        parameter.requires_grad_(parameter is trained)
    assert program.memory.host_bytes["masters"] in masters(program, dtype.itemsize)
    program.export(tmp_path / "out", torch.float32)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert [n for n, v in before.items() if not torch.equal(v.float(), after[n])] == ["lm_head.weight"]
    program.close()

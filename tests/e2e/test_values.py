"""Values in and out of a program: state dicts, other models, and what does not fit them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.errors import ProgramError
from megacompile.state.model_values import ModelValues
from tests.support.models import Plain, batch_for, build


def trained(model: nn.Module, batch: Any = None) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    program = megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32)
    program.train_step(batch_for("plain") if batch is None else batch)
    return program


class Scaled(nn.Module):
    """A buffer that scales, one module under two names, and a weight that others could be expanded to."""

    def __init__(self, width: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.norm = nn.LayerNorm(4)
        self.again = self.norm
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.again(self.norm(x * self.weight))).pow(2).mean()


def test_state_dicts_pass_between_programs_and_plain_models_that_tie_weights() -> None:
    """GPT-2's head is its embedding: torch lists it under both names, and wants both back."""
    model = build("gpt2")
    plain = copy.deepcopy(model)
    program = trained(model, batch_for("gpt2"))
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    state = program.state_dict()
    assert set(state) == set(before)
    plain.load_state_dict(state)
    assert not torch.equal(plain.lm_head.weight, before["lm_head.weight"])  # type: ignore[union-attr,arg-type]
    program.load_state_dict(before)
    program.load_state_dict({n: v for n, v in before.items() if n != "transformer.wte.weight"})
    for name, value in program.state_dict().items():
        assert torch.equal(value, before[name]), name
    program.close()


def test_another_model_gets_parameters_and_buffers() -> None:
    model, other = Scaled(scale=5.0), Scaled()
    program = trained(model, (torch.randn(3, 4),))
    with torch.device("meta"):
        empty = Scaled()
    for target in (other, empty):
        program.sync_to(target)
        for name, value in target.state_dict().items():
            assert torch.equal(value, program.state_dict()[name]), name
    assert isinstance(empty.weight, nn.Parameter)
    assert not isinstance(empty.scale, nn.Parameter)
    program.close()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (lambda: Scaled(1), r"weight has shape \(1,\) in the model and \(4,\) in the program"),
        (lambda: Plain(), "only one of them has"),
        (lambda: nn.Linear(4, 4), "only one of them has"),
    ],
)
def test_a_model_of_another_kind_is_refused(target: Any, words: str) -> None:
    program, given = trained(Scaled(), (torch.randn(3, 4),)), target()
    before = copy.deepcopy(given.state_dict())
    with pytest.raises(megacompile.MegacompileError, match=words):
        program.sync_to(given)
    for name, value in given.state_dict().items():
        assert torch.equal(value, before[name]), name
    program.close()


def test_an_owned_model_is_no_target() -> None:
    program, other = trained(Plain()), trained(Plain())
    with pytest.raises(megacompile.MegacompileError, match="belongs to another program"):
        program.sync_to(other.model)
    program.close()
    other.close()


@pytest.fixture(scope="module")
def going_on() -> Iterator[megacompile.Program]:
    """A program that each case leaves as it was, and trains on."""
    with trained(Plain()) as program:
        yield program


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3, 32).numpy(), "no dense tensor with values in the state .ndarray."),
        (None, "no dense tensor"),
        (torch.zeros(3, 32, device="meta"), "no dense tensor .*meta"),
        (torch.zeros(3, 32).to_sparse(), "no dense tensor .*sparse"),
        (torch.zeros(3, 32, dtype=torch.complex64), "complex64 in the state"),
        (torch.zeros(32), "shape"),
    ],
)
def test_a_value_that_cannot_be_set_changes_nothing(
    value: Any, words: str, going_on: megacompile.Program
) -> None:
    program = going_on
    before = program.state_dict()
    state = {name: torch.zeros_like(v) for name, v in before.items()} | {"last.weight": value}
    with pytest.raises(megacompile.MegacompileError, match=r"last\.weight .*" + words):
        program.load_state_dict(state)
    for name, kept in program.state_dict().items():
        assert torch.equal(kept, before[name]), name
    program.train_step(batch_for("plain"))


def test_a_state_that_was_loaded_in_part_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    program = trained(Plain())
    state, write = program.state_dict(), ModelValues._write

    def interrupted(self: ModelValues, name: str, *rest: Any) -> None:
        if name.startswith("last"):
            raise KeyboardInterrupt
        write(self, name, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ModelValues, "_write", interrupted)
        program.load_state_dict(state)
    with pytest.raises(ProgramError, match="in part only"):
        program.train_step(batch_for("plain"))
    program.load_state_dict(state)
    program.train_step(batch_for("plain"))
    program.close()


def test_a_released_model_is_an_ordinary_one_and_the_state_is_freed() -> None:
    model = build("gpt2")
    program = trained(model, batch_for("gpt2"))
    before = program.state_dict()
    state = weakref.ref(program._session.runtime.state)  # type: ignore[union-attr]
    assert program.release() is model
    gc.collect()
    assert state() is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
        assert torch.equal(program.state_dict()[name], value), name
    model(**batch_for("gpt2")).loss.backward()
    with pytest.raises(ProgramError, match="compile the model again"):
        program.train_step(batch_for("gpt2"))


def test_only_what_is_trained() -> None:
    model = build("gpt2")
    model.transformer.wte.requires_grad_(False)
    program = trained(model, batch_for("gpt2"))
    values, whole = program.state_dict(trained=True), program.state_dict()
    assert set(values) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(value, whole[name]) for name, value in values.items())

"""Random sequences of every call by which values leave a program and come back: none is ever an old one.

A plain model trains beside: each value that a call hands out is that of the last step.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from safetensors.torch import load_file
from torch import Tensor, nn

import megacompile
from megacompile.errors import ProgramError
from megacompile.state.model_values import Lending


class Mixed(nn.Module):
    """A tied embedding, a buffer that training changes, a frozen layer, one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.norm, self.lower = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(self.lower(self.norm(self.embed(x))))
        return nn.functional.cross_entropy(self.head(h), x)


class Sequences(RuleBasedStateMachine):
    """``plain`` is what the program's values should be. ``given`` says that the model has values of its own
    beside the program's, ``waiting`` that gradients wait for an update."""

    @initialize(frozen=st.sampled_from([torch.float32, torch.bfloat16]), lends=st.booleans())
    def compile_first(self, frozen: torch.dtype, lends: bool) -> None:
        torch.manual_seed(0)
        self.model, self.lends = Mixed(), lends
        self.model.frozen.to(frozen)
        self.plain = copy.deepcopy(self.model).float()
        self.folder = Path(tempfile.mkdtemp())
        self.saved: dict[str, Tensor] = {}
        self.steps = 0
        self.compile()

    def compile(self) -> None:
        """The model, as it is, gets a program, which takes it over at once."""
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.eager = torch.optim.SGD(self.plain.parameters(), lr=0.5)
        self.eager.zero_grad()  # what waited went with the program before
        self.program = megacompile.compile(
            self.model, "1GB", optimizer=self.optimizer, compute_dtype=torch.float32
        )
        if self.lends:
            self.program.lend(Lending())
        self.program.prepare(torch.arange(8))
        self.given = self.waiting = False
        self.compiled_at = self.steps

    def batch(self) -> Tensor:
        self.steps += 1
        return torch.randint(0, 8, (8,), generator=torch.Generator().manual_seed(self.steps))

    @rule(how=st.sampled_from(["train_step", "by hand", "load_state_dict", "load", "edit the model"]))
    def change(self, how: str) -> None:
        """What the program's values become, and what they do not."""
        if how == "edit the model":
            with torch.no_grad():
                _ = self.model.lower.weight.zero_() if self.given else None
        elif how == "load_state_dict":
            state = self.program.state_dict()
            state["lower.weight"] = torch.full_like(state["lower.weight"], 0.25)
            self.program.load_state_dict(state)
            self.plain.load_state_dict(state)
        elif how == "load":
            if self.saved and not self.waiting:
                self.program.load(self.folder / "checkpoint")
                self.plain.load_state_dict(self.saved)
        else:
            if how == "by hand":
                self.gather()
                self.program.optimizer_step()
            elif not self.waiting:
                self.program.train_step(batch := self.batch())
                self.plain(batch).backward()
            else:
                return
            self.eager.step()
            self.eager.zero_grad()
            self.waiting = False

    @rule()
    def gather(self) -> None:
        self.program.forward_backward(batch := self.batch())
        self.plain(batch).backward()
        self.waiting = True

    @rule(by=st.sampled_from(["optimizer", "model", "parameters", "drop_gradients"]))
    @precondition(lambda self: self.waiting)
    def drop(self, by: str) -> None:
        if by == "drop_gradients" or (self.given and by != "optimizer"):
            self.program.drop_gradients()
        elif by == "parameters":
            for parameter in self.model.parameters():
                parameter.grad = None
        else:
            owner = self.model if by == "model" else self.optimizer
            owner.zero_grad()
        self.eager.zero_grad()
        with pytest.raises(ProgramError, match="No gradient is waiting"):
            self.program.optimizer_step()
        self.waiting = False

    @rule(how=st.sampled_from(["state_dict", "the model's", "deepcopy", "evaluate", "save", "export"]))
    def read(self, how: str) -> None:
        if how == "state_dict":
            self.compare(self.program.state_dict())
        elif how == "evaluate":
            with torch.no_grad():
                expected = self.plain.eval()(torch.arange(8))
            self.plain.train()
            loss = self.program.evaluate(torch.arange(8))
            torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        elif how == "save" and not self.waiting:
            self.program.save(self.folder / "checkpoint")
            self.saved = copy.deepcopy(self.plain.state_dict())
        elif how == "export":
            self.program.export(self.folder / "exported", torch.float32, beside=True)
            exported = load_file(self.folder / "exported" / "model.safetensors")
            torch.testing.assert_close(exported["lower.weight"], self.plain.lower.weight.detach())
        elif not self.given:
            model = copy.deepcopy(self.model) if how == "deepcopy" else self.model
            self.compare(model.state_dict())

    @rule(own=st.booleans())
    def sync_to(self, own: bool) -> None:
        model = self.model if own else Mixed()
        self.program.sync_to(model)
        self.compare(model.state_dict())
        self.given = self.given or own

    @rule(closes=st.booleans())
    @precondition(lambda self: self.steps > self.compiled_at + 1)
    def compile_again(self, closes: bool) -> None:
        """What a closed program holds, the next one takes; a model with values of its own, by release."""
        if closes:
            self.program.close()
            self.compare(self.program.state_dict())
        if self.given or not closes:
            assert self.program.release() is self.model
            self.compare(self.model.state_dict())
            assert all(type(p) is nn.Parameter for p in self.model.parameters())
        self.compile()
        self.compare(self.program.state_dict())

    def compare(self, state: Mapping[str, Tensor]) -> None:
        expected = self.plain.state_dict()
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value.to(expected[name].dtype), expected[name], rtol=1e-4, atol=1e-5)
        assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()

    def teardown(self) -> None:
        if hasattr(self, "program"):
            self.program.release()
            shutil.rmtree(self.folder)
            self.compare(self.model.state_dict())


TestSequences = Sequences.TestCase
# Without making a failing sequence smaller, which compiles for minutes.
TestSequences.settings = settings(max_examples=8, stateful_step_count=25, phases=[Phase.generate])

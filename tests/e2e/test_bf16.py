"""bf16 compute over FP32 masters: gradients no worse than plain bf16 eager (contract 2)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.capture.batch import read_batch
from megacompile.capture.patches import our_operators
from megacompile.runtime.step_results import step_seed
from megacompile.state.master_layout import slot_view
from tests.support.models import batch_for, build
from tests.support.zoo import causal, token_batch

TOLERANCE = 1e-2  # of a gradient's scale, beyond what plain bf16 eager is off by


def eager_gradients(model: nn.Module, name: str) -> dict[str, Tensor]:
    batch = batch_for(name)
    rng = torch.tensor([step_seed(0, 0, 0), 0])
    with our_operators(model, rng):
        model(**read_batch(batch, model).kwargs).loss.backward()
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


def check_gradients(name: str, dtype: torch.dtype, tolerance: float, **options: Any) -> megacompile.Program:
    """A program whose gradients are no farther from fp32 than those of eager in ``dtype``, and ``tolerance``
    of their scale more."""
    model = build(name)
    exact = eager_gradients(copy.deepcopy(model), name)
    # eager casts parameters only: buffers (rotary frequencies) stay fp32, as they do in a program
    low = copy.deepcopy(model)
    for parameter in low.parameters():
        parameter.data = parameter.data.to(dtype)
    plain = eager_gradients(low, name)

    optimizer = torch.optim.AdamW(model.parameters())
    program = megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=dtype, **options)
    program.forward_backward(batch_for(name))
    program.synchronize()
    runtime = program._session.runtime
    assert runtime is not None
    for layout in runtime.state.groups:
        kept = runtime.buffers.gradients.get(layout.index)
        for slot in layout.slots:
            flat = (
                kept[: 4 * layout.elements].view(torch.float32)
                if kept is not None
                else runtime.resident.gradient(layout.index, ("dgrad",))
            )
            ours = slot_view(flat, slot)
            reference = exact[slot.parameter.name]
            scale = reference.abs().max()
            error = (ours - reference).abs().max()
            allowed = (plain[slot.parameter.name] - reference).abs().max() + tolerance * scale
            assert error <= allowed, slot.parameter.name
    program.optimizer_step()
    return program


@pytest.mark.parametrize("name", ["llama", "gpt2-dropout", "gemma3"])
def test_gradients_are_as_good_as_bf16_eager(name: str) -> None:
    program = check_gradients(name, torch.bfloat16, TOLERANCE)
    assert torch.isfinite(program.train_step(batch_for(name, 1)).loss)
    program.close()


class Kept(nn.Module):
    """A norm in FP32 between products in bf16, as transformers' models declare it."""

    _keep_in_fp32_modules_strict = ("norm",)
    _keep_in_fp32_modules = ("first",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.first(x).float()).to(self.last.weight.dtype)
        return nn.functional.mse_loss(self.last(h), y)


@pytest.mark.parametrize("name", ["plain", "deepseek_v4"])
def test_modules_that_keep_fp32_are_honoured(name: str) -> None:
    """As ``from_pretrained`` in bf16 does: by the strict names, not by those that are kept from fp16."""
    if name == "plain":
        model: Any = Kept()
        norm, other = "norm.weight", "first"
        batch = {"x": torch.randn(4, 16).bfloat16(), "y": torch.randn(4, 3).bfloat16()}
    else:
        model = causal(name, num_hidden_layers=1).train()
        norm, other = "model.norm.weight", "self_attn.compressor.kv_proj"
        batch = token_batch(0)
    assert "norm" in model._keep_in_fp32_modules_strict
    assert other in model._keep_in_fp32_modules
    program = megacompile.compile(
        model, "1GB", optimizer=torch.optim.AdamW(model.parameters()), example_batch=batch
    )
    runtime = program._session.runtime
    assert runtime is not None
    dtypes = {s.parameter.name: g.dtype for g in runtime.state.groups for s in g.slots}
    assert dtypes[norm] == torch.float32
    assert {dtype for name, dtype in dtypes.items() if other in name} == {torch.bfloat16}
    assert torch.isfinite(program.train_step(batch).loss)
    program.close()

"""bf16 compute over FP32 masters: gradients no worse than plain bf16 eager (contract 2)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megacompile
from megacompile.blocks import cpu_products
from megacompile.capture.batch import read_batch
from megacompile.capture.parameter_forms import parameter_forms
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


@pytest.mark.slow_cases(r"(gemma3|llama)")
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


@pytest.mark.slow_cases(r"deepseek")
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


class _Rounded(torch.autograd.Function):
    """A linear layer whose products are float32's, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias.float(), x.float(), weight.float().t()).bfloat16()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        grad, (x, weight) = grads[0], ctx.saved_tensors
        wide = grad.float()
        return (wide @ weight.float()).bfloat16(), (wide.t() @ x.float()).bfloat16(), grad.sum(0)


class _Layers(nn.Module):
    """Linear layers with an activation between; ``linear`` computes one of them."""

    linear: Any = staticmethod(F.linear)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((16, 48), (48, 48), (48, 4)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.linear(F.gelu(x), layer.weight, layer.bias)
        return F.mse_loss(x.float(), y)


def test_a_cpu_without_bf16_products_trains_by_float32_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of a model whose every product is rounded once; plans and sources are those of other CPUs."""
    torch.manual_seed(0)
    model, batch = _Layers(), {"x": torch.randn(24, 16).bfloat16(), "y": torch.randn(24, 4)}
    reference, products, plain = copy.deepcopy(model), list[torch.Size](), cpu_products._product

    def product(a: Tensor, *rest: Any) -> Tensor:
        products.append(a.shape)
        return plain(a, *rest)

    def program_of(model: nn.Module, *, has: bool) -> megacompile.Program:
        monkeypatch.setattr(cpu_products, "has_bf16_products", lambda: has)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return megacompile.compile(model, "1GB", optimizer=optimizer, example_batch=batch)

    monkeypatch.setattr(cpu_products, "_product", product)
    other = program_of(copy.deepcopy(model), has=True)
    other.train_step(batch)
    assert not products
    program = program_of(model, has=False)
    assert (program.schedule.plan, program.schedule.source) == (other.schedule.plan, other.schedule.source)
    other.close()

    own = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(4):
        products.clear()
        low = copy.deepcopy(reference).bfloat16()
        low.linear = _Rounded.apply
        loss = low(**batch)
        loss.backward()
        assert float(program.train_step(batch).loss) == float(loss.detach())
        assert len(products) == 8  # forward, gradients of weights, of all inputs but the first
        for master, narrow in zip(reference.parameters(), low.parameters(), strict=True):
            assert narrow.grad is not None
            master.grad = narrow.grad.float()
        own.step()
    assert program.memory.device_peak_bytes == program.memory.predicted_peak_bytes
    program.close()


class Routed(nn.Module):
    """Experts in bf16, between a norm and a router that are held in FP32 and cast as models cast for them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.router = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4, bias=False)
        self.experts, self.last = nn.Parameter(torch.randn(4, 16, 16) / 4), nn.Linear(16, 3)
        self.bfloat16()
        self.norm.float()
        self.router.float()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x.to(self.first.weight.dtype))
        shares = self.router(self.norm(h.float())).softmax(-1)
        h = torch.einsum("bd,edf,be->bf", h, self.experts, shares.to(h.dtype))
        return nn.functional.mse_loss(self.last(h).float(), y)


class Headed(Routed):
    """Whose head in FP32 takes what is in bf16, as only autocast lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.last.float()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x.to(self.first.weight.dtype)) @ self.experts[0]
        if type(self.last) is nn.Linear and not torch.compiler.is_compiling():
            h = h.float()
        return nn.functional.mse_loss(self.last(h), y) + 0 * self.router.weight.sum()


@pytest.mark.parametrize("frozen", [(), ("router", "norm"), ("first", "experts", "last")], ids=str)
@pytest.mark.parametrize("kind", [Routed, Headed])
def test_what_a_bf16_model_holds_in_fp32_computes_in_it(kind: type[Routed], frozen: tuple[str, ...]) -> None:
    """One step of plain eager on the model as it is, with masters."""
    torch.manual_seed(0)
    model, batch = kind(), {"x": torch.randn(8, 16), "y": torch.randn(8, 3)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    eager = copy.deepcopy(model)
    loss = eager(**batch)
    loss.backward()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    program = megacompile.compile(model, "1GB", optimizer=optimizer, device="cpu")
    assert float(program.train_step(batch).loss) == pytest.approx(float(loss.detach()), rel=1e-3)
    runtime, values = program._session.runtime, program.state_dict()
    assert runtime is not None
    dtypes = {s.parameter.name: g.dtype for g in runtime.state.groups for s in g.slots}
    for name, parameter in eager.named_parameters():
        assert dtypes[name] == parameter.dtype, name
        if parameter.grad is not None:
            moved, grad = parameter.detach().float() - values[name].float(), parameter.grad.float()
            assert float((moved - grad).abs().max()) <= TOLERANCE * float(grad.abs().max()), name
    program.close()


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: dtype for name, (dtype, _) in parameter_forms(model, torch.bfloat16).items()}


def test_what_is_mostly_fp32_and_adapters_compute_in_bf16() -> None:
    """Adapters are FP32 for the sake of their updates, as PEFT makes them."""
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    model = nn.ModuleDict({"large": nn.Linear(8, 8), "small": nn.Linear(8, 2).bfloat16()})
    assert {*dtypes_of(model).values()} == {torch.bfloat16}
    adapted = peft.get_peft_model(build("llama").bfloat16(), peft.LoraConfig(target_modules=["q_proj"]))
    adapted.base_model.model.model.norm.float()
    adapters = {
        name for name, p in adapted.named_parameters() if "lora_" in name and p.dtype == torch.float32
    }
    assert adapters
    kept = {name for name, dtype in dtypes_of(adapted).items() if dtype == torch.float32}
    assert kept == {"base_model.model.model.norm.weight"}

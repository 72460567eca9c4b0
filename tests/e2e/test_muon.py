"""Muon: the host keeps momentum and masters, the device makes updates orthogonal, bitwise as torch does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.runtime.step_results import NonFiniteError
from megacompile.state import muon
from megacompile.state.several_optimizers import Several
from tests.e2e.test_any_optimizer import Pair
from tests.support.reference import EagerTrainer, HostAdamW


class Shapes(nn.Module):
    """Matrices that are wide, tall and square, one laid out by columns, each beside vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 24)) for _ in range(5)
        )
        self.mixing = nn.Parameter(torch.randn(40, 24).T)
        self.last = nn.Linear(40, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.last(x @ self.mixing).square().mean()
        return out


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    matrices = [p for p in named.values() if p.dim() == 2]
    plain, moonshot = matrices[::2], matrices[1::2]
    return [
        {"params": plain, "nesterov": False},
        {"params": moonshot, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.9, "weight_decay": 0.3},
        {"params": [p for p in named.values() if p.dim() == 1], "lr": 1e-2},
    ]


def make(
    groups: list[dict[str, Any]], adamw: type[torch.optim.AdamW] = torch.optim.AdamW
) -> torch.optim.Optimizer:
    return Several([torch.optim.Muon(groups[:2], lr=0.02), adamw(groups[2:])])


def plain(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return make(groups, HostAdamW)


def batch(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 24, generator=torch.Generator().manual_seed(seed))}


CASES: dict[str, dict[str, Any]] = {
    "clipped": {},
    "as gradients come": {"max_grad_norm": None},
    "full recompute": {"max_grad_norm": None, "planner": "full-recompute"},
    "updates after the backward": {"max_grad_norm": None, "planner": "double-buffer"},
    "NVMe": {"max_grad_norm": None, "host_budget": "200KB"},
    "NVMe, clipped": {"host_budget": "250KB"},
}


@pytest.mark.slow_cases(r"(full|updates|NVMe, clipped)")
@pytest.mark.parametrize("name", CASES)
def test_trains_bitwise_as_torch_does_and_resumes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one micro-batch and of two, a schedule of the learning rate, a checkpoint in the middle."""
    monkeypatch.setattr(muon, "CHUNK", 64 * 24)
    torch.manual_seed(0)
    options: dict[str, Any] = {"groups": groups_of, "example_batch": batch(0), **CASES[name]}
    if "host_budget" in options:
        options["offload_dir"] = tmp_path
    pair = Pair(make, Shapes(), plain=plain, **options)
    kinds = [op.kind for op in pair.program._session.scheduled().planned.step.ops]
    assert kinds.count("momentum") == kinds.count("orthogonalize") == kinds.count("free_update") > 5
    if "host_budget" in options:
        assert "nvme" in {group.state.split("-")[0] for group in pair.program.plan.groups}
    for index in range(3):
        pair.step(batch(index))
    pair.step(batch(3), *([batch(13)] if name != "NVMe" else []))  # sums need more of the host
    pair.check()
    pair.program.save(tmp_path / "saved")
    pair.step(batch(4))
    expected = pair.program.state_dict()
    pair.program.load(tmp_path / "saved")
    for group, rate in zip(pair.program.optimizer.param_groups, pair.plain.param_groups, strict=True):
        group["lr"] = rate["lr"] / 0.8
    pair.program.train_step(batch(4))
    assert all(torch.equal(expected[n], v) for n, v in pair.program.state_dict().items())
    pair.check()
    pair.program.close()


@pytest.mark.parametrize("clipped", [True, False])
def test_a_step_that_is_left_out_changes_nothing(clipped: bool) -> None:
    """Momentum too, which an update changes first."""
    torch.manual_seed(0)
    limit = {"max_grad_norm": 0.5 if clipped else None}
    pair = Pair(
        make,
        Shapes(),
        plain=plain,
        groups=groups_of,
        **limit,
        **({"on_nonfinite": "skip"} if clipped else {}),
    )
    pair.step(batch(0))
    bad = {"x": torch.full((8, 24), float("nan"))}
    if clipped:
        pair.program.train_step(bad)
    else:
        with pytest.raises(NonFiniteError, match="not all gradients are finite"):
            pair.program.train_step(bad)
    for seed in range(1, 3):
        pair.step(batch(seed))
    pair.check()
    pair.program.close()


@pytest.mark.slow
def test_a_mixture_of_experts_trains_bitwise_as_a_plain_loop() -> None:
    """Routers and attention by Muon; banks of experts have three dimensions, so that AdamW has them."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    }
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **heads, **experts))
    eager = copy.deepcopy(model)

    def split(model: nn.Module, adamw: type[torch.optim.AdamW] = torch.optim.AdamW) -> Several:
        named = dict(model.named_parameters())
        inner = [n for n, p in named.items() if p.dim() == 2 and ".layers." in n]
        rest = [p for n, p in named.items() if n not in inner]
        return Several([torch.optim.Muon([named[n] for n in inner], lr=0.02), adamw(rest)])

    plain = split(eager, HostAdamW)
    reference = EagerTrainer(eager, plain)
    options: dict[str, Any] = {"max_grad_norm": 0.5, "compute_dtype": torch.float32}
    program = megacompile.compile(model, "1GB", optimizer=split(model), **options)
    for seed in range(2):
        ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
        program.train_step({"input_ids": ids, "labels": ids})
        reference.loss({"input_ids": ids, "labels": ids}).backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
    values = program.state_dict()
    program.close()
    assert all(torch.equal(values[n], p) for n, p in eager.named_parameters())

"""Routing weights before the experts' last product: the numbers, what is kept for the backward, cut banks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.partition import partition
from megacompile.blocks.policies import differentiate
from megacompile.graph.captured import Captured
from megacompile.graph.fusion_check import TOLERANCE
from megacompile.graph.fusion_rewriter import PATTERNS, fuse
from megacompile.graph.tile_cuts import families
from megacompile.graph.tile_rewriter import tile
from tests.unit.graph.test_fuse import architecture, captured
from tests.unit.graph.test_tile import run

pytest.importorskip("transformers.integrations.moe", reason="transformers has no grouped products")
_ONLY = dict.fromkeys(PATTERNS, False) | {"routing_weights": True}
_WIDTH, _INNER, _EXPERTS, _TOKENS, _CHOSEN = 32, 16, 6, 20, 2


class Experts(nn.Module):
    """A mixture whose experts the batch names, with trained weights; ``spoil`` changes one thing."""

    def __init__(self, spoil: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spoil, inner = spoil, 2 * _WIDTH if spoil == "wide" else _INNER
        self.up = nn.Parameter(torch.randn(_EXPERTS, inner, _WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(_EXPERTS, _WIDTH, inner) / 4)
        self.inside, self.router = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 1)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        order = experts.argsort(stable=True)
        offsets = (experts[:, None] <= torch.arange(_EXPERTS)).sum(0).int()
        x = self.inside(x)[order]
        product = torch.ops.transformers.grouped_mm_fallback
        y = product(F.silu(product(x, self.up.mT, offsets)), self.down.mT, offsets)
        weights = self.router(x).sigmoid()
        read = y.sum() if self.spoil == "read" else 0.0
        weights = weights.float() if self.spoil == "wider type" else weights
        y = y + 1 if self.spoil == "biased" else y
        return (y * weights)[order.argsort()].square().mean() + read


def batch(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_TOKENS, _WIDTH, generator=generator)
    experts = torch.randint(1, _EXPERTS, (_TOKENS,), generator=generator)  # the first has no rows
    return {"x": x.to(dtype), "experts": experts}


def results(graph: Captured, model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """The loss and all gradients."""
    loss, grads = run(graph, model, list(batch(dtype).values()))
    return [loss, *(grads[name] for name, _ in model.named_parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_before_the_product_are_as_exact_as_behind_it(dtype: torch.dtype) -> None:
    model = Experts().to(dtype)
    plain = captured(model, batch(dtype), dtype)
    moved, fusions = fuse(plain, _ONLY)
    assert fusions.counts == {"routing_weights": 1}
    double = copy.deepcopy(model).double()
    exact = results(captured(double, batch(dtype) | {"x": batch(dtype)["x"].double()}, torch.float64), double,
                    torch.float64)  # fmt: skip
    for got, want, reference in zip(
        results(moved, model, dtype), results(plain, model, dtype), exact, strict=True
    ):
        scale = float(reference.abs().max())
        ours, theirs = (float((x.double() - reference).abs().max()) / scale for x in (got, want))
        assert ours <= theirs + TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("wide", "inner rows are wider (64) than their results (32)"),
        ("read", "is also read by sum"),
        ("wider type", "its weights are torch.float32, its rows torch.bfloat16"),
        ("biased", "a bias is added"),
    ],
)
def test_what_gains_nothing_stays(spoil: str, reason: str) -> None:
    dtype = torch.bfloat16
    graph = captured(Experts(spoil).to(dtype), batch(dtype), dtype)
    found, fusions = fuse(graph, _ONLY)
    assert not fusions.placements and [reason in miss.reason for miss in fusions.near_misses] == [True]
    assert [n.target for n in found.graph.nodes] == [n.target for n in graph.graph.nodes]


@pytest.mark.slow
def test_the_backward_keeps_no_results_of_experts_and_computes_none_again() -> None:
    model = architecture("Qwen3MoeForCausalLM")
    ids = torch.randint(3, 100, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    plain = captured(model, {"input_ids": ids, "labels": ids}, torch.bfloat16)
    moved, fusions = fuse(plain, _ONLY)
    assert fusions.counts == {"routing_weights": 2}
    before, after = (_layer(graph) for graph in (plain, moved))
    rows = _TOKENS * _CHOSEN
    less = before.policies["some"].saved_bytes - after.policies["some"].saved_bytes
    assert less == rows * _WIDTH * 2
    again = [layer.policies["least"].recompute for layer in (before, after)]
    assert again[0] is not None and again[1] is not None
    assert again[0].flops - again[1].flops == 2 * rows * _WIDTH * _INNER
    backward = after.policies["all"].backward
    assert backward is not None
    assert backward.source.count("aten.index_put.default") == 2  # sums of x's rows, and of the weights'


def _layer(graph: Captured) -> DifferentiatedTemplate:
    (template,) = (t for t in partition(graph).templates if t.name.endswith("layers.0"))
    return differentiate(template, graph.fake_mode)


@pytest.mark.slow
def test_a_cut_bank_with_weights_inside_is_bitwise_the_whole_one() -> None:
    model = architecture("Qwen3MoeForCausalLM")
    ids = torch.randint(3, 8, (1, 5), generator=torch.Generator().manual_seed(0))
    moved, _ = fuse(captured(model, {"input_ids": ids, "labels": ids}), _ONLY)
    bank = next(f for f in families(moved) if "experts" in f.names[0])
    cut = tile(moved, dict.fromkeys(bank.names, (0, 1, bank.rows - 1, bank.rows))).captured
    assert len(cut.graph.nodes) > len(moved.graph.nodes)
    (loss, grads), (ours, found) = (run(graph, model, [ids, ids]) for graph in (moved, cut))
    assert torch.equal(ours, loss) and set(found) == set(grads)
    for name, grad in grads.items():
        assert torch.equal(found[name], grad), name

"""What a function holds, as its trace tells: to the byte what a run of it on fake tensors holds."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megacompile.api.frontend import Compiled, Frontend
from megacompile.blocks import block_functions, joint_graph, policies
from megacompile.blocks.joint_graph import trace_joint
from megacompile.blocks.partition import Template
from megacompile.blocks.policies import differentiate
from megacompile.capture.batch import read_batch
from tests.support.models import batch_for, build
from tests.support.zoo import cases


class Bags(nn.Module):
    """Results that stand in more memory than they show, several results of one operator, views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.mix = nn.EmbeddingBag(32, 12, mode="max"), nn.Conv1d(4, 6, 3)
        self.norm = nn.LayerNorm(10)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.bag(ids).view(-1, 4, 12) + torch.arange(12.0)
        first, second = self.norm(self.mix(found)).chunk(2, 1)
        return nn.functional.mse_loss(first.tanh(), second.expand_as(first))


def compiled_of(kind: str) -> Compiled:
    torch.manual_seed(0)
    kind, _, fused = kind.partition(" ")
    if kind == "LSTM":  # some of its views are traced as copies
        model = cases()[kind].build().train()
        given = {name: tokens[:, :4] for name, tokens in cases()[kind].batch(0).items()}
    elif kind == "bags":
        model, given = Bags(), {"ids": torch.zeros(8, 5, dtype=torch.long)}
    else:
        model, given = build(kind), batch_for(kind, 1)
    frontend = Frontend(model, torch.float32, kernels=bool(fused))
    return frontend.build(read_batch(given, model))


@pytest.mark.parametrize("kind", ["bags", "llama fused", "gpt2", "LSTM"])
def test_a_trace_tells_what_a_run_holds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(block_functions, "_measure", None)
        compiled = compiled_of(kind)
    monkeypatch.setattr(block_functions, "held_bytes", lambda *_: None)
    monkeypatch.setattr(policies, "_CUT", WeakKeyDictionary())  # what was made before
    walked, mode = compiled.templates, compiled.fused.fake_mode
    measured = (
        differentiate(template, mode, fold=kind.endswith("fused")) for template in compiled.part.templates
    )
    assert list(walked) == [replace(m, index=w.index) for m, w in zip(measured, walked, strict=True)]


def test_all_of_a_trace_is_of_one_fake_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a call of ours takes a copy of a tensor that comes of no argument, and it counts as held twice."""
    traced: list[tuple[fx.Graph, FakeTensorMode]] = []

    def trace(template: Template, mode: FakeTensorMode) -> fx.Graph:
        traced.append((trace_joint(template, mode), mode))
        return traced[-1][0]

    monkeypatch.setattr(joint_graph, "trace_joint", trace)
    compiled_of("bags")
    assert any(n.target is torch.ops.aten.arange.default for graph, _ in traced for n in graph.nodes)
    for graph, mode in traced:
        values = [n.meta.get("val") for n in graph.nodes]
        assert all(v.fake_mode is mode for v in values if isinstance(v, FakeTensor))

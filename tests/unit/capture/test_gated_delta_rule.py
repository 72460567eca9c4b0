"""The gated delta rule of transformers' models is one operator of a captured graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from megacompile.capture.patches import our_operators
from tests.support.graphs import check_run, graph_of
from tests.support.zoo import causal

RULE = torch.ops.megacompile.gated_delta_rule.default
RNG = torch.tensor([3, 0])


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_text", "olmo_hybrid"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return causal(request.param)


def batch(tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(5, 64, (2, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.slow
def test_a_graph_does_not_grow_with_the_tokens(model: nn.Module) -> None:
    short, long = (list(graph_of(model, batch(tokens)).graph.nodes) for tokens in (40, 300))
    assert len(short) == len(long)
    calls = [node for node in long if node.target is RULE]
    assert len(calls) == model.config.layer_types.count("linear_attention") > 0


@pytest.mark.slow_cases(r"(?!qwen3_next)")
def test_loss_and_gradients_are_the_model_s(model: nn.Module) -> None:
    check_run(model, batch(150))


def test_states_that_are_given_or_wanted_are_the_model_s_own() -> None:
    q, k, v = torch.randn(3, 1, 70, 2, 8, generator=torch.Generator().manual_seed(0))
    g, beta = -torch.rand(1, 70, 2), torch.rand(1, 70, 2)
    theirs, found = qwen3_next.torch_chunk_gated_delta_rule, []
    for ours in (False, True):
        with our_operators(causal("qwen3_next"), RNG) if ours else torch.enable_grad():
            rule = qwen3_next.torch_chunk_gated_delta_rule
            assert (rule is not theirs) == ours
            out, state = rule(q, k, v, g, beta, output_final_state=True)
            found += [out, state, rule(q, k, v, g, beta, initial_state=state)[0]]
    for mine, other in zip(found[:3], found[3:], strict=True):
        assert torch.equal(mine, other)

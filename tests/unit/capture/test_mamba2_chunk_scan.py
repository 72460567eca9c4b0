"""The scan of transformers' Mamba-2 layers is one operator of a captured graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mamba2 import modeling_mamba2 as mamba2

from megacompile.capture.patches import our_operators
from tests.support.graphs import check_run, graph_of
from tests.support.zoo import causal

SCAN = torch.ops.megacompile.mamba2_chunk_scan.default
RNG = torch.tensor([3, 0])
MODELS = ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    made = causal(request.param)
    for name, parameter in made.named_parameters():
        if name.endswith(("A_log", "dt_bias", ".D")):  # which models begin as constants
            nn.init.normal_(parameter)
    return made.eval()


def batch(tokens: int, padding: Tensor | None = None) -> dict[str, Tensor]:
    ids = torch.randint(5, 64, (2, tokens), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "labels": ids}
    return given if padding is None else given | {"attention_mask": padding}


def scans(model: nn.Module) -> int:
    return sum(hasattr(module, "A_log") for module in model.modules())


@pytest.mark.slow_cases(r"(?!mamba2|falcon_h1-left)")
def test_a_graph_does_not_grow_with_the_tokens(model: nn.Module) -> None:
    short, long = (list(graph_of(model, batch(tokens)).graph.nodes) for tokens in (40, 300))
    assert len(short) == len(long)
    assert sum(node.target is SCAN for node in long) == scans(model) > 0


@pytest.mark.slow_cases(r"(?!mamba2|falcon_h1-left)")
@pytest.mark.parametrize("padded", [None, "left", "right"])
def test_loss_and_gradients_are_the_model_s(model: nn.Module, padded: str | None) -> None:
    positions = torch.arange(150)
    rows = {
        "left": torch.stack([positions >= 20, positions >= 0]),
        "right": torch.stack([positions < 130, positions >= 0]),
    }
    check_run(model, batch(150, rows[padded].long() if padded else None))


def test_states_that_are_given_or_wanted_are_the_model_s_own() -> None:
    draw = torch.Generator().manual_seed(0)
    x, (B, C) = torch.randn(1, 70, 2, 8, generator=draw), torch.randn(2, 1, 70, 1, 4, generator=draw)
    dt, A, D = torch.rand(1, 70, 2, generator=draw), torch.tensor([-1.0, -9.0]), torch.ones(2)
    theirs, found = mamba2.mamba2_chunk_scan, []
    for ours in (False, True):
        with our_operators(causal("mamba2"), RNG) if ours else torch.enable_grad():
            scan = mamba2.mamba2_chunk_scan
            assert (scan is not theirs) == ours
            out, state = scan(x, dt, A, B, C, 64, D=D, return_final_states=True)
            found += [
                out,
                state,
                scan(x, dt, A, B, C, 64, D=D, initial_states=state),
                scan(x, dt, A, B, C, 64),
            ]
            with pytest.raises(ValueError, match="packed sequences"):
                scan(x, dt, A, B, C, 64, D=D, seq_idx=torch.zeros(1, 70, dtype=torch.int32))
    for mine, other in zip(found[:4], found[4:], strict=True):
        assert torch.equal(mine, other)

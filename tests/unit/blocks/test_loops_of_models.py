"""Loops of whole models, beside whole functions; ``python -m benchmarks.loops`` tries all of them."""

from __future__ import annotations

import pytest

from megacompile.blocks.chunk_roles import length_of, two_lengths
from tests.support.looped import LENGTHS, NO_PRODUCT, SHORT, _compiled, looped
from tests.support.zoo import cases


@pytest.mark.slow_cases(r"(BART|gpt_neox|llama, left)")
@pytest.mark.parametrize("name", ["llama, packed", "llama, left-padded", "gpt_neox", "BART"])
def test_loops_of_a_model_compute_what_whole_functions_do(name: str) -> None:
    """Bounds of documents; masks; a split whose parts two loops read; gradients that cancel to zero."""
    found = [t for t in looped(name, LENGTHS[:1], chunks=(25,)) if t.whole != NO_PRODUCT]
    assert found and not [t for t in found if t.whole or t.wrong]
    assert {operator for t in found for operator in t.mixes} <= {"attention", "dropout"}


def test_a_layer_with_experts_has_the_same_graph_at_any_length() -> None:
    """Also where a gradient goes back by the places of all tokens' experts, twice as many."""
    compiled = _compiled(cases()["qwen3_moe"], LENGTHS[0])
    layers = [t for t in compiled.part.templates if length_of(t) == LENGTHS[0]]
    assert [two_lengths(t, compiled.fused.fake_mode, SHORT)[1] for t in layers] == [None] * len(layers)

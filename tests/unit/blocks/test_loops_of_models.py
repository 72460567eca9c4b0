"""Loops of whole models, beside whole functions; ``python -m benchmarks.loops`` tries all of them."""

from __future__ import annotations

import pytest

from tests.support.looped import LENGTHS, NO_PRODUCT, looped


@pytest.mark.slow_cases(r"(BART|gpt_neox|llama, left)")
@pytest.mark.parametrize("name", ["llama, packed", "llama, left-padded", "gpt_neox", "BART"])
def test_loops_of_a_model_compute_what_whole_functions_do(name: str) -> None:
    """Bounds of documents; masks; a split whose parts two loops read; gradients that cancel to zero."""
    found = [t for t in looped(name, LENGTHS[:1], chunks=(25,)) if t.whole != NO_PRODUCT]
    assert found and not [t for t in found if t.whole or t.wrong]
    assert {operator for t in found for operator in t.mixes} <= {"attention", "dropout"}

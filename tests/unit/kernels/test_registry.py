"""The declarations of operators: each is whole, and nothing else in the product names an operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megacompile
import megacompile.cli.main  # noqa: F401
from megacompile.kernels.registry import CALLED, SPECS, called
from tests.support import figures

ROOT = Path(__file__).parents[3]


def registered() -> set[str]:
    """The names of our torch operators."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.partition("::")[2] for name in names if name.startswith("megacompile::")}


def overload(name: str) -> Any:
    return getattr(torch.ops.megacompile, name).default


def test_every_operator_is_declared_once() -> None:
    twins = {c.part.twin.name for c in CALLED.values() if c.part.twin is not None}
    assert registered() == CALLED.keys() | twins and not CALLED.keys() & twins
    for name, call in CALLED.items():
        assert called(overload(name)) is call and call.spec is SPECS[call.spec.name]
    assert called(torch.ops.aten.add.Tensor) is None and called(len) is None


@pytest.mark.parametrize("name", sorted(CALLED))
def test_a_declaration_has_what_its_role_needs(name: str) -> None:
    call = CALLED[name]
    spec, part = call.spec, call.part
    arguments = overload(name)._schema.arguments
    names = [a.name for a in arguments]
    if spec.runs_kernels is not None:
        assert part.flops is not None and part.teraflops, "its speed is that of products"
    if spec.along == "rows" and part is spec.backward:
        assert part.sums, "weights of rows have gradients that are sums"
    if spec.draws is not None and part is spec.forward:
        assert [names[i] for i in spec.draws] == ["rng", "site"]
    if part.twin is not None:
        written = [a.name for a in part.twin.target._schema.arguments if a.alias_info is not None]
        assert len(part.twin.over) == len(written) == len(overload(name)._schema.returns)


EXCEPTIONS = {
    "megacompile/bench/operations.py": "what the benchmark adds to the eager form of each",
    "megacompile/capture/changed_buffers.py": "operators of buffers that change, declared there",
    "megacompile/capture/autograd_functions.py": "functions with a gradient of their own",
    "megacompile/capture/opaque_functions.py": "those that run for real, declared there",
    "megacompile/capture/own_gradients.py": "the operator of such a gradient, declared there",
    "megacompile/capture/repeated_layers.py": "the mark of an equal layer, declared there",
    "megacompile/capture/weight_codings.py": "codes, each kind with the operator that decodes it",
    "megacompile/capture/patches.py": "transformers' functions that ours stand for, by their names there",
    "megacompile/capture/recurrent.py": "torch's recurrent layers, which are made of it",
    "megacompile/graph/sequence_dimension.py": "torch's own operators of these names",
    "megacompile/capture/replacements.py": "transformers' functions, with their arguments",
    "megacompile/blocks/folded_sums.py": "a norm whose backward adds the other term of a sum",
    "megacompile/cli/gpu_doctor.py": "a switch that an operator shares",
    "megacompile/blocks/codegen.py": "the product that is added up within, which other code emits too",
    "megacompile/graph/fusion_check.py": "inputs of a head, whose labels are integers",
    "megacompile/graph/glu_patterns.py": "a pattern",
    "megacompile/graph/lm_head_patterns.py": "a pattern",
    "megacompile/graph/norm_patterns.py": "a pattern",
    "megacompile/graph/qk_norm_rope_patterns.py": "a pattern",
    "megacompile/graph/rope_patterns.py": "a pattern",
    "megacompile/graph/head_tiles.py": "a head of which pieces are made",
    "megacompile/graph/tile_rewriter.py": "a head that is fused before pieces are made of it",
}
ORDINARY = {"attention", "dropout", "uniform", "adamw"}  # other things are called so too


def test_nothing_else_in_the_product_names_an_operator() -> None:
    naming = figures.naming(figures.product(ROOT))
    assert naming.keys() - {"adamw"} == {name for name in SPECS if name != "adamw_"}
    files = {str(file) for name in naming.keys() - ORDINARY for file in naming[name]}
    outside = {file for file in files if not file.startswith("kernels/")}
    assert outside == EXCEPTIONS.keys(), "declare it in kernels/, or say here why not"


@pytest.mark.parametrize("name", sorted(SPECS))
def test_what_is_chunked_by_elements_or_rows_has_an_eager_form(name: str) -> None:
    spec = SPECS[name]
    assert spec.along == "mixing" or (spec.eager and spec.backward is not None)

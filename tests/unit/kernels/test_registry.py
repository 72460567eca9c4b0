"""The declarations of operators: each is whole, and nothing else in the product names an operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megacompile
import megacompile.cli.main  # noqa: F401
from megacompile.kernels.registry import CALLED, SPECS, called
from megacompile.tile import operators  # noqa: F401


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
        assert part.flops is not None, "its speed is that of products"
    if spec.along == "rows" and part is spec.backward:
        assert part.sums, "weights of rows have gradients that are sums"
    if spec.draws is not None and part is spec.forward:
        assert [names[i] for i in spec.draws] == ["rng", "site"]
    if part.twin is not None:
        written = [a.name for a in part.twin.target._schema.arguments if a.alias_info is not None]
        assert len(part.twin.over) == len(written) == len(overload(name)._schema.returns)

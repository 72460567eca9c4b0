"""The kernels that a block function launches are those that plans count on its graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from megacompile.differentiate import policies
from megacompile.differentiate.functions import BlockFunction
from megacompile.kernels import _triton
from tests.simulated.numbers import runtime
from tests.support.cuda_programs import program
from tests.support.models import batch_for, build


@pytest.mark.parametrize(("name", "inductor"), [("llama", False), ("gemma3", False), ("llama", True)])
def test_block_functions_launch_what_is_counted(
    name: str, inductor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, list[Tensor]] = {}
    block_function = policies.block_function

    def noted(function: str, graph: fx.Graph, *rest: Any) -> BlockFunction:
        arguments[function] = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
        return block_function(function, graph, *rest)

    monkeypatch.setattr(policies, "block_function", noted)
    monkeypatch.setattr(_triton, "HAS_TRITON", True)  # as where it is installed
    batch = batch_for(name, size=4, length=64)
    options = {"compute_dtype": torch.bfloat16, "inductor": inductor, "example_batch": batch}
    made = program(build(name), "cuda", "1GB", **options)
    (compiled,) = made._session.compiler.frontend._compiled.values()
    functions = [f for template in compiled.templates for f in template.functions()]
    assert any(f.fused for f in functions) == inductor
    for function in functions:
        counted = _launched(function, arguments[function.name])
        assert function.launches == pytest.approx(counted, abs=max(2, counted / 10)), function.name
    made.close()


def _launched(function: BlockFunction, like: list[Tensor]) -> int:
    """Kernels that a call launches, and copies on the device, for which it asks alike."""
    run = function.load(torch.device("cuda"))
    given = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in like]
    before = runtime.count("launches") + runtime.count("copies")
    with torch.no_grad():
        run(given)
    return runtime.count("launches") + runtime.count("copies") - before

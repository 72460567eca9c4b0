"""Operators that write over their arguments: where they may, where they may not, and with equal results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from megacompile.blocks.codegen import function_source, load_functions
from megacompile.blocks.inplace_reuse import reuse

ops = torch.ops.megacompile


def glu(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    return list(ops.glu_backward(grad * 1, gate * 2, up * 3, "silu"))


def given(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    return list(ops.glu_backward(grad, gate, up, "silu"))


def read_later(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    mine, other = gate * 2, up * 3
    view = mine.view(-1)
    return [*ops.glu_backward(grad, mine, other, "silu"), view + 1]


def one_storage(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    both = torch.stack((gate, up))
    return list(ops.glu_backward(grad, both[0], both[1], "silu"))


def also_the_gradient(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    mine = gate * 2
    return list(ops.glu_backward(mine, mine, up * 3, "silu"))


def other_strides(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    return list(ops.glu_backward(grad.mT, (gate * 2).mT, (up * 3).mT, "silu"))


def clamped(grad: Tensor, both: Tensor, up: Tensor) -> list[Tensor]:
    return [ops.clamped_glu_backward(grad[:, :3], both * 2, 1.0, 1.7, True)]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    turned = ops.rope((x * 2).view(1, 4, 6), cos[:, :6], sin[:, :6], False)
    return [ops.rope_backward(turned * 3, cos[:, :6], sin[:, :6], False)]


def traced(function: Callable[..., list[Tensor]]) -> fx.Graph:
    inputs = [torch.randn(4, 6, dtype=torch.float64) for _ in range(3)]
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    graph.output_node().args = (tuple(graph.output_node().args[0]),)  # type: ignore[arg-type]
    return graph


def run(graph: fx.Graph) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    arguments = [torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(3)]
    kept = [x.clone() for x in arguments]
    results = load_functions(function_source(graph, "f", ""), torch.device("cpu"))["f"](list(arguments))
    unchanged = all(torch.equal(a, b) for a, b in zip(arguments, kept, strict=True))
    return [unchanged, *results]


@pytest.mark.parametrize(
    ("function", "twins"),
    [(glu, 1), (given, 0), (read_later, 0), (one_storage, 0), (also_the_gradient, 0), (other_strides, 0),
     (clamped, 1), (rope, 2)],
)  # fmt: skip
def test_reuse_changes_no_result(function: Callable[..., list[Tensor]], twins: int) -> None:
    plain, ours = traced(function), traced(function)
    reuse(ours, set())
    ours.lint()
    written = [n for n in ours.nodes if "_.default" in str(n.target)]
    assert len(written) == twins
    before, after = run(plain), run(ours)
    assert before[0] and after[0], "an argument that the function does not own was written"
    torch.testing.assert_close(after[1:], before[1:], rtol=0, atol=0)


def test_what_is_owned_may_be_written() -> None:
    graph = traced(given)
    reuse(graph, {n for n in graph.nodes if n.op == "placeholder"})
    plain = run(traced(given))
    written, *results = run(graph)
    assert not written
    torch.testing.assert_close(results, plain[1:], rtol=0, atol=0)

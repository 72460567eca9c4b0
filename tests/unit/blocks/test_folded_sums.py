"""Sums that the operator of a term takes in: which are, how they round, what they cost, where they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import megacompile
from megacompile.blocks.codegen import function_source, load_functions
from megacompile.blocks.costs import flops, launches, moved
from megacompile.blocks.folded_sums import with_folded_sums
from megacompile.blocks.inplace_reuse import add_in_place
from tests.support.models import batch_for, build

aten, ops = torch.ops.aten, torch.ops.megacompile
ROWS, WIDTH = 6, 16
Function = Callable[[Tensor, Tensor], list[Tensor]]


def product(x: Tensor, w: Tensor) -> Tensor:
    """A product [2, 3, WIDTH] of rows [2, 3, WIDTH]."""
    return aten._unsafe_view(aten.mm(x.view(ROWS, WIDTH), w), x.shape)


def residual(x: Tensor, w: Tensor) -> list[Tensor]:
    mine = x * 2
    return [mine + product(mine.cos(), w)]


def given(x: Tensor, w: Tensor) -> list[Tensor]:
    return [product(x, w) + x]


def three(x: Tensor, w: Tensor) -> list[Tensor]:
    first, second = product(x, w), product(x.cos(), w)
    return [first + second + product(x.sin(), w)]


def kept(x: Tensor, w: Tensor) -> list[Tensor]:
    mine = x * 2
    return [mine + product(x, w), mine.sin()]


def norm(x: Tensor, w: Tensor) -> list[Tensor]:
    _, rstd = ops.rms_norm(x, w[0], 1e-6, 0.0, True)
    residual, grad = x * 3, x.cos()
    dw_first = ops.rms_norm_backward(grad, x, w[0], rstd, 0.0, True)
    return [dw_first[1] + 1, residual + dw_first[0]]


def later(x: Tensor, w: Tensor) -> list[Tensor]:
    found = product(x, w)
    return [found + x.cos()]


def read_twice(x: Tensor, w: Tensor) -> list[Tensor]:
    found = product(x, w)
    return [x + found, found.sin()]


def doubled(x: Tensor, w: Tensor) -> list[Tensor]:
    found = product(x, w)
    return [found + found]


def scaled(x: Tensor, w: Tensor) -> list[Tensor]:
    return [torch.add(x, product(x, w), alpha=2)]


def turned(x: Tensor, w: Tensor) -> list[Tensor]:
    return [x.view(ROWS, WIDTH).t() + aten.mm(x.view(ROWS, WIDTH), w).t()]


def row(x: Tensor, w: Tensor) -> list[Tensor]:
    return [w[0] + product(x, w)]


def wider(x: Tensor, w: Tensor) -> list[Tensor]:
    return [x.double() + product(x, w)]


def numbers(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 3, WIDTH, generator=generator), torch.randn(WIDTH, WIDTH, generator=generator)
    return x.to(dtype), w.to(dtype)


def traced(function: Function, dtype: torch.dtype) -> tuple[fx.Graph, Any]:
    """A function's graph, and the fake mode of its values."""
    graph = make_fx(function, tracing_mode="fake")(*numbers(dtype)).graph
    graph.output_node().args = (tuple(graph.output_node().args[0]),)  # type: ignore[arg-type]
    graph.eliminate_dead_code()
    return graph, next(iter(graph.nodes)).meta["val"].fake_mode


def run(graph: fx.Graph, dtype: torch.dtype) -> list[Tensor]:
    arguments = numbers(dtype)
    results = load_functions(function_source(graph, "f", ""), torch.device("cpu"))["f"](list(arguments))
    assert all(map(torch.equal, arguments, numbers(dtype))), "an argument was written"
    return results


def count(graph: fx.Graph, *targets: Any) -> int:
    return sum(node.target in targets for node in graph.nodes)


FOLDED = [(residual, 1, 1), (given, 1, 0), (three, 2, 2), (kept, 1, 0), (norm, 1, 0)]
LEFT = [(f, 0, 0) for f in (later, read_twice, doubled, scaled, turned, row, wider)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("function", "folded", "in_place"), FOLDED + LEFT)
def test_sums_are_folded_where_a_term_can_take_them(
    function: Function, folded: int, in_place: int, dtype: torch.dtype
) -> None:
    """No result is farther from float64 than unfolded, but for a last bit; memory is written where it is
    the function's own and nothing reads it again."""
    plain, mode = traced(function, dtype)
    ours = with_folded_sums(plain, mode)
    ours.lint()
    assert count(ours, aten.addmm.default, ops.add_rms_norm_backward.default) == folded
    assert count(ours, aten.add.Tensor) == count(plain, aten.add.Tensor) - folded
    copied = run(ours, dtype)
    add_in_place(ours, set())
    ours.lint()
    assert all(map(torch.equal, copied, run(ours, dtype)))
    assert count(ours, aten.addmm_.default) == in_place
    exact = run(traced(function, torch.float64)[0], torch.float64)
    last_bit = torch.finfo(dtype).eps
    for found, before, right in zip(run(ours, dtype), run(plain, dtype), exact, strict=True):
        assert (found.dtype, found.shape, found.stride()) == (before.dtype, before.shape, before.stride())
        distance, allowed = ((t.double() - right).abs().max() for t in (found, before))
        assert distance <= allowed + last_bit * right.abs().max()


def test_what_a_sum_in_a_product_costs() -> None:
    """The product's FLOPs, and one read of what it adds to; with a copy before it, if it is out of place."""
    plain, mode = traced(residual, torch.bfloat16)
    nbytes = ROWS * WIDTH * 2
    ours = with_folded_sums(plain, mode)
    (node,) = (n for n in ours.nodes if n.target is aten.addmm.default)
    assert (flops(node), moved(node), launches(node)) == (2 * ROWS * WIDTH * WIDTH, 3 * nbytes, 2)
    add_in_place(ours, set())
    (node,) = (n for n in ours.nodes if n.target is aten.addmm_.default)
    assert (moved(node), launches(node)) == (nbytes, 1)
    biased = make_fx(torch.addmm, tracing_mode="fake")(torch.ones(3), torch.ones(3, 2), torch.ones(2, 3))
    (node,) = (n for n in biased.graph.nodes if n.target is aten.addmm.default)
    assert (moved(node), launches(node)) == (0, 1)


def test_programs_fold_sums_where_kernels_are_on() -> None:
    """Losses and weights stay beside those of eager's order, the peak is the predicted one, and a switch
    leaves sums as they are."""
    found = {}
    for kernels in (False, True, {"folded_sums": False}):
        model = build("llama")
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with megacompile.compile(
            model, "1GB", optimizer=adamw, compute_dtype=torch.float32, kernels=kernels
        ) as program:
            losses = [float(program.train_step(batch_for("llama", 1)).loss) for _ in range(3)]
            assert program.memory.device_peak_bytes == program.memory.predicted_peak_bytes
            templates = program._session.scheduled().compiled.templates
            sources = "".join(f.source for t in templates for f in t.functions())
            assert ("aten.addmm_.default" in sources) == (kernels is True)
            assert ("folded_sums" in str(program.fusions)) == (kernels is not True)
            found[str(kernels)] = losses
    expected, *others = found.values()
    for losses in others:
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)

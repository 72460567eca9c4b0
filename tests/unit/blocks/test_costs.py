"""What nodes of a graph cost: grouped products, for which torch has no formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from megacompile.blocks.costs import flops, grouped, launches, moved

_EXPERTS, _ROWS, _INNER, _OUTER = 4, 24, 8, 16


def operands() -> list[Tensor]:
    """Sorted rows, stacked weights, offsets (each expert has rows), the gradient of the results."""
    offsets = torch.tensor([3, 10, 11, _ROWS], dtype=torch.int32)
    shapes = (_ROWS, _INNER), (_EXPERTS, _INNER, _OUTER), (_ROWS, _OUTER)
    x, weight, grad = (torch.ones(shape) for shape in shapes)
    return [x, weight, offsets, grad]


def called(graph: fx.GraphModule, name: str) -> fx.Node:
    """The node that calls an operator."""
    (node,) = (n for n in graph.graph.nodes if name in str(n.target))
    return node  # type: ignore[no-any-return]


@pytest.mark.parametrize("suffix", ["", "_backward"])
def test_a_loop_over_experts_costs_what_its_products_do(suffix: str) -> None:
    moe = pytest.importorskip("transformers.integrations.moe", reason="transformers has no grouped products")
    name, given = f"grouped_mm_fallback{suffix}", operands()[: 4 if suffix else 3]
    node = called(make_fx(getattr(torch.ops.transformers, name), tracing_mode="fake")(*given), name)
    with FlopCounterMode(display=False) as counter:
        getattr(moe, "_grouped_mm_fallback" + ("_bwd" if suffix else ""))(*given)
    work = counter.get_total_flops()
    assert work > 0 and (flops(node), flops(node, 0.5), moved(node)) == (work, work // 2, 0)
    products = 2 if suffix else 1
    assert launches(node) == products * (_EXPERTS + 1)  # each expert's, and zeros to write to


def test_a_grouped_product_reads_its_weights_beside_its_rows() -> None:
    def forward_and_gradients(x: Tensor, weight: Tensor, offsets: Tensor, grad: Tensor) -> list[Tensor]:
        product = torch.ops.aten._grouped_mm
        rows = product(x, weight, offsets), product(grad, weight.mT, offsets)
        return [*rows, product(x.mT, grad, offsets)]

    given = [t if t.dtype == torch.int32 else t.bfloat16() for t in operands()]
    graph = make_fx(forward_and_gradients, tracing_mode="fake")(*given).graph
    products = [n for n in graph.nodes if "_grouped_mm" in str(n.target)]
    nbytes, rows = sum(t.nbytes for t in given), given[0].nbytes + given[3].nbytes
    assert len(products) == 3
    for node in products:  # of rows, weights and rows, each is the result of one
        work = 2 * _ROWS * _INNER * _OUTER
        assert (grouped(node), moved(node)) == ((work, nbytes), 0)
        assert grouped(node, 0.5) == (work // 2, nbytes - rows // 2)
    assert grouped(next(n for n in graph.nodes if n.op == "placeholder")) == (0, 0)

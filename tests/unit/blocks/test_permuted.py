"""Rows that come back from a permutation: their gradient is gathered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from megacompile.blocks.permuted_gradients import gather_permuted

aten = torch.ops.aten


def mixture(x: Tensor, experts: Tensor, how: str) -> Tensor:
    """Rows [T, H] sorted by expert, two for each token, and brought back."""
    order = torch.sort(experts)[1]
    numbers = torch.arange(len(order))
    if how == "shifted":
        numbers = torch.arange(1, len(order) + 1) % len(order)
    inverse = torch.empty_like(order).index_put((order,), numbers)
    if how == "chosen":  # not a permutation
        inverse = experts
    back = x[order // 2].sin()[inverse]
    return back.cos() if how == "each" else back.view(-1, 2, x.shape[1]).sum(1)


@pytest.mark.parametrize(("how", "scattered"), [("summed", 1), ("each", 1), ("shifted", 2), ("chosen", 2)])
def test_gradients_of_a_permutation_are_gathered(how: str, scattered: int) -> None:
    """What stays scattered is the sum over a token's own rows, and what is no inverse of a sort."""

    def backward(x: Tensor, experts: Tensor, grad: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(mixture(x, experts, how), [x], grad)
        return found

    torch.manual_seed(0)
    x = torch.randn(6, 4, requires_grad=True)
    experts = torch.randint(0, 3, (12,))
    grad = torch.randn(12 if how == "each" else 6, 4)
    traced = make_fx(backward, tracing_mode="fake")(x, experts, grad)
    gather_permuted(traced.graph, next(iter(traced.graph.nodes)).meta["val"].fake_mode)
    sums = [n for n in traced.graph.nodes if n.target is aten.index_put.default and n.args[3:] == (True,)]
    assert len(sums) == scattered
    ours = fx.GraphModule(traced, traced.graph)(x, experts, grad)
    assert torch.equal(ours, backward(x, experts, grad))

"""What operators do to dimensions: an index that is said to be carried alone is made of that index alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from megacompile.graph.sequence_dimension import carried

aten = torch.ops.aten
SHAPE = (2, 5, 6)
Expected = tuple[int | None, ...]
CARRIED: dict[str, tuple[Callable[[Tensor], Any], Expected]] = {
    "pointwise": (lambda x: x * torch.ones(3, 2, 5, 6), (1, 2, 3)),
    "broadcast": (lambda x: torch.ones(4, 2, 5, 6) + x, (1, 2, 3)),
    "expand": (lambda x: x.expand(3, 2, 5, 6), (1, 2, 3)),
    "view": (lambda x: x.view(2, 5, 2, 3), (0, 1, None)),
    "view that joins": (lambda x: x.view(10, 6), (None, None, 1)),
    "view that only looks alike": (lambda x: x.view(5, 2, 6), (None, None, 2)),
    "unsqueeze": (lambda x: x.unsqueeze(1), (0, 2, 3)),
    "permute": (lambda x: x.permute(2, 0, 1), (1, 2, 0)),
    "transpose": (lambda x: x.transpose(1, -1), (0, 2, 1)),
    "sum": (lambda x: x.sum(1), (0, None, 1)),
    "sum that keeps": (lambda x: x.sum((0, -1), keepdim=True), (None, 1, None)),
    "mean of all": (lambda x: x.mean(), (None, None, None)),
    "softmax": (lambda x: x.softmax(-1), (0, 1, None)),
    "its gradient": (lambda x: aten._softmax_backward_data(x, x, 1, x.dtype), (0, None, 2)),
    "norm": (lambda x: torch.native_layer_norm(x, (6,), None, None, 1e-5), (0, 1, None)),
    "split": (lambda x: x.split((2, 4), -1), (0, 1, None)),
    "split of parts": (lambda x: x.split(2, 1), (0, None, 2)),
    "unbind": (lambda x: x.unbind(0), (None, 0, 1)),
    "select": (lambda x: x.select(-1, 2), (0, 1, None)),
    "slice": (lambda x: x[:, 1:], (0, None, 2)),
    "gradient of a slice": (lambda x: aten.slice_backward(x, (2, 9, 6), 1, 2, 7, 1), (0, None, 2)),
    "gradient of a selection": (lambda x: aten.select_backward(x, (2, 4, 5, 6), 1, 3), (0, 2, 3)),
    "cat": (lambda x: torch.cat([x, x.new_ones(2, 5, 1)], -1), (0, 1, None)),
    "stack": (lambda x: torch.stack([x, torch.ones(SHAPE)], 1), (0, 2, 3)),
    "product": (lambda x: torch.bmm(x, torch.ones(2, 6, 3)), (0, 1, None)),
    "product from the left": (lambda x: torch.bmm(torch.ones(2, 3, 5), x), (None, None, None)),
    "product with itself": (lambda x: (lambda y: torch.bmm(y, y))(x[:, :, :5]), (None, None, None)),
    "not known": (lambda x: x.cumsum(1), (None, None, None)),
}


@pytest.mark.parametrize("name", CARRIED)
def test_a_carried_index_is_made_of_the_same_index_alone(name: str) -> None:
    """Another number at one index changes the results at no other."""
    function, expected = CARRIED[name]
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    graph = make_fx(function, tracing_mode="fake")(x).graph
    (node,) = (n for n in graph.nodes if n.op == "call_function" and _ends(n))
    argument = next(a for a in node.all_input_nodes if a in _made_of(graph))
    assert carried(node, argument) == expected
    for dim, to in enumerate(expected):
        if to is None:
            continue
        changed = x.clone()
        changed.select(dim, 1).add_(1.0)
        for a, b in zip(*(pytree.tree_leaves(function(value)) for value in (x, changed)), strict=True):
            rest = [i for i in range(a.shape[to]) if i != 1]
            assert torch.equal(a.index_select(to, torch.tensor(rest)), b.index_select(to, torch.tensor(rest)))
            assert not torch.equal(a, b)


def _ends(node: Any) -> bool:
    """Whether a call's results, or their parts, are the function's."""
    return all(u.op == "output" or "getitem" in str(u.target) for u in node.users) and "getitem" not in str(
        node.target
    )


def _made_of(graph: Any) -> set[Any]:
    found: set[Any] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or found & set(node.all_input_nodes):
            found.add(node)
    return found

"""A captured graph is the one that torch's own decomposition of the whole graph gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

from megacompile.capture import functionalise, trace
from megacompile.capture.batch import read_batch
from megacompile.capture.exported_graph import clean
from megacompile.capture.parameter_forms import parameter_forms
from tests.support.graphs import capture
from tests.support.zoo import cases

_CASES = cases()


def _lines(found: fx.Graph) -> list[Any]:
    """What a graph computes, name by name, with the form and place of each value."""
    clean(found)
    numbers = {node: i for i, node in enumerate(found.nodes)}
    return [
        (
            node.op,
            str(node.target),
            repr(fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")),
            [
                (v.shape, v.stride(), v.dtype, v.requires_grad, v.untyped_storage().nbytes())
                for v in torch.utils._pytree.tree_leaves(node.meta.get("val"))
                if isinstance(v, Tensor)
            ],
            list(node.meta.get("nn_module_stack") or {}),
        )
        for node in found.nodes
        if node.op != "output"
    ]


_FUNCTIONALISE, _BARRIERS = functionalise.functionalise, functionalise._keep_gradient_barriers


def _captured(model: nn.Module, batch: Any) -> list[tuple[list[Any], list[Any]]]:
    """For each trace of a forward, what was written form by form, and what torch writes."""
    both = []

    def compare(exported: torch.export.ExportedProgram) -> Any:
        whole: list[fx.Graph] = []

        def decompose(root: fx.GraphModule) -> None:
            _BARRIERS(root)
            for module in root.modules():
                if isinstance(module, fx.GraphModule):
                    module.recompile()
            whole.append(exported.run_decompositions({}).graph)

        with mock.patch.object(functionalise, "_keep_gradient_barriers", decompose):
            found = _FUNCTIONALISE(exported)
        ours = fx.Graph()
        ours.output(ours.graph_copy(found[0], {}))
        both.append((_lines(ours), _lines(whole[0])))
        return found

    read = read_batch(batch, model)
    forms = parameter_forms(model, torch.float32)
    with mock.patch.object(trace, "functionalise", compare):
        capture(model, read.args, read.kwargs, forms=forms)
    return both


@pytest.mark.slow_cases(r"(gpt2|gemma3|GRU)")
@pytest.mark.parametrize("name", ["llama, packed", "gpt2", "gemma3_text", "ALBERT, padded", "GRU"])
def test_forms_decompose_as_the_whole_graph_does(name: str) -> None:
    case = _CASES[name]
    for ours, theirs in _captured(case.build(), case.batch(0)):
        assert ours == theirs


class _Net(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4), write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self.layer(x)).square().mean()


def _inverse(y: Tensor) -> Tensor:
    order = y[:, 0].argsort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return y[inverse]


def _twice(y: Tensor) -> Tensor:
    rest = torch.zeros_like(y)
    rest.copy_(y.sum(0))
    rest += 1
    return rest.masked_fill_(y > 0, 0.5).mul(y.relu_().sum())


def _casts(y: Tensor) -> Tensor:
    counts = torch.ones(2, 4, dtype=torch.float64)
    return counts.mul_(y) * 2


def _view(y: Tensor) -> Tensor:
    y[:, 0] = 1.0
    return y


def _seen(y: Tensor) -> Tensor:
    column = y[:, 0]
    y.add_(1)
    return y * column.sum()


def _argument(y: Tensor) -> Tensor:
    same = y.contiguous()
    y.add_(1)
    return y * same


def _viewed_later(y: Tensor) -> Tensor:
    return y.add_(1).view(-1)[:6] * y.sum().mul_(2)


@pytest.mark.parametrize(
    ("write", "alone"),
    [(_inverse, True), (_twice, True), (_casts, True), (_view, False), (_seen, False), (_argument, True),
     (_viewed_later, False)],
)  # fmt: skip
def test_writes_become_what_torch_makes_of_them(write: Callable[[Tensor], Tensor], alone: bool) -> None:
    """Without tracing the whole graph again, where what is written into has no view."""
    model, batch = _Net(write), {"x": torch.randn(2, 4)}
    theirs = torch.export.ExportedProgram.run_decompositions
    with mock.patch.object(
        torch.export.ExportedProgram, "run_decompositions", autospec=True, side_effect=theirs
    ) as whole:
        graphs = _captured(model, batch)
    assert whole.call_count == 2 - alone  # one of them is the test's own
    for ours, expected in graphs:
        assert ours == expected

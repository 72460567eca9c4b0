"""A captured graph is the one that torch's own decomposition of the whole graph gives."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

from megacompile.capture import trace
from megacompile.capture.batch import read_batch
from megacompile.capture.fingerprint import parameter_forms
from megacompile.capture.trace import clean
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


_FUNCTIONALISE = trace.functionalise


def _captured(model: nn.Module, batch: Any) -> list[tuple[list[Any], list[Any]]]:
    """For each trace of a forward, what was written form by form, and what torch writes."""
    both = []

    def compare(exported: torch.export.ExportedProgram) -> Any:
        found = _FUNCTIONALISE(exported)
        for module in exported.graph_module.modules():
            if isinstance(module, fx.GraphModule):
                module.recompile()
        whole = exported.run_decompositions({}).graph
        copy = fx.Graph()
        copy.output(copy.graph_copy(found[0], {}))
        both.append((_lines(copy), _lines(whole)))
        return found

    read = read_batch(batch, model)
    forms = parameter_forms(model, torch.float32)
    with mock.patch.object(trace, "functionalise", compare):
        trace.capture(model, read.args, read.kwargs, forms=forms)
    return both


@pytest.mark.parametrize("name", ["llama, packed", "gpt2", "gemma3_text", "ALBERT, padded", "GRU"])
def test_forms_decompose_as_the_whole_graph_does(name: str) -> None:
    case = _CASES[name]
    for ours, theirs in _captured(case.build(), case.batch(0)):
        assert ours == theirs


def test_only_a_forward_that_writes_goes_through_torch() -> None:
    decompose = "run_decompositions"
    for writes in (False, True):
        model, batch = _Net(writes), {"x": torch.randn(2, 4)}
        read, forms = read_batch(batch, model), parameter_forms(model, torch.float32)
        theirs = torch.export.ExportedProgram.run_decompositions
        with mock.patch.object(
            torch.export.ExportedProgram, decompose, autospec=True, side_effect=theirs
        ) as whole:
            trace.capture(model, read.args, read.kwargs, forms=forms)
        assert whole.called == writes


class _Net(nn.Module):
    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.layer, self.writes = nn.Linear(4, 4), writes

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y.add_(1) if self.writes else y + 1).square().mean()

"""Recurrent layers as operators: torch's results in any dtype, and what is declared of their work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megacompile.capture.patches import our_operators
from megacompile.kernels import recurrent_layer
from megacompile.kernels.registry import OpPass, called

RNG = torch.zeros(2, dtype=torch.long)
LENGTH, BATCH, INPUT, WIDTH = 7, 3, 5, 6
LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"bidirectional": True}),
    "lstm, projected": (nn.LSTM, {"proj_size": 4}),
    "gru": (nn.GRU, {"num_layers": 2, "bias": False}),
    "rnn": (nn.RNN, {"bidirectional": True}),
}


def results(module: nn.RNNBase, x: Tensor, first: Any, *, ours: bool) -> list[Tensor]:
    """Output, last states and all gradients, in float64."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    with our_operators(module, RNG) if ours else torch.enable_grad():
        out, last = module(x, first)
    made = [out, *pytree.tree_leaves(last)]
    torch.stack([(s.double() ** 2).sum() for s in made]).sum().backward()
    return [t.double() for t in (*made, x.grad, *(p.grad for p in module.parameters())) if t is not None]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # torch's own
@pytest.mark.parametrize("given", [False, True], ids=["from zeros", "from states"])
@pytest.mark.parametrize("name", LAYERS)
def test_low_precision_is_as_good_as_torchs(name: str, given: bool) -> None:
    torch.manual_seed(0)
    cell, options = LAYERS[name]
    module, x, first = cell(INPUT, WIDTH, **options), torch.randn(LENGTH, BATCH, INPUT), None
    if given:
        count = module.num_layers * (2 if module.bidirectional else 1)
        first = torch.randn(count, BATCH, module.proj_size or WIDTH)
        first = (first, torch.randn(count, BATCH, WIDTH)) if cell is nn.LSTM else first

    def run(dtype: torch.dtype, ours: bool) -> list[Tensor]:
        cast = pytree.tree_map_only(Tensor, lambda t: t.to(dtype), (x, first))
        return results(module.to(dtype), *cast, ours=ours)

    exact = run(torch.float64, ours=False)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        for mine, theirs, right in zip(run(dtype, ours=True), run(dtype, ours=False), exact, strict=True):
            allowed = (theirs - right).abs().max() + tolerance * right.abs().max()
            assert (mine - right).abs().max() <= allowed


class Work(TorchDispatchMode):
    """Counts operators that compute, each of which is a kernel on a GPU, and the FLOPs of products."""

    launches = flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        self.launches += not views and "empty" not in func._schema.name
        if "mm" in func._schema.name:
            left, right = args[-2:]
            self.flops += 2 * left.numel() * right.shape[1]
        return func(*args, **(kwargs or {}))


def check_work(operator: Any, names: str, given: tuple[Any, ...]) -> Any:
    """What a call returns; its declared launches and FLOPs are those of its body."""
    overload = operator._opoverload
    found = called(overload)
    assert found is not None
    part: OpPass = found.part
    with Work() as work:
        made = operator._init_fn(*given)
    assert callable(part.launches) and part.flops is not None
    assert part.launches(dict(zip(names.split(), given, strict=True))) == pytest.approx(work.launches, abs=3)
    assert part.flops(*(tuple(x.shape) if isinstance(x, Tensor) else x for x in given)) == work.flops
    return made


@pytest.mark.parametrize(
    ("kind", "projected"), [("lstm", False), ("lstm", True), ("gru", False), ("tanh", False), ("relu", False)]
)
def test_declared_work_is_what_bodies_do(kind: str, projected: bool) -> None:
    size, length = recurrent_layer.GATES[kind] * WIDTH, 40
    states = 4 if projected else WIDTH
    tensors = (
        torch.randn(BATCH, states),
        torch.randn(BATCH, WIDTH) if kind == "lstm" else None,
        torch.randn(size, states),
        torch.randn(size),
        torch.randn(states, WIDTH) if projected else None,
    )
    inputs = "hidden cell weight bias projection"
    given = torch.randn(length, BATCH, size), *tensors, kind, False
    output, last, gates, kept = check_work(
        recurrent_layer.recurrent_layer_op, f"given {inputs} kind reverse", given
    )
    given = output, last, *tensors, output, gates, kept, kind, False
    names = f"grad d_cell {inputs} output gates kept kind reverse"
    check_work(recurrent_layer.recurrent_layer_backward_op, names, given)

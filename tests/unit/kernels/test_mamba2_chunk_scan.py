"""Mamba-2's scan beside its definition, token by token, and beside what transformers computes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from megacompile.blocks.costs import launches, moved
from megacompile.kernels import mamba2, mamba2_chunk_scan
from megacompile.kernels._triton import Gpu, recording
from megacompile.kernels.mamba2 import (
    ScanInputs,
    backward_reference,
    backward_triton,
    forward_reference,
    forward_triton,
)

HOMES = sorted(
    path.stem.removeprefix("modeling_")
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    if "def mamba2_chunk_scan" in path.read_text()
)


def inputs(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """x, dt, A, B, C, D: two rows, two groups of two heads; some forget slowly, some at once."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, tokens, 4, 8, generator=draw)
    B, C = torch.randn(2, 2, tokens, 2, 16, generator=draw)
    dt = F.softplus(torch.randn(2, tokens, 4, generator=draw))
    A, D = -torch.logspace(-3, 1, 4), torch.randn(4, generator=draw)
    return [t.to(dtype).requires_grad_() for t in (x, dt, A, B, C, D)]


def by_token(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """The definition in the operator's docstring."""
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    state = x.new_zeros(x.shape[0], x.shape[2], B.shape[3], x.shape[3])
    found = []
    for t in range(x.shape[1]):
        written = B[:, t, :, :, None] * (dt[:, t, :, None] * x[:, t])[:, :, None]
        state = state * (A * dt[:, t]).exp()[:, :, None, None] + written
        found.append((state * C[:, t, :, :, None]).sum(-2) + D[:, None] * x[:, t])
    return torch.stack(found, 1)


def results(function: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """out and the gradients of all inputs."""
    out = function(*given)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest, in parts of each tensor's scale."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("tokens", [330, 64, 1])
def test_out_and_gradients_are_those_of_the_definition(tokens: int) -> None:
    given = inputs(tokens, torch.float64)
    assert distance(results(mamba2_chunk_scan, given), results(by_token, given)) <= 1e-12


def without_states(products: Tensor, *_: Any, **__: Any) -> Tensor:
    return products.zero_()[0]


FAULTS = {
    "no state": ("_through", without_states),
    "a token's own decay": (
        "_pairs_across",
        lambda pairs: F.pad(pairs.cumsum(-1).tril_().sum(-2), (1, 0))[..., :-1].mT,
    ),
    "no decays of pairs": ("_pairs_across", lambda pairs: torch.zeros_like(pairs[..., 0]).mT),
    "no order": ("_differences", lambda c: (c.mT.unsqueeze(-1) - c.mT.unsqueeze(-2)).mT),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(130, torch.float64)
    expected = results(by_token, given)
    monkeypatch.setattr(mamba2, *FAULTS[fault])
    assert distance(results(mamba2_chunk_scan, given), expected) > 1e-3


@pytest.mark.slow_cases(r".*(?<!mamba2\])$")
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 1e-2)])
def test_every_model_of_transformers_means_the_same_scan(
    home: str, dtype: torch.dtype, tolerance: float
) -> None:
    """In parts of each tensor's scale; in bfloat16 both compute in float32 and round gradients once."""
    theirs = importlib.import_module(f"transformers.models.{home}.modeling_{home}").mamba2_chunk_scan

    def as_they_do(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
        out: Tensor = theirs(x, dt, A, B, C, chunk_size=128, D=D)
        return out

    given = inputs(150, dtype)
    given[2] = given[2].detach().float().requires_grad_()
    mine, other = results(mamba2_chunk_scan, given), results(as_they_do, given)
    assert [x.dtype for x in mine] == [x.dtype for x in other]
    assert distance(mine, other) <= tolerance


@pytest.mark.parametrize("scale", [1e-2, 30.0])
def test_long_and_short_memories_keep_their_digits(scale: float) -> None:
    """Sums of a chunk's decays are hundreds where tokens are forgotten at once; their differences count."""
    given = inputs(200, torch.float32)
    given[1] = (given[1].detach() * scale).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in given]
    assert distance(results(mamba2_chunk_scan, given), results(by_token, exact)) <= 2e-6


def test_flops_are_those_of_the_products_that_run() -> None:
    """The operator's own rule, beside what torch counts inside."""
    given = ScanInputs(*(x.detach() for x in inputs(256, torch.float32)))
    with FlopCounterMode(display=False) as inside:
        out, kept = forward_reference(given)
        backward_reference(out, given, kept)
    with FlopCounterMode(display=False) as outside:
        mamba2_chunk_scan(*inputs(256, torch.float32)).backward(out)
    assert outside.get_total_flops() == inside.get_total_flops() > 0


def test_plans_count_about_the_launches_and_bytes_of_what_runs() -> None:
    """As :mod:`~megacompile.blocks.costs` counts what the references call."""
    draw = torch.Generator().manual_seed(0)
    x, B = torch.randn(1, 700, 8, 32, generator=draw), torch.randn(1, 700, 2, 64, generator=draw)
    given = [x.bfloat16(), x[..., 0].bfloat16(), x[0, 0, :, 0], B.bfloat16(), B.bfloat16(), x[0, 1, :, 0]]
    out, kept = forward_reference(ScanInputs(*given))

    def backward(grad: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return backward_reference(grad, ScanInputs(*rest[:6]), rest[6])

    ops = torch.ops.megacompile
    for operator, function, values in (
        (ops.mamba2_chunk_scan, lambda *x: forward_reference(ScanInputs(*x)), given),
        (ops.mamba2_chunk_scan_backward, backward, [out, *given, kept]),
    ):
        inside = [
            n for n in make_fx(function, tracing_mode="fake")(*values).graph.nodes if n.op[:4] == "call"
        ]
        graph = fx.Graph()
        leaves = [graph.placeholder(f"x{i}") for i in range(len(values))]
        for leaf, value in zip(leaves, values, strict=True):
            leaf.meta["val"] = value
        node = graph.call_function(operator.default, tuple(leaves))
        assert launches(node) == pytest.approx(sum(map(launches, inside)), rel=0.1)
        assert moved(node) == pytest.approx(sum(map(moved, inside)), rel=0.1)


@pytest.mark.parametrize(("dtype", "kernels"), [(torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.parametrize("backward", [False, True])
def test_plans_for_a_gpu_count_the_launches_that_run(
    dtype: torch.dtype, kernels: bool, backward: bool
) -> None:
    """Those of our kernels where they take the inputs, and a copy of what has no rows; in the backward one of
    the gradient, and sums of tokens in the types of A and D. Elsewhere torch's."""
    given = [x.detach().to("meta") for x in inputs(330, dtype)]
    given[3] = given[3].mT.contiguous().mT
    with recording(90) as recorded:
        out, states = forward_triton(ScanInputs(*given))
        if backward:
            recorded.clear()
            backward_triton(out, ScanInputs(*given), states)
    operator = torch.ops.megacompile
    operator = operator.mamba2_chunk_scan_backward if backward else operator.mamba2_chunk_scan
    graph, values = fx.Graph(), [out, *given, states] if backward else given
    leaves = [graph.placeholder(f"x{i}") for i in range(len(values))]
    for leaf, value in zip(leaves, values, strict=True):
        leaf.meta["val"] = value
    node = graph.call_function(operator.default, tuple(leaves))
    on_cpu = launches(node), moved(node)
    with recording(gpu=Gpu(4)):
        on_gpu = launches(node), moved(node)
    assert len(recorded) == (8 if backward else 4)
    assert all(x.kernel.__name__.startswith("mamba2_") for x in recorded)
    ours = len(recorded) + 1 + (1 + 2 * 2 if backward else 0)
    assert on_gpu[0] == (ours if kernels else on_cpu[0]) and on_cpu[0] > 90
    assert (on_gpu[1] < on_cpu[1]) == kernels

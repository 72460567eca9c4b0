"""The gated delta rule beside its definition, token by token, and beside what transformers computes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from megacompile.blocks.costs import flops, launches
from megacompile.blocks.kernel_calls import kernel_calls
from megacompile.kernels import gated_delta_rule
from megacompile.kernels._triton import Gpu, recording
from megacompile.kernels.gated_delta import RuleInputs, backward_triton, forward_triton

rule = importlib.import_module("megacompile.kernels.gated_delta")

HOMES = sorted(
    path.stem.removeprefix("modeling_")
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    if "def torch_chunk_gated_delta_rule" in path.read_text()
)


def inputs(tokens: int, dtype: torch.dtype, *, value_heads: int = 4, width: int = 16) -> list[Tensor]:
    """q, k, v, g, beta: two rows, two heads of keys, some of which forget slowly and some at once."""
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, tokens, 2, width, generator=draw)
    v = torch.randn(2, tokens, value_heads, 8, generator=draw)
    rates = torch.logspace(-3, 1, value_heads)
    g = -rates * F.softplus(torch.randn(2, tokens, value_heads, generator=draw))
    beta = torch.rand(2, tokens, value_heads, generator=draw)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta)]


def by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalised: bool) -> Tensor:
    """The definition in the operator's docstring."""
    if normalised:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    found = []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        missing = v[:, t] - (state * k[:, t, :, :, None]).sum(-2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * missing)[..., None, :]
        found.append((state * q[:, t, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(found, 1)


@pytest.mark.parametrize(("tokens", "normalised"), [(330, True), (64, False), (1, True)])
def test_out_and_gradients_are_those_of_the_definition(tokens: int, normalised: bool) -> None:
    given = inputs(tokens, torch.float64)
    if not normalised:  # keys longer than one make the state grow without end
        given[1] = (given[1].detach() / 16).requires_grad_()
    ours, theirs = gated_delta_rule(*given, normalised), by_token(*given, normalised)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    grad = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, given, grad), torch.autograd.grad(theirs, given, grad), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.slow_cases(r".*(?<!qwen3_next\])$")
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_every_model_of_transformers_means_the_same_rule(
    home: str, dtype: torch.dtype, tolerance: float
) -> None:
    """In parts of each tensor's scale; in bfloat16 both compute in float32 and round once."""
    theirs = importlib.import_module(
        f"transformers.models.{home}.modeling_{home}"
    ).torch_chunk_gated_delta_rule
    given = inputs(150, dtype)
    grad = torch.randn(given[2].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = [gated_delta_rule(*given, True), theirs(*given, use_qk_l2norm_in_kernel=True)[0]]
    found = [[x, *torch.autograd.grad(x, given, grad)] for x in results]
    for mine, other in zip(*found, strict=True):
        assert mine.dtype == other.dtype
        distance = (mine.double() - other.double()).abs().max() / other.double().abs().max()
        assert distance <= tolerance


def test_equal_keys_do_not_overflow() -> None:
    """Powers of what is inverted would grow beyond all digits where all keys are alike."""
    given = inputs(128, torch.float32)
    given[1] = torch.ones_like(given[1])
    given[3], given[4] = torch.zeros_like(given[3]), torch.ones_like(given[4])
    wide = [x.double() for x in given]
    torch.testing.assert_close(
        gated_delta_rule(*given), gated_delta_rule(*wide).float(), rtol=1e-4, atol=1e-4
    )


def test_flops_are_those_of_the_products_that_run() -> None:
    """The operator's own rule, beside what torch counts inside; a triangular inverse is no product to it."""
    given = RuleInputs(*(x.detach() for x in inputs(256, torch.float32)), True)
    inverses = 2 * 2 * 4 * 256 * 64 * 64 // 2
    with FlopCounterMode(display=False) as inside:
        out, states = rule.forward_reference(given)
    forward = inside.get_total_flops()
    with FlopCounterMode(display=False) as inside:
        rule.backward_reference(out, given, states)
    backward = inside.get_total_flops()
    with FlopCounterMode(display=False) as outside:
        leaves = inputs(256, torch.float32)
        gated_delta_rule(*leaves).backward(out)
    assert outside.get_total_flops() == forward + backward + 2 * inverses


@pytest.mark.parametrize(
    ("dtype", "width", "kernels"),
    [(torch.bfloat16, 64, True), (torch.bfloat16, 48, False), (torch.float32, 64, False)],
)
@pytest.mark.parametrize("backward", [False, True])
def test_plans_for_a_gpu_count_the_launches_that_run(
    dtype: torch.dtype, width: int, kernels: bool, backward: bool
) -> None:
    """Those of our kernels, where they take the inputs, and their work; elsewhere torch's, which grow with
    the tokens."""
    given = [x.detach().to("meta") for x in inputs(4196, dtype, width=width)]
    with recording(90) as recorded:
        out, states = forward_triton(RuleInputs(*given, True))
        if backward:
            recorded.clear()
            backward_triton(out, RuleInputs(*given, True), states)
    operator = torch.ops.megacompile
    operator = operator.gated_delta_rule_backward if backward else operator.gated_delta_rule
    values = [out, *given, states] if backward else given
    graph = fx.Graph()
    leaves = [graph.placeholder(f"x{n}") for n in range(len(values))]
    for leaf, value in zip(leaves, values, strict=True):
        leaf.meta["val"] = value
    node = graph.call_function(operator.default, (*leaves, True))
    node.meta["val"] = tuple(given) if backward else (out, states)
    on_cpu = launches(node)
    with recording(gpu=Gpu(4)):
        on_gpu = launches(node)
        ((call, _),) = kernel_calls(graph)
    assert call.work == (flops(node) if kernels else 0) and bool(call.teraflops) == kernels
    ours = len(recorded) + backward  # and the zeros of the last state's gradient
    assert len(recorded) == (3 * 6 if backward else 2)
    assert {x.kernel.__name__.split("_kernel")[0][:11] for x in recorded} == {"gated_delta"}
    assert on_gpu == (ours if kernels else on_cpu) and on_cpu > 1000

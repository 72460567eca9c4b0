import importlib

import pytest
import torch
import torch.nn.functional as F
from harness import ALL, compare, plant, randn, results, strided, without

from megacompile.kernels import gated_delta
from megacompile.kernels.gated_delta import RuleInputs, forward_reference, gated_delta_rule

rule = importlib.import_module("megacompile.kernels.gated_delta")


def eager(q, k, v, g, beta, normalised=True):
    """Token by token, in float32 as transformers does, rounded once."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    to, (q, k, v, g, beta) = q.dtype, (x.to(dtype) for x in (q, k, v, g, beta))
    if normalised:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    state, found = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]), []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        lacking = v[:, t] - (k[:, t, :, None] @ state)[:, :, 0]
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * lacking)[:, :, None]
        found.append((q[:, t, :, None] @ state)[:, :, 0] * k.shape[3] ** -0.5)
    nothing = v * (q * k).sum(-1, keepdim=True) * (g * beta)[..., None]
    return torch.stack(found, 1).to(to) if found else nothing.to(to)


def given(batch, tokens, groups, heads, width, inner):
    """Heads that forget slowly and at once; strengths beyond one, as OLMo Hybrid has them."""
    torch.manual_seed(1)
    q, k = randn(batch, tokens, groups, width), randn(batch, tokens, groups, width)
    g = -torch.logspace(-3, 1, heads) * F.softplus(torch.randn(batch, tokens, heads))
    beta = 2 * torch.rand(batch, tokens, heads)
    return q, k, randn(batch, tokens, heads, inner), g.requires_grad_(), beta.requires_grad_()


SHAPES = [
    (1, 266, 1, 2, 72, 40),  # two spans, a chunk of ten tokens, columns of two programs, some masked
    (2, 64, 2, 4, 128, 32),
    (1, 65, 2, 2, 96, 20),
    (1, 1, 1, 1, 64, 16),
    (1, 5, 1, 1, 200, 8),  # keys too wide for the kernels
    (1, 70, 1, 2, 16, 8),  # and too narrow in bfloat16
]


@pytest.mark.slow_cases(r"shape([1-5]|0-dtype0)")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(shape, dtype):
    compare(gated_delta_rule, eager, given(*shape), dtype)


def test_half_precision_runs_in_torch():
    compare(gated_delta_rule, eager, given(1, 70, 1, 2, 16, 8), torch.float16)


@pytest.mark.slow_cases(r"True")
@pytest.mark.parametrize("normalised", [True, False])
def test_the_formulas_in_float64(normalised):
    """To the last digits: the states beside the other implementation's, all else beside the definition's."""
    q, k, v, g, beta = (x.detach().double().requires_grad_() for x in given(1, 266, 1, 2, 24, 40))
    k = k if normalised else (k.detach() / 12).requires_grad_()
    inputs, grad = (q, k, v, g, beta), torch.randn(v.shape)
    _, states = rule.gated_delta_rule_op(*inputs, normalised)
    _, expected = forward_reference(RuleInputs(*(x.detach() for x in inputs), normalised))
    torch.testing.assert_close(states, expected, rtol=1e-12, atol=1e-12)
    both = [results(lambda *x, f=f: f(*x, normalised), inputs, [grad]) for f in (gated_delta_rule, eager)]
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-10)


def test_equal_keys_do_not_overflow():
    """Powers of what is inverted would grow beyond all digits."""
    q, k, v, g, beta = (x.detach() for x in given(1, 128, 1, 2, 16, 8))
    inputs = q, torch.ones_like(k), v, torch.zeros_like(g), torch.ones_like(beta)
    exact, _ = forward_reference(RuleInputs(*(x.double() for x in inputs), True))
    torch.testing.assert_close(gated_delta_rule(*inputs).double(), exact, rtol=1e-4, atol=1e-4)


def test_layouts():
    """Slices of one projection, tokens before the batch, columns apart, one row for a batch."""
    q, k, v, g, beta = (x.detach() for x in given(2, 70, 2, 2, 16, 16))
    expected = gated_delta_rule(q, k, v, g, beta)
    whole = torch.cat((q, k, v), -1)
    for layout in (
        (*whole.split(16, -1), g, beta),
        [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v, g, beta)],
        [strided(x) for x in (q, k, v, g, beta)],
    ):
        assert torch.equal(gated_delta_rule(*layout), expected)
    ones = [x[:1] for x in (q, k, v, g, beta)]
    both = gated_delta_rule(*(x.expand(2, *x.shape[1:]) for x in ones))
    assert torch.equal(both, expected[:1].expand_as(both))


def test_parts_of_a_backward_change_no_bit(monkeypatch):
    inputs = [x.to(torch.bfloat16).detach().requires_grad_() for x in given(2, 600, 1, 2, 16, 16)]
    grad, found = torch.randn(inputs[2].shape), []
    for held, parts in ((4096, 1), (1024, 2), (1, 3)):
        monkeypatch.setattr(gated_delta, "HELD", held)
        assert len(gated_delta.parts_of(2, 600)) == parts
        found.append(results(gated_delta_rule, inputs, [grad]))
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))


FAULTS = {  # a kernel, what it takes wrong, how; the first result that is: out, dq, dk, dv, dg, dbeta
    "no decay of the state": ("forward", "factors", lambda x: x.sqrt(), 0),
    "no norm of written keys": (
        "forward",
        "factors",
        lambda x: x * x.new_tensor([1, 1, 1.05, 1])[:, None],
        0,
    ),
    "a chunk that reads no state": ("forward", "factors", without(ALL, ALL, 1, 1), 0),
    "one block of the inverse": ("forward", "solves", without(..., slice(32, 64), slice(32)), 0),
    "scores of the next token": ("forward", "scores", lambda x: x.roll(1, -1), 0),
    "a state of another span": ("states", "states", lambda x: x.roll(1, 0), 1),
    "a row that is not solved": ("states", "solves", without(..., 40, ALL), 1),
    "a chunk without a gradient": ("backward_state", "grad", without(ALL, slice(64, 128)), 2),
    "scores that look back": ("backward_state", "scores", lambda x: x.mT.contiguous(), 2),
    "a gradient that does not decay": ("backward_state", "factors", lambda x: x.sqrt(), 2),
    "a state of the next chunk": ("backward_q", "before", lambda x: x.roll(1, 2), 1),
    "pairs of one value head": ("backward_q", "d_scores", without(0, 1), 1),
    "no state that decays": ("backward_q", "behind", torch.zeros_like, 4),
    "no writes": ("backward_k", "behind", torch.zeros_like, 2),
    "keys that see no keys": ("backward_k", "d_products", torch.zeros_like, 2),
    "pairs that decay nothing": ("backward_k", "sums", torch.zeros_like, 4),
}


@pytest.mark.slow_cases(r"(?!one block)")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, monkeypatch):
    """The tolerance rule for bfloat16 is narrow enough to see each."""
    name, argument, change, result = FAULTS[fault]
    plant(monkeypatch, gated_delta, f"gated_delta_{name}_kernel", argument, change)
    with pytest.raises(AssertionError, match=f"result {result}"):
        compare(gated_delta_rule, eager, given(1, 270, 1, 2, 64, 16), torch.bfloat16)

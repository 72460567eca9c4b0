import importlib

import pytest
import torch
import torch.nn.functional as F
from harness import ALL, compare, plant, randn, results, strided, without

from megacompile.kernels import mamba2
from megacompile.kernels.mamba2 import ScanInputs, forward_reference, mamba2_chunk_scan

scan = importlib.import_module("megacompile.kernels.mamba2")


def eager(x, dt, A, B, C, D):
    """Token by token, in float32, as is the result."""
    x, dt, A, B, C, D = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x, dt, A, B, C, D))
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    state, found = x.new_zeros(x.shape[0], x.shape[2], B.shape[3], x.shape[3]), []
    for t in range(x.shape[1]):
        written = B[:, t, :, :, None] * (dt[:, t, :, None] * x[:, t])[:, :, None]
        state = state * (A * dt[:, t]).exp()[:, :, None, None] + written
        found.append((C[:, t, :, None] @ state)[:, :, 0] + D[:, None] * x[:, t])
    nothing = D[:, None] * x * (dt * A * (B * C).sum(-1))[..., None]
    return torch.stack(found, 1) if found else nothing


def given(batch, tokens, heads, width, groups, inner):
    """Heads that forget slowly and at once."""
    torch.manual_seed(1)
    dt = F.softplus(torch.randn(batch, tokens, heads) - 1)
    A = -torch.logspace(-3, 1, heads)
    B, C = randn(batch, tokens, groups, inner), randn(batch, tokens, groups, inner)
    return randn(batch, tokens, heads, width), dt.requires_grad_(), A.requires_grad_(), B, C, randn(heads)


SHAPES = [
    (1, 266, 2, 40, 1, 24),  # two spans, a chunk of ten tokens, masked columns
    (2, 64, 4, 32, 2, 128),
    (1, 65, 2, 72, 2, 200),  # columns of several programs
    (1, 1, 1, 16, 1, 16),
    (1, 70, 18, 16, 1, 16),  # heads of a group that do not fit in a part
    (1, 5, 1, 8, 1, 300),  # B and C too wide for the kernels
]


@pytest.mark.slow_cases(r"shape([013-6]|2-dtype0)")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(shape, dtype):
    compare(mamba2_chunk_scan, eager, given(*shape), dtype)


def test_half_precision_runs_in_torch():
    compare(mamba2_chunk_scan, eager, given(1, 70, 2, 8, 1, 16), torch.float16)


def test_the_formulas_in_float64():
    """To the last digits: the states beside the other implementation's, all else beside the definition's."""
    inputs = [t.detach().double().requires_grad_() for t in given(1, 266, 2, 24, 1, 16)]
    _, states = scan.mamba2_chunk_scan_op(*inputs)
    _, expected = forward_reference(ScanInputs(*(t.detach() for t in inputs)))
    torch.testing.assert_close(states, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn(inputs[0].shape)
    both = [results(function, inputs, [grad]) for function in (mamba2_chunk_scan, eager)]
    torch.testing.assert_close(*both, rtol=1e-9, atol=1e-9)


def test_layouts():
    """Slices of one projection, tokens before the batch, columns apart, one row for a batch."""
    x, dt, A, B, C, D = (t.detach().requires_grad_() for t in given(2, 70, 2, 16, 2, 16))
    grad = torch.randn(x.shape)
    expected = results(mamba2_chunk_scan, (x, dt, A, B, C, D), [grad])
    parts = torch.cat((x, B), -1).split(16, -1)
    dt, C = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (dt, C))
    found = results(mamba2_chunk_scan, (parts[0], dt, A, parts[1], C, D), [strided(grad)])
    assert all(map(torch.equal, found, expected))
    apart = [strided(t) for t in (x, dt, B, C)]
    assert torch.equal(mamba2_chunk_scan(*apart[:2], A, *apart[2:], D), expected[0])
    ones = [t[:1].expand(2, *t.shape[1:]) for t in (x, dt, B, C)]
    found = results(mamba2_chunk_scan, (*ones[:2], A, *ones[2:], D), [grad[:1].expand(x.shape)])
    assert all(torch.equal(found[i], expected[i][:1].expand_as(found[i])) for i in (0, 1, 2, 4, 5))


NO_DECAYS = without(ALL, ALL, ALL, 0)
FAULTS = {  # a kernel, what it takes wrong, how; the first result that is: out, dx, ddt, dA, dB, dC, dD
    "no decay of the state": ("scan", "states", lambda x: torch.cat((x[:1], x[1:] * 1.1)), 0),
    "a span that reads no state": ("scan", "states", without(1), 0),
    "pairs of the next token": ("scan", "similar", lambda x: x.roll(1, -1), 0),
    "a chunk that reads none before it": ("scan", "similar", without(..., 1, ALL, ALL), 0),
    "a span whose state has no gradient": ("backward_x", "states", without(0), 1),
    "a chunk that gives nothing to the next": ("backward_x", "similar", without(..., 1, ALL, ALL), 1),
    "scores that look back": ("backward_x", "similar", lambda x: x.mT.contiguous(), 1),
    "writes that do not decay": ("backward_x", "factors", NO_DECAYS, 1),
    "no skip": ("backward_x", "d", torch.zeros_like, 1),
    "pairs of another token": ("backward_pairs", "similar", lambda x: x.roll(1, -1), 2),
    "pairs that do not decay": ("backward_pairs", "factors", NO_DECAYS, 2),
    "pairs that nothing passes": ("backward_decays", "pairs", without(ALL, ALL, ALL, 0), 2),
    "chunks that pass nothing on": ("backward_decays", "pairs", without(ALL, ALL, ALL, slice(1, 4)), 2),
    "no later tokens": ("backward_decays", "given", torch.zeros_like, 3),
    "no writes": ("backward_decays", "written", torch.zeros_like, 3),
    "no reads": ("backward_decays", "risen", torch.zeros_like, 3),
    "no steps": ("backward_decays", "by_dt", torch.zeros_like, 2),
    "reads that decay nothing": ("backward_groups", "factors", NO_DECAYS, 2),
    "a state of another span": ("backward_groups", "states", lambda x: x.roll(1, 0), 3),
    "a chunk with itself alone": ("backward_groups", "d_similar", without(..., 1, ALL, ALL), 4),
    "nothing skipped": ("backward_decays", "skipped", torch.zeros_like, 6),
}


@pytest.mark.slow_cases(r"(?!no decay)")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, monkeypatch):
    """The tolerance rule for bfloat16 is narrow enough to see each."""
    name, argument, change, result = FAULTS[fault]
    plant(monkeypatch, mamba2, f"mamba2_{name}_kernel", argument, change)
    with pytest.raises(AssertionError, match=f"result {result}"):
        compare(mamba2_chunk_scan, eager, given(1, 300, 2, 16, 1, 16), torch.bfloat16)

import importlib

import pytest
import torch
import torch.nn.functional as F
from harness import compare, randn, results, strided

from megacompile.kernels.mamba2_chunk_scan import mamba2_chunk_scan
from megacompile.kernels.mamba2_reference import Inputs, forward_reference

scan = importlib.import_module("megacompile.kernels.mamba2_chunk_scan")


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
    (1, 330, 2, 40, 1, 24),  # two spans, a chunk of ten tokens, columns of two programs, some masked
    (2, 64, 4, 32, 2, 128),
    (1, 65, 2, 20, 2, 200),
    (1, 1, 1, 16, 1, 16),
    (1, 5, 1, 8, 1, 300),  # B and C too wide for the kernels
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(shape, dtype):
    compare(mamba2_chunk_scan, eager, given(*shape), dtype)


def test_half_precision_runs_in_torch():
    compare(mamba2_chunk_scan, eager, given(1, 70, 2, 8, 1, 16), torch.float16)


def test_the_formulas_in_float64():
    """To the last digits: the states beside the other implementation's, all else beside the definition's."""
    inputs = [t.detach().double().requires_grad_() for t in given(1, 600, 2, 40, 1, 24)]
    _, states = scan.mamba2_chunk_scan_op(*inputs)
    _, expected = forward_reference(Inputs(*(t.detach() for t in inputs)))
    torch.testing.assert_close(states, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn(inputs[0].shape)
    both = [results(function, inputs, [grad]) for function in (mamba2_chunk_scan, eager)]
    torch.testing.assert_close(*both, rtol=1e-9, atol=1e-9)


def test_layouts():
    """Slices of one projection, tokens before the batch, columns apart, one row for a batch."""
    x, dt, A, B, C, D = (t.detach() for t in given(2, 70, 2, 16, 2, 16))
    expected = mamba2_chunk_scan(x, dt, A, B, C, D)
    parts = torch.cat((x, B, C), -1).split(16, -1)
    early = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, dt, B, C)]
    apart = [strided(t) for t in (x, dt, B, C)]
    for ours, steps, left, right in ((parts[0], dt, *parts[1:]), early, apart):
        assert torch.equal(mamba2_chunk_scan(ours, steps, A, left, right, D), expected)
    ones = [t[:1].expand(2, *t.shape[1:]) for t in (x, dt, B, C)]
    both = mamba2_chunk_scan(*ones[:2], A, *ones[2:], D)
    assert torch.equal(both, expected[:1].expand_as(both))


FAULTS = {  # what the last kernel is given of the others
    "no decay of the state": lambda similar, states: states[1].mul_(1.1),
    "a span that reads no state": lambda similar, states: states[1].zero_(),
    "pairs of the next token": lambda similar, states: similar.copy_(similar.roll(1, -1)),
    "a chunk that reads none before it": lambda similar, states: similar[..., 1, :, :].zero_(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, monkeypatch):
    """The tolerance rule for bfloat16 is narrow enough to see each."""
    launch = scan.launch

    def spoiled(kernel, grid, *args, **constants):
        if kernel is scan.mamba2_scan_kernel:
            FAULTS[fault](*args[5:7])
        launch(kernel, grid, *args, **constants)

    monkeypatch.setattr(scan, "launch", spoiled)
    with pytest.raises(AssertionError, match="result 0"):
        compare(mamba2_chunk_scan, eager, given(1, 300, 2, 16, 1, 16), torch.bfloat16)

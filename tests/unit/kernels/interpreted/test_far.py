"""Offsets beyond 2**31 elements: tokens times columns reach that long before a GPU's memory ends.

Nothing of that size is touched: memory is reserved, and of a long grid the last program runs alone.
"""

import importlib

import pytest
import torch
from harness import LOW
from triton.runtime import interpreter

from megacompile.kernels import gated_delta, mamba2
from megacompile.kernels.attention import Rule, backward_reference, forward_reference
from megacompile.kernels.cross_entropy_tiles import LossTerms
from megacompile.kernels.gated_delta import RuleInputs
from megacompile.kernels.gated_delta import backward_reference as delta_backward
from megacompile.kernels.gated_delta import forward_reference as delta_reference
from megacompile.kernels.mamba2 import ScanInputs
from megacompile.kernels.mamba2 import backward_reference as scan_backward
from megacompile.kernels.mamba2 import forward_reference as scan_reference
from megacompile.kernels.qk_norm_rope import qk_norm_rope_backward_reference, qk_norm_rope_reference

attention, cross_entropy_tiles, glu, clamped_glu, rope, qk_norm_rope = (
    importlib.import_module(f"megacompile.kernels.{name}")
    for name in ("attention", "cross_entropy_tiles", "glu", "clamped_glu", "rope", "qk_norm_rope")
)
FAR = 1 << 31
builder = interpreter.interpreter_builder


class Executor(interpreter.GridExecutor):
    """The interpreter's, without its last step: copying every storage onto itself."""

    def _restore_args_dev(self, *_):
        pass


class LastProgram(Executor):
    """Runs the last program of a grid and no other."""

    def __init__(self, fn, names, grid, hooks=()):
        super().__init__(fn, names, (1,), hooks)
        self.full = (*grid, 1, 1)[:3]

    def __call__(self, *args, **constants):
        with pytest.MonkeyPatch.context() as patch:
            dim, index = builder.set_grid_dim, builder.set_grid_idx
            patch.setattr(builder, "set_grid_dim", lambda *_: dim(*self.full))
            patch.setattr(builder, "set_grid_idx", lambda *_: index(*(n - 1 for n in self.full)))
            super().__call__(*args, **constants)


@pytest.fixture
def last(monkeypatch):
    monkeypatch.setattr(interpreter, "GridExecutor", LastProgram)


@pytest.fixture
def lazy(monkeypatch):
    monkeypatch.setattr(interpreter, "GridExecutor", Executor)


def reserved(*shape):
    """Memory that is not touched but for its last 4096 elements."""
    x = torch.empty(shape, dtype=LOW[0])
    x.view(-1)[-4096:] = torch.randn(4096)
    return x


def tail(x):
    """The part of a tensor of which the last program computes some, apart from it."""
    return x.view(-1)[-256:].clone()


@pytest.mark.parametrize("numel", [FAR - 512, FAR + 512])
def test_glu(last, numel):
    gate, up = reserved(numel), reserved(numel)
    y = glu.glu_triton(gate, up, "silu")
    torch.testing.assert_close(tail(y), glu.glu_reference(tail(gate), tail(up), "silu"))
    grad = up
    glu_reference = [torch.empty(256, dtype=gate.dtype) for _ in range(2)]
    glu.glu_backward_reference(tail(grad), tail(gate), tail(up), "silu", *glu_reference)
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    glu.glu_backward_triton(grad, gate, up, "silu", dgate, dup)
    torch.testing.assert_close([tail(dgate), tail(dup)], glu_reference)


@pytest.mark.parametrize("interleaved", [True, False])
def test_clamped_glu(last, interleaved):
    both = reserved(FAR // 2048 + 1, 2048) if not interleaved else reserved(1, FAR + 512)
    row = both[-1:, -1024:].clone() if interleaved else both[-1:].clone()
    y = clamped_glu.clamped_glu_triton(both, 7.0, 1.702, interleaved)
    expected = clamped_glu.clamped_glu_reference(row, 7.0, 1.702, interleaved)
    torch.testing.assert_close(tail(y), tail(expected))
    grad, dboth, dexpected = y, torch.empty_like(both), torch.empty_like(row)
    clamped_glu.clamped_glu_backward_triton(grad, both, 7.0, 1.702, interleaved, dboth)
    given = grad.view(-1)[-row.numel() // 2 :].view(1, -1).clone(), row, 7.0, 1.702, interleaved
    clamped_glu.clamped_glu_backward_reference(*given, dexpected)
    torch.testing.assert_close(tail(dboth), tail(dexpected))


def test_cross_entropy(last):
    logits = reserved(FAR // 2048 + 2, 2048)
    rows = logits.shape[0]
    labels, state = torch.zeros(rows, dtype=torch.int64), cross_entropy_tiles.new_state(logits, rows)
    labels[-1], terms = 2000, LossTerms(2048)
    expected = cross_entropy_tiles.new_state(logits, 1)
    cross_entropy_tiles.accumulate_reference(expected, logits[-1:], labels[-1:], 0, terms)
    cross_entropy_tiles.accumulate_triton(state, logits, labels, 0, terms)
    torch.testing.assert_close(state[:3, -1:], expected[:3])
    stats, grad = state[:2].contiguous(), torch.ones(rows)
    given = logits[-1:].clone(), labels[-1:], stats[:, -1:], grad[-1:], 0, terms
    cross_entropy_tiles.gradient_triton(logits, labels, stats, grad, 0, terms)
    torch.testing.assert_close(tail(logits), tail(cross_entropy_tiles.gradient_reference(*given).half()))


def far_apart(x, dim):
    """Equal values, whose indices of ``dim`` lie 2**30 elements apart; the last of three lies at 2**31."""
    strides = [1 << 30 if d == dim else s for d, s in enumerate(x.stride())]
    far = torch.empty((x.shape[dim] << 30) + x.numel(), dtype=x.dtype).as_strided(x.shape, strides)
    return far.copy_(x)


def far_shape(dim):
    """Three sizes, of which that of ``dim`` suffices for ``far_apart``."""
    return [3 if d == dim else 1 + (d == 1) for d in range(3)]


@pytest.mark.parametrize("dim", [0, 1])
def test_attention(lazy, dim):
    """[B, H, S, D] with contiguous heads: the third row or head of a long sequence."""
    torch.manual_seed(1)
    q, k, v = torch.randn(3, *[3 if d == dim else 1 for d in range(2)], 20, 16, dtype=LOW[0])
    rule = Rule(0.2)
    grad, out, lse = q.flip(0), *forward_reference(q, k, v, rule)
    ours = attention.forward_triton(*(far_apart(x, dim) for x in (q, k, v)), rule)
    torch.testing.assert_close(ours[0], out, atol=2e-3, rtol=2e-3)
    far = [far_apart(x, dim) for x in (grad, q, k, v, out)]
    found = attention.backward_triton(*far, lse, rule)
    expected = backward_reference(grad, q, k, v, out, lse, rule)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rope(lazy, dim):
    torch.manual_seed(1)
    x = far_apart(torch.randn(*far_shape(dim), 8, dtype=LOW[0]), dim)
    cos, sin = torch.randn(2, 1, 1, x.shape[2], 8, dtype=LOW[0])
    expected = rope.rope_reference(x.contiguous(), cos, sin, False, False, torch.empty(x.shape).half())
    rope.rope_triton(x, cos, sin, False, False, x)
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_qk_norm_rope(lazy, dim):
    torch.manual_seed(1)
    x, grad = torch.randn(2, *far_shape(dim), 8, dtype=LOW[0])
    given = torch.ones(8), *torch.randn(2, 1, 1, x.shape[2], 8, dtype=LOW[0])
    far = far_apart(x, dim)
    y, rstd = qk_norm_rope.qk_norm_rope_triton(far, *given, 1e-6, 0.0)
    torch.testing.assert_close((y, rstd), qk_norm_rope_reference(x, *given, 1e-6, 0.0), atol=2e-3, rtol=2e-3)
    found = qk_norm_rope.qk_norm_rope_backward_triton(far_apart(grad, dim), far, *given, rstd, 0.0)
    expected = qk_norm_rope_backward_reference(grad, x, *given, rstd, 0.0)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gated_delta_rule(lazy, dim):
    """[B, T, H, D], and gates without D."""
    torch.manual_seed(1)
    q, k, v, grad = torch.randn(4, *far_shape(dim), 16, dtype=LOW[0])
    gates = [x.half() for x in (-torch.rand(v.shape[:3]), torch.rand(v.shape[:3]))]
    far, near = (
        RuleInputs(*(far_apart(x, dim) for x in (q, k, v, *gates)), True),
        RuleInputs(q, k, v, *gates, True),
    )
    expected = delta_reference(near)
    found = gated_delta.forward_triton(far)
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)
    found = gated_delta.backward_triton(far_apart(grad, dim), far, found[1])
    expected = delta_backward(grad, near, expected[1])
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)


def test_gated_delta_rule_of_many_heads(last):
    """What its kernels leave each other passes 2**31 elements: [CHUNK, CHUNK] and a state of each head."""
    torch.manual_seed(1)
    q, k = torch.randn(2, 1, 64, 1, 128, dtype=LOW[0])
    v, grad = torch.randn(2, 1, 64, 1, 32, dtype=LOW[0])
    given = q, k, v, -torch.rand(1, 64, 1).half(), torch.rand(1, 64, 1).half()
    many = [x.expand(1024, 64, 520, *x.shape[3:]) for x in given]
    out, states = gated_delta.forward_triton(RuleInputs(*many, True))
    expected, state = delta_reference(RuleInputs(*given, True))
    torch.testing.assert_close(out[-1:, :, -1:], expected, atol=5e-3, rtol=5e-3)
    found = [torch.empty(x.shape, dtype=x.dtype) for x in many]
    d_state = torch.empty(states.shape[1:])
    d_state[-1, -1] = 0
    grads = grad.expand(many[2].shape)
    gated_delta.backward_part(grads, RuleInputs(*many, True), states, d_state, found)
    expected = delta_backward(grad, RuleInputs(*given, True), state)
    torch.testing.assert_close([x[-1:, :, -1:] for x in found], list(expected), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_mamba2_chunk_scan(lazy, dim):
    """[B, T, H, P], steps without P."""
    torch.manual_seed(1)
    x, B, C, grad = torch.randn(4, *far_shape(dim), 16, dtype=LOW[0])
    dt, A, D = torch.rand(x.shape[:3]).half(), -torch.rand(x.shape[2]), torch.rand(x.shape[2])
    far = [far_apart(t, dim) for t in (x, dt, B, C)]
    far, near = ScanInputs(*far[:2], A, *far[2:], D), ScanInputs(x, dt, A, B, C, D)
    expected, found = scan_reference(near), mamba2.forward_triton(far)
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)
    found = mamba2.backward_triton(far_apart(grad, dim), far, found[1])
    torch.testing.assert_close(found, scan_backward(grad, near, expected[1]), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("batch", "groups", "inner"), [(4096, 8, 64), (260, 520, 16)])
def test_mamba2_chunk_scan_of_many_heads(last, batch, groups, inner):
    """What its kernels leave each other passes 2**31 elements: states of heads, pairs of tokens of groups."""
    torch.manual_seed(1)
    x, grad = torch.randn(2, 1, 64, 1, 16, dtype=LOW[0])
    B, C = torch.randn(2, 1, 64, 1, inner, dtype=LOW[0]) / 8
    dt, A, D = torch.rand(1, 64, 1).half(), -torch.rand(1), torch.rand(1)
    one = ScanInputs(x, dt, A, B, C, D)
    expected, kept = scan_reference(one)
    x, grad, dt, B, C = (
        t.expand(batch, 64, heads, *t.shape[3:])
        for t, heads in zip((x, grad, dt, B, C), (520, 520, 520, groups, groups), strict=True)
    )
    many = ScanInputs(x, dt, A.expand(520), B, C, D.expand(520))
    out, states = mamba2.forward_triton(many)
    torch.testing.assert_close(out[-1:, :, -1:], expected, atol=5e-3, rtol=5e-3)
    found = [t[-1:, :, -1:] for t in mamba2.backward_triton(grad, many, states) if t.dim() > 1]
    expected = [t for t in scan_backward(grad[:1, :, :1], one, kept) if t.dim() > 1]
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)

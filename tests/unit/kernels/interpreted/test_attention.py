import importlib
import math

import pytest
import torch
from harness import DTYPES, compare, randn, strided

from megacompile.kernels import sdpa
from megacompile.kernels.attention import (
    Rule,
    document_bounds,
    flash_attention_backward,
    flash_attention_forward,
)

attention = importlib.import_module("megacompile.kernels.attention")
CASES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 37},
    "two-sided window": {"causal": False, "window": 20},
    "softcap": {"softcap": 3.0},
    "all": {"window": 50, "softcap": 3.0},
}


class Flash(torch.autograd.Function):
    """The two launchers as one differentiable function, for the tests."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, options):
        out, lse = flash_attention_forward(q, k, v, Rule(sinks=sinks, **options))
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, grad):
        *saved, sinks = ctx.saved_tensors
        dq, dk, dv, dsinks = flash_attention_backward(grad, *saved, Rule(sinks=sinks, **ctx.options))
        return dq, dk, dv, dsinks if sinks is not None else None, None


def eager(q, k, v, sinks, scale, causal=True, window=0, softcap=0.0, bounds=None):
    """Spelled out, probabilities rounded to the input's type as in transformers' eager attention."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = ((q @ k.mT) * scale).float() if q.dtype != torch.float64 else (q @ k.mT) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2])[None, :]
    seen = (j <= i) if causal else torch.ones_like(i + j, dtype=torch.bool)
    if window:
        seen = seen & (i - j < window) & (j - i < window)
    if bounds is not None:
        first, last = bounds[0][:, None, :, None], bounds[1][:, None, :, None]
        seen = seen & (j >= first) & (j < last)
    s = s.masked_fill(~seen, torch.finfo(s.dtype).min)
    if sinks is not None:
        column = sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        s = torch.cat((s, column), dim=-1)
    p = s.softmax(-1)
    p = (p if sinks is None else p[..., :-1]) * seen.any(-1, keepdim=True)
    return p.to(v.dtype) @ v


def check(shapes, dtype, sinks=False, floor=0.0, **options):
    torch.manual_seed(1)
    batch, heads, groups, queries, keys, dim, v_dim = shapes
    options["scale"] = 1 / math.sqrt(dim)
    inputs = [
        randn(batch, heads, queries, dim),
        randn(batch, groups, keys, dim),
        randn(batch, groups, keys, v_dim),
    ]
    inputs += [randn(heads)] if sinks else []
    compare(
        lambda q, k, v, s=None: Flash.apply(q, k, v, s, options),
        lambda q, k, v, s=None: eager(q, k, v, s, **options),
        inputs,
        dtype,
        floor=floor,
    )


@pytest.mark.slow_cases(r".*-True|(?!causal-).*dtype1|(?!all-).*dtype2")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_rules(case, dtype, sinks):
    heads = (4, 2) if case in ("causal", "all") else (2, 1)  # two groups of queries' heads, or one
    check((1, *heads, 150, 150, 24, 24), dtype, sinks, **CASES[case])


@pytest.mark.slow_cases(r"shapes[034]")
@pytest.mark.parametrize(
    "shapes",
    [
        (2, 2, 2, 1, 1, 16, 16),
        (1, 3, 1, 33, 97, 40, 40),  # the last queries of a longer row of keys
        (1, 2, 2, 70, 70, 96, 64),  # values of another width, as in latent attention
        (1, 1, 1, 41, 41, 160, 160),
        (1, 2, 1, 0, 0, 16, 16),
    ],
)
def test_shapes(shapes):
    # One key: the gradient of its score is exactly zero, a difference of terms around one.
    check(shapes, torch.float32, floor=1.0 if shapes[4] == 1 else 0.0)
    check(shapes, torch.bfloat16, True, window=29)


@pytest.mark.slow_cases(r"(False|True-dtype1)")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents(causal, dtype):
    """Packed rows equal the documents one by one; padding gives zeros and takes no gradient."""
    bounds = document_bounds(torch.tensor([0, 5, 70, 71, 140]), 150)
    assert bounds[:, 0, [0, 69, 70, 145]].tolist() == [[0, 5, 70, 140], [5, 70, 71, 140]]
    check((1, 2, 1, 150, 150, 24, 24), dtype, causal=causal, bounds=bounds)
    q, k, v = torch.randn(3, 1, 2, 150, 24)
    out, lse = flash_attention_forward(q, k, v, Rule(0.2, causal, bounds=bounds))
    alone, _ = flash_attention_forward(*(x[:, :, 5:70] for x in (q, k, v)), Rule(0.2, causal))
    torch.testing.assert_close(out[:, :, 5:70], alone)
    assert not out[:, :, 140:].any() and (lse[:, :, 140:] == float("-inf")).all()


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_of_everything_is_none(causal):
    check((1, 1, 1, 33, 70, 16, 16), torch.float32, causal=causal, window=2**31 - 1)


def test_one_row_of_documents_for_a_batch():
    """Bounds are broadcast over the batch, and may be views; so may sink logits."""
    bounds = document_bounds(torch.tensor([0, 5, 40]), 40)
    check((2, 2, 2, 40, 40, 16, 16), torch.float32, bounds=bounds)
    q, k, v = torch.randn(3, 2, 2, 40, 16)
    sinks = torch.randn(4)
    sparse = bounds.expand(2, 2, 40).mT.contiguous().mT
    ours = flash_attention_forward(q, k, v, Rule(0.2, sinks=sinks[::2], bounds=sparse))
    rule = Rule(0.2, sinks=sinks[::2].clone(), bounds=sparse.contiguous())
    dense = flash_attention_forward(q, k, v, rule)
    torch.testing.assert_close(ours, dense, rtol=0, atol=0)


@pytest.mark.slow_cases(r".*-90")
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ((1, 2, 1, 300, 300, 64, 64), {"window": 200}),
        ((1, 2, 1, 290, 290, 128, 128), {"bounds": [0, 20, 260, 280]}),
        ((1, 1, 1, 150, 280, 192, 128), {"softcap": 5.0}),
        ((1, 1, 1, 270, 270, 256, 256), {"causal": False, "window": 170}),
    ],
)
def test_tiles_of_other_chips(arch, shapes, options, monkeypatch):
    """Large tiles, wholly visible ones among them; dk and dv by launches of their own on 9.0."""
    monkeypatch.setattr(attention, "arch_of", lambda _: arch)
    if "bounds" in options:
        options = {"bounds": document_bounds(torch.tensor(options["bounds"]), shapes[3])}
    check(shapes, torch.float32, **options)


@pytest.mark.parametrize("factor", [-0.5, 0.0])
def test_scales_that_are_not_positive(factor):
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    out, _ = flash_attention_forward(q, k, v, Rule(factor))
    torch.testing.assert_close(out, eager(q, k, v, None, factor))


def test_layouts_and_determinism():
    """Heads inside tokens, strided columns; the same bits from every run."""
    q, k, v = torch.randn(3, 2, 70, 2, 24)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = flash_attention_forward(q, k, v, Rule(0.2))
    assert out.transpose(1, 2).is_contiguous()
    again, _ = flash_attention_forward(strided(q), strided(k), strided(v).detach(), Rule(0.2))
    assert torch.equal(out, again)
    grad = torch.randn(2, 2, 24, 70).mT
    first, second = (flash_attention_backward(grad, q, k, v, out, lse, Rule(0.2)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("scale", [0.0, 30.0])
def test_extreme_scores(scale):
    """All scores equal; scores in the thousands, where gradients cancel to zero."""
    q, k, v = (randn(1, 1, 40, 16, scale=s) for s in (scale, scale, 1.0))
    for dtype in DTYPES:
        compare(
            lambda q, k, v: Flash.apply(q, k, v, None, {"scale": 0.25}),
            lambda q, k, v: eager(q, k, v, None, 0.25),
            (q, k, v),
            dtype,
            floor=1.0,
        )


def test_gradcheck():
    bounds = document_bounds(torch.tensor([0, 2, 6]), 6)
    options = {"scale": 0.7, "window": 3, "softcap": 2.0, "bounds": bounds}
    inputs = [randn(1, 2, 6, 3), randn(1, 1, 6, 3), randn(1, 1, 6, 4), randn(2)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    function = lambda q, k, v, s: Flash.apply(q, k, v, s, options)  # noqa: E731
    assert torch.autograd.gradcheck(function, doubles, fast_mode=True)


@pytest.mark.slow_cases(r"dtype1-features[0-2]")
@pytest.mark.parametrize(
    "features", [{"window": 9}, {"softcap": 3.0}, {"sinks": True, "window": 9}, {"documents": (0, 7, 33)}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_compilers_operator_takes_this_kernel(features, dtype, monkeypatch):
    """megacompile::attention calls it for what the library lacks; strides and types are those of its fake."""
    calls = []
    launch = sdpa.flash_attention_forward
    monkeypatch.setattr(sdpa, "flash_attention_forward", lambda *args: (calls.append(1), launch(*args))[1])
    window, softcap = features.get("window", 0), features.get("softcap", 0.0)
    cumulative = features.get("documents")
    bounds = document_bounds(torch.tensor(cumulative), 33).expand(2, 2, 33) if cumulative else None

    def run(q, k, v, sinks=None):
        constants = 0.3, True, window, softcap, 0.0, 0, False, bounds
        out, lse = torch.ops.megacompile.attention(q, k, v, None, sinks, None, *constants)
        assert out.stride() == (2 * 33 * 16, 16, 32, 1) and lse.dtype == torch.float32
        return out

    inputs = [randn(2, 2, 33, 16), randn(2, 1, 33, 16), randn(2, 1, 33, 16)]
    inputs += [randn(2)] if "sinks" in features else []
    terms = 0.3, True, window, softcap, bounds
    compare(run, lambda *x: eager(*x[:3], x[3] if x[3:] else None, *terms), inputs, dtype)
    assert calls

import pytest
import torch
from harness import DTYPES, SHAPES, compare, gradcheck, randn, spread, strided

from megacompile.kernels.add_rms_norm import add_rms_norm
from megacompile.kernels.rms_norm import rms_norm

VARIANTS = {"llama": (0.0, True), "gemma": (1.0, False), "olmo": (0.0, False)}


def eager(x, weight, offset, cast_early, eps=1e-6):
    """As in transformers' LlamaRMSNorm, Gemma3RMSNorm and Olmo2RMSNorm."""
    y = x.float() if x.dtype != torch.float64 else x
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    if cast_early:
        return weight * y.to(x.dtype)
    return (y * (offset + weight.to(y.dtype))).to(x.dtype)


@pytest.mark.slow_cases(r"shape[02]-\S*dtype")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(shape, dtype, variant):
    torch.manual_seed(1)
    rule = VARIANTS[variant]
    compare(
        lambda x, w: rms_norm(x, w, 1e-6, *rule),
        lambda x, w: eager(x, w, *rule),
        (randn(*shape), randn(shape[1])),
        dtype,
    )


def test_without_weight_and_with_wide_weight():
    compare(
        lambda x: rms_norm(x, None),
        lambda x: eager(x, None, 0, True),
        (randn(7, 96),),
        torch.float16,
    )
    x, weight = torch.randn(5, 33).bfloat16(), torch.randn(33)
    y = rms_norm(x, weight)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, eager(x, weight, 0, True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 5, 41), (0, 16), (3, 0, 16), (41,)])
def test_ranks_and_empty(shape):
    x = randn(*shape)
    compare(rms_norm, lambda x, w: eager(x, w, 0, True), (x, randn(shape[-1])), torch.float32)


def test_strided():
    x, weight = randn(9, 41), randn(41)
    expected = eager(x, weight, 0, True)
    torch.testing.assert_close(rms_norm(strided(x), weight), expected, rtol=1e-5, atol=1e-5)
    transposed = x.detach().mT.contiguous().mT
    torch.testing.assert_close(rms_norm(transposed, weight), expected, rtol=1e-5, atol=1e-5)
    gradcheck(lambda x, w: rms_norm(spread(x), w).mT.contiguous(), randn(3, 5), randn(5))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e4])
def test_extreme_values(scale):
    for dtype in DTYPES:
        compare(
            rms_norm,
            lambda x, w: eager(x, w, 0, True),
            (randn(5, 123, scale=scale), randn(123)),
            dtype,
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck(variant):
    gradcheck(lambda x, w: rms_norm(x, w, 1e-6, *VARIANTS[variant]), randn(3, 5), randn(5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_residual(variant, dtype):
    rule = VARIANTS[variant]

    def plain(x, residual, weight):
        total = x + residual
        return eager(total, weight, *rule), total

    compare(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-6, *rule),
        plain,
        (randn(199, 123), randn(199, 123), randn(123)),
        dtype,
    )


def test_residual_gradcheck():
    gradcheck(lambda x, r, w: add_rms_norm(x, r, w), randn(3, 5), randn(3, 5), randn(5))


def test_wide_rows():
    """Past 8192 columns x is read twice, past 16384 torch takes the backward, past 32768 all."""
    for width in (9001, 20000, 33000):
        compare(
            rms_norm,
            lambda x, w: eager(x, w, 0, True),
            (randn(6, width), randn(width)),
            torch.float16,
        )

import pytest
import torch
from harness import DTYPES, SHAPES, compare, gradcheck, randn, spread, strided
from torch.nn.functional import layer_norm as plain

from megacompile.kernels.layer_norm import layer_norm
from megacompile.kernels.rms_norm import rms_norm


def eager(x, weight, bias):
    return plain(x, x.shape[-1:], weight, bias, 1e-5)


@pytest.mark.slow_cases(r"shape[02]-\S*dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(shape, dtype):
    torch.manual_seed(1)
    compare(layer_norm, eager, (randn(*shape), randn(shape[1]), randn(shape[1])), dtype)


def test_optional_parameters():
    compare(
        lambda x: layer_norm(x, None),
        lambda x: eager(x, None, None),
        (randn(7, 96),),
        torch.float16,
    )
    compare(layer_norm, lambda x, w: eager(x, w, None), (randn(7, 96), randn(96)), torch.float16)


@pytest.mark.parametrize("shape", [(2, 3, 5, 41), (0, 16), (41,)])
def test_ranks_and_empty(shape):
    inputs = (randn(*shape), randn(shape[-1]), randn(shape[-1]))
    compare(layer_norm, eager, inputs, torch.float32)


def test_strided():
    x, weight, bias = randn(9, 41), randn(41), randn(41)
    expected = eager(x, weight, bias)
    torch.testing.assert_close(layer_norm(strided(x), weight, bias), expected, rtol=1e-5, atol=1e-5)
    gradcheck(lambda x, w, b: layer_norm(spread(x), w, b).mT.contiguous(), randn(3, 5), randn(5), randn(5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale,shift", [(0.0, 0.0), (1e-20, 0.0), (1.0, 1000.0), (1e4, 0.0)])
def test_extreme_values(scale, shift, dtype):
    x = (torch.randn(5, 123) * scale + shift).requires_grad_()
    compare(layer_norm, eager, (x, randn(123), randn(123)), dtype)


def test_gradcheck():
    gradcheck(layer_norm, randn(3, 5), randn(5), randn(5))
    gradcheck(lambda x: layer_norm(x, None), randn(3, 5))


def test_wide_rows():
    """Past 8192 columns torch takes over the backward, past 32768 the forward too."""
    compare(layer_norm, eager, (randn(6, 9001), randn(9001), randn(9001)), torch.bfloat16)
    compare(layer_norm, eager, (randn(2, 33000), randn(33000), randn(33000)), torch.float16)


@pytest.mark.parametrize("columns", [40, 1])
def test_a_weight_of_another_length_is_refused(columns):
    x, good, bad = torch.randn(3, 41), torch.ones(41), torch.ones(columns)
    for weight, bias in ((bad, good), (good, bad)):
        with pytest.raises(ValueError, match="41 columns"):
            layer_norm(x, weight, bias)
    with pytest.raises(ValueError, match="41 columns"):
        rms_norm(x, bad)

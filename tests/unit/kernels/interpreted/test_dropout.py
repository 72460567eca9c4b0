import pytest
import torch
from harness import DTYPES

from megacompile.kernels.dropout import dropout, dropout_mask, dropout_reference


@pytest.mark.slow_cases(r"0\.[15]--42")
@pytest.mark.parametrize("seed,base", [(0, 0), (-42, 7), (2**62 + 5, 2**40)])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_triton_and_torch_drop_the_same_elements(seed, base, p):
    rng = torch.tensor([seed, base])
    x = torch.rand(7, 411) + 0.5
    assert torch.equal(dropout(x, rng, 3, p) != 0, dropout_mask(rng, 3, x.shape, p))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_layout(dtype):
    rng = torch.tensor([1, 2])
    x = torch.randn(5, 300).to(dtype)
    assert torch.equal(dropout(x, rng, 0, 0.3), dropout_reference(x, rng, 0, 0.3))
    turned = x.mT.contiguous().mT
    assert torch.equal(dropout(turned, rng, 0, 0.3), dropout(x, rng, 0, 0.3))
    assert dropout(x[:0], rng, 0, 0.3).shape == (0, 300)


def test_gradient_is_dropout_of_the_gradient():
    rng = torch.tensor([1, 2])
    x, grad = torch.randn(2, 40, 30).double()
    mask = dropout_mask(rng, 5, x.shape, 0.25)
    torch.testing.assert_close(dropout(grad, rng, 5, 0.25), grad * mask / 0.75, rtol=1e-6, atol=0)

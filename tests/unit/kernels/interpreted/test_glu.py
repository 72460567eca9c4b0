import pytest
import torch
import torch.nn.functional as F
from harness import DTYPES, SHAPES, compare, gradcheck, randn, spread, strided

from megacompile.kernels.glu import ACTIVATIONS, glu

EAGER = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu": F.relu,
}


@pytest.mark.slow_cases(r"shape[02]-\S*dtype|shape1-dtype\d-(gelu_erf|relu)")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 4096), *SHAPES[1:]])
def test_forward_and_backward(shape, dtype, activation):
    torch.manual_seed(1)
    compare(
        lambda g, u: glu(g, u, activation),
        lambda g, u: EAGER[activation](g) * u,
        (randn(*shape, scale=3.0), randn(*shape)),
        dtype,
    )


@pytest.mark.parametrize("shape", [(2, 3, 5, 41), (0, 16), (3, 0), (1,)])
def test_ranks_and_empty(shape):
    compare(glu, lambda g, u: F.silu(g) * u, (randn(*shape), randn(*shape)), torch.float32)


def test_halves_of_a_packed_projection():
    for dtype in DTYPES:
        compare(
            lambda both: glu(*both.chunk(2, dim=-1)),
            lambda both: F.silu(both.chunk(2, dim=-1)[0]) * both.chunk(2, dim=-1)[1],
            (randn(3, 5, 246),),
            dtype,
        )


def test_strided():
    gate, up = randn(9, 41), randn(9, 41)
    expected = F.silu(gate) * up
    torch.testing.assert_close(glu(strided(gate), up), expected, rtol=1e-5, atol=1e-6)
    gradcheck(lambda g, u: glu(spread(g), spread(u)).mT.contiguous(), randn(3, 5), randn(3, 5))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_values(activation):
    """Saturated gates: no overflow becomes NaN, the derivative is exactly 0 or 1."""
    values = torch.tensor([0.0, -0.0, 1e-38, 88.0, -88.0, 120.0, -120.0, 1e4, -1e4])
    for dtype in DTYPES:
        compare(
            lambda g, u: glu(g, u, activation),
            lambda g, u: EAGER[activation](g) * u,
            (values.clone().requires_grad_(), randn(9)),
            dtype,
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation):
    gradcheck(lambda g, u: glu(g, u, activation), randn(3, 5), randn(3, 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_in_place(dtype):
    """What the emitted code calls where nothing reads gate and up again."""
    grad, gate, up = (torch.randn(41, 123).to(dtype) for _ in range(3))
    expected = torch.ops.megacompile.glu_backward(grad, gate, up, "silu")
    torch.ops.megacompile.glu_backward_(grad, gate, up, "silu")
    assert torch.equal(gate, expected[0]) and torch.equal(up, expected[1])

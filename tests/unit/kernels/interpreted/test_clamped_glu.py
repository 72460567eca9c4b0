import pytest
import torch
from harness import DTYPES, SHAPES, compare, gradcheck, randn, spread, strided

from megacompile.kernels.clamped_glu import clamped_glu

LAYOUTS = {"interleaved": True, "halves": False}


def eager(both, limit=7.0, alpha=1.702, interleaved=True):
    """As in transformers' GptOssExperts; MiniMaxM3's keep gate and up in halves."""
    gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, dim=-1)
    gate, up = gate.clamp(min=None, max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@pytest.mark.slow_cases(r"shape[02]-\S*dtype|shape3-halves-dtype[01]")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape,layout", [*((s, "interleaved") for s in SHAPES), ((67, 123), "halves")])
def test_forward_and_backward(shape, dtype, layout):
    torch.manual_seed(1)
    rows, columns = shape
    rule = 7.0, 1.702, LAYOUTS[layout]
    compare(
        lambda x: clamped_glu(x, *rule),
        lambda x: eager(x, *rule),
        (randn(rows, 2 * columns, scale=5.0),),
        dtype,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 5, 82), (0, 16), (3, 0), (2,)])
def test_ranks_and_empty(shape, layout):
    rule = 2.0, 1.5, LAYOUTS[layout]
    compare(lambda x: clamped_glu(x, *rule), lambda x: eager(x, *rule), (randn(*shape),), torch.float32)


@pytest.mark.slow_cases(r"halves")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided(layout):
    rule = 1.0, 1.702, LAYOUTS[layout]
    both = randn(9, 82)
    torch.testing.assert_close(clamped_glu(strided(both), *rule), eager(both, *rule), rtol=1e-5, atol=1e-6)
    gradcheck(lambda x: clamped_glu(spread(x), *rule).mT.contiguous(), randn(3, 10))


@pytest.mark.slow_cases(r"dtype[01]-halves")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values(dtype, layout):
    """Saturated, at the limit itself (the gradient passes), beyond it, denormal, infinite."""
    values = [0.0, -0.0, 1e-40, 7.0, -7.0, 7.1, 88.0, -88.0, 1e3, -1e3, float("inf"), float("nan")]
    both = torch.cartesian_prod(torch.tensor(values), torch.tensor(values))
    rule = 7.0, 1.702, LAYOUTS[layout]
    compare(lambda x: clamped_glu(x, *rule), lambda x: eager(x, *rule), (both.requires_grad_(),), dtype)


@pytest.mark.slow_cases(r"halves")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck(layout):
    gradcheck(lambda x: clamped_glu(x, 1.0, 1.5, LAYOUTS[layout]), randn(3, 10))


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_in_place(dtype):
    """What the emitted code calls where nothing reads its input again."""
    grad, both = torch.randn(41, 123).to(dtype), torch.randn(41, 246).to(dtype)
    expected = torch.ops.megacompile.clamped_glu_backward(grad, both, 7.0, 1.702, True)
    torch.ops.megacompile.clamped_glu_backward_(grad, both, 7.0, 1.702, True)
    assert torch.equal(both, expected)


def test_an_odd_number_of_columns_is_refused():
    with pytest.raises(ValueError, match="even number of columns"):
        clamped_glu(torch.randn(3, 5))

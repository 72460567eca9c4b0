import pytest
import test_rms_norm
import test_rope
import torch
from harness import DTYPES, compare, gradcheck, randn, results, spread, strided

from megacompile.kernels.qk_norm_rope import qk_norm_rope

VARIANTS = {"qwen": 0.0, "gemma": 1.0}


def eager(x, weight, cos, sin, offset=0.0):
    """As in transformers' attention of Qwen3 and of Gemma 3."""
    return test_rope.eager(test_rms_norm.eager(x, weight, offset, not offset), cos, sin)


@pytest.mark.slow_cases(r"(shape[023]|.*dtype[12]-gemma|.*dtype0-qwen)")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape,rotary", [((2, 3, 17, 64), 64), ((1, 3, 21, 41), 18), ((2, 40, 3, 128), 128), ((1, 2, 9, 96), 96)]
)
def test_forward_and_backward(shape, rotary, dtype, variant):
    """Heads of a tile and more, fewer and more tiles than programs, widths that are no powers of two."""
    torch.manual_seed(1)
    cos, sin = test_rope.tables(shape[2], rotary, shape[0])
    compare(
        lambda x, w, c, s: qk_norm_rope(x, w, c, s, offset=VARIANTS[variant]),
        lambda x, w, c, s: eager(x, w, c, s, VARIANTS[variant]),
        (randn(*shape), randn(shape[3]), cos, sin),
        dtype,
    )


def test_layouts():
    """Heads before or after tokens, columns apart, tables of each batch row or of all."""
    x, weight = randn(2, 3, 4, 8), randn(8)
    grad = torch.randn(2, 3, 4, 8)
    for batch in (1, 2):
        tables = test_rope.tables(4, 8, batch)
        expected = results(eager, (x, weight, *tables), [grad])
        by_token = x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for given in (x, by_token, strided(x), x.detach()[:, :1].expand(-1, 3, -1, -1).requires_grad_()):
            wanted = expected if given.shape == x.shape and torch.equal(given, x) else None
            wanted = wanted or results(eager, (given, weight, *tables), [grad])
            seed = grad if batch == 1 else strided(grad)
            found = results(qk_norm_rope, (given, strided(weight), *map(strided, tables)), [seed])
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert qk_norm_rope(by_token, weight, *tables).stride() == by_token.stride()


def test_weights_of_another_type():
    """A norm that is kept in float32; its gradient is of that type."""
    x, weight = randn(2, 3, 7, 8).detach().bfloat16().requires_grad_(), randn(8)
    tables = test_rope.tables(7, 8)
    y = qk_norm_rope(x, weight, *tables)
    assert y.dtype == torch.bfloat16
    exact = eager(x.float(), weight, *tables)
    torch.testing.assert_close(y.float(), exact, rtol=1e-2, atol=1e-2)
    (dw,) = torch.autograd.grad(y.float().sum(), weight)
    torch.testing.assert_close(dw, torch.autograd.grad(exact.sum(), weight)[0], rtol=1e-3, atol=1e-3)


@pytest.mark.slow_cases(r"6")
@pytest.mark.parametrize("rotary", [4, 6])
def test_gradcheck(rotary):
    """With tables whose halves differ, of all columns or of some."""
    cos, sin = torch.randn(2, 1, 1, 1, rotary).double()
    gradcheck(lambda x, w: qk_norm_rope(spread(x), w, cos, sin, offset=1.0), randn(1, 2, 1, 6), randn(6))

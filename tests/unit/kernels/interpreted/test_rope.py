import pytest
import torch
from harness import DTYPES, compare, gradcheck, randn, strided

from megacompile.kernels.rope import rope


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def eager(x, cos, sin, interleaved=False):
    """As in transformers' apply_rotary_pos_emb of Llama, GPT-NeoX (partial) and Cohere."""
    rotary = cos.shape[-1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    rotate = rotate_pairs if interleaved else rotate_half
    return torch.cat((turned * cos + rotate(turned) * sin, rest), dim=-1)


def tables(tokens, rotary, batch=1, interleaved=False):
    angle = torch.rand(batch, 1, tokens, rotary // 2) * 6
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


@pytest.mark.slow_cases(r"shape[02]-\S*dtype|.*dtype([01]-True|2-False)")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape,rotary", [((2, 3, 17, 64), 64), ((1, 3, 21, 41), 18), ((2, 2, 9, 96), 96)])
def test_forward_and_backward(shape, rotary, dtype, interleaved):
    torch.manual_seed(1)
    cos, sin = tables(shape[2], rotary, shape[0], interleaved)
    compare(
        lambda x, c, s: rope(x, c, s, interleaved),
        lambda x, c, s: eager(x, c, s, interleaved),
        (randn(*shape), cos, sin),
        dtype,
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_layouts(interleaved):
    """Heads before or after tokens, transposed views, no shared table at all, fewer dimensions."""
    cos, sin = tables(7, 8, 2, interleaved)
    x = torch.randn(2, 3, 7, 8)
    expected = eager(x, cos, sin, interleaved)

    def check(x, cos, sin, expected):
        out = rope(x, cos, sin, interleaved)
        assert out.stride() == torch.empty_like(x).stride()
        torch.testing.assert_close(out, expected)

    check(x, cos, sin, expected)
    by_token = x.transpose(1, 2).contiguous()
    check(by_token, cos.transpose(1, 2), sin.transpose(1, 2), expected.transpose(1, 2))
    check(by_token.transpose(1, 2), cos, sin, expected)
    check(strided(x).detach(), cos, sin, expected)
    check(x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), cos, sin, expected)
    full_cos, full_sin = cos.expand_as(x).contiguous(), sin.expand_as(x).contiguous()
    check(x, full_cos, full_sin, expected)
    check(x[0], cos[0], sin[0], expected[0])
    check(x[0, 0], cos[0, 0], sin[0, 0], expected[0, 0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place_and_back(interleaved):
    cos, sin = tables(7, 6, interleaved=interleaved)
    x = torch.randn(2, 3, 7, 10)
    y = x.clone()
    torch.ops.megacompile.rope_(y, cos, sin, interleaved)
    torch.testing.assert_close(y, eager(x, cos, sin, interleaved))
    torch.ops.megacompile.rope_(y, cos, sin, interleaved, True)
    torch.testing.assert_close(y, x)
    for dtype in DTYPES:
        y = x.to(dtype, copy=True)
        torch.ops.megacompile.rope_(y, cos, sin, interleaved)
        assert torch.equal(y, rope(x.to(dtype), cos, sin, interleaved))


def test_empty():
    cos, sin = tables(0, 8)
    assert rope(torch.empty(2, 3, 0, 8), cos, sin).shape == (2, 3, 0, 8)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck(interleaved):
    """With tables whose halves differ: the backward is the transpose, not a rotation by -angle."""
    cos, sin = torch.randn(2, 1, 1, 3, 4).double()
    gradcheck(lambda x: rope(x, cos, sin, interleaved), randn(1, 1, 3, 6))

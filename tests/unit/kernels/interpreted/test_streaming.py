"""Gradient bucket, split floats, stochastic rounding, quantisation, AdamW."""

import copy

import pytest
import torch
from harness import DTYPES

from megacompile.kernels.adamw import Constants, adamw_, adamw_reference
from megacompile.kernels.dropout import random_words
from megacompile.kernels.gradient_bucket import accumulate_gradient, pack, unpack
from megacompile.kernels.quantize import (
    book_tables,
    dequantize,
    dequantize_reference,
    quantize,
    quantize_reference,
)
from megacompile.kernels.rounding import (
    join_halves,
    split_halves,
    stochastic_round,
    stochastic_round_reference,
)


def every_kind_of_float(count=4096):
    """Random bit patterns, so all exponents, infinities, NaN and denormals."""
    bits = random_words(torch.tensor([3, 4]), 0, (count,)).to(torch.int32)
    specials = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3.4028235e38]
    return torch.cat((bits.view(torch.float32), torch.tensor(specials)))


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_split_and_join_are_exact():
    x = every_kind_of_float()
    high, low = split_halves(x)
    assert high.dtype == torch.bfloat16 and low.dtype == torch.int16
    assert same_bits(join_halves(high, low), x)
    near = x.abs() < 1e38
    error = (high.float() - x)[near].abs()
    assert (error <= (x.bfloat16().float() - x)[near].abs()).all()


def test_stochastic_rounding():
    rng = torch.tensor([5, 6])
    x = every_kind_of_float()
    ours, reference = stochastic_round(x, rng, 1), stochastic_round_reference(x, rng, 1)
    torch.testing.assert_close(ours, reference, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.isnan(), x.isnan())
    # One value between two neighbours: the mean is the value, to five standard errors.
    count = 40000
    value = 1.0 + 2**-7 * 0.3
    mean = stochastic_round(torch.full((count,), value), rng, 2).double().mean().item()
    assert abs(mean - value) < 5 * 2**-7 * (0.3 * 0.7 / count) ** 0.5


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("bucket_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_bucket(dtype, bucket_type, add):
    grad = torch.randn(123, 41).to(dtype)
    bucket = torch.randn(6000).to(bucket_type)
    scale = torch.tensor(0.25)
    part = slice(700, 700 + grad.numel())
    expected = bucket.clone()
    value = grad.float().flatten() * scale + (bucket[part].float() if add else 0.0)
    expected[part] = value.to(bucket_type)
    squares = accumulate_gradient(bucket, grad.mT.contiguous().mT, 700, scale, add)
    assert torch.equal(bucket, expected)
    torch.testing.assert_close(squares, value.square().sum(), rtol=1e-6, atol=0)


def test_gradient_bucket_edges():
    bucket = torch.zeros(10)
    assert accumulate_gradient(bucket, torch.empty(0), 10).item() == 0
    assert accumulate_gradient(bucket, torch.tensor([3.0, float("inf")])).item() == float("inf")
    with pytest.raises(ValueError, match="does not fit"):
        accumulate_gradient(bucket, torch.zeros(4), 7)


def test_pack_and_unpack():
    tensors = [torch.randn(3, 5), torch.randn(7).double(), torch.randn(2, 2).mT]
    bucket = torch.zeros(40, dtype=torch.bfloat16)
    pack(bucket, tensors, [0, 16, 32])
    back = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    unpack(bucket, back, [0, 16, 32])
    for one, other in zip(tensors, back, strict=True):
        assert torch.equal(one.bfloat16(), other.bfloat16())


@pytest.mark.parametrize("size", [16, 64, 2048])
@pytest.mark.parametrize("book", ["dynamic8", "dynamic8_unsigned", "nf4", "linear4_unsigned"])
def test_quantize_is_the_reference(book, size):
    for dtype, count in ((torch.float32, 5001), (torch.bfloat16, 512), (torch.float16, 1)):
        x = (torch.randn(count) * torch.rand(count).pow(8)).to(dtype)
        x = x.abs() if "unsigned" in book else x
        table, middles = book_tables(book, x.device)
        codes, scales = quantize(x, book, size)
        expected, expected_scales = quantize_reference(x, middles, book, size)
        assert torch.equal(codes, expected) and torch.equal(scales, expected_scales)
        back = dequantize(codes, scales, list(x.shape), dtype, book, size)
        again = dequantize_reference(codes, scales, table, book, size, torch.empty_like(x))
        assert torch.equal(back, again)


def test_quantize_edges():
    codes, scales = quantize(torch.zeros(40), "dynamic8", 16)
    assert not dequantize(codes, scales, [40], torch.float32, "dynamic8", 16).any()
    x = torch.ones(48)
    x[17] = float("nan")
    codes, scales = quantize(x, "dynamic8", 16)
    assert scales.isfinite().tolist() == [True, False, True]
    assert quantize(torch.empty(0))[0].shape == (0,)
    with pytest.raises(ValueError, match="power of two"):
        quantize(x, "dynamic8", 100)


@pytest.mark.parametrize("grad_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", [False, True])
def test_adamw_follows_torch(split, grad_type):
    """Five steps beside torch's optimizer; split weights lose nothing."""
    torch.manual_seed(0)
    plain = torch.nn.Parameter(torch.randn(1999))
    optimizer = torch.optim.AdamW([plain], lr=1e-2, weight_decay=0.1)
    weight, low = (*split_halves(plain.detach()),) if split else (plain.detach().clone(), None)
    mean, square = torch.zeros(1999), torch.zeros(1999)
    rounded = torch.zeros(1999, dtype=torch.bfloat16)
    scale = torch.tensor([0.5])
    for step in range(1, 6):
        grad = torch.randn(1999).to(grad_type)
        plain.grad = grad.float() * 0.5
        optimizer.step()
        adamw_(weight, low, mean, square, grad, 1e-2, 0.9, 0.999, 1e-8, 0.1, step, scale, rounded)
        value = join_halves(weight, low) if split else weight
        torch.testing.assert_close(value, plain.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(rounded, value.bfloat16())
    torch.testing.assert_close(square, optimizer.state[plain]["exp_avg_sq"], rtol=1e-6, atol=0)


def test_adamw_is_the_reference():
    constants = Constants.of(1e-2, 0.9, 0.95, 1e-8, 0.0, 3)
    state = [torch.randn(300), None, torch.randn(300), torch.rand(300)]
    other = copy.deepcopy(state)
    grad = torch.randn(300)
    adamw_(*state, grad, 1e-2, 0.9, 0.95, 1e-8, 0.0, 3, None, None)
    adamw_reference(*other, grad, constants, None, None)
    torch.testing.assert_close(state[0], other[0], rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="low halves"):
        adamw_(state[0].bfloat16(), *other[1:], grad, 1e-2, 0.9, 0.95, 1e-8, 0.0, 3, None, None)


def test_views_are_read_as_what_they_are():
    """A kernel that walks over memory gets dense copies of what is strided."""
    x, seeds = torch.randn(300), torch.tensor([[1, 2], [3, 4]])
    rng = seeds[:, 0]
    assert torch.equal(stochastic_round(x, rng, 1), stochastic_round_reference(x, rng, 1))
    codes, scales = (torch.stack((t, t), 1)[:, 0] for t in quantize(x, "dynamic8", 64))
    again = dequantize(codes, scales, [300], x.dtype, "dynamic8", 64)
    assert torch.equal(again, dequantize(codes.contiguous(), scales.contiguous(), [300], x.dtype, size=64))


def test_writes_beyond_the_arguments_are_refused():
    state = [torch.zeros(6) for _ in range(3)]
    rest = (1e-2, 0.9, 0.999, 1e-8, 0.1, 3, None, None)
    for weight, grad in ((torch.zeros(12)[::2], torch.zeros(6)), (torch.zeros(6), torch.zeros(7))):
        with pytest.raises(ValueError, match="contiguous tensors with as many elements"):
            adamw_(weight, None, state[1], state[2], grad, *rest)
    with pytest.raises(ValueError, match="contiguous buckets"):
        accumulate_gradient(torch.zeros(12)[::2], torch.zeros(6))

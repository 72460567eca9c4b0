"""AdamW on the device, and the halves that it reads and writes."""

import copy

import pytest
import torch
from triton.runtime import interpreter

from megacompile.kernels.adamw import Constants, adamw_, adamw_reference, join_reference, split_reference
from megacompile.kernels.random_numbers import random_words
from megacompile.state import adam


def every_kind_of_float(count=4096):
    """Random bit patterns, so all exponents, infinities, NaN and denormals."""
    bits = random_words(torch.tensor([3, 4]), 0, (count,)).to(torch.int32)
    specials = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3.4028235e38]
    return torch.cat((bits.view(torch.float32), torch.tensor(specials)))


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_split_and_join_are_exact():
    x = every_kind_of_float()
    high, low = split_reference(x)
    assert high.dtype == torch.bfloat16 and low.dtype == torch.int16
    assert same_bits(join_reference(high, low), x)
    near = x.abs() < 1e38
    error = (high.float() - x)[near].abs()
    assert (error <= (x.bfloat16().float() - x)[near].abs()).all()


def test_the_kernel_keeps_every_half():
    """A step of nothing leaves the bits of all weights that have a value."""
    x = every_kind_of_float()
    x = x[x.isfinite()]
    high, low = split_reference(x)
    moments = torch.zeros_like(x), torch.zeros_like(x)
    adamw_(high, low, *moments, torch.zeros_like(x), 0.0, 0.9, 0.999, 1e-8, 0.0, 1, None)
    assert torch.equal(join_reference(high, low), x)


@pytest.mark.parametrize("grad_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", [False, True])
def test_adamw_follows_torch(split, grad_type):
    """Five steps beside torch's optimizer; split weights lose nothing."""
    torch.manual_seed(0)
    plain = torch.nn.Parameter(torch.randn(1999))
    optimizer = torch.optim.AdamW([plain], lr=1e-2, weight_decay=0.1)
    weight, low = (*split_reference(plain.detach()),) if split else (plain.detach().clone(), None)
    mean, square = torch.zeros(1999), torch.zeros(1999)
    scale = torch.tensor([0.5])
    for step in range(1, 6):
        grad = torch.randn(1999).to(grad_type)
        plain.grad = grad.float() * 0.5
        optimizer.step()
        adamw_(weight, low, mean, square, grad, 1e-2, 0.9, 0.999, 1e-8, 0.1, step, scale)
        value = join_reference(weight, low) if split else weight
        torch.testing.assert_close(value, plain.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(square, optimizer.state[plain]["exp_avg_sq"], rtol=1e-6, atol=0)


def test_adamw_is_the_reference():
    constants = Constants.of(1e-2, 0.9, 0.95, 1e-8, 0.0, 3)
    state = [torch.randn(300), None, torch.randn(300), torch.rand(300)]
    other = copy.deepcopy(state)
    grad = torch.randn(300)
    adamw_(*state, grad, 1e-2, 0.9, 0.95, 1e-8, 0.0, 3, None)
    adamw_reference(other, grad, constants, None)
    torch.testing.assert_close(state[0], other[0], rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="low halves"):
        adamw_(state[0].bfloat16(), *other[1:], grad, 1e-2, 0.9, 0.95, 1e-8, 0.0, 3, None)


@pytest.mark.parametrize("beta1", [0.9, 0.3])
@pytest.mark.parametrize("grad_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", [False, True])
def test_bits_are_those_of_the_host(split, grad_type, beta1):
    """Wherever a group is updated. The interpreter fuses what the kernel says is fused, and nothing else."""
    if adam.backend() != "c" or not hasattr(getattr(interpreter, "_interpreter", None), "fma_fp32"):
        pytest.skip("fused multiply-adds round once in C and in Triton 3.9's interpreter: run there")
    torch.manual_seed(0)
    weight = torch.randn(5000)
    weight, low = split_reference(weight) if split else (weight, None)
    state = weight, low, torch.randn(5000) * 1e-3, torch.rand(5000) * 1e-6
    host = [None if x is None else x.clone() for x in state]
    for step in (1, 2, 300):
        grad = (torch.randn(5000) * 1e-3).to(grad_type)
        adamw_(*state, grad, 1e-2, beta1, 0.999, 1e-8, 0.1, step, torch.tensor([0.7]))
        hyper = adam.AdamHyper(1e-2, beta1, 0.999, 1e-8, 0.1, step, grad_scale=0.7)
        adam.adamw_step((host[0], host[1]) if split else host[0], *host[2:], grad, hyper)
        for name, ours, theirs in zip(("weight", "low", "mean", "square"), state, host, strict=True):
            assert ours is None or torch.equal(ours, theirs), (name, step)


def test_writes_beyond_the_arguments_are_refused():
    state = [torch.zeros(6) for _ in range(3)]
    rest = (1e-2, 0.9, 0.999, 1e-8, 0.1, 3, None)
    for weight, grad in ((torch.zeros(12)[::2], torch.zeros(6)), (torch.zeros(6), torch.zeros(7))):
        with pytest.raises(ValueError, match="contiguous tensors with as many elements"):
            adamw_(weight, None, state[1], state[2], grad, *rest)

"""The patched interpreter computes bfloat16 as torch does, bit by bit."""

import torch
import triton
import triton.language as tl


@triton.jit
def _arithmetic(a_ptr, b_ptr, wide_ptr, cast_ptr, sum_ptr, product_ptr, dot_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(cast_ptr + at, tl.load(wide_ptr + at).to(tl.bfloat16))
    tl.store(sum_ptr + at, a + b)
    tl.store(product_ptr + at, tl.where(a > b, a * b, a))
    tl.store(dot_ptr + at, tl.dot(a, b))


def test_casts_arithmetic_and_dot():
    torch.manual_seed(0)
    wide = torch.randn(32, 32) * torch.logspace(-42, 38, 32)
    wide[0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 3.4e38])
    a, b = torch.randn(2, 32, 32).bfloat16()
    cast, total, product = (torch.empty(32, 32, dtype=torch.bfloat16) for _ in range(3))
    dot = torch.empty(32, 32)
    _arithmetic[(1,)](a, b, wide, cast, total, product, dot, N=32)
    torch.testing.assert_close(cast, wide.bfloat16(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(total, a + b, rtol=0, atol=0)
    torch.testing.assert_close(product, torch.where(a > b, a * b, a), rtol=0, atol=0)
    torch.testing.assert_close(dot, a.float() @ b.float(), rtol=1e-5, atol=1e-5)

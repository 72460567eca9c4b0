import pytest
import torch
from harness import DTYPES

from megacompile.kernels import decode_8bit
from megacompile.kernels.decode_8bit import decode_8bit_reference, decode_8bit_triton, stored_8bit_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 96), (3, 4096), (13, 41), (1, 1)])
def test_kernel_gives_the_bits_of_the_reference(shape, dtype, monkeypatch):
    scales = torch.rand(shape[0]) + 1e-3
    codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    stored = torch.cat((scales.view(torch.uint8), codes.view(-1).view(torch.uint8)))
    assert len(stored) == stored_8bit_bytes(*shape)
    whole = decode_8bit_reference(stored, shape, dtype)
    assert torch.equal(whole, (codes * (scales.mul(1 / 127))[:, None]).to(dtype))
    assert torch.equal(decode_8bit_triton(stored, shape, dtype), whole)
    monkeypatch.setattr(decode_8bit, "CHUNK", 64)
    assert torch.equal(decode_8bit_reference(stored, shape, dtype), whole)

import pytest
import torch
from harness import DTYPES

from megacompile.kernels import decode_4bit
from megacompile.kernels.decode_4bit import decode_4bit_reference, decode_4bit_triton, stored_4bit_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "block"), [((64, 96), 64), ((3, 4096), 128), ((13, 41), 64), ((1, 1), 64)])
def test_kernel_gives_the_bits_of_the_reference(shape, block, dtype, monkeypatch):
    elements = shape[0] * shape[1]
    scales = torch.rand(-(-elements // block)) + 1e-3
    codes = torch.randint(0, 256, (-(-elements // 2),), dtype=torch.uint8)
    stored = torch.cat((torch.randn(16).view(torch.uint8), scales.view(torch.uint8), codes))
    assert len(stored) == stored_4bit_bytes(elements, block)
    whole = decode_4bit_reference(stored, shape, block, dtype)
    assert torch.equal(decode_4bit_triton(stored, shape, block, dtype), whole)
    monkeypatch.setattr(decode_4bit, "CHUNK", 256)
    assert torch.equal(decode_4bit_reference(stored, shape, block, dtype), whole)

"""Checked copies: the bytes, and zlib's checksum of them, by either code."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch

from megacompile.state.adam import backend, set_backend
from megacompile.state.checked_copies import copy_checked


@pytest.fixture(params=["auto", "torch"])
def code(request: pytest.FixtureRequest) -> Iterator[str]:
    set_backend(request.param)
    yield backend()
    set_backend("auto")


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 1000, 4096, 65537])
def test_a_copy_and_its_checksum(code: str, count: int) -> None:
    source = torch.randint(
        0, 256, (count + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)
    )
    to = torch.full((count + 8,), 7, dtype=torch.uint8)
    for start in (0, 3):  # wherever they lie in memory
        given = source[start : start + count]
        for before in (0, 1, 0xDEADBEEF):
            assert copy_checked(to[start:], given, before) == zlib.crc32(given.numpy(), before)
        assert torch.equal(to[start : start + count], given)
    assert to[count + 3 :].tolist() == [7] * 5

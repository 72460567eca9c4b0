"""Values that bf16 holds as they are, and values as their two halves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megacompile.state.adam import split
from megacompile.state.parameter_values import is_exact, write_halves

ROWS = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    ("value", "exact"),
    [
        (ROWS, True),
        (ROWS.t(), True),
        (ROWS + 0.001, False),
        ((ROWS + 0.001).bfloat16(), True),
        (ROWS.double() / 2, True),
        (ROWS.double() + 0.001, False),
        (ROWS.half() / 64, True),
        (torch.tensor(1.001).half(), False),
        (torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 2.0**-133]), True),
        (torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32), False),  # a payload of NaN
        (torch.tensor(2.0**-149), False),
        (torch.cat([torch.zeros(1 << 22), torch.tensor([1.001])]), False),  # in a later chunk
        (torch.empty(0), True),
        (torch.empty(3, device="meta"), False),
        (torch.empty(3, device="meta", dtype=torch.bfloat16), True),
    ],
)
def test_exact_values(value: Tensor, exact: bool) -> None:
    assert is_exact(value) is exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_values_of_any_dtype_become_the_halves_of_their_fp32_values(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacompile.state.parameter_values._CHUNK", 1000)
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)  # infinities and NaN too
    values = patterns.view(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16).to(dtype)
    n = values.numel()
    written, expected = (
        (torch.ones(n, dtype=torch.bfloat16), torch.ones(n, dtype=torch.int16)) for _ in range(2)
    )
    write_halves(values, *written)
    split(values.float(), *expected)
    for mine, theirs in zip(written, expected, strict=True):
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))

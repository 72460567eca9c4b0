"""Values that bf16 holds as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megacompile.state.masters import is_exact

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

"""Parameters of a model: emptied when a program takes their values over, and set when it gives them back."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def nothing_for(parameter: nn.Parameter) -> Tensor:
    """NaN, or zeros of integers, in the shape of a parameter and the memory of one element."""
    floating = parameter.is_floating_point() or parameter.is_complex()
    value = torch.full((), float("nan") if floating else 0, dtype=parameter.dtype)
    return value.expand(parameter.shape)


def set_value(target: Tensor, value: Tensor) -> None:
    """Make a parameter or buffer, which may be on the meta device, hold ``value`` in its own dtype."""
    fresh = value.to(target.dtype)
    if not target.is_meta:
        Tensor.data.__set__(target, fresh)  # type: ignore[attr-defined]  # an owned one refuses .data = fresh
        return
    if isinstance(target, nn.Parameter):
        fresh = nn.Parameter(fresh, requires_grad=target.requires_grad)
    # .data cannot change the device type; the tensor stays the same object
    torch.utils.swap_tensors(target, fresh)  # type: ignore[no-untyped-call]

"""Parameters of a model: emptied when a program takes their values over, and set when it gives them back; and
their values, written as the program keeps them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacompile.capture.coded_weights import is_of_bitsandbytes, set_stored
from megacompile.host import adam as host_adam

_CHUNK = 1 << 22  # elements


def empty(parameter: nn.Parameter) -> None:
    """Leave a parameter NaN, or zeros of integers, in its shape and the memory of one element."""
    floating = parameter.is_floating_point() or parameter.is_complex()
    value = torch.full((), float("nan") if floating else 0, dtype=parameter.dtype)
    _put(parameter, value.expand(parameter.shape))


def set_value(target: Tensor, value: Tensor) -> None:
    """Make a parameter or buffer, which may be on the meta device, hold ``value`` in its own dtype; a coded
    weight what a program stores of it."""
    if is_of_bitsandbytes(target):
        set_stored(target, value)
    else:
        _put(target, value)


def _put(target: Tensor, value: Tensor) -> None:
    fresh = value.to(target.dtype)
    if not target.is_meta:
        Tensor.data.__set__(target, fresh)  # type: ignore[attr-defined]  # an owned one refuses .data = fresh
        return
    if isinstance(target, nn.Parameter):
        fresh = nn.Parameter(fresh, requires_grad=target.requires_grad)
    # .data cannot change the device type; the tensor stays the same object
    torch.utils.swap_tensors(target, fresh)  # type: ignore[no-untyped-call]


def is_exact(value: Tensor) -> bool:
    """Whether bfloat16 holds each element as it is; of a tensor without values, whether its dtype says so."""
    if value.is_meta or value.dtype == torch.bfloat16:
        return value.dtype == torch.bfloat16
    pieces = torch.split(value.detach().reshape(-1), _CHUNK)
    return not any(bool((piece.float().view(torch.int32) & 0xFFFF).any()) for piece in pieces)


def write_halves(flat: Tensor, high: Tensor, low: Tensor) -> None:
    """Write values to their two halves, on the host or a device, without a whole parameter there twice."""
    for start in range(0, flat.numel(), _CHUNK):
        piece = slice(start, start + _CHUNK)
        if high.device.type == "cpu":
            host_adam.split(flat[piece].float(), high[piece], low[piece])
            continue
        halves = torch.empty_like(high[piece], device="cpu"), torch.empty_like(low[piece], device="cpu")
        host_adam.split(flat[piece].float(), *halves)
        high[piece].copy_(halves[0])
        low[piece].copy_(halves[1])

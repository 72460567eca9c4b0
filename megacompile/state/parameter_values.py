"""Empty a model's parameters when a program takes their values over, and set them when it gives them back;
write values as the program keeps them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacompile.capture.quantized_weights import coding_of
from megacompile.state import adam

_CHUNK = 1 << 22  # elements


def empty(parameter: nn.Parameter) -> None:
    """Leave a parameter NaN, or zeros of integers and codes, in its shape and the memory of one element."""
    coding = coding_of(parameter)
    if coding is not None:
        coding.empty(parameter)
        return
    floating = parameter.is_floating_point() or parameter.is_complex()
    value = torch.full((), float("nan") if floating else 0, dtype=parameter.dtype)
    _put(parameter, value.expand(parameter.shape))


def set_value(target: Tensor, value: Tensor) -> None:
    """Set a parameter or buffer, also on the meta device, to ``value`` in its own dtype; a coded weight to
    the bytes that a program stores."""
    coding = coding_of(target)
    if coding is None:
        _put(target, value)
    else:
        coding.set(target, value)


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
    """Return whether bfloat16 holds each element as it is; of a tensor without values, whether its dtype says
    so."""
    if value.is_meta or value.dtype == torch.bfloat16:
        return value.dtype == torch.bfloat16
    pieces = torch.split(value.detach().reshape(-1), _CHUNK)
    return not any(bool((piece.float().view(torch.int32) & 0xFFFF).any()) for piece in pieces)


def write_halves(flat: Tensor, high: Tensor, low: Tensor) -> None:
    """Write values to their two halves, on the host or a device, without a whole parameter there twice."""
    if flat.dtype == torch.bfloat16:  # the high halves themselves
        high.view(flat.dtype).copy_(flat)
        low.zero_()
        return
    # so much that threads do not touch the same huge pages first, or, of a cast, what stays in the heap
    size = _CHUNK * (torch.get_num_threads() if flat.dtype == torch.float32 else 1)
    for start in range(0, flat.numel(), size):
        piece = slice(start, start + size)
        if high.device.type == "cpu":
            adam.split(flat[piece].float(), high[piece], low[piece])
            continue
        halves = torch.empty_like(high[piece], device="cpu"), torch.empty_like(low[piece], device="cpu")
        adam.split(flat[piece].float(), *halves)
        high[piece].copy_(halves[0])
        low[piece].copy_(halves[1])


def computed(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A value as a state would stream it, in the dtype that programs compute in."""
    if (value.dtype, dtype) != (torch.float32, torch.bfloat16):
        return value.to(dtype)
    high = torch.empty(value.numel(), dtype=dtype)
    write_halves(value.reshape(-1), high, torch.empty_like(high, dtype=torch.int16))
    return high.view(value.shape)

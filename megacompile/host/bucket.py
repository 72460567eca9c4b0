"""Buckets: the flat tensors in which parameters of a weight group, or gradients, lie one after another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megacompile.assemble.assembly import GroupLayout, Parameter, Slot


def is_dense(x: Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gaps."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.numel() == 0 or span == x.numel()


def padding_of(group: GroupLayout) -> list[slice]:
    """Where a bucket holds no parameter."""
    stops = [slot.offset + slot.parameter.numel for slot in group.slots]
    starts = [*(slot.offset for slot in group.slots[1:]), group.elements]
    return [slice(a, b) for a, b in zip(stops, starts, strict=True) if a < b]


def rows_of(parameter: Parameter, whole: Tensor) -> Tensor:
    """What a parameter or piece holds of the whole parameter's tensor."""
    return whole[parameter.first_row :][: parameter.shape[0]] if parameter.whole else whole


def slot_view(flat: Tensor, slot: Slot) -> Tensor:
    """A parameter's view, in its own shape and strides, of a flat bucket."""
    return strided(flat, slot.offset, slot)


def strided(flat: Tensor, offset: int, slot: Slot) -> Tensor:
    """What begins at ``offset`` of a flat tensor, in a parameter's shape and strides."""
    start = flat.storage_offset() + offset
    return flat.as_strided(slot.parameter.shape, slot.parameter.stride, start)


def add_gradients(
    home: Tensor, slots: Sequence[Slot], parts: Sequence[tuple[int, Tensor]], fresh: bool
) -> None:
    """Land host gradients in a flat bucket; what a fresh bucket gets no gradient for is zero."""
    if fresh and len(parts) < len(slots):
        home.zero_()
    for index, grad in parts:
        place = slot_view(home, slots[index])
        place.copy_(grad) if fresh else place.add_(grad)

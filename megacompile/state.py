"""Host state: FP32 masters and Adam moments of all weight groups, 12 bytes per trained parameter.

A group that computes in bf16 keeps its masters as two 16-bit halves; the high half is the weight that
is streamed. A group that computes in fp32 streams its masters as they are. Either way the pair is
exact: reading a parameter back gives its FP32 value bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megacompile import host_adam
from megacompile.assemble import GroupLayout, Slot


class HostState:
    """Flat buckets on the host, one set per weight group, and views of single parameters in them."""

    def __init__(self, groups: Sequence[GroupLayout]) -> None:
        self.groups = tuple(groups)
        self.weights: list[Tensor] = []  # what is streamed: bf16 high halves or fp32 masters
        self._low: list[Tensor | None] = []
        self.exp_avg: list[Tensor | None] = []
        self.exp_avg_sq: list[Tensor | None] = []
        self.steps = [0] * len(self.groups)
        for group in self.groups:
            split = group.dtype == torch.bfloat16
            self.weights.append(torch.zeros(group.elements, dtype=group.dtype))
            self._low.append(torch.zeros(group.elements, dtype=torch.int16) if split else None)
            self.exp_avg.append(torch.zeros(group.elements) if group.trainable else None)
            self.exp_avg_sq.append(torch.zeros(group.elements) if group.trainable else None)

    def nbytes(self) -> dict[str, int]:
        """Host bytes by kind: "masters" and "moments"."""
        masters = sum(w.nbytes for w in self.weights) + sum(t.nbytes for t in self._low if t is not None)
        moments = sum(t.nbytes for t in (*self.exp_avg, *self.exp_avg_sq) if t is not None)
        return {"masters": masters, "moments": moments}

    def take(self, model: nn.Module, places: Mapping[str, tuple[int, int]]) -> None:
        """Move each placed parameter's value here, one at a time, and leave NaN in its place.

        The model's storage is released parameter by parameter, so that no second copy of the model
        ever exists on the host.
        """
        for name, parameter in model.named_parameters():
            if name not in places:
                continue
            self.write(places[name], parameter.data)
            parameter.data = torch.full((), float("nan"), dtype=parameter.dtype).expand(parameter.shape)

    def write(self, place: tuple[int, int], value: Tensor) -> None:
        """Set one parameter from a tensor of its shape, of any floating dtype."""
        slot = self._find(place)
        if self._low[place[0]] is None:
            slot_view(self.weights[place[0]], slot).copy_(value)
            return
        start, stop = slot.offset, slot.offset + slot.parameter.numel
        flat = torch.empty(stop - start)
        _strided(flat, 0, slot).copy_(value)
        low = self._low[place[0]]
        assert low is not None
        host_adam.split(flat, self.weights[place[0]][start:stop], low[start:stop])

    def read(self, place: tuple[int, int]) -> Tensor:
        """One parameter's FP32 master as a new tensor of its shape."""
        slot = self._find(place)
        return self._gather(slot, self.weights[place[0]], self._low[place[0]])

    def moments(self, place: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
        """(exp_avg, exp_avg_sq) of one parameter as new tensors, None for a frozen one."""
        slot = self._find(place)
        first, second = self.exp_avg[place[0]], self.exp_avg_sq[place[0]]
        if first is None or second is None:
            return None
        return self._gather(slot, first, None), self._gather(slot, second, None)

    def write_moments(self, place: tuple[int, int], exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Set one parameter's moments."""
        slot = self._find(place)
        first, second = self.exp_avg[place[0]], self.exp_avg_sq[place[0]]
        assert first is not None and second is not None
        slot_view(first, slot).copy_(exp_avg)
        slot_view(second, slot).copy_(exp_avg_sq)

    def _find(self, place: tuple[int, int]) -> Slot:
        return self.groups[place[0]].slots[place[1]]

    def _gather(self, slot: Slot, flat: Tensor, low: Tensor | None) -> Tensor:
        start, stop = slot.offset, slot.offset + slot.parameter.numel
        if low is None:
            return slot_view(flat, slot).clone(memory_format=torch.preserve_format)
        out = torch.empty(stop - start)
        host_adam.join(flat[start:stop], low[start:stop], out)
        return _strided(out, 0, slot)

    def update(
        self,
        group: int,
        grad: Tensor,
        hypers: Sequence[host_adam.AdamHyper],
        *,
        threads: int | None,
    ) -> None:
        """One Adam step of a whole group; ``hypers`` are per optimizer param group."""
        first, second, low = self.exp_avg[group], self.exp_avg_sq[group], self._low[group]
        assert first is not None and second is not None
        for start, stop, index in self.groups[group].spans():
            part = slice(start, stop)
            weights = self.weights[group][part]
            master = weights if low is None else (weights, low[part])
            host_adam.adamw_step(master, first[part], second[part], grad[part], hypers[index], threads)


def slot_view(flat: Tensor, slot: Slot) -> Tensor:
    """A parameter's view, in its own shape and strides, of a flat bucket."""
    return _strided(flat, slot.offset, slot)


def _strided(flat: Tensor, offset: int, slot: Slot) -> Tensor:
    start = flat.storage_offset() + offset
    return flat.as_strided(slot.parameter.shape, slot.parameter.stride, start)

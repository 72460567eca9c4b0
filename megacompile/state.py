"""Host state: FP32 masters and Adam moments of all weight groups.

A group that computes in bf16 keeps its masters as two 16-bit halves; the high half is the weight that
is streamed. A group that computes in fp32 streams its masters as they are. Either way the pair is
exact: reading a parameter back gives its FP32 value bit for bit. Moments are kept in one of the
formats of `formats.py`: 12, about 6 or about 5 bytes per trained parameter in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megacompile import host_adam
from megacompile.assemble import GroupLayout, Slot
from megacompile.formats import CODINGS, Coding, Run, StateFormat, group_arrays, group_runs, state_bytes
from megacompile.host_adam_coded import Coded, coded_adamw_step


class HostState:
    """Flat arrays on the host, one set per weight group, and views of single parameters in them.

    ``arrays`` holds by group, by name, what :func:`~megacompile.formats.group_arrays` lists.
    """

    def __init__(self, groups: Sequence[GroupLayout], form: StateFormat = "fp32") -> None:
        self.groups = tuple(groups)
        self.form = form
        self.arrays: list[dict[str, Tensor]] = [
            {a.name: torch.zeros(a.elements, dtype=a.dtype) for a in group_arrays(group, form)}
            for group in self.groups
        ]
        self.weights = [arrays["weights"] for arrays in self.arrays]  # what is streamed
        self.steps = [0] * len(self.groups)
        self._runs = [group_runs(group, form) for group in self.groups]

    def nbytes(self) -> dict[str, int]:
        """Host bytes by kind: "masters" and "moments"."""
        return state_bytes(self.groups, self.form)

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
        if self._low(place[0]) is None:
            slot_view(self.weights[place[0]], slot).copy_(value)
            return
        start, stop = slot.offset, slot.offset + slot.parameter.numel
        flat = torch.empty(stop - start)
        _strided(flat, 0, slot).copy_(value)
        low = self._low(place[0])
        assert low is not None
        host_adam.split(flat, self.weights[place[0]][start:stop], low[start:stop])

    def read(self, place: tuple[int, int]) -> Tensor:
        """One parameter's FP32 master as a new tensor of its shape."""
        slot = self._find(place)
        return self._gather(slot, self.weights[place[0]], self._low(place[0]))

    def _low(self, group: int) -> Tensor | None:
        return self.arrays[group].get("low")

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
        arrays = self.arrays[group]
        weights, low = self.weights[group], self._low(group)
        for run in self._runs[group]:
            part = slice(run.start, run.stop)
            place = slice(run.offset, run.offset + run.stop - run.start)
            master = weights[part] if low is None else (weights[part], low[part])
            hyper = hypers[run.param_group]
            if run.coded:
                coding = CODINGS[self.form]
                coded = [_coded(arrays, name, run, coding) for name in ("exp_avg", "exp_avg_sq")]
                coded_adamw_step(master, *coded, grad[part], hyper, coding, threads)
                continue
            first, second = arrays["exp_avg"][place], arrays["exp_avg_sq"][place]
            host_adam.adamw_step(master, first, second, grad[part], hyper, threads)


def _coded(arrays: Mapping[str, Tensor], name: str, run: Run, coding: Coding) -> Coded:
    """A run's part of a coded moment."""
    elements = run.stop - run.start
    start, stop = coding.code_bytes(run.offset), coding.code_bytes(run.offset + elements)
    scales = slice(run.block, run.block + coding.blocks(elements))
    return Coded(arrays[f"{name}_codes"][start:stop], arrays[f"{name}_scales"][scales])


def slot_view(flat: Tensor, slot: Slot) -> Tensor:
    """A parameter's view, in its own shape and strides, of a flat bucket."""
    return _strided(flat, slot.offset, slot)


def _strided(flat: Tensor, offset: int, slot: Slot) -> Tensor:
    start = flat.storage_offset() + offset
    return flat.as_strided(slot.parameter.shape, slot.parameter.stride, start)

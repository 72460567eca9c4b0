"""Keep the host state: FP32 masters and Adam moments of all weight groups.

A group that computes in bf16 keeps its masters as two 16-bit halves; the high half is the weight that is
streamed. Where it is frozen and all low halves are zero, the high ones are all that is kept. A group that
computes in fp32 streams its masters as they are. In each case reading a parameter back gives its FP32 value
bit for bit. Moments are kept in one of the formats of :mod:`~megacompile.state.moment_formats`: 12, about 6
or about 5 bytes per trained parameter in all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import GroupLayout, Slot
from megacompile.distributed.world import World
from megacompile.errors import MegacompileError
from megacompile.state import adam
from megacompile.state.coded_adam import Coded, coded_adamw_step
from megacompile.state.host_arena import HostArena
from megacompile.state.master_layout import (
    collected,
    own_part,
    owned,
    padding_of,
    rows_of,
    slot_view,
    strided,
)
from megacompile.state.moment_formats import CODINGS, Form, Run, StateFormat, moment_names, shard_runs
from megacompile.state.nvme_offload import (
    Offload,
    StatePlacement,
    buffer_bytes,
    host_state_bytes,
    place_groups,
    scratch_bytes,
)
from megacompile.state.optimizer_state import Numbers
from megacompile.state.optimizer_step import OptimizerStep
from megacompile.state.param_group import GroupSettings
from megacompile.state.parameter_values import is_exact, write_halves
from megacompile.state.snapshot import Copies, Snapshot
from megacompile.state.state_views import moments_of, parts_of
from megacompile.state.torch_optimizer import TorchOptimizer

Weights = Callable[[str], Tensor]
"""The value of a parameter by its name."""


class HostState:
    """Flat arrays on the host, one set per weight group, and views of single parameters in them.

    ``arrays`` holds by group, by name, what :func:`~megacompile.state.moment_formats.group_arrays` lists, as
    far as it is in RAM; ``placement`` says which groups keep the rest, or all, on storage. All state in RAM
    lies in one arena, which leaves ``transient_bytes`` to steps. ``total_bytes`` are its bytes without these,
    with the ``scratch_bytes`` of updates outside of it. :meth:`move` brings a group to the device, where
    single parameters can still be read and written. ``steps`` counts by group the updates of each of its
    parameters, since not every step need have a gradient for it; ``numbers`` has what another optimizer than
    Adam keeps of each beside tensors.

    Each of several ranks in ``world`` holds its shards. They read and write parameters together: all take the
    values of rank 0, and rank 0 alone gets the values that are read.
    """

    def __init__(
        self,
        groups: Sequence[GroupLayout],
        form: Form = "fp32",
        placement: StatePlacement | None = None,
        transient_bytes: int = 0,
        world: World | None = None,
    ) -> None:
        self.world = world or World()
        self.groups = tuple(groups)
        self.form = form
        placement = placement or StatePlacement(("host",) * len(self.groups))
        self._places = places = place_groups(self.groups, form, placement.states)
        self._window = placement.window
        self.total_bytes = host_state_bytes(places, placement.window)
        self.scratch_bytes = scratch_bytes(places)
        self.arena = HostArena(self.total_bytes - self.scratch_bytes + transient_bytes)
        self.arrays: list[dict[str, Tensor]] = [
            {a.name: self.arena.take((a.elements,), a.dtype) for a in place.in_ram} for place in places
        ]
        self.offload = Offload(self.groups, places, placement, self.arena) if placement.window else None
        self.steps = [[0] * len(group.slots) for group in self.groups]
        self.numbers: list[list[Numbers]] = [[{} for _ in group.slots] for group in self.groups]
        self._homes: dict[int, dict[str, Tensor]] = {}  # where arrays that were moved lay
        self._snapshot = Snapshot((), form, (), ())  # the last one
        self.copies = Copies()  # that snapshots make
        rank = self.world.ranks.shard
        self._moments: StateFormat = "fp32" if isinstance(form, TorchOptimizer) else form
        self._own_step = OptimizerStep(form, rank) if isinstance(form, TorchOptimizer) else None
        self._runs = [shard_runs(group, self._moments, rank) for group in self.groups]
        # sums over ranks are zero there
        self._padding = [padding_of(group) if group.ranks == 1 else [] for group in self.groups]

    def nbytes(self) -> dict[str, int]:
        """Bytes in RAM by kind: "masters", "moments", the "window" over what is on storage, "copies" for a
        checkpoint, "scratch" of updates by an optimizer's own class."""
        kept = [a for place in self._places for a in place.in_ram]
        sizes = {kind: sum(a.nbytes for a in kept if a.kind == kind) for kind in ("masters", "moments")}
        window = self._window * sum(buffer_bytes(self._places))
        scratch = {"scratch": self.scratch_bytes} if self.scratch_bytes else {}
        return sizes | {"window": window, "copies": self.copies.nbytes} | scratch

    def move(self, group: int, device: torch.device) -> None:
        """Bring a group's arrays to a device, or back to where they lay on the host."""
        home = self._homes.setdefault(group, self.arrays[group])
        if device.type == "cpu":
            self._snapshot.before_change(group)
            for name, array in self.arrays[group].items():
                home[name].copy_(array)
            self.arrays[group] = home
        else:
            self.arrays[group] = {name: array.to(device) for name, array in home.items()}

    def refuse_rounding(self, places: Sequence[tuple[int, int]], value: Tensor) -> None:
        """Refuse, by name, a value of a frozen parameter that the state would have to round."""
        group, parameter = self.groups[places[0][0]], self._find(places[0]).parameter
        if group.exact and not is_exact(value):
            raise rounding_error(parameter.whole or parameter.name, "the value to be set")

    def write_whole(self, places: Sequence[tuple[int, int]], value: Tensor) -> None:
        """Set a parameter that may be cut from a tensor of its whole shape."""
        self.refuse_rounding(places, value)
        for place in places:
            self.write(place, rows_of(self._find(place).parameter, value))

    def read_whole(self, places: Sequence[tuple[int, int]]) -> Tensor:
        """The FP32 master of a parameter that may be cut as a new tensor of its whole shape."""
        parts = [self.read(place) for place in places]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def streamed_part(self, place: tuple[int, int], whole: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a parameter or piece is of a tensor of the whole parameter's shape, and as it is
        streamed: a view until another group is opened; it may not be on the device."""
        slot, weights = self._find(place), self.open(place[0], change=False)["weights"]
        return rows_of(slot.parameter, whole), slot_view(weights, slot)

    def write(self, place: tuple[int, int], value: Tensor) -> None:
        """Set one parameter, or what of it is this rank's, from a tensor of its shape, of any floating
        dtype."""
        slot, arrays = self._find(place), self.open(place[0], change=True)
        weights, low = arrays["weights"], arrays.get("low")
        if low is None and self.world.size == 1:
            slot_view(weights, slot).copy_(value)
            return
        part, own = own_part(self.groups[place[0]], slot, self.world.ranks.shard)
        if not value.is_contiguous() or value.stride() != slot.parameter.stride:
            value = strided(torch.empty(value.numel(), dtype=torch.float32), 0, slot).copy_(value)
            value = value.as_strided((value.numel(),), (1,))
        flat = value.view(-1)[part]
        if low is None:
            weights[own].copy_(flat)
            return
        write_halves(flat, weights[own], low[own])

    def read(self, place: tuple[int, int]) -> Tensor:
        """One parameter's FP32 master as a new tensor of its shape; without values on ranks that are not
        the first."""
        slot, arrays = self._find(place), self.open(place[0], change=False)
        weights, low = arrays["weights"], arrays.get("low")
        if self.world.size > 1:
            layout = self.groups[place[0]]
            weights = collected(self.world, layout, slot, weights)
            low = None if low is None else collected(self.world, layout, slot, low)
            slot = replace(slot, offset=0)
        if weights.is_meta:
            return torch.empty(slot.parameter.shape, device="meta")
        return self._gather(slot, weights, low)

    def open(self, group: int, *, change: bool) -> dict[str, Tensor]:
        """All arrays of a group, for as long as no other group is opened and no step runs.

        ``change`` says that they will be written to. Nothing may be under way.
        """
        if change:
            self._snapshot.before_change(group)
        if self.offload is None or not self.offload.places[group].on_storage:
            return self.arrays[group]
        return self.arrays[group] | self.offload.open(group, change=change)

    def reset_moments(self) -> None:
        """The optimizer's state and step counts as at the start, which is all that others than Adam need."""
        for group in range(0 if isinstance(self.form, TorchOptimizer) else len(self.groups)):
            arrays = self.open(group, change=True)
            for name in {*moment_names(False), *moment_names(True)} & set(arrays):
                arrays[name].zero_()
        self.steps[:] = [[0] * len(group.slots) for group in self.groups]
        self.numbers[:] = [[{} for _ in group.slots] for group in self.groups]

    def named_numbers(self) -> dict[str, Numbers]:
        """Return by the model's parameters what :attr:`numbers` of all ranks have of them, which all pieces
        have alike."""
        named: dict[str, Numbers] = {}
        for group, numbers in zip(self.groups, self.numbers, strict=True):
            for slot, own in zip(group.slots, numbers, strict=True):
                if own:
                    named[slot.parameter.whole or slot.parameter.name] = own
        if not isinstance(self.form, TorchOptimizer):
            return named
        heard = self.world.exchange(lambda: json.dumps(named).encode())
        return {name: own for text in heard for name, own in json.loads(text).items()}

    def take_numbers(self, named: Mapping[str, Numbers]) -> None:
        """Set :attr:`numbers` to what :meth:`named_numbers` gave, of what is this rank's."""
        for group, numbers in zip(self.groups, self.numbers, strict=True):
            numbers[:] = [{} for _ in group.slots]
            for index, slot, _ in owned(group, self.world.ranks.shard):
                numbers[index] = dict(named.get(slot.parameter.whole or slot.parameter.name, {}))

    def _find(self, place: tuple[int, int]) -> Slot:
        return self.groups[place[0]].slots[place[1]]

    def _gather(self, slot: Slot, flat: Tensor, low: Tensor | None) -> Tensor:
        start, stop = slot.offset, slot.offset + slot.parameter.numel
        if low is None:
            value = slot_view(flat, slot).to("cpu", copy=True)
            return value.float() if value.dtype == torch.bfloat16 else value
        out = torch.empty(stop - start, dtype=torch.float32)
        adam.join(flat[start:stop].cpu(), low[start:stop].cpu(), out)
        return strided(out, 0, slot)

    @property
    def traveling(self) -> list[Tensor]:
        """Host memory that weights are copied to the device from."""
        kept = [arrays["weights"] for arrays in self.arrays if "weights" in arrays]
        return kept + (self.offload.staged if self.offload is not None else [])

    def streamed(self, group: int, slot: int | None) -> Tensor:
        """The weights that travel to the device: in RAM, or in a buffer that they were read into."""
        if slot is None:
            return self.arrays[group]["weights"]
        assert self.offload is not None
        return self.offload.weights(group, slot)

    def weight(self, group: int, slot: int) -> Tensor:
        """One parameter's weight in RAM as it is streamed, a view."""
        return slot_view(self.arrays[group]["weights"], self.groups[group].slots[slot])

    def plain_runs(
        self, group: int, grad: Tensor, hypers: Sequence[adam.AdamHyper], slots: Collection[int]
    ) -> Iterator[tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, adam.AdamHyper]]:
        """(weights, low halves, moments, gradient, hyper-parameters) of each run with FP32 moments that
        :meth:`update` would update."""
        for weights, low, moments, part, hyper in self._views(group, self.arrays[group], grad, hypers, slots):
            first, second = moments  # four where they are coded: those are updated on the host
            yield weights, low, first, second, part, hyper

    def _views(
        self,
        group: int,
        arrays: Mapping[str, Tensor],
        grad: Tensor,
        hypers: Sequence[adam.AdamHyper],
        slots: Collection[int],
    ) -> Iterator[tuple[Tensor, Tensor | None, list[Tensor], Tensor, adam.AdamHyper]]:
        """(weights, low halves, moments, gradient, hyper-parameters) of each run of a group to be updated;
        counts the updates when the last one is over."""
        if self._lies_at_home(group):
            self._snapshot.before_change(group)
        low, steps = arrays.get("low"), self.steps[group]
        for run in self._runs_of(group, slots):
            part = slice(run.start, run.stop)
            lows = None if low is None else low[part]
            moments = moments_of(arrays, run.place, self._moments)
            hyper = replace(hypers[run.param_group], step=steps[run.slot] + 1)
            yield arrays["weights"][part], lows, moments, grad[part], hyper
        for slot in slots:
            steps[slot] += 1

    def _runs_of(self, group: int, slots: Collection[int]) -> Sequence[Run]:
        """Return what Adam calls update of some parameters of a group: all of it, as a rule."""
        steps = self.steps[group]
        if len(slots) == len(steps) == steps.count(steps[0]):
            return self._runs[group]
        chosen = [step if slot in slots else None for slot, step in enumerate(steps)]
        return shard_runs(self.groups[group], self._moments, self.world.ranks.shard, chosen)

    def update(
        self,
        group: int,
        grad: Tensor,
        hypers: Sequence[adam.AdamHyper] | Sequence[GroupSettings],
        slots: Collection[int],
        *,
        threads: int | None,
        slot: int | None = None,
    ) -> None:
        """One optimizer step of a group's parameters in ``slots``; ``hypers`` are per optimizer param group,
        and which step it is of each parameter is known here.

        ``slot`` is the buffer of the window that holds what of the group is on storage. ``grad`` is the
        group's bucket; nobody has written between its parameters, which a block of codes may reach.
        """
        arrays = self._arrays_of(group, slot)
        if self._own_step is not None:
            if self._lies_at_home(group):
                self._snapshot.before_change(group)
            steps, numbers, layout = self.steps[group], self.numbers[group], self.groups[group]
            settings = cast("Sequence[GroupSettings]", hypers)
            self._own_step.update(layout, arrays, grad, settings, steps, numbers, slots, threads)
            for index in slots:
                steps[index] += 1
            return
        for padding in self._padding[group]:
            grad[padding] = 0
        rates = cast("Sequence[adam.AdamHyper]", hypers)
        for weights, low, moments, part, hyper in self._views(group, arrays, grad, rates, slots):
            master = weights if low is None else (weights, low)
            if len(moments) == 4:
                coded = Coded(*moments[:2]), Coded(*moments[2:])
                coded_adamw_step(master, *coded, part, hyper, CODINGS[self._moments], threads)
            else:
                first, second = moments
                adam.adamw_step(master, first, second, part, hyper, threads)

    def update_rows(
        self,
        group: int,
        slot: int,
        rows: Tensor,
        grad: Tensor | None,
        hypers: Sequence[adam.AdamHyper],
        *,
        threads: int,
    ) -> None:
        """Take what of :meth:`update` is of some rows of a table [rows, width] whose moments are in FP32.

        ``grad`` has a row for each of them, None stands for zeros. Whoever has updated all rows of a table
        calls :meth:`count_updates`.
        """
        if self._lies_at_home(group):
            self._snapshot.before_change(group)
        layout, arrays = self.groups[group], self.arrays[group]
        parameter = layout.slots[slot].parameter
        chosen = [0 if index == slot else None for index in range(len(layout.slots))]
        (run,) = shard_runs(layout, self._moments, self.world.ranks.shard, chosen)
        part = slice(run.start, run.start + parameter.numel)
        first, second = (m[: parameter.numel] for m in moments_of(arrays, run.place, self._moments))
        weights, low = arrays["weights"][part], arrays.get("low")
        master = weights if low is None else (weights, low[part])
        hyper = replace(hypers[run.param_group], step=self.steps[group][slot] + 1)
        adam.adamw_rows(master, first, second, rows, parameter.shape[1], grad, hyper, threads)

    def count_updates(self, group: int, slots: Collection[int]) -> None:
        """Count an update of parameters of a group, all of which is over."""
        for slot in slots:
            self.steps[group][slot] += 1

    def add_momentum(
        self,
        group: int,
        grad: Tensor,
        settings: Sequence[GroupSettings],
        slots: Collection[int],
        *,
        threads: int | None,
        slot: int | None = None,
    ) -> None:
        """Take the first part of an update of a group's matrices, whose second one the device has; see
        :meth:`update`, which takes the third."""
        assert self._own_step is not None
        if self._lies_at_home(group):
            self._snapshot.before_change(group)
        arrays, steps = self._arrays_of(group, slot), self.steps[group]
        self._own_step.add_momentum(self.groups[group], arrays, grad, settings, steps, slots, threads)

    def _arrays_of(self, group: int, slot: int | None) -> Mapping[str, Tensor]:
        """A group's arrays, with those that are in a buffer of the window."""
        if slot is None or self.offload is None:
            return self.arrays[group]
        return self.arrays[group] | self.offload.arrays(group, slot)

    def call(self, method: str, settings: Sequence[GroupSettings]) -> None:
        """Call a method of the optimizer's class, such as eval() and train() of some, over every parameter
        that has a state and whose param group it has written to; nothing may be under way."""
        assert self._own_step is not None
        for index, group in enumerate(self.groups):
            steps, numbers = self.steps[index], self.numbers[index]
            chosen = [
                i for i, s in enumerate(group.slots) if steps[i] and settings[s.parameter.param_group].written
            ]
            if chosen:
                arrays = self.open(index, change=True)
                self._own_step.update(group, arrays, None, settings, steps, numbers, chosen, None, method)

    def parts(self, *, change: bool = False) -> Iterator[dict[str, dict[str, Tensor]]]:
        """By group: each parameter's name with flat views of all that is kept of it, by array's name.

        As with :meth:`open`, views are for as long as the iterator stands at their group. Each of several
        ranks has those of its shards.
        """
        for index, group in enumerate(self.groups):
            yield parts_of(group, self.open(index, change=change), self.form, self.world.ranks.shard)

    @property
    def passing(self) -> bool:
        """Return whether :meth:`parts` passes groups through one buffer: some are on storage."""
        return self.offload is not None and any(place.on_storage for place in self.offload.places)

    def written(self, count: int) -> None:
        """Nothing: while :meth:`parts` is read, no step runs."""

    def snapshot(self, updated: Sequence[int], room_bytes: int) -> Snapshot:
        """The state as it is now, nothing of it on storage, and nothing under way.

        What is on the device comes to its place on the host, which stays free for it. ``updated`` is the
        order of updates, ``room_bytes`` what copies may take.
        """
        for group, arrays in enumerate(self.arrays):
            if not self._lies_at_home(group):
                for name, array in arrays.items():
                    self._homes[group][name].copy_(array)
        homes = [self._homes.get(group, arrays) for group, arrays in enumerate(self.arrays)]
        return Snapshot(
            self.groups,
            self.form,
            self.steps,
            homes,
            updated,
            room_bytes,
            self.copies,
            self.world.ranks.shard,
        )

    def guard(self, snapshot: Snapshot) -> None:
        """Tell a snapshot of every change from now on; the one before must have ended."""
        self._snapshot = snapshot

    def _lies_at_home(self, group: int) -> bool:
        return self.arrays[group] is self._homes.get(group, self.arrays[group])


def rounding_error(name: str, what: str) -> MegacompileError:
    """Return the error for ``what``, which a frozen parameter that is kept in bf16 alone cannot hold."""
    return MegacompileError(
        f"{name} is frozen and had values in bfloat16 when it was compiled, so no more is kept of it, and "
        f"{what} would be rounded: give the model these values before it is compiled."
    )

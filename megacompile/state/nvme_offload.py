"""Offload state to NVMe: what of each weight group lives there, and the host window that it passes through.

In:  group layouts, a state format, a :class:`StatePlacement`. Out: :class:`Offload`, which moves a group's
weights or state between its regions on storage and buffers of two windows: one for the rest of the state
(or all of it), one for streamed weights.

A group's arrays lie one behind the other in a buffer and in its regions, in the order of
:func:`~megacompile.state.moment_formats.group_arrays`, each at a multiple of the arena's alignment; what
they mean does not matter here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import GroupLayout
from megacompile.errors import StorageError
from megacompile.state.host_arena import HostArena, padded
from megacompile.state.moment_formats import FlatArray, Form, group_arrays
from megacompile.state.nvme import Storage
from megacompile.state.torch_optimizer import TorchOptimizer
from megacompile.user_warning import warn_user


@dataclass(frozen=True)
class StatePlacement:
    """The places of each group's state ("host", "nvme", "nvme-all"), over how many buffers, and the
    folders."""

    states: tuple[str, ...]
    window: int = 0
    directories: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupPlace:
    """The arrays of a group that stay in RAM and those that are on storage, the streamed weights first.

    ``weight_bytes`` is what the weights take on storage (0 where they stay in RAM), ``state_bytes`` the
    rest, both padded. ``scratch_bytes`` is what an update of the group takes of RAM beside, in no arena.
    """

    in_ram: tuple[FlatArray, ...]
    on_storage: tuple[FlatArray, ...]
    weight_bytes: int
    state_bytes: int
    scratch_bytes: int = 0

    @property
    def ram_bytes(self) -> int:
        return sum(padded(a.nbytes) for a in self.in_ram)

    @property
    def storage_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes


def place_groups(groups: Sequence[GroupLayout], form: Form, states: Sequence[str]) -> tuple[GroupPlace, ...]:
    """Return where the arrays of each group go."""
    return tuple(place_group(g, form, s) for g, s in zip(groups, states, strict=True))


def place_group(group: GroupLayout, form: Form, state: str) -> GroupPlace:
    """Return where a group's arrays go: "host", "nvme" (all but the weights) or "nvme-all"."""
    arrays = group_arrays(group, form)
    in_ram = tuple(a for a in arrays if state == "host" or (state == "nvme" and a.name == "weights"))
    gone = tuple(a for a in arrays if a not in in_ram)
    sizes = {a.name: padded(a.nbytes) for a in gone}
    weights = sizes.get("weights", 0)
    scratch = form.scratch_bytes(group) if isinstance(form, TorchOptimizer) and group.trainable else 0
    return GroupPlace(in_ram, gone, weights, sum(sizes.values()) - weights, padded(scratch))


def buffer_bytes(places: Iterable[GroupPlace]) -> tuple[int, int]:
    """Bytes of one buffer for state and of one for weights; 0 where nothing passes through."""
    places = list(places)
    state = max((p.storage_bytes for p in places), default=0)
    return padded(state), padded(max((p.weight_bytes for p in places), default=0))


def host_state_bytes(places: Iterable[GroupPlace], window: int) -> int:
    """Bytes that groups take in RAM, their windows and the scratch of updates included."""
    places = list(places)
    return sum(p.ram_bytes for p in places) + window * sum(buffer_bytes(places)) + scratch_bytes(places)


def scratch_bytes(places: Iterable[GroupPlace]) -> int:
    """Bytes that an update takes beside all arrays: one group is updated at a time."""
    return max((p.scratch_bytes for p in places), default=0)


class Offload:
    """Regions on storage and the windows over them; what is on storage is zero at first."""

    def __init__(
        self,
        groups: Sequence[GroupLayout],
        places: Sequence[GroupPlace],
        placement: StatePlacement,
        arena: HostArena,
    ) -> None:
        self.places = tuple(places)
        # a block's trained and frozen weights are two groups of one name
        self._weights = [f"the weights of {g.name} (group {g.index})" for g in groups]
        self._state = [f"the state of {g.name} (group {g.index})" for g in groups]
        regions = dict(zip(self._weights, (p.weight_bytes for p in places), strict=True))
        regions |= dict(zip(self._state, (p.state_bytes for p in places), strict=True))
        self.storage = Storage(placement.directories, regions)
        self._buffers, self.staged = (
            [arena.take((nbytes,), torch.uint8) for _ in range(placement.window)]
            for nbytes in buffer_bytes(places)
        )
        self._fresh = {i for i, p in enumerate(places) if p.on_storage}  # never written
        self._open = -1
        self._changed = False

    def read_weights(self, group: int, slot: int) -> None:
        """Bring a group's streamed weights into a buffer for them."""
        self.storage.read(self._weights[group], self.staged[slot][: self.places[group].weight_bytes])

    def weights(self, group: int, slot: int) -> Tensor:
        """Return what :meth:`read_weights` brought."""
        array = self.places[group].on_storage[0]
        return self.staged[slot][: array.nbytes].view(array.dtype)

    def read_state(self, group: int, slot: int) -> None:
        """Bring all of a group that is on storage into a buffer of the window."""
        weights, state = self._parts(group, slot)
        self.storage.read(self._weights[group], weights)
        self.storage.read(self._state[group], state)

    def arrays(self, group: int, slot: int) -> dict[str, Tensor]:
        """Return what :meth:`read_state` brought, by name."""
        found, offset = {}, 0
        for array in self.places[group].on_storage:
            found[array.name] = self._buffers[slot][offset : offset + array.nbytes].view(array.dtype)
            offset += padded(array.nbytes)
        return found

    def write_state(self, group: int, slot: int) -> None:
        """Store a buffer of the window as the group's state."""
        weights, state = self._parts(group, slot)
        self.storage.write(self._weights[group], weights)
        self.storage.write(self._state[group], state)

    def _parts(self, group: int, slot: int) -> tuple[Tensor, Tensor]:
        place, buffer = self.places[group], self._buffers[slot]
        return buffer[: place.weight_bytes], buffer[place.weight_bytes : place.storage_bytes]

    def open(self, group: int, *, change: bool) -> dict[str, Tensor]:
        """A group's arrays in RAM until another group is opened or a step begins.

        With ``change`` they are written back then, and what storage has lost is zero.
        """
        if group != self._open:
            self.write_back()
            if group in self._fresh:
                self._buffers[0][: self.places[group].storage_bytes].zero_()
                self._changed = True
            else:
                self._read_or_reset(group, change)
            self._open = group
        self._changed |= change
        return self.arrays(group, 0)

    def _read_or_reset(self, group: int, change: bool) -> None:
        try:
            self.read_state(group, 0)
        except StorageError:
            if not change:
                raise
            self._buffers[0][: self.places[group].storage_bytes].zero_()
            warn_user(
                f"{self._state[group].capitalize()} was lost on storage: what of it is not loaded "
                "now starts from zero."
            )

    def write_back(self) -> None:
        """Write back what :meth:`open` gave out to be changed."""
        if self._changed:
            self.write_state(self._open, 0)
            self._fresh.discard(self._open)
        self._open, self._changed = -1, False

    @property
    def needs_write_back(self) -> bool:
        """Return whether :meth:`begin` has anything to do."""
        return self._open >= 0 or bool(self._fresh)

    def begin(self) -> None:
        """Before a step: everything is on storage and the window is free."""
        self.write_back()
        for group in sorted(self._fresh):
            self.open(group, change=True)
        self.write_back()

"""The host budget: bytes of state and buffers, and what is on NVMe instead."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import Assembly, GroupLayout
from megacompile.errors import StorageError
from megacompile.schedule.plan import Plan
from megacompile.schedule.step import Step, kept_gradients, offload_buffers, offloads
from megacompile.schedule.workload import Workload
from megacompile.state.host_arena import HostArena, padded
from megacompile.state.moment_formats import FlatArray, Form, group_arrays
from megacompile.state.nvme import Storage
from megacompile.state.torch_optimizer import Foreign

# ------------------------------------------------------------------------------------------------------------
# State on NVMe: what of each weight group lives there, and the host window that it passes through.
#
# In:  group layouts, a state format, a :class:`StatePlacement`. Out: :class:`Offload`, which moves a group's
# weights or state between its regions on storage and buffers of two windows: one for the rest of the state
# (or all of it), one for streamed weights.
#
# A group's arrays lie one behind the other in a buffer and in its regions, in the order of
# :func:`~megacompile.state.moment_formats.group_arrays`, each at a multiple of the arena's alignment; what
# they mean does not matter here.


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
    scratch = form.scratch_bytes(group) if isinstance(form, Foreign) and group.trainable else 0
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

    # ---- operations of a step --------------------------------------------------------------------

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

    # ---- between steps ---------------------------------------------------------------------------

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
            warnings.warn(
                f"{self._state[group].capitalize()} was lost on storage: what of it is not loaded "
                "now starts from zero.",
                stacklevel=2,
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


# ------------------------------------------------------------------------------------------------------------
# Host needs: the bytes of host memory that a planned step takes, counted as the arena gives them out.
#
# In:  the layout of the weight groups, a state format, a plan and its step. Out: :class:`HostBytes`, by kind.
# The search, the error messages, the reports and the arena all count by it, so for a plan that fits a host
# budget to the byte memory is found. Every buffer takes whole pages
# (:func:`~megacompile.state.host_arena.padded`).


@dataclass(frozen=True)
class HostBytes:
    """Host bytes by kind; ``buffers`` are the ring that gradients pass, ``offloaded`` offloaded activations.

    ``window`` are the buffers that state on NVMe passes through, ``padding`` what rounding up to pages
    adds; ``nvme`` lies on the drive and is not in ``total``; ``scratch`` is what an update by an optimizer's
    own class takes beside the state.
    """

    masters: int
    moments: int
    gradients: int
    buffers: int
    offloaded: int
    window: int
    padding: int
    nvme: int
    scratch: int = 0

    @property
    def total(self) -> int:
        return int(sum(astuple(self))) - self.nvme

    def of_ranks(self, count: int) -> HostBytes:
        """Return what that many ranks take together where each takes this."""
        return HostBytes(*(count * nbytes for nbytes in astuple(self)))


def host_bytes(assembly: Assembly, form: Form, plan: Plan, step: Step) -> HostBytes:
    """Return what a plan's step takes of the host. It has room for what is on the device, which may come
    back."""
    states, window = host_states(plan), storage_window(plan)
    places = place_groups(assembly.groups, form, states)
    held = [array for place in places for array in place.in_ram]
    masters, moments = (sum(a.nbytes for a in held if a.kind == kind) for kind in ("masters", "moments"))
    passing = window * sum(buffer_bytes(places))
    gradients, buffers, offloaded = map(sum, _buffers(step, assembly.work))
    total = host_state_bytes(places, window) + step_bytes(step, assembly.work)
    scratch = scratch_bytes(places)
    padding = total - masters - moments - gradients - buffers - offloaded - passing - scratch
    stored = sum(offloads(step, "nvme_write").values())
    nvme = sum(p.storage_bytes for p in places) + stored
    return HostBytes(masters, moments, gradients, buffers, offloaded, passing, padding, nvme, scratch)


def step_bytes(step: Step, work: Workload) -> int:
    """Host bytes of a step beside the state: kept gradients, the ring, offloaded activations."""
    return sum(padded(nbytes) for kind in _buffers(step, work) for nbytes in kind)


def _buffers(step: Step, work: Workload) -> tuple[list[int], ...]:
    """Bytes of each buffer for a kept gradient, of the ring, and for offloaded activations.

    Gradients that are summed are kept in FP32, others as they come.
    """
    groups = work.groups
    kept = [
        groups[g].nbytes if own else groups[g].gradient_bytes or 4 * groups[g].elements
        for g, own in kept_gradients(step).items()
    ]
    return kept, list(step.ring), list(offload_buffers(step).values())


def state_in_ram(groups: Sequence[GroupLayout], form: Form) -> int:
    """Host bytes of masters and moments where nothing is on storage."""
    return host_state_bytes(place_groups(groups, form, ("host",) * len(groups)), 0)


def host_states(plan: Plan) -> tuple[str, ...]:
    """Return where each group's state has its place on the host: "host" too for one that is on the device."""
    return tuple("host" if g.state == "device" else g.state for g in plan.groups)


def storage_window(plan: Plan) -> int:
    """Return how many buffers of each kind the plan has for what is on storage; 0 where nothing is."""
    stored = any(s != "host" for s in host_states(plan)) or any(b.saved_on == "nvme" for b in plan.blocks)
    return plan.window if stored else 0

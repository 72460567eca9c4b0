"""Masters and moments of a model in host memory: their arrays, their views, their snapshots."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from megacompile.blocks.weight_groups import GroupLayout, Slot, padded_elements
from megacompile.capture.quantized_weights import coding_of
from megacompile.distributed.world import World
from megacompile.errors import BudgetError, MegacompileError
from megacompile.state import adam
from megacompile.state.host_arena import HostArena, Room, padded
from megacompile.state.host_budget import (
    Offload,
    StatePlacement,
    buffer_bytes,
    host_state_bytes,
    place_groups,
    scratch_bytes,
)
from megacompile.state.master_layout import (
    collected,
    own_part,
    owned,
    padding_of,
    rows_of,
    slot_view,
    strided,
)
from megacompile.state.moment_formats import (
    CODINGS,
    Coded,
    Form,
    MomentPlace,
    Run,
    StateFormat,
    coded_adamw_step,
    group_arrays,
    moment_names,
    shard_places,
    shard_runs,
)
from megacompile.state.torch_optimizer import Foreign, GroupSettings, Numbers

# ------------------------------------------------------------------------------------------------------------
# Parameters of a model: emptied when a program takes their values over, and set when it gives them back; and
# their values, written as the program keeps them.


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
    """Make a parameter or buffer, which may be on the meta device, hold ``value`` in its own dtype; a coded
    weight what a program stores of it."""
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


# ------------------------------------------------------------------------------------------------------------
# Views of what the host keeps of single parameters, in a group's flat arrays.
#
# In: a group's layout and its arrays by name. Out: by parameter, its masters and moments by array's name.


def shapes_of(groups: Sequence[GroupLayout], form: Form) -> Iterator[dict[str, dict[str, Tensor]]]:
    """Return what :meth:`HostState.parts` gives of such groups, without values, on the meta device."""
    for group in groups:
        arrays = {
            a.name: torch.empty(a.elements, dtype=a.dtype, device="meta") for a in group_arrays(group, form)
        }
        yield parts_of(group, arrays, form)


def parts_of(
    group: GroupLayout, arrays: Mapping[str, Tensor], form: Form, rank: int = 0
) -> dict[str, dict[str, Tensor]]:
    """Each parameter's name with flat views of all that is kept of it, by array's name; of what a rank keeps.

    The ranks' views one after another are those of a whole group, whose moments end with less padding.
    """
    named = {}
    if isinstance(form, Foreign):
        kept = form.views(group, arrays, rank) if group.trainable else ({} for _ in group.slots)
        masters = {n: arrays[n] for n in ("weights", "low") if n in arrays}
        return {
            slot.parameter.name: {n: flat[own_part(group, slot, rank)[1]] for n, flat in masters.items()}
            | views
            for slot, views in zip(group.slots, kept, strict=True)
        }
    places = shard_places(group, form, rank) if group.trainable else [None] * len(group.slots)
    for slot, moments in zip(group.slots, places, strict=True):
        _, own = own_part(group, slot, rank)
        found = {n: arrays[n][own] for n in ("weights", "low") if n in arrays}
        if moments is not None:
            start, place = moments
            left = max(0, padded_elements(slot.parameter.numel) - start)
            place = replace(place, elements=min(place.elements, left))
            found |= dict(zip(moment_names(place.coded), moments_of(arrays, place, form), strict=True))
        named[slot.parameter.name] = found
    return named


def moments_of(arrays: Mapping[str, Tensor], place: MomentPlace, form: StateFormat) -> list[Tensor]:
    """Views of a place's moments, in the order of :func:`~megacompile.state.moment_formats.moment_names`."""
    start, stop = place.offset, place.offset + place.elements
    if not place.coded:
        return [arrays[name][start:stop] for name in moment_names(False)]
    coding = CODINGS[form]
    codes = slice(coding.code_bytes(start), coding.code_bytes(stop))
    scales = slice(place.block, place.block + coding.blocks(place.elements))
    parts = (codes, scales, codes, scales)
    return [arrays[name][part] for name, part in zip(moment_names(True), parts, strict=True)]


# ------------------------------------------------------------------------------------------------------------
# Snapshots: the state of all groups as it was at one moment, for a thread that reads it while updates go on.
#
# In:  weight groups, their flat arrays on the host (a rank's shards), and how many bytes copies may take.
# Out: :class:`Snapshot`.
#
# Invariant: the reader waits for nobody but for a copy that is being made, so whoever waits for it goes on.


Arrays = Mapping[str, Tensor]


class Copies:
    """Memory for copies, on huge pages, made by the first snapshot that copies. As the first touch of a page
    costs as much as the copy, or more, it is kept for later ones until :meth:`free`."""

    def __init__(self) -> None:
        self._arena: HostArena | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._arena is None else self._arena.nbytes

    def room(self, nbytes: int) -> Room:
        """So many bytes, or none where the host does not give what its budget allows."""
        if self.nbytes < nbytes:
            self.free()
            try:
                self._arena = HostArena(nbytes)
            except BudgetError:
                return Room(torch.empty(0, dtype=torch.uint8))
        assert self._arena is not None
        return Room(self._arena.tensor[:nbytes])

    def free(self) -> None:
        """Give it back; no snapshot may be under way."""
        self._arena = None


class Snapshot:
    """Groups as they are now, for a reader of all of them.

    Where ``room_bytes`` hold copies of all, the group that is ``updated`` last comes first: updates and the
    reader meet once. Else the reader goes before the updates, which follow it.

    Whoever is about to change a group calls :meth:`before_change`: a group that the reader has not come to is
    copied while ``room_bytes`` last, else its change waits until it was read. ``copied`` counts the copies;
    ``begun`` says that the reader did, ``hurried`` tells it that somebody waits: a change, or who called
    :meth:`hurry`.
    """

    passing = False

    def __init__(
        self,
        groups: Sequence[GroupLayout],
        form: Form,
        steps: Sequence[Sequence[int]],
        arrays: Sequence[Arrays],
        updated: Sequence[int] = (),
        room_bytes: int = 0,
        copies: Copies | None = None,
        rank: int = 0,
    ) -> None:
        self.groups, self.form, self.rank = tuple(groups), form, rank
        self.steps = tuple(map(tuple, steps))
        self.copied = 0
        needed = sum(padded(a.nbytes) for named in arrays for a in named.values())
        self._room_bytes = min(room_bytes, needed)
        self._copies = copies or Copies()
        self._room = Room(torch.empty(0, dtype=torch.uint8))  # of them, once there are any
        self._pieces: dict[int, list[Tensor]] = {}  # of it, by group
        self._arrays = dict(enumerate(arrays))  # of groups that were not read yet
        self._live = set(self._arrays)  # those of them that are read where the state has them
        order = list(updated) if room_bytes < needed else [*reversed(updated)]
        self._order = tuple(dict.fromkeys([*order, *self._arrays]))
        self._taken = 0  # so many of them the reader has come to
        self.begun = self._over = False
        self.hurried, self._waiting = threading.Event(), 0
        self._changed = threading.Condition()  # over a lock that may be taken again

    def before_change(self, group: int) -> None:
        """Return when the group may be changed: it was read, or there is a copy of it."""
        with self._changed:
            taken = self._order[: self._taken]
            if group in self._live and (group in taken or not self._copy(group)):
                self._wait_for(group)

    def _wait_for(self, group: int) -> None:
        self.hurry()
        self._changed.wait_for(lambda: group not in self._live)
        self._waiting -= 1
        if not self._waiting:
            self.hurried.clear()

    def hurry(self) -> None:
        """Somebody waits for the reader."""
        with self._changed:
            self._waiting += 1
            self.hurried.set()

    def _copy(self, group: int) -> bool:
        arrays = self._arrays[group]
        if not self.copied and self._room_bytes:
            self._room = self._copies.room(self._room_bytes)
        room = self._room
        pieces = {name: room.take(array.nbytes) for name, array in arrays.items()}
        taken = [piece for piece in pieces.values() if piece is not None]
        if len(taken) < len(arrays):
            for piece in taken:
                room.give(piece)
            return False
        self._arrays[group] = {
            name: taken[i].view(array.dtype).copy_(array) for i, (name, array) in enumerate(arrays.items())
        }
        self._pieces[group] = taken
        self._live.remove(group)
        self.copied += 1
        return True

    # ---- the reader's ----------------------------------------------------------------------------

    def begin(self) -> bool:
        """The reader begins; False where it was cancelled."""
        with self._changed:
            self.begun = not self._over
            return self.begun

    def parts(self) -> Iterator[dict[str, dict[str, Tensor]]]:
        """By group, what :func:`~megacompile.state.masters.parts_of` gives; it stays until
        :meth:`written`."""
        for index in self._order:
            with self._changed:
                arrays = self._arrays[index]
                self._taken += 1
            yield parts_of(self.groups[index], arrays, self.form, self.rank)

    def written(self, count: int) -> None:
        """The first ``count`` groups of :meth:`parts` were read: their copies go, their changes go on."""
        with self._changed:
            done = set(self._order[:count]) & set(self._arrays)
            for group in done:
                del self._arrays[group]
                for piece in self._pieces.pop(group, ()):
                    self._room.give(piece)
            self._live -= done
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing is read any more."""
        with self._changed:
            self._over = True
            self._arrays.clear()
            self._live.clear()
            self._pieces.clear()
            self._room = Room(torch.empty(0, dtype=torch.uint8))
            self._changed.notify_all()

    def cancel(self) -> None:
        """End it, if the reader did not begin."""
        with self._changed:
            if not self.begun:
                self.end()


# ------------------------------------------------------------------------------------------------------------
# Host state: FP32 masters and Adam moments of all weight groups.
#
# A group that computes in bf16 keeps its masters as two 16-bit halves; the high half is the weight that is
# streamed. Where it is frozen and all low halves are zero, the high ones are all that is kept. A group that
# computes in fp32 streams its masters as they are. In each case reading a parameter back gives its FP32 value
# bit for bit. Moments are kept in one of the formats of `host/formats.py`: 12, about 6 or about 5 bytes per
# trained parameter in all.


Weights = Callable[[str], Tensor]
"""The value of a parameter by its name."""


class HostState:
    """Flat arrays on the host, one set per weight group, and views of single parameters in them.

    ``arrays`` holds by group, by name, what :func:`~megacompile.state.moment_formats.group_arrays` lists, as
    far as
    it is in RAM; ``placement`` says which groups keep the rest, or all, on storage. All that is in RAM lies
    in one arena, which leaves ``transient_bytes`` for what steps need; ``total_bytes`` are what it takes
    without them, and the ``scratch_bytes`` that updates take outside of it. :meth:`move`
    brings a group to the device, where single parameters can still be read and written. ``steps`` counts by
    group the updates of each of its parameters, since not every step need have a gradient for it; ``numbers``
    has what another optimizer than Adam keeps of each beside tensors.

    Of several ranks in ``world``, each holds its shards; whatever reads or writes parameters is then done by
    all of them together: they take the values that rank 0 gives, and rank 0 alone is given what is read.
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
        self._moments: StateFormat = "fp32" if isinstance(form, Foreign) else form
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
        for group in range(0 if isinstance(self.form, Foreign) else len(self.groups)):
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
        if not isinstance(self.form, Foreign):
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
        if isinstance(self.form, Foreign):
            if self._lies_at_home(group):
                self._snapshot.before_change(group)
            steps, numbers, rank = self.steps[group], self.numbers[group], self.world.ranks.shard
            settings, layout = cast("Sequence[GroupSettings]", hypers), self.groups[group]
            self.form.update(layout, arrays, grad, settings, steps, numbers, slots, threads, rank=rank)
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
        assert isinstance(self.form, Foreign)
        if self._lies_at_home(group):
            self._snapshot.before_change(group)
        arrays, steps, rank = self._arrays_of(group, slot), self.steps[group], self.world.ranks.shard
        self.form.add_momentum(self.groups[group], arrays, grad, settings, steps, slots, threads, rank)

    def _arrays_of(self, group: int, slot: int | None) -> Mapping[str, Tensor]:
        """A group's arrays, with those that are in a buffer of the window."""
        if slot is None or self.offload is None:
            return self.arrays[group]
        return self.arrays[group] | self.offload.arrays(group, slot)

    def call(self, method: str, settings: Sequence[GroupSettings]) -> None:
        """Call a method of the optimizer's class, such as eval() and train() of some, over every parameter
        that has a state and whose param group it has written to; nothing may be under way."""
        assert isinstance(self.form, Foreign)
        for index, group in enumerate(self.groups):
            steps, numbers = self.steps[index], self.numbers[index]
            chosen = [
                i for i, s in enumerate(group.slots) if steps[i] and settings[s.parameter.param_group].written
            ]
            if chosen:
                arrays, rank = self.open(index, change=True), self.world.ranks.shard
                self.form.update(group, arrays, None, settings, steps, numbers, chosen, None, method, rank)

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

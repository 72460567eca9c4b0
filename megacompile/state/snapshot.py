"""Take snapshots: the state of all groups at one moment, for a thread that reads it while updates go on.

In:  weight groups, their flat arrays on the host (a rank's shards), and how many bytes copies may take.
Out: :class:`Snapshot`.

Invariant: the reader waits for nobody but for a copy that is being made, so whoever waits for it goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import GroupLayout
from megacompile.errors import BudgetError
from megacompile.state.host_arena import HostArena, Room, padded
from megacompile.state.moment_formats import (
    Form,
)
from megacompile.state.state_views import parts_of

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

    def begin(self) -> bool:
        """The reader begins; False where it was cancelled."""
        with self._changed:
            self.begun = not self._over
            return self.begun

    def parts(self) -> Iterator[dict[str, dict[str, Tensor]]]:
        """By group, what :func:`~megacompile.state.state_views.parts_of` gives; it stays until
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

"""Snapshots: the state of all groups as it was at one moment, for a thread that reads it while updates go on.

In:  weight groups, their flat arrays on the host, and how many bytes copies may take. Out: :class:`Snapshot`.

Invariant: the reader waits for nobody but for a copy that is being made, so whoever waits for it goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from megacompile.assemble.assembly import GroupLayout
from megacompile.host.formats import StateFormat
from megacompile.host.views import parts_of

Arrays = Mapping[str, Tensor]


class Snapshot:
    """Groups as they are now, in the order in which steps update them, for a reader that follows.

    Whoever is about to change a group calls :meth:`before_change`: a group that the reader has not come to is
    copied while ``room_bytes`` last, else its change waits until it was read. ``copied`` counts the copies;
    ``begun`` says that the reader did.
    """

    passing = False

    def __init__(
        self,
        groups: Sequence[GroupLayout],
        form: StateFormat,
        steps: Sequence[int],
        arrays: Sequence[Arrays],
        updated: Sequence[int] = (),
        room_bytes: int = 0,
    ) -> None:
        self.groups, self.form, self.steps = tuple(groups), form, tuple(steps)
        self.copied = 0
        self._room = room_bytes
        self._arrays = dict(enumerate(arrays))  # of groups that were not read yet
        self._live = set(self._arrays)  # those of them that are read where the state has them
        self._order = tuple(dict.fromkeys([*updated, *self._arrays]))
        self._taken = 0  # so many of them the reader has come to
        self.begun = self._over = False
        self._changed = threading.Condition()

    def before_change(self, group: int) -> None:
        """Return when the group may be changed: it was read, or there is a copy of it."""
        with self._changed:
            taken = self._order[: self._taken]
            if group in self._live and (group in taken or not self._copy(group)):
                self._changed.wait_for(lambda: group not in self._live)

    def _copy(self, group: int) -> bool:
        arrays = self._arrays[group]
        nbytes = _nbytes(arrays)
        if nbytes > self._room:
            return False
        try:
            self._arrays[group] = {name: array.clone() for name, array in arrays.items()}
        except (MemoryError, RuntimeError):  # the host does not give what its budget allows
            return False
        self._live.remove(group)
        self._room -= nbytes
        self.copied += 1
        return True

    # ---- the reader's ----------------------------------------------------------------------------

    def begin(self) -> bool:
        """The reader begins; False where it was cancelled."""
        with self._changed:
            self.begun = not self._over
            return self.begun

    def parts(self) -> Iterator[dict[str, dict[str, Tensor]]]:
        """By group, what :func:`~megacompile.host.views.parts_of` gives; it stays until :meth:`written`."""
        for index in self._order:
            with self._changed:
                arrays = self._arrays[index]
                self._taken += 1
            yield parts_of(self.groups[index], arrays, self.form)

    def written(self, count: int) -> None:
        """The first ``count`` groups of :meth:`parts` were read: their copies go, their changes go on."""
        with self._changed:
            done = set(self._order[:count]) & set(self._arrays)
            self._room += sum(_nbytes(self._arrays[group]) for group in done - self._live)
            for group in done:
                del self._arrays[group]
            self._live -= done
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing is read any more."""
        with self._changed:
            self._over = True
            self._arrays.clear()
            self._live.clear()
            self._changed.notify_all()

    def cancel(self) -> None:
        """End it, if the reader did not begin."""
        with self._changed:
            if not self.begun:
                self.end()


def _nbytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())

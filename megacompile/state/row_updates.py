"""Update a gathered table in parts: rows that a step names, rows that the next batch looks up, the rest.

A row that no micro-batch of a step names has gradient zero. Its update is the same arithmetic whenever it
runs, once it is known that the step updates, so only the named rows wait for their gradient. Where the rest
comes last, it runs beside the next step, whose lookups bring the rows that they want up to date before they
read them: :meth:`RowUpdate.catch_up`.

Invariant: each row is updated once, and nobody reads a row of which an update is due or under way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megacompile.state.adam import AdamHyper
from megacompile.state.masters import HostState

_AT_ONCE = 1 << 22  # elements of the rest that a lookup may have to wait for: 100 MB, under 1 ms on a server


class RowUpdate:
    """The update of one step of the tables of a weight group.

    ``named`` are by slot the rows, ascending, that the step names. :meth:`update_named` takes their
    gradients, row after row and slot after slot; it and :meth:`update_rest` may come in either order, on one
    thread.
    """

    def __init__(self, state: HostState, group: int, named: Mapping[int, Tensor]) -> None:
        self.named = dict(named)
        self._state, self._group = state, group
        slots = state.groups[group].slots
        self._shapes = {slot: slots[slot].parameter.shape for slot in named}
        self._left = {slot: torch.ones(self._shapes[slot][0], dtype=torch.bool) for slot in named}
        for slot, rows in named.items():
            self._left[slot][rows] = False
        self._hypers: Sequence[AdamHyper] | None = None  # once the step updates
        self._parts = 2  # named rows and the rest, of which none was updated yet
        self._free = threading.Condition()
        self._busy = self._wanted = False  # the rest, or a lookup, is at rows

    @property
    def rows(self) -> int:
        """The number of rows that the step names."""
        return sum(map(len, self.named.values()))

    def gradients(self, flat: Tensor) -> dict[int, Tensor]:
        """Return by slot where the gradients of its named rows lie in a flat buffer: [rows, width]."""
        found, start = {}, 0
        for slot, rows in self.named.items():
            width = self._shapes[slot][1]
            found[slot] = flat[start : start + len(rows) * width].view(len(rows), width)
            start += len(rows) * width
        return found

    def update_named(self, flat: Tensor, hypers: Sequence[AdamHyper], threads: int) -> None:
        """Update the named rows by their gradients."""
        self._hypers = hypers
        for slot, grad in self.gradients(flat).items():
            self._update(slot, self.named[slot], grad, threads)
        self._part_is_over()

    def update_rest(self, hypers: Sequence[AdamHyper], threads: int) -> None:
        """Update all other rows, but for those that lookups have brought up to date."""
        self._hypers = hypers
        for slot, left in self._left.items():
            count = max(1, _AT_ONCE // self._shapes[slot][1])
            for start in range(0, len(left), count):
                with self._turn():
                    some = left[start : start + count]
                    rows = start + some.nonzero().view(-1)
                    some.zero_()
                    self._update(slot, rows, None, threads)
        self._part_is_over()

    def catch_up(self, slot: int, rows: Tensor, threads: int) -> None:
        """Bring rows, which may repeat, up to date before they are looked up by a later step."""
        if slot not in self._left or self._hypers is None or not self._parts:
            return  # the step does not train the table, did not update, or has done so
        with self._turn(first=True):
            left = self._left[slot]
            due = torch.unique(rows[left[rows]])
            left[due] = False
            self._update(slot, due, None, threads)

    @contextmanager
    def _turn(self, *, first: bool = False) -> Iterator[None]:
        """Exclude each other; a lookup comes ``first``, when the rest has done the rows that it is at."""
        with self._free:
            self._wanted |= first
            self._free.wait_for(lambda: not self._busy and (first or not self._wanted))
            self._busy = True
        try:
            yield
        finally:
            with self._free:
                self._busy = False
                self._wanted &= not first
                self._free.notify_all()

    def _update(self, slot: int, rows: Tensor, grad: Tensor | None, threads: int) -> None:
        if len(rows):
            assert self._hypers is not None
            self._state.update_rows(self._group, slot, rows, grad, self._hypers, threads=threads)

    def _part_is_over(self) -> None:
        self._parts -= 1
        if not self._parts:
            self._state.count_updates(self._group, self.named)

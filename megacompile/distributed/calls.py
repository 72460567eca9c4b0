"""The user's calls of a program on each rank: which one it makes and where, and what to say of unlike ones.

In: the names of the public methods that are called. Out: a digest that ranks compare whenever they exchange
anything, and a sentence that names the first unlike calls, with the lines of the users' scripts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_NOT_THE_USERS = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,  # model.zero_grad() comes from there
    contextlib.__file__,
)
DIGEST_BYTES = 8


@dataclass(frozen=True)
class Call:
    """A call of a method ``name`` at the line ``where`` of a script; without a name, an exchange outside of
    any."""

    name: str
    where: str

    def __str__(self) -> str:
        return f"{self.name or 'an exchange'} ({self.where})"


def line_of_user() -> str:
    """Return the file and line of the user that called into this package, by torch too."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_NOT_THE_USERS) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Calls:
    """The calls of one rank of a program: ``last`` is the newest, ``told`` whether an exchange was in it."""

    def __init__(self, first: Call) -> None:
        self.last, self.told = first, True
        self._current: Call | None = None
        self._noted: list[Call] = []  # that exchanged nothing, since the last exchange

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Within, the user's call is ``name``, unless it is made by another one."""
        if self._current is not None:
            yield
            return
        self.last = self._current = Call(name, line_of_user())
        self.told = False
        try:
            yield
        finally:
            self._current = None

    def note(self) -> None:
        """Remember that all ranks have to make this call, which exchanges nothing."""
        self._noted.append(self.last)

    def since_exchange(self) -> list[Call]:
        """Return the calls that ranks must have made alike when they exchange something next."""
        return [*self._noted, self._current or Call("", line_of_user())]

    def exchanged(self) -> None:
        """Note that all ranks have heard of the calls so far."""
        self._noted.clear()
        self.told = True


def digest(calls: Sequence[Call]) -> bytes:
    """Return :data:`DIGEST_BYTES` that are those of other calls only where their names are the same."""
    names = "\n".join(call.name for call in calls)
    return hashlib.blake2b(names.encode(), digest_size=DIGEST_BYTES).digest()


def first_unlike(of_ranks: Sequence[Sequence[Call]]) -> str:
    """Name the first call that a rank has not made as rank 0 has, in a sentence."""
    for number in range(max(map(len, of_ranks))):
        calls = [made[min(number, len(made) - 1)] for made in of_ranks]
        for rank, call in enumerate(calls):
            if call.name != calls[0].name:
                return unlike(0, calls[0], rank, call)
    return unlike(0, of_ranks[0][-1], 1, of_ranks[1][-1])


def unlike(rank: int, call: Call, other: int, theirs: Call) -> str:
    """Say that two ranks make unlike calls."""
    (first, mine), (second, yours) = sorted([(rank, str(call)), (other, str(theirs))])
    return (
        f"Rank {first} called {mine}, and rank {second} {yours}: have all ranks make the same calls, in one "
        "order."
    )

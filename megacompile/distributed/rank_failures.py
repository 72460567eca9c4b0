"""Leave last words in the store for the other ranks when one fails, and tell what follows from them.

In: why a rank stops, or only that a collective failed. Out: a sentence that names the rank, the same on
all.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from torch.distributed import distributed_c10d

from megacompile import errors
from megacompile.distributed.calls import Call, Calls, unlike
from megacompile.distributed.ranks import TIMEOUT
from megacompile.errors import ProgramError

T = TypeVar("T")
LAST_WORDS = 3.0  # seconds in which the reason for a failure is looked for
LOOK = timedelta(seconds=1)  # after which a rank that waits in the store looks who has ended
_ALIKE = "give all ranks the same calls, such as a loop of as many batches"
_programs = itertools.count()
_begun: Counter[int] = Counter()  # exchanges of callers, by the number of the program


class LostError(RuntimeError):
    """A collective failed, as another rank is gone or has stopped."""


class LastWords:
    """The words of the ranks of one program, in a store that may be gone with its rank; ``calls`` are this
    rank's."""

    def __init__(self, rank: int, size: int, calls: Calls) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # one store may be that of all attempts
        every = distributed_c10d._get_default_store()
        every = distributed_c10d.PrefixStore(f"megacompile/words of attempt {attempt}", every)
        self._number = next(_programs)
        self._process, self._store = every, distributed_c10d.PrefixStore(str(self._number), every)
        self._rank, self._size, self._calls, self._pid = rank, size, calls, os.getpid()
        self._others = [r for r in range(size) if r != rank]
        self._closed = self._waits = False
        self._store.set(f"process/{rank}", json.dumps([_process_namespace(), self._pid]))

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the rank's, which speaks for it."""
        return os.getpid() != self._pid

    def leave(self, reason: str) -> None:
        """Say why this rank stops."""
        within(LAST_WORDS, lambda: self._store.set(f"words/{self._rank}", reason[:1000]))

    def close(self) -> None:
        """Tell the others that this rank closes its program, and the error that is being handled, if any."""
        said = json.dumps([self._rank, *astuple(self._calls.last), self._stopped(sys.exc_info()[1])])
        within(LAST_WORDS, lambda: self._store.set("closed", said))
        self._closed = True

    def drop(self) -> None:
        """Say that this rank has dropped its program."""
        why = f"Rank {self._rank} dropped its program after {self._calls.last}: {_ALIKE}."
        within(LAST_WORDS, lambda: self._store.set("over", why))

    def end(self) -> None:
        """Say that this rank's script is over, for all its programs."""
        why = self._stopped(getattr(sys, "last_value", None))  # set where that has ended it
        why = why or f"Rank {self._rank} ended its script after {self._calls.last}: {_ALIKE}."
        within(LAST_WORDS, lambda: self._process.set("over", why))

    def _stopped(self, error: BaseException | None) -> str:
        return "" if error is None else f"Rank {self._rank} stopped: {type(error).__name__}: {error}"[:1000]

    def meet(self, number: int) -> None:
        """Return when all ranks have come here for the ``number``-th time; raise where one never will."""
        met, until = f"met/{number}", time.monotonic() + TIMEOUT.total_seconds()
        if self._store.add(f"came/{number}", 1) == self._size:
            self._store.set(met, "1")

        def have_met() -> bool:
            try:
                self._store.wait([met], LOOK)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
                return bool(self._store.check([met]))
            return True

        self.await_callers(have_met)

    def await_callers(self, are_here: Callable[[], bool]) -> None:
        """Return once all ranks ``are_here``, which waits for a second; raise where one will not come."""
        _begun[self._number] += 1
        in_main = threading.current_thread() is threading.main_thread()  # others may wait beside it
        try:
            while not are_here():
                why = within(LAST_WORDS, lambda: self._said() or (self._elsewhere() if in_main else ""))
                if why and not are_here():
                    raise LostError(self.cause(why))
        finally:
            if self._waits:
                within(LAST_WORDS, lambda: self._process.set(f"waits/{self._rank}", "null"))
                self._waits = False

    def _elsewhere(self) -> str:
        """Note the exchange that this rank waits in; return a sentence if the next rank waits in another
        program, for an exchange ahead of this one."""
        said = json.dumps([self._number, _begun[self._number], *astuple(self._calls.last)])
        self._process.set(f"waits/{self._rank}", said)
        self._waits, other = True, (self._rank + 1) % self._size
        if not self._process.check([f"waits/{other}"]):
            return ""
        number, begun, *call = json.loads(self._process.get(f"waits/{other}")) or (self._number, 0)
        if number == self._number or begun <= _begun[number]:
            return ""
        theirs = Call(*call)
        why = unlike(
            self._rank, self._calls.last, other, replace(theirs, name=f"{theirs.name} of another program")
        )
        self._process.set(f"{number}/cause", why)
        return why

    def cause(self, known: str = "") -> str:
        """Return the rank because of which a collective failed; ``known`` if it is known already."""
        gone = "Rank 0 is gone." if self._rank else "The other ranks are gone."
        found = known or within(LAST_WORDS + 1, self._look) or gone
        within(LAST_WORDS, lambda: self._store.set("cause", found))
        return found

    def _said(self) -> str:
        """Return why a rank makes no more calls, as it has said itself; "" where none has."""
        if self._store.check(["cause"]):
            return str(self._store.get("cause").decode())
        if self._store.check(["closed"]) and not self._closed:
            rank, name, where, stopped = json.loads(self._store.get("closed"))
            return stopped or unlike(self._rank, self._calls.last, rank, Call(name, where))
        for store in (self._store, self._process):
            if store.check(["over"]):
                return str(store.get("over").decode())
        return ""

    def _look(self) -> str:
        self._store.set(f"here/{self._rank}", "1")
        until = time.monotonic() + LAST_WORDS
        while True:
            ended = [r for r in self._others if self._has_ended(r)]  # first: what it has left is there then
            for rank in self._others:
                if self._store.check([f"words/{rank}"]):
                    return f"Rank {rank} stopped: {self._store.get(f'words/{rank}').decode()}"
            if why := self._said():
                return why
            silent = [r for r in self._others if not self._store.check([f"here/{r}"])]
            if not silent:
                return "The connection between the ranks was lost."
            if gone := [r for r in ended if r in silent]:
                return f"Rank {', '.join(map(str, gone))} is gone."
            if time.monotonic() > until:
                return f"Rank {', '.join(map(str, silent))} is gone, or does not answer."
            time.sleep(0.02)

    def _has_ended(self, rank: int) -> bool:
        """Return whether its process is no more, as far as that can be seen from here."""
        if not self._store.check([f"process/{rank}"]):
            return False
        machine, process = json.loads(self._store.get(f"process/{rank}"))
        return bool(machine) and machine == _process_namespace() and _is_over(process)


def _process_namespace() -> list[str]:
    """Return what numbers of processes are numbers of: a namespace of a boot; nothing where it is not
    known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, str(Path("/proc/self/ns/pid").readlink())]
    except OSError:
        return []


def _is_over(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"  # over, and waited for by nobody yet


def within(seconds: float, run: Callable[[], T]) -> T | None:
    """Return what ``run`` returns, None where it takes longer or fails: whom it asks may be gone."""
    found: list[T] = []

    def attempt() -> None:
        try:
            found.append(run())
        except RuntimeError:
            return

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def is_of_a_collective(error: BaseException) -> bool:
    """Return whether it says that a collective failed: one of ours, or a library's in a group of its own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return isinstance(error, LostError) or (
        isinstance(error, RuntimeError) and where.startswith("torch.distributed.")
    )


def tell(error: Exception) -> str:
    """An error as the other ranks are told it."""
    return json.dumps([type(error).__name__, str(error), getattr(error, "least_bytes", None)])


def told(rank: int, text: str) -> Exception:
    """An error of another rank, of its kind where that is one of ours."""
    name, message, least = json.loads(text)
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.BudgetError):
        return kind(f"Rank {rank}: {message}", least_bytes=least)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind(f"Rank {rank}: {message}")
    return ProgramError(f"Rank {rank} stopped: {name}: {message}")

"""Last words: what ranks leave for each other in the store when one of them fails, and what follows from it.

In: why a rank stops, or only that a collective failed. Out: a sentence that names the rank, the same on all.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from megacompile import errors
from megacompile.errors import ProgramError

T = TypeVar("T")
LAST_WORDS = 3.0  # seconds in which the reason for a failure is looked for


class LostError(RuntimeError):
    """A collective failed, as another rank is gone or has stopped."""


class LastWords:
    """The words of the ranks of one program, in a store that may be gone with its rank."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank = store, rank
        self._others = [r for r in range(size) if r != rank]
        self._store.set(f"process/{rank}", json.dumps([_machine(), os.getpid()]))

    def leave(self, reason: str) -> None:
        """Say why this rank stops."""
        within(LAST_WORDS, lambda: self._store.set(f"words/{self._rank}", reason[:1000]))

    def cause(self, known: str = "") -> str:
        """Which rank is the reason that a collective failed; ``known`` where that is so already."""
        gone = "Rank 0 is gone." if self._rank else "The other ranks are gone."
        found = known or within(LAST_WORDS + 1, self._look) or gone
        within(LAST_WORDS, lambda: self._store.set("cause", found))
        return found

    def _look(self) -> str:
        self._store.set(f"here/{self._rank}", "1")
        until = time.monotonic() + LAST_WORDS
        while True:
            ended = [r for r in self._others if self._has_ended(r)]  # first: what it has left is there then
            for rank in self._others:
                if self._store.check([f"words/{rank}"]):
                    return f"Rank {rank} stopped: {self._store.get(f'words/{rank}').decode()}"
            if self._store.check(["cause"]):
                return str(self._store.get("cause").decode())
            silent = [r for r in self._others if not self._store.check([f"here/{r}"])]
            if not silent:
                return "The connection between the ranks was lost."
            if gone := [r for r in ended if r in silent]:
                return f"Rank {', '.join(map(str, gone))} is gone."
            if time.monotonic() > until:
                return f"Rank {', '.join(map(str, silent))} is gone, or does not answer."
            time.sleep(0.02)

    def _has_ended(self, rank: int) -> bool:
        """Whether its process is no more, as far as that can be seen from here."""
        if not self._store.check([f"process/{rank}"]):
            return False
        machine, process = json.loads(self._store.get(f"process/{rank}"))
        return bool(machine) and machine == _machine() and _is_over(process)


def _machine() -> list[str]:
    """What numbers of processes are numbers of: a namespace of a boot; nothing where it is not known."""
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
    """What ``run`` returns, None where it takes longer or fails: whom it asks may be gone."""
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
    """Whether it says that a collective failed: one of ours, or a library's in a group of its own."""
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

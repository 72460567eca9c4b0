"""Collectives of tensors on the ranks' devices, for one thread of each: over gloo or NCCL.

In: tensors on this rank's device. Out: what the ranks of its replica have of them, or ``across`` replicas
those of its shard, in their order; on a GPU in the order of the calling thread's stream.

On a CPU a collective that fails raises in the thread that is in it. On a GPU no thread is: a kernel waits for
ever for the kernel of a rank that is gone, and everything behind it waits, too. So a thread beats: some times
a second the ranks tell each other over gloo how many collectives each has issued. It raises at once for a
rank that is gone; a rank that stalls makes a collective wait for too long. torch's own watchdog is switched
off, because it would end the process without naming the rank.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacompile.distributed.ranks import TIMEOUT, Ranks

_BEAT = 0.25  # seconds
_NEVER = timedelta(days=365)  # the timeout of torch's watchdog
_LEFT_ALONE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_FIRST_BYTES = 32 << 20  # of the collectives after which NCCL holds what it will


class Collectives:
    """Collectives of CPUs: what they exchange is there when a call returns."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, every = ranks, range(ranks.size)
        rows = [every[first:][: ranks.shards] for first in every[:: ranks.shards]]
        self._groups = [[self._make_group(row) for row in rows][ranks.replica]]
        if ranks.replicas > 1:  # all ranks make all groups, of which each is in two
            columns = [every[first :: ranks.shards] for first in range(ranks.shards)]
            self._groups.append([self._make_group(column) for column in columns][ranks.shard])

    def _make_group(self, members: Sequence[int]) -> Any:
        return dist.new_group(list(members), backend="gloo", timeout=TIMEOUT)

    def all_gather(self, whole: Tensor, *, across: bool = False) -> None:
        """Fill a flat tensor in place; this rank's part is in its place already."""
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        group = self._groups[across]
        mine = whole.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        self._issue(lambda: gather(whole, mine, group=group))

    def all_to_all(self, received: Tensor, sent: Tensor, *, across: bool = False) -> None:
        """The r-th of equal parts of ``sent`` to the group's rank r, as its part of this rank's number there.

        Two buffers: within one, gloo gives wrong numbers from three ranks on.
        """
        self._issue(lambda: dist.all_to_all_single(received, sent, group=self._groups[across]))

    def _issue(self, run: Callable[[], object]) -> None:
        run()

    def begin(self) -> None:
        """Take what the first exchanges take."""

    def end(self, *, failed: bool) -> None:
        """Exchange nothing any more, and tell the others."""
        for group in self._groups:
            end_group(group)


class _Says(IntEnum):
    """The message of a rank with every beat."""

    GOES_ON = 0
    CLOSES = 1
    FAILED = 2


class GpuCollectives(Collectives):
    """Collectives of GPUs. Once another rank fails, ``lost`` is called with its name, or with "" if it is not
    known."""

    def __init__(self, ranks: Ranks, device: torch.device, lost: Callable[[str], None]) -> None:
        self._device, self._lost = device, lost
        super().__init__(ranks)
        self._beats: Any = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._issued = 0
        self._under_way: deque[torch.cuda.Event] = deque()
        self._since = time.monotonic()  # the first of those under way is so
        self._says, self._ends, self._left = _Says.GOES_ON, threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="megacompile-watch", daemon=True).start()

    def _make_group(self, members: Sequence[int]) -> Any:
        with _environment(_LEFT_ALONE):
            return dist.new_group(list(members), backend="nccl", timeout=_NEVER)

    def begin(self) -> None:
        """NCCL takes memory with the first collective of a kind: before anyone asks what is left."""
        numel = _FIRST_BYTES // self._ranks.size * self._ranks.size
        whole, other = (torch.zeros(numel, dtype=torch.uint8, device=self._device) for _ in range(2))
        for across in range(len(self._groups)):
            self.all_gather(whole, across=bool(across))
            self.all_to_all(other, whole, across=bool(across))
        torch.cuda.synchronize(self._device)
        del whole, other
        torch.cuda.empty_cache()

    def _issue(self, run: Callable[[], object]) -> None:
        run()
        over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        over.record(torch.cuda.current_stream(self._device))
        if not self._under_way:
            self._since = time.monotonic()
        self._under_way.append(over)
        self._issued += 1

    def end(self, *, failed: bool) -> None:
        torch.cuda.set_device(self._device)  # or torch 2.15 makes a context on the first one as a group ends
        self._says = _Says.FAILED if failed else _Says.CLOSES
        self._ends.set()
        for group in self._groups if failed else ():
            group.abort()  # kernels that wait for others' end
        self._left.wait()
        for group in (*self._groups, self._beats):
            end_group(group)

    def _watch(self) -> None:
        """Beat until a rank says that it ends, is gone, or keeps the others waiting."""
        torch.cuda.set_device(self._device)  # a thread that asks for events takes memory of its device
        why = ""
        try:
            while True:
                said = self._beat()
                states = [state for state, _ in said]
                if any(states) or (why := self._fault([issued for _, issued in said])):
                    break
                self._ends.wait(_BEAT)
            failed = bool(why) or _Says.FAILED in states
        except RuntimeError:
            failed = True
        self._left.set()
        if failed and not self._ends.is_set():
            self._lost(why)

    def _beat(self) -> list[tuple[int, int]]:
        mine = torch.tensor([self._says, self._issued])
        theirs = [torch.empty_like(mine) for _ in range(self._ranks.size)]
        dist.all_gather(theirs, mine, group=self._beats)
        return [(int(state), int(issued)) for state, issued in theirs]

    def _fault(self, issued: list[int]) -> str:
        """Say what is wrong with the collectives under way; "" where they make progress."""
        while self._under_way and _is_done(self._under_way[0]):
            self._under_way.popleft()
            self._since = time.monotonic()
        errors = [group._get_backend(self._device).get_error().name for group in self._groups]
        if any(error != "SUCCESS" for error in errors):
            return "The connection between the ranks' GPUs was lost."
        waited = time.monotonic() - self._since
        if not self._under_way or waited < TIMEOUT.total_seconds():
            return ""
        behind = [str(rank) for rank, count in enumerate(issued) if count < max(issued)]
        who = f"Rank {', '.join(behind)} does" if behind else "The ranks' GPUs do"
        return f"{who} not answer: a collective has waited for {waited:.0f} s."


def end_group(group: Any) -> None:
    with suppress(ValueError):  # the script has ended all groups
        dist.destroy_process_group(group)


def _is_done(event: torch.cuda.Event) -> bool:
    try:
        return bool(event.query())  # type: ignore[no-untyped-call]
    except RuntimeError:  # an error of the device comes out of any call: whoever computes there will raise it
        return False


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Within, the process's environment has these settings."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

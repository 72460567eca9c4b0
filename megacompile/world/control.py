"""World: what the ranks of one program say and send to each other, and what they do when one of them fails.

In:  :class:`~megacompile.world.ranks.Ranks`. Out: exchanges of bytes between callers, collectives of tensors.
Four process groups, as four threads use them: over gloo those of the caller, of the host stream and of the
thread that saves, and that of collectives. Within each all ranks do the same in the same order.

Invariant: what keeps one rank from going on ends the others' waiting too, with an error that names it.
"""

from __future__ import annotations

import atexit
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megacompile.errors import MegacompileError, ProgramError
from megacompile.world import faults
from megacompile.world.agreement import difference, shared_gpu, versions
from megacompile.world.collectives import Collectives, GpuCollectives
from megacompile.world.faults import LastWords, LostError, is_of_a_collective, tell, told, within
from megacompile.world.ranks import TIMEOUT, Ranks

T = TypeVar("T")
_OF_ALL = "raised_on_all_ranks"  # an attribute of such errors
_TO_WRITE = timedelta(days=1)  # how long ranks wait for one that writes its part of a checkpoint
_BLOCK = 512  # bytes that an exchange sends at once; longer texts take another
_worlds = itertools.count()
_connected: weakref.WeakSet[World] = weakref.WeakSet()


class World:
    """The ranks of one program; one alone exchanges with nobody.

    ``ended`` says, once a rank has failed, which and why: nothing can be exchanged any more. ``fail`` is told
    so too where no call that is under way would find out. ``chosen`` says why they have the mesh that they
    have, where it was not given.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks = ranks or Ranks()
        self.rank, self.size, self.local = ranks.rank, ranks.size, ranks.local
        self.ended = self.chosen = ""
        self.fail: Callable[[BaseException], None] = lambda error: None
        self._losing = threading.RLock()
        self._comm: Collectives | None = None
        if self.size > 1:
            self._calls, self._host = (dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(2))
            self._saves = dist.new_group(backend="gloo", timeout=_TO_WRITE)
            self._first = self._calls  # of the first replica
            store = distributed_c10d._get_default_store()
            store = distributed_c10d.PrefixStore(f"megacompile/{next(_worlds)}", store)
            self._words = LastWords(store, self.rank, self.size)

    # ---- callers ---------------------------------------------------------------------------------

    def exchange(self, say: Callable[[], bytes], *, saving: bool = False) -> list[bytes]:
        """What every rank says, by rank; where one of them raises, all do, and name it. ``saving``: in the
        thread that saves, as nobody else does meanwhile."""
        if self.size == 1:
            return [say()]
        error: Exception | None = None
        try:
            said = b"+" + say()
        except Exception as raised:
            error, said = raised, b"-" + tell(raised).encode()
        heard = self._gather_bytes(said, self._saves if saving else self._calls)
        for rank, text in enumerate(heard):
            if text[:1] == b"-":
                raise self.agreed(error or told(rank, text[1:].decode()))
        return [text[1:] for text in heard]

    def compare(self, describe: Callable[[], Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What every rank says of itself; :class:`MegacompileError` on all where they are not alike."""
        return self.alike(self.hear(describe))

    def hear(self, describe: Callable[[], Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What every rank says of itself, by rank."""
        return [json.loads(text) for text in self.exchange(lambda: json.dumps(describe()).encode())]

    def alike(self, heard: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What all ranks have heard; :class:`MegacompileError` on all where they are not alike."""
        sentence = difference(heard)
        if sentence:
            raise self.agreed(MegacompileError(sentence))
        return heard

    def agree(self, run: Callable[[], T], *, saving: bool = False) -> T:
        """What ``run`` returns, once it has returned on every rank; as :meth:`exchange`."""
        found: list[T] = []

        def say() -> bytes:
            found.append(run())
            return b""

        self.exchange(say, saving=saving)
        return found[0]

    def from_first(self, make: Callable[[], bytes]) -> bytes:
        """What ``make`` returns on rank 0, on every rank."""
        return self.exchange(lambda: make() if self.rank == 0 else b"")[0]

    def agreed(self, error: T) -> T:
        """``error``, which all ranks raise at this point: they can go on together after it."""
        setattr(error, _OF_ALL, True)
        return error

    def broadcast(self, value: Tensor) -> Tensor:
        """Rank 0's value of a tensor that is alike on all ranks, contiguous."""
        if self.size == 1:
            return value
        host = value.cpu() if self.rank == 0 else torch.empty_like(value, device="cpu")
        host = host.contiguous()
        if host.numel():
            self._collective(lambda: dist.broadcast(_bytes(host), 0, group=self._calls))
        return host.to(value.device)

    def gather(self, shard: Tensor) -> Tensor | None:
        """All shards (flat, of one length), one after another; on rank 0, from the ranks of its replica."""
        if self.ranks.replica or not shard.numel():
            return shard if self.rank == 0 else None
        count = self.ranks.shards
        whole = shard.new_empty(count * shard.numel()) if self.rank == 0 else None
        parts = [_bytes(part) for part in whole.chunk(count)] if whole is not None else None
        self._collective(lambda: dist.gather(_bytes(shard), parts, 0, group=self._first))
        return whole

    def _gather_bytes(self, said: bytes, group: Any) -> list[bytes]:
        size, block = len(said), _BLOCK
        head = size.to_bytes(8, "little") + said[: block - 8]
        heard = self._all_gather(head.ljust(block, b"\0"), block, group)
        sizes = [int.from_bytes(text[:8], "little") for text in heard]
        if max(sizes) > block - 8:
            more = self._all_gather(said, max(sizes), group)
            heard = [text[:8] + rest for text, rest in zip(heard, more, strict=True)]
        return [text[8 : 8 + n] for text, n in zip(heard, sizes, strict=True)]

    def _all_gather(self, said: bytes, size: int, group: Any) -> list[bytes]:
        mine = torch.frombuffer(bytearray(said.ljust(size, b"\0")), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        self._collective(lambda: dist.all_gather(theirs, mine, group=group))
        return [bytes(t.numpy()) for t in theirs]

    # ---- streams ---------------------------------------------------------------------------------

    @contextmanager
    def connected(self, device: torch.device) -> Iterator[None]:
        """Make what the ranks' devices exchange tensors by, and keep it unless an error ends the block: what
        that takes of a device's memory, it has from the start."""
        try:
            if self.size > 1:
                with self.together():
                    self._connect(device)
            yield
        except BaseException:
            self.disconnect()
            raise

    def _connect(self, device: torch.device) -> None:
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        mesh, even = f"{self.ranks.replicas} × {self.ranks.shards}", self.local * self.ranks.undecided
        own = {"device": device.type, "mesh": mesh, "gpu": gpu, "even": even, **versions()}
        said = self.compare(lambda: own)
        if shared := shared_gpu([rank["gpu"] for rank in said]):
            raise self.agreed(MegacompileError(shared))
        self._device = device
        self.ranks = replace(self.ranks, undecided=bool(even) and all(rank["even"] == even for rank in said))
        if self.ranks.replicas > 1:
            self._first = dist.new_group([*range(self.ranks.shards)], backend="gloo", timeout=TIMEOUT)
        if gpu:
            self._comm = GpuCollectives(self.ranks, device, self._lose)
        else:
            self._comm = Collectives(self.ranks)
        _connected.add(self)
        self._comm.begin()

    def settle(self, shards: int, why: str) -> None:
        """Take a mesh whose rows have so many ranks, where none was given; all ranks do so together."""
        self.chosen, fixed = why, replace(self.ranks, shards=shards, undecided=False)
        if fixed.replicas > 1:
            self.disconnect()
            self.ranks = fixed
            self._connect(self._device)
        self.ranks = fixed

    def disconnect(self, *, failed: bool = False) -> None:
        """Undo :meth:`connected`; the other ranks do so too, soon."""
        comm, self._comm = self._comm, None
        if comm is not None:
            within(faults.LAST_WORDS, lambda: comm.end(failed=failed))

    def all_gather(self, whole: Tensor, *, across: bool = False) -> None:
        """Fill a flat tensor on the device in place; this rank's part is in its place already.

        Among the ranks of a replica, or ``across`` replicas among those that have one shard.
        """
        self._collective(lambda: self._tensors.all_gather(whole, across=across))

    def all_to_all(self, received: Tensor, sent: Tensor, *, across: bool = False) -> None:
        """The r-th of equal parts of ``sent`` to the r-th of the same ranks, as its part of this one's number
        there."""
        self._collective(lambda: self._tensors.all_to_all(received, sent, across=across))

    @property
    def _tensors(self) -> Collectives:
        if self._comm is None:
            raise LostError(self.ended or "The ranks' devices are not connected.")
        return self._comm

    def all_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, by rank, in FP64; for the host stream."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        if numbers:
            self._collective(lambda: dist.all_gather(theirs, mine, group=self._host))
        return [t.tolist() for t in theirs]

    def _collective(self, run: Callable[[], Any]) -> None:
        if self.ended:
            raise LostError(self.ended)
        try:
            run()
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise  # of this rank's own device
        except RuntimeError as error:
            raise LostError(str(error)) from error

    # ---- faults ----------------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """What all ranks do inside; an error that not all of them raise there ends the world for all."""
        if self.size == 1:
            yield
            return
        if self.ended:
            raise ProgramError(f"{self.ended} Start all ranks again, from the last checkpoint.")
        try:
            yield
        except BaseException as error:
            if is_of_a_collective(error):
                self._lose()
                raise ProgramError(self.ended) from error
            if not hasattr(error, _OF_ALL):
                self._stop(error)
            raise

    def _stop(self, error: BaseException) -> None:
        """This rank fails by itself."""
        with self._losing:
            if not self.ended:
                self._words.leave(f"{type(error).__name__}: {error}")
                self._end(f"Rank {self.rank} stopped ({type(error).__name__}).")

    def _lose(self, why: str = "") -> None:
        """Another rank fails; of the threads that find out the first says which."""
        with self._losing:
            if not self.ended:
                self._end(self._words.cause(why))

    def _end(self, reason: str) -> None:
        """Wake all who wait for this rank, and this rank's threads that wait for others."""
        self.ended = reason
        self.fail(LostError(reason))
        self.disconnect(failed=True)
        for group in {self._host, self._calls, self._saves, self._first}:
            within(faults.LAST_WORDS, lambda group=group: dist.destroy_process_group(group))  # type: ignore[misc]


@atexit.register
def _disconnect_all() -> None:
    """Leave no rank to wait for one that is going."""
    for world in list(_connected):
        world.disconnect()


def _bytes(flat: Tensor) -> Tensor:
    """A contiguous tensor as bytes: gloo does not take all dtypes."""
    return flat.detach().view(-1).view(torch.uint8)

"""The world of a program: what its ranks say and send to each other, and what they do when one of them fails.

In:  :class:`~megacompile.distributed.ranks.Ranks`. Out: exchanges of bytes between callers, collectives of
tensors. Four process groups, as four threads use them: over gloo those of the caller, of the host stream
and of the thread that saves, and that of collectives. Within each all ranks do the same in the same order.

Invariant: what keeps one rank from going on ends the others' waiting too, with an error that names it.
"""

from __future__ import annotations

import atexit
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megacompile.distributed.calls import DIGEST_BYTES, Call, Calls, digest, first_unlike, line_of_user
from megacompile.distributed.collectives import Collectives, GpuCollectives, end_group
from megacompile.distributed.rank_differences import difference, shared_gpu, versions
from megacompile.distributed.rank_failures import (
    LAST_WORDS,
    LOOK,
    LastWords,
    LostError,
    is_of_a_collective,
    tell,
    told,
    within,
)
from megacompile.distributed.ranks import TIMEOUT, Ranks
from megacompile.errors import MegacompileError, ProgramError

T = TypeVar("T")
_OF_ALL = "raised_on_all_ranks"  # an attribute of such errors
_TO_WRITE = timedelta(days=1)  # how long ranks wait for one that writes its part of a checkpoint
_BLOCK = 2032  # bytes of a text that an exchange sends at once, as a step's is; longer ones take another
_worlds: weakref.WeakSet[World] = weakref.WeakSet()  # of several ranks
_failed: list[
    Any
] = []  # groups, which gloo frees only once what is under way in them has ended elsewhere too


class _UnlikeError(Exception):
    """The ranks exchange unlike things."""


class World:
    """The ranks of one program; one alone exchanges with nobody.

    ``ended`` says, once a rank has failed, which and why: nothing can be exchanged any more. ``chosen`` says
    why they have the mesh that they have, where it was not given.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks = ranks or Ranks()
        self.rank, self.size, self.local = ranks.rank, ranks.size, ranks.local
        self.ended = self.chosen = ""
        self._fail: Callable[[BaseException], None] = lambda error: None
        self._losing = threading.RLock()
        self._comm: Collectives | None = None
        self.calls = Calls(Call("compile", line_of_user()))
        self._groups: dict[str, Any] = {}
        self._met = 0
        if self.size > 1:
            self._words = LastWords(self.rank, self.size, self.calls)
            _worlds.add(self)
            weakref.finalize(self, _drop, self._words, self._groups).atexit = False
            with self.together():
                self._open_calls()
                self._groups["host"] = dist.new_group(backend="gloo", timeout=TIMEOUT)
                self._groups["saves"] = dist.new_group(backend="gloo", timeout=_TO_WRITE)

    def exchange(self, say: Callable[[], bytes], *, saving: bool = False) -> list[bytes]:
        """Return what every rank says, by rank; where one of them raises, all do, and name it. ``saving``: in
        the thread that saves, as nobody else does meanwhile."""
        if self.size == 1:
            return [say()]
        error: Exception | None = None
        try:
            said = b"+" + say()
        except Exception as raised:
            error, said = raised, b"-" + tell(raised).encode()
        heard = self._gather_bytes(said, "saves") if saving else self._hear_callers(said)
        for rank, text in enumerate(heard):
            if text[:1] == b"-":
                raise self.agreed(error or told(rank, text[1:].decode()))
        return [text[1:] for text in heard]

    def compare(self, describe: Callable[[], Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return what every rank says of itself; :class:`MegacompileError` on all where they are not
        alike."""
        return self.alike(self.hear(describe))

    def hear(self, describe: Callable[[], Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return what every rank says of itself, by rank."""
        return [json.loads(text) for text in self.exchange(lambda: json.dumps(describe()).encode())]

    def alike(self, heard: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what all ranks have heard; :class:`MegacompileError` on all where they are not alike."""
        sentence = difference(heard)
        if sentence:
            raise self.agreed(MegacompileError(sentence))
        return heard

    def agree(self, run: Callable[[], T], *, saving: bool = False) -> T:
        """Return what ``run`` returns, once it has returned on every rank; as :meth:`exchange`."""
        found: list[T] = []

        def say() -> bytes:
            found.append(run())
            return b""

        self.exchange(say, saving=saving)
        return found[0]

    def from_first(self, make: Callable[[], bytes]) -> bytes:
        """Return what ``make`` returns on rank 0, on every rank."""
        return self.exchange(lambda: make() if self.rank == 0 else b"")[0]

    def agreed(self, error: T) -> T:
        """``error``, which all ranks raise at this point: they can go on together after it."""
        setattr(error, _OF_ALL, True)
        return error

    def broadcast(self, value: Tensor) -> Tensor:
        """Rank 0's value of a tensor that is alike on all ranks, contiguous."""
        if self.size == 1:
            return value
        self._begin_call()
        host = value.cpu() if self.rank == 0 else torch.empty_like(value, device="cpu")
        host = host.contiguous()
        if host.numel():
            self._collective(lambda: dist.broadcast(_as_bytes(host), 0, group=self._group("calls")))
        return host.to(value.device)

    def gather(self, shard: Tensor) -> Tensor | None:
        """All shards (flat, of one length), one after another; on rank 0, from the ranks of its replica."""
        self._begin_call()
        if self.ranks.replica or not shard.numel():
            return shard if self.rank == 0 else None
        count = self.ranks.shards
        whole = shard.new_empty(count * shard.numel()) if self.rank == 0 else None
        parts = [_as_bytes(part) for part in whole.chunk(count)] if whole is not None else None
        self._collective(lambda: dist.gather(_as_bytes(shard), parts, 0, group=self._group("first")))
        return whole

    def call(self, name: str) -> AbstractContextManager[None]:
        """Within, what this rank exchanges is of a call of the user's of this name."""
        return self.calls.within(name) if self.size > 1 else nullcontext()

    def note_call(self) -> None:
        """Note a call without an exchange, so that the next exchange refuses ranks that have not made it."""
        if self.size > 1:
            self.calls.note()

    def _begin_call(self) -> None:
        """Tell the other ranks which call this is, where no exchange has."""
        if self.size > 1 and not (self.calls.told and "calls" in self._groups):
            self._hear_callers(b"")

    def _hear_callers(self, said: bytes) -> list[bytes]:
        """Return what the callers on all ranks say; :class:`MegacompileError` on all where their calls are
        unlike."""
        if "calls" not in self._groups and not self.ended:  # closed since
            self._open_calls()
            self._open_first()
        made = self.calls.since_exchange()
        try:
            return self._gather_bytes(said, "calls", digest(made))
        except _UnlikeError:
            texts = self._gather_bytes(json.dumps([*map(astuple, made)]).encode(), "calls")
            of_ranks = [[Call(*call) for call in json.loads(text)] for text in texts]
            raise self.agreed(MegacompileError(first_unlike(of_ranks))) from None
        finally:
            self.calls.exchanged()

    def _open_calls(self) -> None:
        """Open the group of callers, once all ranks have come."""
        self._met += 1
        try:
            self._words.meet(self._met)
        except RuntimeError as error:  # the store may be gone with its rank
            raise LostError(str(error)) from error
        self._groups["calls"] = self._groups["first"] = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def _open_first(self) -> None:
        """Open the group of the first replica."""
        if self.ranks.replicas > 1:
            members = [*range(self.ranks.shards)]
            self._groups["first"] = dist.new_group(members, backend="gloo", timeout=TIMEOUT)

    def _group(self, name: str) -> Any:
        if name not in self._groups:
            raise LostError(self.ended or "The program was closed.")
        return self._groups[name]

    def _gather_bytes(self, said: bytes, group: str, kind: bytes = b"") -> list[bytes]:
        """Return what all ranks say; :class:`_UnlikeError` on all where what is said is not of one kind."""
        size, start = len(said), 8 + DIGEST_BYTES
        head = size.to_bytes(8, "little") + kind.ljust(DIGEST_BYTES, b"\0") + said[:_BLOCK]
        heard = self._all_gather(head, start + _BLOCK, group)
        if len({text[8:start] for text in heard}) > 1:
            raise _UnlikeError
        sizes = [int.from_bytes(text[:8], "little") for text in heard]
        if max(sizes) > _BLOCK:
            texts = self._all_gather(said, max(sizes), group)
        else:
            texts = [text[start:] for text in heard]
        return [text[:n] for text, n in zip(texts, sizes, strict=True)]

    def _all_gather(self, said: bytes, size: int, group: str) -> list[bytes]:
        mine = torch.frombuffer(bytearray(said.ljust(size, b"\0")), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self.size)]

        def hear() -> None:
            work: Any = dist.all_gather(theirs, mine, group=self._group(group), async_op=True)
            if group == "calls":
                self._words.await_callers(partial(_have_come, work))
            else:
                work.wait()

        self._collective(hear)
        return [bytes(t.numpy()) for t in theirs]

    @contextmanager
    def connected(self, device: torch.device) -> Iterator[None]:
        """Connect the ranks' devices, and keep the connection unless an error ends the block. It takes its
        share of the devices' memory at the start."""
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
        self._open_first()
        if gpu:
            self._comm = GpuCollectives(self.ranks, device, self._lose)
        else:
            self._comm = Collectives(self.ranks)
        self._comm.begin()

    def settle(self, shards: int, why: str) -> None:
        """Take a mesh whose rows have so many ranks, where none was given; all ranks do so together."""
        self.chosen, fixed = why, replace(self.ranks, shards=shards, undecided=False)
        if fixed.replicas > 1:
            self.disconnect()
            self.ranks = fixed
            self._connect(self._device)
        self.ranks = fixed

    def tell_failures(self, fail: Callable[[BaseException], None]) -> None:
        """Tell ``fail`` when a rank has failed, also where no call that is under way would find out."""
        self._fail = fail

    def disconnect(self, *, failed: bool = False) -> None:
        """Undo :meth:`connected`; the other ranks do so too, soon."""
        comm, self._comm = self._comm, None
        if comm is not None:
            within(LAST_WORDS, lambda: comm.end(failed=failed))

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
            self._collective(lambda: dist.all_gather(theirs, mine, group=self._group("host")))
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

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run what all ranks do inside; an error that not all of them raise there ends the world for all."""
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
        self._fail(LostError(reason))
        self.disconnect(failed=True)
        _failed.extend(self._groups.values())
        _destroy(self._groups)

    def close(self) -> None:
        """Undo :meth:`connected`, and let no rank wait for this one but those that close too: because of the
        error that is being handled, if one is. What all have closed can still exchange something."""
        self.disconnect()
        if self._groups:
            self.calls.note()
            self._words.close()
            _destroy(self._groups)

    def end_script(self) -> None:
        """Tell the other ranks that this rank's script is over."""
        if self._words.is_forked:
            return
        self.disconnect()
        if not self.ended:
            self._words.end()
            _destroy(self._groups)


def _have_come(work: Any) -> bool:
    """Wait for a collective for a second; raise why it failed, where it did."""
    try:
        work.wait(LOOK)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def _destroy(groups: dict[str, Any]) -> None:
    """Destroy groups, which wakes who waits in them elsewhere."""
    for group in {groups.pop(name) for name in list(groups)}:
        within(LAST_WORDS, partial(end_group, group))


def _drop(words: LastWords, groups: dict[str, Any]) -> None:
    """Tell the other ranks that this rank's program is gone; in a thread, because the caller may hold any
    lock."""

    def leave() -> None:
        words.drop()
        _destroy(groups)

    if not words.is_forked:
        threading.Thread(target=leave).start()


@atexit.register
def _end_script() -> None:
    """Leave no rank to wait for one that is going."""
    for world in list(_worlds):
        world.end_script()


def _as_bytes(flat: Tensor) -> Tensor:
    """A contiguous tensor as bytes: gloo does not take all dtypes."""
    return flat.detach().view(-1).view(torch.uint8)

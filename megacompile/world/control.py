"""World: what the ranks of one program say and send to each other, and what they do when one of them fails.

In:  :class:`~megacompile.world.ranks.Ranks`. Out: exchanges of bytes between callers, collectives of tensors.
Three process groups over gloo, as three threads use them: the caller's, the host stream's, and the stream of
collectives'. Within each all ranks do the same in the same order.

Invariant: what keeps one rank from going on ends the others' waiting too, with an error that names it.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megacompile import errors
from megacompile.errors import MegacompileError, ProgramError
from megacompile.world.agreement import difference
from megacompile.world.ranks import TIMEOUT, Ranks

T = TypeVar("T")
_BLOCK = 512  # bytes that an exchange sends at once; longer texts take another
_LAST_WORDS = 3.0  # seconds in which the reason for a failure is looked for
_worlds = itertools.count()


class LostError(RuntimeError):
    """A collective failed, as another rank is gone or has stopped."""


class World:
    """The ranks of one program; one alone exchanges with nobody.

    ``ended`` says, once a rank has failed, which and why: nothing can be exchanged any more.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        ranks = ranks or Ranks()
        self.rank, self.size, self.local = ranks.rank, ranks.size, ranks.local
        self.ended = ""
        self._known: BaseException | None = None  # raised on all ranks
        if self.size > 1:
            self._calls, self._host, self._comm = (
                dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(3)
            )
            store = distributed_c10d._get_default_store()
            self._store: Any = distributed_c10d.PrefixStore(f"megacompile/{next(_worlds)}", store)

    # ---- callers ---------------------------------------------------------------------------------

    def exchange(self, say: Callable[[], bytes]) -> list[bytes]:
        """What every rank says, by rank; where one of them raises, all do, and name it."""
        if self.size == 1:
            return [say()]
        error: Exception | None = None
        try:
            said = b"+" + say()
        except Exception as raised:
            error, said = raised, b"-" + f"{type(raised).__name__}\n{raised}".encode()
        heard = self._gather_bytes(said)
        for rank, text in enumerate(heard):
            if text[:1] == b"-":
                raise self.agreed(error or _told(rank, text[1:].decode()))
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

    def agree(self, run: Callable[[], T]) -> T:
        """What ``run`` returns, once it has returned on every rank."""
        found: list[T] = []

        def say() -> bytes:
            found.append(run())
            return b""

        self.exchange(say)
        return found[0]

    def from_first(self, make: Callable[[], bytes]) -> bytes:
        """What ``make`` returns on rank 0, on every rank."""
        return self.exchange(lambda: make() if self.rank == 0 else b"")[0]

    def agreed(self, error: T) -> T:
        """``error``, which all ranks raise at this point: they can go on together after it."""
        assert isinstance(error, BaseException)
        self._known = error
        return error

    def broadcast(self, value: Tensor) -> Tensor:
        """Rank 0's value of a tensor that is alike on all ranks, contiguous."""
        if self.size == 1:
            return value
        value = value.contiguous() if self.rank == 0 else torch.empty_like(value).contiguous()
        if value.numel():
            self._collective(lambda: dist.broadcast(_bytes(value), 0, group=self._calls))
        return value

    def gather(self, shard: Tensor) -> Tensor | None:
        """All ranks' shards (flat, of one length), one after another; on rank 0."""
        if not shard.numel():
            return shard if self.rank == 0 else None
        whole = shard.new_empty(self.size * shard.numel()) if self.rank == 0 else None
        parts = [_bytes(part) for part in whole.chunk(self.size)] if whole is not None else None
        self._collective(lambda: dist.gather(_bytes(shard), parts, 0, group=self._calls))
        return whole

    def scatter(self, shard: Tensor, whole: Tensor | None) -> None:
        """The inverse: each rank's shard, out of ``whole`` on rank 0."""
        if not shard.numel():
            return
        parts = [_bytes(part) for part in whole.chunk(self.size)] if whole is not None else None
        self._collective(lambda: dist.scatter(_bytes(shard), parts, 0, group=self._calls))

    def _gather_bytes(self, said: bytes) -> list[bytes]:
        size, block = len(said), _BLOCK
        head = size.to_bytes(8, "little") + said[: block - 8]
        heard = self._all_gather(head.ljust(block, b"\0"), block)
        sizes = [int.from_bytes(text[:8], "little") for text in heard]
        if max(sizes) > block - 8:
            heard = [
                text[:8] + more for text, more in zip(heard, self._all_gather(said, max(sizes)), strict=True)
            ]
        return [text[8 : 8 + n] for text, n in zip(heard, sizes, strict=True)]

    def _all_gather(self, said: bytes, size: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(said.ljust(size, b"\0")), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        self._collective(lambda: dist.all_gather(theirs, mine, group=self._calls))
        return [bytes(t.numpy()) for t in theirs]

    # ---- streams ---------------------------------------------------------------------------------

    def all_gather(self, whole: Tensor) -> None:
        """Fill a flat tensor in place; this rank's shard is in its place already."""
        mine = whole.chunk(self.size)[self.rank]
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._collective(lambda: gather(whole, mine, group=self._comm))

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """The r-th of ``size`` equal parts of ``sent`` to rank r, as its part of this rank's number.

        Two buffers: within one, gloo gives wrong numbers from three ranks on.
        """
        self._collective(lambda: dist.all_to_all_single(received, sent, group=self._comm))

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
            if _is_of_a_collective(error) and not self.ended:
                self._end(self._cause())
                raise ProgramError(self.ended) from error
            if error is not self._known and not self.ended:
                self._say_why(f"{type(error).__name__}: {error}")
                self._end(f"Rank {self.rank} stopped ({type(error).__name__}).")
            raise

    def _say_why(self, reason: str) -> None:
        """Leave last words for whoever waits; the store may be gone with its rank."""
        _within(_LAST_WORDS, lambda: self._store.set(f"words/{self.rank}", reason[:1000]))

    def _end(self, reason: str) -> None:
        """Wake all who wait for this rank."""
        self.ended = reason
        for group in (self._comm, self._host, self._calls):
            _within(_LAST_WORDS, lambda group=group: dist.destroy_process_group(group))  # type: ignore[misc]

    def _cause(self) -> str:
        """Which rank is the reason that a collective failed."""
        gone = "Rank 0 is gone." if self.rank else "The other ranks are gone."
        return _within(_LAST_WORDS + 1, self._look) or gone

    def _look(self) -> str:
        others = [r for r in range(self.size) if r != self.rank]
        self._store.set(f"here/{self.rank}", "1")
        until = time.monotonic() + _LAST_WORDS
        while True:
            for rank in others:
                if self._store.check([f"words/{rank}"]):
                    return f"Rank {rank} stopped: {self._store.get(f'words/{rank}').decode()}"
            silent = [r for r in others if not self._store.check([f"here/{r}"])]
            if not silent:
                return "The connection between the ranks was lost."
            if time.monotonic() > until:
                return f"Rank {', '.join(map(str, silent))} is gone, or does not answer."
            time.sleep(0.02)


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether it says that a collective failed: one of ours, or a library's in a group of its own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return isinstance(error, LostError) or (
        isinstance(error, RuntimeError) and where.startswith("torch.distributed.")
    )


def _told(rank: int, text: str) -> Exception:
    """An error of another rank, of its kind where that is one of ours."""
    name, _, message = text.partition("\n")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind(f"Rank {rank}: {message}")
    return ProgramError(f"Rank {rank} stopped: {name}: {message}")


def _within(seconds: float, run: Callable[[], T]) -> T | None:
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


def _bytes(flat: Tensor) -> Tensor:
    """A contiguous tensor as bytes: gloo does not take all dtypes."""
    return flat.detach().view(-1).view(torch.uint8)


def refuse_several(size: int, what: str) -> None:
    """Refuse what several ranks cannot do yet."""
    if size > 1:
        raise MegacompileError(f"{what} is not there for several devices yet: train on one, or leave it out.")

"""Collectives of the ranks of one program, what they tell each other, and what they do when one fails."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import astuple, replace
from datetime import timedelta
from enum import IntEnum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megacompile import errors
from megacompile.distributed.calls import (
    DIGEST_BYTES,
    Call,
    Calls,
    digest,
    first_unlike,
    line_of_user,
    unlike,
)
from megacompile.distributed.ranks import TIMEOUT, Ranks
from megacompile.errors import MegacompileError, ProgramError

# ------------------------------------------------------------------------------------------------------------
# What must be alike on all ranks before they do anything together, and the sentence where it is not.
#
# In: what every rank says of itself, by name. Out: nothing, or the sentence that names the first rank that
# differs from rank 0.


_PACKAGES = ("megacompile", "torch", "triton", "transformers")  # what programs and their numbers depend on
_SENTENCES = {  # in the order in which they are looked at
    "device": "Rank {rank} trains on {theirs}, and rank 0 on {first}: give all ranks one kind of device.",
    "mesh": "Rank {rank} has a mesh of {theirs}, and rank 0 of {first}: give all ranks the same.",
    **dict.fromkeys(
        _PACKAGES, "Rank {rank} runs {theirs}, and rank 0 {first}: install the same versions on all machines."
    ),
    "settings": "Rank {rank} was compiled with {theirs}, and rank 0 with {first}: give all ranks the same.",
    "updates": (
        "Rank {rank} updates by {theirs}, rank 0 by {first}: give all machines of a mesh the same, or their "
        "copies of the state drift apart."
    ),
    "layout": "The weight groups of rank {rank} are not those of rank 0: make the same model on every rank.",
    "source": "Rank {rank} compiled another program than rank 0: please report this schedule.",
    "micro": "Rank {rank} brought {theirs} micro-batches, rank 0 {first}: give every rank as many.",
    "shapes": (
        "Rank {rank} brought a batch of {theirs}, rank 0 one of {first}: give all ranks batches of one "
        "shape, padded where they are shorter."
    ),
    "program": (
        "The model or the batch of rank {rank} is set otherwise than on rank 0 (a mode, an attribute, a "
        "constant): set all alike."
    ),
    "optimizer": "The optimizer of rank {rank} has {theirs}, that of rank 0 {first}: set all alike.",
    "place": "Rank {rank} is at another step, or has another seed, than rank 0: load the same checkpoint.",
    "count": (
        "Rank {rank} gave num_items_in_batch={theirs}, rank 0 {first}: give every rank the count of all "
        "ranks' batches together."
    ),
    "trained": (
        "Rank {rank} has made {theirs} updates, and rank 0 {first}: give every rank the same arguments, and "
        "an output_dir that all see."
    ),
    "names": "Rank {rank} loads other names, shapes or dtypes than rank 0: give every rank the same state.",
}


def versions() -> dict[str, str]:
    """Return the versions of the packages that ranks must have alike, by name."""
    return {name: _installed(name) for name in _PACKAGES}


def _installed(name: str) -> str:
    if name == "torch":
        return f"torch {torch.__version__}"  # with what it was built for
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"no {name}"


def difference(said: Sequence[Mapping[str, Any]]) -> str:
    """The first thing in which a rank differs from rank 0, in a sentence; "" where all are alike."""
    for what, sentence in _SENTENCES.items():
        values = [of_rank.get(what) for of_rank in said]
        for rank, theirs in enumerate(values):
            if theirs != values[0]:
                return sentence.format(rank=rank, theirs=theirs, first=values[0])
    return ""


def shared_gpu(gpus: Sequence[str]) -> str:
    """Say which ranks were given one GPU, by the GPUs' identifiers, in a sentence; "" where each has its
    own."""
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if gpu and first < rank:
            return (
                f"Ranks {first} and {rank} have one GPU: start no more processes than there are GPUs, and "
                "give device='cuda' without a number."
            )
    return ""


# ------------------------------------------------------------------------------------------------------------
# Last words: what ranks leave for each other in the store when one of them fails, and what follows from it.
#
# In: why a rank stops, or only that a collective failed. Out: a sentence that names the rank, the same on
# all.


T = TypeVar("T")
LAST_WORDS = 3.0  # seconds in which the reason for a failure is looked for
_LOOK = timedelta(seconds=1)  # after which a rank that waits in the store looks who has ended
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
        self._store.set(f"process/{rank}", json.dumps([_machine(), self._pid]))

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the rank's, which speaks for it."""
        return os.getpid() != self._pid

    def leave(self, reason: str) -> None:
        """Say why this rank stops."""
        within(LAST_WORDS, lambda: self._store.set(f"words/{self._rank}", reason[:1000]))

    def close(self) -> None:
        """Say that this rank closes its program, and for which error, where one is being handled."""
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
                self._store.wait([met], _LOOK)
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
        """Say where this rank waits; return that the next one waits in another program, if it does, for an
        exchange that this one has not come to."""
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
        """Return the rank that is the reason that a collective failed; ``known`` where that is so already."""
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
        return bool(machine) and machine == _machine() and _is_over(process)


def _machine() -> list[str]:
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


# ------------------------------------------------------------------------------------------------------------
# Collectives of tensors on the ranks' devices, for one thread of each: over gloo or NCCL.
#
# In: tensors on this rank's device. Out: what the ranks of its replica have of them, or ``across`` replicas
# those of its shard, in their order; on a GPU in the order of the calling thread's stream.
#
# On a CPU a collective that fails raises in the thread that is in it. On a GPU no thread is: a kernel waits
# for ever for that of a rank that is gone, and with it all that waits for the kernel. So a thread beats: some
# times a second the ranks tell each other over gloo how many collectives each has issued. A rank that is gone
# makes that raise at once; one that stalls lets a collective wait for too long. torch's own watchdog would
# end the process without a word of which rank it was, and is told not to.

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
            _end_group(group)


class _Says(IntEnum):
    """The message of a rank with every beat."""

    GOES_ON = 0
    CLOSES = 1
    FAILED = 2


class GpuCollectives(Collectives):
    """Collectives of GPUs. Once another rank fails, ``lost`` is told which one, or "" where that is not
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
            _end_group(group)

    # ---- the thread ------------------------------------------------------------------------------

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


def _end_group(group: Any) -> None:
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


# ------------------------------------------------------------------------------------------------------------
# World: what the ranks of one program say and send to each other, and what they do when one of them fails.
#
# In:  :class:`~megacompile.distributed.ranks.Ranks`. Out: exchanges of bytes between callers, collectives of
# tensors. Four process groups, as four threads use them: over gloo those of the caller, of the host stream
# and of the thread that saves, and that of collectives. Within each all ranks do the same in the same order.
#
# Invariant: what keeps one rank from going on ends the others' waiting too, with an error that names it.


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

    # ---- callers ---------------------------------------------------------------------------------

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
            self._collective(lambda: dist.broadcast(_bytes(host), 0, group=self._group("calls")))
        return host.to(value.device)

    def gather(self, shard: Tensor) -> Tensor | None:
        """All shards (flat, of one length), one after another; on rank 0, from the ranks of its replica."""
        self._begin_call()
        if self.ranks.replica or not shard.numel():
            return shard if self.rank == 0 else None
        count = self.ranks.shards
        whole = shard.new_empty(count * shard.numel()) if self.rank == 0 else None
        parts = [_bytes(part) for part in whole.chunk(count)] if whole is not None else None
        self._collective(lambda: dist.gather(_bytes(shard), parts, 0, group=self._group("first")))
        return whole

    def call(self, name: str) -> AbstractContextManager[None]:
        """Within, what this rank exchanges is of a call of the user's of this name."""
        return self.calls.within(name) if self.size > 1 else nullcontext()

    def note_call(self) -> None:
        """Have the next exchange refuse ranks that have not made this call, in which nothing is exchanged."""
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
        """Make the group of callers, once all ranks have come."""
        self._met += 1
        try:
            self._words.meet(self._met)
        except RuntimeError as error:  # the store may be gone with its rank
            raise LostError(str(error)) from error
        self._groups["calls"] = self._groups["first"] = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def _open_first(self) -> None:
        """Make the group of the first replica."""
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

    # ---- faults ----------------------------------------------------------------------------------

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
        """Let no rank wait for this one, whose script is over."""
        if self._words.is_forked:
            return
        self.disconnect()
        if not self.ended:
            self._words.end()
            _destroy(self._groups)


def _have_come(work: Any) -> bool:
    """Wait for a collective for a second; raise why it failed, where it did."""
    try:
        work.wait(_LOOK)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def _destroy(groups: dict[str, Any]) -> None:
    """Destroy groups, which wakes who waits in them elsewhere."""
    for group in {groups.pop(name) for name in list(groups)}:
        within(LAST_WORDS, partial(_end_group, group))


def _drop(words: LastWords, groups: dict[str, Any]) -> None:
    """Let no rank wait for this one, whose program is gone; in a thread, as whoever dropped it may hold any
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


def _bytes(flat: Tensor) -> Tensor:
    """A contiguous tensor as bytes: gloo does not take all dtypes."""
    return flat.detach().view(-1).view(torch.uint8)

"""Collectives of the ranks of one program, what they tell each other, and what they do when one fails."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from enum import IntEnum
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megacompile import errors
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
        """Return the rank that is the reason that a collective failed; ``known`` where that is so already."""
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
            dist.destroy_process_group(group)


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
        for group in self._groups:
            dist.destroy_process_group(group)
        dist.destroy_process_group(self._beats)

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
_BLOCK = 512  # bytes that an exchange sends at once; longer texts take another
_worlds = itertools.count()
_connected: weakref.WeakSet[World] = weakref.WeakSet()


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
        if self.size > 1:
            self._calls, self._host = (dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(2))
            self._saves = dist.new_group(backend="gloo", timeout=_TO_WRITE)
            self._first = self._calls  # of the first replica
            store = distributed_c10d._get_default_store()
            store = distributed_c10d.PrefixStore(f"megacompile/{next(_worlds)}", store)
            self._words = LastWords(store, self.rank, self.size)

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
        heard = self._gather_bytes(said, self._saves if saving else self._calls)
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
        for group in {self._host, self._calls, self._saves, self._first}:
            within(LAST_WORDS, lambda group=group: dist.destroy_process_group(group))  # type: ignore[misc]


@atexit.register
def _disconnect_all() -> None:
    """Leave no rank to wait for one that is going."""
    for world in list(_connected):
        world.disconnect()


def _bytes(flat: Tensor) -> Tensor:
    """A contiguous tensor as bytes: gloo does not take all dtypes."""
    return flat.detach().view(-1).view(torch.uint8)

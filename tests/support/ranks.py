"""Several ranks on this machine: processes of a fork server that imported everything, over gloo.

In: a function of ``(rank, *arguments)`` of this package or of a test's module. Out: what each rank returned,
or the text of what it raised.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

from megacompile import Program, ProgramError
from megacompile.distributed.world import World
from megacompile.hardware.machine import Machine
from megacompile.planner.arrangements import with_state_at
from megacompile.planner.group_state import trained_groups
from megacompile.planner.search import search
from megacompile.planner.too_small import fitting
from megacompile.runtime.block_calls import Blocks
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.workload import Workload
from tests.support.scripts import context

WAIT = 600.0  # seconds for a rank's answer, before a test takes it to hang
_AFTER_ERROR = 180.0  # seconds for the others', once one has raised
HANGS = "hangs"


@dataclass(frozen=True)
class Raised:
    """What a rank raised: the name of its type, its message, and where."""

    kind: str
    message: str
    trace: str


def run_ranks(size: int, work: Callable[..., Any], *arguments: Any, timeout: float = 600.0) -> list[Any]:
    """What ``work(rank, *arguments)`` returned on each of so many ranks, :class:`Raised` where it raised,
    None where the process ended without an answer, :data:`HANGS` where it gave none. ``timeout`` is that of
    collectives, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=_run, args=(rank, size, store, timeout, pipes[rank][1], work, arguments))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for _, end in pipes:
            end.close()
        answers: list[Any] = [HANGS]
        try:
            answers = _answers([receiver for receiver, _ in pipes])
            return answers
        finally:
            for process in processes:
                process.join(0 if any(a is HANGS for a in answers) else 10)
                if process.is_alive():
                    process.kill()
                    process.join()


def whole(answers: Sequence[Any]) -> list[Any]:
    """The answers, none of them an error."""
    for rank, answer in enumerate(answers):
        assert not isinstance(answer, Raised), f"rank {rank}: {answer.trace}"
    assert all(answer is not HANGS for answer in answers), "a rank hangs"
    return list(answers)


def saved(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint; those in files of several ranks together."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for file in sorted(folder.glob("*.safetensors")):
        for name, part in load_file(file).items():
            parts[name].append(part)
    assert parts, folder
    return {name: found[0] if len(found) == 1 else torch.cat(found) for name, found in parts.items()}


def on_host(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
    """A planner that keeps no state on devices."""
    return fitting(search(work, mode, machine, budget_bytes)).plan


def on_devices(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
    """One that keeps all trained state there."""
    return with_state_at(on_host(work, mode, machine, budget_bytes), trained_groups(work), "device")


def partly_on_devices(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
    """One that keeps that of every second group there."""
    return with_state_at(on_host(work, mode, machine, budget_bytes), trained_groups(work)[::2], "device")


def _answers(receivers: list[Any]) -> list[Any]:
    """By rank, as they come; :data:`HANGS` for those that give none."""
    answers: list[Any] = [HANGS] * len(receivers)
    waiting, until = list(receivers), time.monotonic() + WAIT
    while waiting and (ready := connection.wait(waiting, until - time.monotonic())):
        for receiver in ready:
            waiting.remove(receiver)
            try:
                answer = pickle.loads(receiver.recv_bytes())  # tensors by value
            except EOFError:
                answer = None
            answers[receivers.index(receiver)] = answer
            if isinstance(answer, Raised):  # for whom the others may wait
                until = min(until, time.monotonic() + _AFTER_ERROR)
    return answers


def _run(
    rank: int, size: int, store: str, timeout: float, pipe: Any, work: Callable[..., Any], arguments: Any
) -> None:
    import torch.distributed as dist

    from megacompile.distributed import collectives, rank_failures, ranks, world
    from tests.support.warm import captures  # which the fork server has made

    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's name may not resolve
    limit = timedelta(seconds=timeout)
    ranks.TIMEOUT = rank_failures.TIMEOUT = collectives.TIMEOUT = world.TIMEOUT = limit
    # ranks of a busy machine may hear of a failure that much apart
    rank_failures.LAST_WORDS = world.LAST_WORDS = 10.0
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    try:
        with captures.shared():
            answer = work(rank, *arguments)
    except Exception as error:
        answer = Raised(type(error).__name__, str(error), traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()


@contextmanager
def raising(kind: type[BaseException], *words: str) -> Any:
    """As ``pytest.raises``, in a rank."""
    try:
        yield
    except kind as error:
        for word in words:
            assert word in str(error), str(error)
        return
    raise AssertionError(f"no {kind.__name__}")


_FAULTS = {
    "raises": ValueError("the card fell out"),
    "runs out": torch.OutOfMemoryError("no room on the card"),
}


@contextmanager
def failing(how: str, where: str, count: int, stall: float = 0.0) -> Iterator[None]:
    """Who calls ``where``, of collectives or of blocks, for the ``count``-th time is killed, raises, or
    stalls for so many seconds."""
    owner: Any = World if where.startswith("all_") else Blocks
    real, seen = getattr(owner, where), []

    def fail(*arguments: Any, **named: Any) -> Any:
        seen.append(where)
        if len(seen) == count:
            if how in _FAULTS:
                raise _FAULTS[how]
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(stall)
        return real(*arguments, **named)

    with mock.patch.object(owner, where, fail):
        yield


FAULTS = [
    ("killed", "all_gather", 5, "Rank 1 is gone"),
    ("killed", "all_to_all", 3, "Rank 1 is gone"),
    ("raises", "all_to_all", 3, "Rank 1 stopped: ValueError: the card fell out"),
    ("raises", "call", 5, "Rank 1 stopped: ValueError: the card fell out"),
    ("stalls", "all_gather", 5, "does not answer"),
]
"""How rank 1 fails, where, at which call, and the words of the others for it."""


def told(
    program: Program, step: Callable[[], object], rank: int, how: str, where: str, count: int, stall: float
) -> str:
    """Rank 1 fails after one step, as :func:`failing` says; what this rank says then."""
    step()
    program.synchronize()
    with failing(how, where, count, stall) if rank == 1 else nullcontext():
        return end_of(program, step)


def end_of(program: Program, step: Callable[[], object]) -> str:
    """What three steps end with, after which the program does nothing any more."""
    try:
        for _ in range(3):
            step()
        program.synchronize()
    except (ProgramError, ValueError) as error:
        with raising(ProgramError, "Start all ranks again"):
            step()
        return str(error)
    return "trained on"

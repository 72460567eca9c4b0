"""Ranks on simulated GPUs, which exchange by a simulated NCCL: the bits of ranks on CPUs, budgets, faults."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megacompile import MegacompileError
from megacompile.api import pipeline
from megacompile.api.pipeline import Compiler
from megacompile.runtime import backends
from megacompile.runtime.cuda_streams import CudaStreams
from megacompile.runtime.step_results import NonFiniteError
from tests.simulated.device import simulated
from tests.simulated.numbers import runtime
from tests.simulated.test_faults import DELAY, Wide, batch
from tests.support.cuda_programs import program
from tests.support.models import batch_for, build, llama
from tests.support.ranks import FAULTS, raising, run_ranks, saved, told, whole

BUDGET = 10**9
CONTEXT, NCCL = 512 << 20, 64 << 20  # what the simulated driver and a communicator take of a device
DEVICES = 4
BF16: dict[str, Any] = {"compute_dtype": torch.bfloat16}


class Lora(nn.Module):
    """A frozen projection beside a narrow one that trains."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, 4, bias=False)
        self.up = nn.Linear(4, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def tied() -> nn.Module:
    model = llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()  # type: ignore[operator]
    return model


def adapted() -> nn.Module:
    model = llama().requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "llama": (llama, {}),
    "in bf16": (llama, BF16),
    "tied": (tied, {}),
    "lora": (adapted, {}),
    "clipped": (llama, {"max_grad_norm": 0.5}),
    "on devices": (llama, {"max_grad_norm": 0.5}),  # their AdamW rounds otherwise than the host's
}
AS_ONE = ("llama", "in bf16", "lora")  # the others add in another order than one process


@pytest.fixture(autouse=True)
def several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the fork server, which these tests are the first to start: torch counts its devices once."""
    monkeypatch.setenv("CUDASIM_DEVICES", str(DEVICES))


def on_gpu(rank: int, size: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """What ``work(rank, size, *arguments)`` returns in a process that has the GPU of its number."""
    with pytest.MonkeyPatch.context() as patch, simulated(patch):
        answer = work(rank, size, *arguments)
        assert runtime.count("contexts") == 1 << rank  # on no other rank's GPU
        return answer


def train(rank: int, size: int, device: str, folder: Path, names: list[str]) -> dict[str, Any]:
    """Two steps, a checkpoint, and one step more by another program; of one process, which is given all
    ranks' micro-batches, ``rank`` is -1."""
    numbers, found = range(size) if rank < 0 else [rank], {}

    def step(trained: Any, number: int) -> list[Tensor]:
        micro = [batch_for("llama", 10 * number + n, size=4, length=64) for n in numbers]
        return list(trained.train_step(micro).losses)

    for name in names:
        torch.manual_seed(max(0, rank))  # rank 0's values count
        with pytest.MonkeyPatch.context() as patch:
            if name != "on devices":
                patch.setattr(Compiler, "_may_reside", lambda *_: ())
            losses = trained_twice(device, folder / name, *CASES[name], step)
        found[name] = [float(loss) for step in losses for loss in step]
    return found


def trained_twice(
    device: str,
    folder: Path,
    build_case: Callable[[], nn.Module],
    options: dict[str, Any],
    step: Callable[[Any, int], list[Tensor]],
) -> list[list[Tensor]]:
    with program(build_case(), device, "1GB", **options) as trained:
        losses = [step(trained, 0), step(trained, 1)]
        trained.save(folder)
    with program(build_case(), device, "1GB", **options) as trained:
        trained.prepare(batch_for("llama", 0, size=4, length=64))
        trained.load(folder)
        losses.append(step(trained, 2))
        trained.save(folder)
        if device == "cuda":
            assert CONTEXT + NCCL + torch.cuda.max_memory_reserved() <= BUDGET
            taken = runtime.count("used") - torch.cuda.memory_reserved()
            assert taken == NCCL  # of one program: the one before has given its own back
            assert bool(trained._session.scheduled().planned.step.resident) == (folder.name == "on devices")
    return losses


def differing(one: Path, other: Path) -> list[str]:
    ours, theirs = saved(one), saved(other)
    assert ours.keys() == theirs.keys() and ours
    return [n for n, v in theirs.items() if not torch.equal(ours[n], v)]


def test_gpus_train_as_cpus_and_as_one_process(tmp_path: Path) -> None:
    names = list(CASES)
    gpus = whole(run_ranks(2, on_gpu, 2, train, "cuda", tmp_path / "gpus", names))
    cpus = whole(run_ranks(2, train, 2, "cpu", tmp_path / "cpus", names))
    one = train(-1, 2, "cpu", tmp_path / "one", list(AS_ONE))
    beside = [[losses.pop("on devices") for losses in found] for found in (gpus, cpus)]
    assert beside[0][0][:2] == beside[1][0][:2]  # of the first step
    torch.testing.assert_close(*map(torch.tensor, beside), rtol=1e-5, atol=0)
    ours, theirs = (saved(tmp_path / side / "on devices") for side in ("gpus", "cpus"))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)  # an update is of 1e-3
    assert gpus == cpus
    for name in names[:-1]:
        assert differing(tmp_path / "gpus" / name, tmp_path / "cpus" / name) == [], name
    for name in AS_ONE:
        assert gpus[1][name] == one[name]
        assert differing(tmp_path / "gpus" / name, tmp_path / "one" / name) == [], name


def on_mesh(rank: int, size: int, device: str) -> list[float]:
    """What two rows of ranks find; as on two machines, where compile chooses the rows."""
    given = steps_of_rows(rank, size, device, init_device_mesh("cpu", (2, size // 2)))
    place = {"LOCAL_WORLD_SIZE": str(size // 2), "LOCAL_RANK": str(rank % (size // 2))}
    with mock.patch.dict(os.environ, place), slow(backends, "_machine_of"), slow(pipeline, "nominal_cpu"):
        chosen = steps_of_rows(rank, size, device if device == "cpu" else f"cuda:{rank}", None)
    assert chosen == given
    return given


def slow(module: ModuleType, rates: str) -> AbstractContextManager[object]:
    """Rates of machines with a slow network between them, for which a copy in each is faster."""
    measured = getattr(module, rates)
    return mock.patch.object(module, rates, lambda *of: replace(measured(*of), network_bandwidth=1e6))


def steps_of_rows(rank: int, size: int, device: str, mesh: DeviceMesh | None) -> list[float]:
    """Losses and norms, and the sum of what each rank has of the state."""
    torch.manual_seed(0)
    found: list[float] = []
    with (
        mock.patch.object(Compiler, "_may_reside", lambda *_: ()),
        program(Wide(), device, "1GB", planner="double-buffer", mesh=mesh, max_grad_norm=0.1) as trained,
    ):
        for step in range(2):
            out = trained.train_step((batch(size * step + rank),))
            found += [float(loss) for loss in out.losses] + [float(out.grad_norm)]
        assert "rt.all_reduce(" in trained.source
        trained.synchronize()
        assert trained._session.runtime is not None
        for parts in trained._session.runtime.state.parts():
            found += [float(array.double().sum()) for arrays in parts.values() for array in arrays.values()]
    return found


def test_replicas_on_gpus_train_as_on_cpus() -> None:
    gpus = whole(run_ranks(4, on_gpu, 4, on_mesh, "cuda"))
    cpus = whole(run_ranks(4, on_mesh, 4, "cpu"))
    assert gpus == cpus
    assert gpus[:2] == gpus[2:] and gpus[0] != gpus[1]  # equal replicas of unequal shards


# Who waits, for what kind of operation, and what is late. What compute waits for before it frees a gradient
# is implied by its later waits: collectives are in one order.
WAITS = [
    ("comm", "prefetch", "copy_us"),
    ("comm", "backward", "lag_us"),
    ("comm", "push_shard", "copy_us"),
    ("compute", "all_gather", "exchange_us"),
    ("d2h", "reduce", "exchange_us"),
]


def without(patch: pytest.MonkeyPatch, waiter: str, kind: str) -> None:
    """Leave out what a stream waits for of a kind."""
    submit, wait = CudaStreams.submit, CudaStreams.wait

    def left(after: Iterable[Any], stream: str) -> list[Any]:
        return [event for event in after if stream != waiter or event[0] != kind]

    def fewer(self: CudaStreams, stream: str, event: Any, after: Iterable[Any], run: Any) -> None:
        submit(self, stream, event, left(after, stream), run)

    patch.setattr(CudaStreams, "submit", fewer)
    patch.setattr(CudaStreams, "wait", lambda self, after: wait(self, left(after, "compute")))


def sums(device: str, rank: int) -> list[float]:
    """Losses and the sum of the weights; of ranks on GPUs the last one is each rank's own."""
    torch.manual_seed(0)
    trained = program(Wide(), device, "1GB", planner="double-buffer")
    found: list[float] = []
    try:
        for step in range(2):
            found += [float(loss) for loss in trained.train_step((batch(2 * step + rank),)).losses]
        found += [float(w.double().sum()) for w in trained.state_dict().values()]
    except NonFiniteError:
        found.append(math.nan)
    finally:
        trained.close()
    return found


def leaving_out(rank: int, size: int) -> list[list[float]]:
    """The sums as they should be, and without each wait in turn."""
    found = [sums("cuda", rank)]
    for waiter, kind, late in WAITS:
        with pytest.MonkeyPatch.context() as patch:
            without(patch, waiter, kind)
            runtime.set(**{late: 4 * DELAY})  # two processes share the cores
            found.append(sums("cuda", rank))
            runtime.set(lag_us=100, copy_us=0, exchange_us=0)
    return found


def test_without_a_wait_of_the_collectives_numbers_are_wrong() -> None:
    right, *wrong = whole(run_ranks(2, on_gpu, 2, leaving_out))[0]
    cpus = whole(run_ranks(2, on_cpu))
    assert right == cpus[0]
    assert [wait for wait, found in zip(WAITS, wrong, strict=True) if found == right] == []


def on_cpu(rank: int) -> list[float]:
    return sums("cpu", rank)


STALL = 20.0  # seconds that ranks wait for each other


def failing_rank(rank: int, size: int, how: str, where: str, count: int) -> str:
    trained = program(Wide(), "cuda", "1GB", planner="double-buffer")
    said = told(trained, lambda: trained.train_step((batch(rank),)), rank, how, where, count, STALL + 15)
    trained.close()
    return said


@pytest.mark.parametrize(("how", "where", "count", "words"), FAULTS)
def test_a_rank_that_fails_is_named_by_the_others(how: str, where: str, count: int, words: str) -> None:
    """None of them computes on: a collective that waits for the rank is ended."""
    timeout = STALL if how == "stalls" else 600.0
    first, failed, third = run_ranks(3, on_gpu, 3, failing_rank, how, where, count, timeout=timeout)
    assert words in first and words in third, (first, third)
    if how == "killed":
        assert failed is None
    if how == "raises":
        assert failed == "the card fell out"


def refused(rank: int, size: int) -> None:
    with raising(MegacompileError, "Ranks 0 and 1 have one GPU"):
        program(build("plain"), "cuda:0", "1GB")
    with raising(MegacompileError, "Rank 1 trains on cpu, and rank 0 on cuda"):
        program(build("plain"), "cpu" if rank else "cuda", "1GB")
    with mock.patch.dict(os.environ, LOCAL_RANK=str(DEVICES + rank)):
        words = f"of this machine has no GPU of its own, as torch finds {DEVICES}"
        with raising(MegacompileError, words):
            program(build("plain"), "cuda", "1GB")


def test_each_rank_needs_a_gpu_of_its_own() -> None:
    whole(run_ranks(2, refused, 2))

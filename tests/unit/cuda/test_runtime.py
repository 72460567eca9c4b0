"""Training on the CUDA device over a GPU made of CPU tensors: bitwise as on the CPU device."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megacompile
from megacompile.api import compile
from megacompile.api.bound_programs import Bindings
from megacompile.errors import BudgetExceededError
from megacompile.hardware.caching_allocator import PAGE_BYTES
from megacompile.kernels._triton import Gpu
from megacompile.runtime import cuda, cuda_host_memory
from megacompile.runtime.cuda import CudaDevice
from megacompile.runtime.cuda_memory import LOOSE_BYTES, plan_bytes
from megacompile.runtime.device_state import ResidentState
from megacompile.runtime.executor import Runtime
from megacompile.runtime.staging import Staging
from megacompile.schedule.step import Step
from tests.e2e.test_changed_buffers import Classifier, cross_entropy, images
from tests.support.cuda_programs import check_fault_is_told, program
from tests.support.fake_cuda import FakeCuda
from tests.support.models import batch_for, build
from tests.unit.blocks.test_inductor import rows, small

BUDGET = 10**9


def train(name: str, device: str, batches: list[Any], **options: Any) -> tuple[list[float], Any]:
    trained = program(build(name), device, **options)
    losses = [float(trained.train_step(batch).loss) for batch in batches]
    state = trained.state_dict()
    trained.close()
    return losses, state


@pytest.mark.slow_cases(r"llama")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"max_grad_norm": 0.5}),
        ("gpt2-dropout", {"compute_dtype": torch.bfloat16}),
        ("plain", {}),
    ],
)
def test_training_is_bitwise_that_of_the_cpu_device(
    gpu: FakeCuda, name: str, options: dict[str, Any]
) -> None:
    batches = [batch_for(name, i, size=4, length=64) for i in range(3)]
    expected, state = train(name, "cpu", batches, **options)
    losses, ours = train(name, "cuda", batches, **options)
    assert losses == expected
    assert all(torch.equal(ours[n], v) for n, v in state.items())
    assert gpu.copies > 0
    assert gpu.registered > 0
    assert gpu.released


def test_buffers_that_a_forward_changes_are_the_model_s_after_each_step(gpu: FakeCuda) -> None:
    batches, found = images(3), []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        trained = program(Classifier(), device, loss_fn=cross_entropy)
        seen = []
        for batch in batches:
            trained.train_step([batch, batches[0]])
            seen.append({n: b.clone() for n, b in trained.model.named_buffers()})
        trained.load_state_dict(trained.state_dict() | {"stem.1.running_mean": torch.ones(4)})
        trained.train_step(batches[0])
        seen.append(trained.state_dict() | {"loss": trained.evaluate(batches[0])})
        trained.close()
        found.append(seen)
    for ours, theirs in zip(*found, strict=True):
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert gpu.copies > 0


@pytest.mark.parametrize(
    ("name", "options"), [("gpt2", {"max_grad_norm": 0.5, "compute_dtype": torch.bfloat16}), ("plain", {})]
)
def test_where_nothing_is_page_locked_copies_pass_through_buffers(
    gpu: FakeCuda, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [batch_for(name, i) for i in range(3)]
    expected, state = train(name, "cpu", batches, **options)
    monkeypatch.setattr(cuda_host_memory, "Staging", functools.partial(Staging, piece_bytes=4096))
    gpu.refuses = True
    losses, ours = train(name, "cuda", batches, **options)
    assert losses == expected
    assert all(torch.equal(ours[n], v) for n, v in state.items())
    assert gpu.through > 0 and gpu.registered == 0


@pytest.mark.slow_cases(r"True")
@pytest.mark.parametrize("half", [False, True])
def test_no_copy_crosses_from_one_page_locked_piece_to_another(
    gpu: FakeCuda, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [batch_for("gpt2", i) for i in range(3)]
    expected, state = train("gpt2", "cpu", batches, max_grad_norm=0.5, compute_dtype=torch.bfloat16)
    monkeypatch.setattr(cuda_host_memory, "Staging", functools.partial(Staging, piece_bytes=4096))
    gpu.piece_bytes, gpu.half = 6001, half
    trained = program(build("gpt2"), "cuda", max_grad_norm=0.5, compute_dtype=torch.bfloat16)
    assert [float(trained.train_step(batch).loss) for batch in batches] == expected
    assert all(torch.equal(trained.state_dict()[n], v) for n, v in state.items())
    memory = trained.memory
    trained.close()
    assert memory.page_locked_bytes > 0 and (memory.staged_bytes > 0) == half
    assert ("pass through buffers" in str(memory)) and gpu._borders


@pytest.mark.slow_cases(r"True")
@pytest.mark.parametrize("refuses", [False, True])
def test_offloads_go_to_nvme_when_they_have_landed(
    gpu: FakeCuda, refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [batch_for("gpt2", i) for i in range(3)]
    expected, state = train("gpt2", "cpu", batches)
    planner = program(build("gpt2"), "cpu")
    planner.train_step(batches[0])
    plan = planner.plan
    planner.close()
    blocks = tuple(replace(block, checkpoint="all", saved_on="nvme") for block in plan.blocks)
    monkeypatch.setattr(cuda_host_memory, "Staging", functools.partial(Staging, piece_bytes=4096))
    gpu.refuses = refuses
    plan = replace(plan, blocks=blocks, window=1, workload="")
    losses, ours = train("gpt2", "cuda", batches, plan=plan, offload_dir=tmp_path)
    assert losses == expected
    assert all(torch.equal(ours[n], v) for n, v in state.items())


def test_the_report_says_that_copies_are_staged(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_host_memory, "Staging", functools.partial(Staging, piece_bytes=4096))
    gpu.refuses = True
    trained = program(build("plain"), "cuda")
    trained.train_step(batch_for("plain"))
    assert "staging (host memory is not page-locked) 32.8 kB" in str(trained.memory)
    trained.close()


def test_micro_batches_sum_on_the_host_as_on_the_cpu_device(gpu: FakeCuda) -> None:
    batches = [[batch_for("gpt2", 2 * i), batch_for("gpt2", 2 * i + 1)] for i in range(2)]
    expected, state = train("gpt2", "cpu", batches, compute_dtype=torch.bfloat16)
    losses, ours = train("gpt2", "cuda", batches, compute_dtype=torch.bfloat16)
    assert losses == expected
    assert all(torch.equal(ours[n], v) for n, v in state.items())


def test_predictions_are_bitwise_those_of_the_cpu_device(gpu: FakeCuda) -> None:
    """Whole outputs, several results, and those of several dtypes, before and after a step."""
    batch, found = batch_for("gpt2"), {}
    for device in ("cpu", "cuda"):
        trained = program(build("gpt2"), device, compute_dtype=torch.bfloat16, example_batch=batch)
        found[device] = [trained.predict(batch).logits]
        trained.train_step(batch)
        found[device] += trained.predict(
            {**batch, "output_hidden_states": True},
            outputs=lambda out, batch: (*out.hidden_states, out.logits.argmax(-1), out.loss > 0),
        )
        trained.close()
    assert len(found["cpu"]) == 8
    assert all(torch.equal(a, b) for a, b in zip(found["cpu"], found["cuda"], strict=True))


@pytest.mark.slow_cases(r"(clipped-False|immediate-True)")
@pytest.mark.parametrize("resides", [False, True])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=["immediate", "clipped"])
def test_a_checkpoint_that_is_written_while_steps_run_is_of_its_moment(
    gpu: Any, options: dict[str, Any], resides: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and the writer in any order, each tensor in a file of its own."""
    if resides:
        gpu.let_state_reside()
    monkeypatch.setattr("megacompile.state.checkpoint.SHARD_BYTES", 1)
    trained = program(build("gpt2"), "cuda", "1GB" if resides else "3MB", **options)
    for index in range(3):
        trained.train_step(batch_for("gpt2", index))
        trained.save(tmp_path / f"waited {index}")
        trained.save(tmp_path / f"run {index}", wait=False)
    trained.train_step(batch_for("gpt2", 3))
    trained.close()
    for index in range(3):
        written = {f.name: f.read_bytes() for f in (tmp_path / f"run {index}").iterdir()}
        assert written == {f.name: f.read_bytes() for f in (tmp_path / f"waited {index}").iterdir()}


@pytest.mark.slow
def test_functions_by_inductor_run_on_the_streams(gpu: FakeCuda) -> None:
    """Their allocations are torch's; bitwise the CPU device's run."""
    losses = {}
    for device in ("cpu", "cuda"):
        trained = small(device=device, max_grad_norm=1.0)
        losses[device] = [float(trained.train_step(rows(i)).loss) for i in range(3)]
        trained.close()
    assert losses["cuda"] == losses["cpu"]


def moving(gpu: FakeCuda) -> tuple[list[float], list[float], set[int]]:
    """Micro-batches of two lengths: where all state fits it stays on the device; where it does not, the long
    ones' program has some on the host, and waiting gradients go where their state goes.

    Losses in both, and how many groups' state the programs of the second kept on the device.
    """
    gpu.let_state_reside()  # type: ignore[attr-defined]
    short, long = batch_for("plain", size=4), batch_for("plain", size=16)
    probe = program(build("plain"), "cuda", "1GB", max_grad_norm=1.0)
    probe.forward_backward(short)
    need = probe.memory.predicted_peak_bytes
    probe.close()
    losses = []
    for budget in ("1GB", f"{need}B"):
        trained = program(build("plain"), "cuda", budget, max_grad_norm=1.0)
        orders = ([short, long], [long, long, short], [short, long, short])
        losses.append([float(trained.train_step(batches).loss) for batches in orders])
        counts = {len(s.planned.step.resident) for s in trained._session.decided.programs.values()}
        trained.close()
    return losses[0], losses[1], counts


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_waiting_gradients_move_with_the_state(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that moves is issued on the compute stream, with nothing under way."""
    streams = []
    move = ResidentState.move

    def watched(self: ResidentState, step: Step) -> None:
        streams.append(gpu.current())
        move(self, step)

    monkeypatch.setattr(ResidentState, "move", watched)
    fits, moves, counts = moving(gpu)
    assert fits == moves
    assert len(counts) > 1, "no state moved"
    assert streams and all(stream in gpu.computes for stream in streams)


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_the_proof_finds_a_move_that_waits_for_nothing(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient to which the host still adds another one is not there to be moved."""
    add, prepare, ready = cuda.add_gradients, Runtime._prepare, CudaDevice.prepare
    moved = threading.Event()

    def late(*args: Any) -> None:
        assert moved.wait(60)
        add(*args)

    def after_the_move(self: CudaDevice, *args: Any) -> Any:
        moved.set()
        return ready(self, *args)

    def before_its_pushes(self: Runtime, program: Any, inputs: Any) -> None:
        prepare(self, program, inputs)
        if not program.updates:
            moved.clear()

    monkeypatch.setattr(cuda, "add_gradients", late)
    monkeypatch.setattr(CudaDevice, "prepare", after_the_move)
    monkeypatch.setattr(Runtime, "_prepare", before_its_pushes)
    monkeypatch.setattr(Runtime, "synchronize", lambda self: None)
    fits, moves, _ = moving(gpu)
    assert fits != moves


def test_what_ran_when_is_timed_by_the_devices_events(gpu: FakeCuda) -> None:
    trained = program(build("plain"), "cuda", max_grad_norm=1.0)
    for _ in range(3):
        trained.train_step(batch_for("plain"))
    trained.synchronize()
    runtime = trained._session.runtime
    assert runtime is not None
    _, (step, trace) = runtime.traces
    expected = Counter(
        op.event for op in step.ops if op.kind not in ("load", "evict", "free", "free_offloaded")
    )
    assert Counter(event for event, _, _ in trace) == expected
    streams = {op.event: op.stream for op in step.ops}
    for stream in ("compute", "h2d", "d2h", "host"):
        spans = sorted((a, b) for event, a, b in trace if streams[event] == stream)
        assert all(a <= b for a, b in spans)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    trained.close()


@pytest.mark.parametrize("where", ["copy", "update"])
def test_a_fault_on_a_stream_reaches_the_caller(gpu: FakeCuda, where: str) -> None:
    trained = program(build("plain"), "cuda", budget="1GB", max_grad_norm=1.0)
    batch = batch_for("plain")
    trained.train_step(batch)
    trained.synchronize()

    state = trained._session.runtime.state  # type: ignore[union-attr]
    check_fault_is_told(trained, batch, CudaDevice if where == "copy" else type(state), where)
    if where == "copy":
        assert torch.isfinite(trained.train_step(batch).loss)
    else:
        with pytest.raises(megacompile.ProgramError, match="load_state_dict"):
            trained.train_step(batch)
    trained.close()


def test_a_loss_that_is_not_finite_changes_nothing(gpu: FakeCuda) -> None:
    trained = program(build("plain"), "cuda")
    batch = batch_for("plain")
    trained.train_step(batch)
    before = trained.state_dict()
    bad = {k: v * float("nan") if v.is_floating_point() else v for k, v in batch.items()}
    with pytest.raises(megacompile.NonFiniteError):
        trained.train_step(bad)
    assert all(torch.equal(v, before[n]) for n, v in trained.state_dict().items())
    assert torch.isfinite(trained.train_step(batch).loss)
    trained.close()


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_loss_that_is_not_finite_beside_a_gradient_that_is_trains(
    clip: float | None, gpu: FakeCuda
) -> None:
    """Bitwise as on the CPU device, whose updates come after each loss is known."""
    states = []
    for device in ("cuda", "cpu"):
        trained = program(build("plain"), device, max_grad_norm=clip)
        for shift in (0.0, math.nan, 0.0):
            trained.train_step(batch_for("plain"), loss=lambda _, loss, shift=shift: loss + shift)
        states.append(trained.state_dict())
        trained.close()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_holding_more_than_the_budget_is_an_error(gpu: FakeCuda) -> None:
    trained = program(build("plain"), "cuda", budget="1GB")
    trained.train_step(batch_for("plain"))
    assert gpu.limited == BUDGET - gpu.context_bytes() - PAGE_BYTES
    gpu.reserved = BUDGET + 1
    with pytest.raises(BudgetExceededError, match="held 1000000001 bytes"):
        trained.train_step(batch_for("plain"))
    trained.close()


def test_the_context_is_measured_again_until_all_is_loaded(gpu: FakeCuda) -> None:
    """Page-locking, and kernels that are loaded when they first run, take device memory too."""
    trained = program(build("plain"), "cuda", f"{BUDGET}B")
    allowed = []
    for taken in (3000, 7000, 9000):
        gpu._context = taken
        trained.train_step(batch_for("plain", size=4))
        allowed.append(gpu.limited + PAGE_BYTES)
    trained.close()
    assert allowed == [BUDGET - 3000, BUDGET - 7000, BUDGET - 7000]


def test_the_context_counts_against_the_budget() -> None:
    fake = FakeCuda(context_bytes=600 << 20)
    beside = LOOSE_BYTES + (16 << 20)
    assert plan_bytes(fake, 10**9) == 10**9 - (600 << 20) - beside
    assert plan_bytes(fake, 10**10) == 10**10 - (600 << 20) - LOOSE_BYTES - 10**8
    with pytest.raises(megacompile.BudgetError, match="CUDA context"):
        plan_bytes(fake, (600 << 20) + beside)


def test_buffers_of_the_model_follow_it(gpu: FakeCuda) -> None:
    """A buffer that is loaded anew reaches the copy on the device."""
    fake = CudaDevice(FakeCuda(), BUDGET)
    source = torch.ones(3)
    first = fake._constant(source)
    source.fill_(2.0)
    assert fake._constant(source) is first
    assert torch.equal(first, source)
    fake.close()


@pytest.mark.parametrize("launches", [True, False])
def test_a_gpu_with_triton_gets_the_fused_kernels_unless_told(
    gpu: FakeCuda, launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = compile.open_backend
    monkeypatch.setattr(
        compile, "open_backend", lambda *given: replace(opened(*given), device=torch.device("cuda"))
    )
    monkeypatch.setattr(compile, "check_triton", lambda device, needed: launches)
    monkeypatch.setattr(compile, "gpu_of", lambda device: Gpu(128, 89))
    monkeypatch.setattr(Bindings, "make_ready", lambda *_: None)  # no GPU to compile kernels for
    for kernels in (None, False):
        trained = program(build("llama"), "cuda", "1GB", kernels=kernels, example_batch=batch_for("llama"))
        assert bool(trained.fusions.counts) == (launches and kernels is None)
        trained.close()

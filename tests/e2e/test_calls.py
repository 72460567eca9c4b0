"""From where a program is called changes nothing: torch's modes, threads, Ctrl-C at any moment."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import megacompile
from megacompile.blocks.memory_meter import StorageMeter
from megacompile.errors import ProgramError
from megacompile.state import adam
from megacompile.state.masters import HostState
from tests.support.models import Plain, batch_for
from tests.support.reference import EagerTrainer, assert_equal


def made(budget: str = "80KB", **options: Any) -> tuple[megacompile.Program, EagerTrainer]:
    torch.manual_seed(0)
    model = Plain()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    program = megacompile.compile(model, budget, optimizer=optimizer, compute_dtype=torch.float32, **options)
    return program, EagerTrainer(eager, torch.optim.AdamW(eager.parameters(), lr=1e-2))


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "anomaly": torch.autograd.detect_anomaly,
    "meta": lambda: torch.device("meta"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("mode", MODES)
def test_trains_as_ever_in_modes_of_torch(mode: str) -> None:
    batches = [batch_for("plain", i) for i in range(3)]
    program, trainer = made()
    with MODES[mode]():  # type: ignore[no-untyped-call]
        program.evaluate(batches[0])
        program.train_step(batches[0])
        program.state_dict()
    program.train_step(batches[1])
    with MODES[mode]():  # type: ignore[no-untyped-call]
        program.train_step(batches[2])
    for batch in batches:
        trainer.train_step([batch])
    assert_equal(program, trainer)
    program.close()


@pytest.fixture
def defaults() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    adam.set_backend("auto")


@pytest.mark.slow_cases(r"auto-")
@pytest.mark.parametrize("state", ["fp32", "int4"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_default_dtype_is_not_that_of_the_state(backend: Any, state: Any, defaults: None) -> None:
    """Scripts set it while they build models; host code says what it means."""
    batch = {name: value.bfloat16() for name, value in batch_for("plain").items()}
    results = []
    adam.set_backend(backend)
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = Plain(width=128)  # beyond the size that keeps fp32 moments
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        program = megacompile.compile(
            model, "1MB", optimizer=optimizer, max_grad_norm=1.0, optimizer_state=state, example_batch=batch
        )
        torch.set_default_dtype(dtype)
        program.train_step(batch)
        results.append(program.state_dict())
        torch.set_default_dtype(torch.float32)
        program.close()
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_autocast_is_refused() -> None:
    program, _ = made()
    calls: list[Callable[[Any], Any]] = [program.train_step, program.evaluate, program.prepare]
    for call in calls:
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ProgramError, match="autocast"):
            call(batch_for("plain"))
    program.close()


def test_calls_of_several_threads_come_one_after_the_other() -> None:
    program, trainer = made()
    batch, failures = batch_for("plain"), []

    def train() -> None:
        try:
            for _ in range(5):
                program.train_step(batch)
                program.state_dict()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not failures
    for _ in range(15):
        trainer.train_step([batch])
    assert_equal(program, trainer)
    program.close()


def test_ctrl_c_between_two_updates_leaves_a_whole_step(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Updates follow their gradients at once here, so a step that stopped in the middle would leave it
    inconsistent."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    program, trainer = made(budget="50KB")
    batch = batch_for("plain")
    program.train_step(batch)
    update, pressed = HostState.update, threading.Event()

    def interrupting(self: HostState, *arguments: Any, **options: Any) -> None:
        update(self, *arguments, **options)
        if not pressed.is_set():
            pressed.set()
            os.kill(os.getpid(), signal.SIGINT)

    for _ in range(5):
        pressed.clear()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(HostState, "update", interrupting)
            program.train_step(batch)
            program.synchronize()  # where the first update was begun late
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        # else an update that is left presses in the next round, before its step has begun
        program.synchronize()
    for _ in range(6):
        trainer.train_step([batch])
    assert_equal(program, trainer)
    program.close()


def test_an_interrupt_while_waiting_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = made()
    program.train_step(batch_for("plain"))
    runtime = program._session.runtime
    assert runtime is not None

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "synchronize", interrupted)
        patch.setattr(type(runtime), "inconsistent", True)  # as long as its updates are under way
        with pytest.raises(KeyboardInterrupt):
            program.synchronize()
    program.train_step(batch_for("plain"))
    program.close()


def test_no_meter_stays_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception out of a signal's handler can strike when a context is entered and not yet left."""
    program, _ = made(max_grad_norm=1.0)
    program.prepare(batch_for("plain"))  # its first step is metered
    enter = StorageMeter.__enter__

    def struck(meter: StorageMeter) -> Any:
        enter(meter)  # type: ignore[no-untyped-call]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StorageMeter, "__enter__", struck)
        with pytest.raises(KeyboardInterrupt):
            program.train_step(batch_for("plain"))
    assert not _get_current_dispatch_mode_stack()  # type: ignore[no-untyped-call]
    program.train_step(batch_for("plain"))
    program.close()


def test_param_groups_that_changed_before_an_update_by_hand_are_refused() -> None:
    program, _ = made()
    program.forward_backward(batch_for("plain"))
    groups = program.optimizer.param_groups
    kept = list(groups)
    groups.clear()
    with pytest.raises(megacompile.MegacompileError, match="param groups changed"):
        program.optimizer_step()
    groups += kept
    program.optimizer_step()
    program.close()

"""Faults: non-finite gradients wherever they arise, forks, threads, memory limits, ends of processes."""

from __future__ import annotations

import copy
import math
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import megacompile
from tests.support.models import batch_for, build
from tests.support.reference import EagerTrainer
from tests.support.scripts import run_script

ROOT = Path(__file__).parents[2]


def compiled(model: nn.Module, **options: Any) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, **options)


class Fragile(nn.Module):
    """Linear layers; layer ``bad`` has a finite output and a NaN gradient where the batch says z = 0."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.shift = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(4))
        self.bad = bad

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == self.bad:
                x = x + torch.sqrt((self.shift[i] * z).square())
        return x.square().mean()


def fragile_batch(z: float) -> dict[str, Tensor]:
    return {"x": batch_for("plain")["x"], "z": torch.tensor(z)}


@pytest.mark.parametrize("bad", [0, 3])  # the last gradient of a backward, and the first
@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("micro", [1, 2])
def test_nan_gradients_leave_the_state_whole(bad: int, policy: Any, micro: int) -> None:
    torch.manual_seed(0)
    program = compiled(Fragile(bad), on_nonfinite=policy)
    good, evil = fragile_batch(1.0), fragile_batch(0.0)
    steps = [good] if micro == 1 else [good, good]
    program.train_step(steps)
    before = program.state_dict()
    out = program.train_step([good] * (micro - 1) + [evil])
    assert math.isfinite(out.loss)
    if policy == "raise":
        with pytest.raises(megacompile.NonFiniteError, match="not applied"):
            program.train_step(steps)
    else:
        assert out.grad_norm is not None and not math.isfinite(out.grad_norm)
    assert all(torch.equal(v, before[n]) for n, v in program.state_dict().items())
    assert all(torch.isfinite(v).all() for v in before.values())
    twin = compiled(_with_state(Fragile(bad), before), on_nonfinite=policy)
    assert float(program.train_step(steps).loss) == float(twin.train_step(steps).loss)
    program.close()
    twin.close()


def _with_state(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    model.load_state_dict(state)
    return model


def test_a_failing_micro_batch_keeps_the_gradients_gathered_before() -> None:
    model = build("llama", layers=1)
    eager = copy.deepcopy(model)
    trainer = EagerTrainer(eager, torch.optim.AdamW(eager.parameters(), lr=1e-3))
    program = compiled(model)
    batch = batch_for("llama")
    program.forward_backward(batch)
    out_of_range = {**batch, "input_ids": batch["input_ids"] + 1000}
    with pytest.raises(megacompile.ProgramError, match="failed on this batch"):
        program.forward_backward(out_of_range)
    program.optimizer_step()
    trainer.train_step([batch])
    state = program.state_dict()
    assert all(torch.equal(state[n], p) for n, p in eager.named_parameters())
    program.close()


def test_gradients_that_are_lost_are_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(build("plain"), planner="full-recompute")  # gradients wait on the host
    batch = batch_for("plain")
    program.forward_backward(batch)
    program.synchronize()
    runtime = program._session.runtime
    assert runtime is not None
    with monkeypatch.context() as patch:
        patch.setattr(runtime.device, "push", _broken)
        with pytest.raises(OSError, match="planted"):
            program.forward_backward(batch)
            program.synchronize()
            program.forward_backward(batch)
    with pytest.raises(megacompile.ProgramError, match="repeat those micro-batches"):
        program.optimizer_step()
    assert math.isfinite(program.train_step(batch).loss)
    program.close()


def _broken(*args: Any) -> None:
    raise OSError("planted fault")


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_a_failing_micro_batch_of_one_step_leaves_none_of_its_gradients() -> None:
    program = compiled(build("llama", layers=1))
    batch = batch_for("llama")
    evil = {"input_ids": batch_for("llama", length=16)["input_ids"] + 1000}
    evil["labels"] = evil["input_ids"] - 1000
    before = program_state(program, batch)
    with pytest.raises(megacompile.ProgramError, match="failed on this batch"):
        program.train_step([batch, evil])
    assert all(torch.equal(v, before[n]) for n, v in program.state_dict().items())
    assert math.isfinite(program.train_step(batch).loss)
    program.close()


def program_state(program: megacompile.Program, batch: Any) -> dict[str, Tensor]:
    program.train_step(batch)
    return program.state_dict()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_children_are_refused_and_harmless() -> None:
    program = compiled(build("plain"), max_grad_norm=1.0)
    batch = batch_for("plain")
    program.train_step(batch)  # updates may still run
    child = os.fork()
    if child == 0:
        code = 1
        try:
            program.train_step(batch)
        except megacompile.ProgramError as error:
            code = 0 if "another process" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loader = DataLoader(TensorDataset(batch["x"], batch["y"]), batch_size=2, num_workers=2)
    for _ in range(2):
        for x, y in loader:
            assert math.isfinite(program.train_step({"x": x, "y": y}).loss)
    program.close()


def test_models_are_captured_in_two_threads_at_once() -> None:
    expected = {}
    found: dict[int, float] = {}
    for seed in (0, 1):
        program = compiled(build("gpt2-dropout", seed, layers=2))
        expected[seed] = float(program.train_step(batch_for("gpt2-dropout")).loss)
        program.close()

    def work(seed: int, model: nn.Module) -> None:
        program = compiled(model)
        found[seed] = float(program.train_step(batch_for("gpt2-dropout")).loss)
        program.close()

    threads = [threading.Thread(target=work, args=(s, build("gpt2-dropout", s, layers=2))) for s in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert found == expected


PRELUDE = """
import torch, megacompile
from tests.support.models import Plain, batch_for
def make(width=32):
    model = Plain(width)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return megacompile.compile(model, "1GB", optimizer=adamw, compute_dtype=torch.float32, max_grad_norm=1.0)
"""


@pytest.mark.slow
def test_a_process_ends_without_close() -> None:
    done = run_script(
        PRELUDE + "p = make()\nfor _ in range(3): p.train_step(batch_for('plain'))\nprint('over')"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "over\n"


@pytest.mark.slow
def test_an_exception_ends_a_process_with_a_program() -> None:
    done = run_script(PRELUDE + "p = make()\np.train_step(batch_for('plain'))\nraise SystemExit(7)")
    assert done.returncode == 7, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs rlimits")
def test_a_memory_limit_is_a_clear_error() -> None:
    """31 M parameters are 376 MB of state under a limit that leaves 400 MB to it and to compiling."""
    limit = """
import resource
model = Plain(1400)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + 400_000_000, hard))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
try:
    p = megacompile.compile(model, "80MB", optimizer=adamw, compute_dtype=torch.float32, max_grad_norm=1.0)
    p.train_step(batch_for("plain"))
except megacompile.BudgetError as error:
    print("BudgetError", error)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))  # looking at the weights may start threads
    print(all(bool(torch.isfinite(p).all()) for p in model.parameters()))
"""
    done = run_script(PRELUDE + limit)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("BudgetError"), done.stdout
    assert "host" in done.stdout
    assert done.stdout.endswith("True\n")


@pytest.mark.parametrize("form", ["fp32", "int8"])
def test_weights_loaded_after_an_inconsistent_step_start_without_its_moments(
    monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    """The run that goes on is, bit for bit, one that starts from these weights."""
    start, batch = build("plain").state_dict(), batch_for("plain")
    program, fresh = (compiled(build("plain"), optimizer_state=form) for _ in range(2))
    program.train_step(batch)
    program.synchronize()
    state = program._session.runtime.state  # type: ignore[union-attr]
    update, done = type(state).update, []

    def once(*args: Any, **options: Any) -> Any:
        if done:
            raise OSError("planted fault")
        done.append(True)
        return update(*args, **options)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="planted"):
        patch.setattr(type(state), "update", once)
        program.train_step(batch)
        program.synchronize()
    with pytest.raises(megacompile.ProgramError, match="moments to zero"):
        program.train_step(batch)
    program.load_state_dict(start)
    for _ in range(2):
        program.train_step(batch)
        fresh.train_step(batch)
    expected = fresh.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in program.state_dict().items())
    program.close()
    fresh.close()

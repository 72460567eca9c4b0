"""The program through its public face: habits of training, state, faults, dumps."""

from __future__ import annotations

import copy
import json
import math
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import megacompile
from megacompile.api import frontend, session
from megacompile.api.pipeline import Compiler
from megacompile.runtime import cpu
from megacompile.state import master_layout
from tests.support.cuda_programs import check_fault_is_told
from tests.support.models import Plain, batch_for, build
from tests.support.reference import EagerTrainer


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def compiled(model: nn.Module, budget: str = "1GB", **options: Any) -> megacompile.Program:
    options.setdefault("optimizer", adamw(model))
    return megacompile.compile(model, budget, compute_dtype=torch.float32, **options)


def assert_equal(program: megacompile.Program, model: nn.Module) -> None:
    state = program.state_dict()
    for name, value in model.named_parameters():
        assert torch.equal(state[name], value), name


def test_a_known_batch_does_not_wait_for_another_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    program, batch = compiled(build("plain")), batch_for("plain")
    program.train_step(batch)
    program.evaluate(batch)
    program.forward_backward(batch)
    program.optimizer_step()
    lock = mock.MagicMock()
    monkeypatch.setattr(frontend, "TRACING", lock)
    program.train_step(batch)
    program.evaluate(batch)
    program.forward_backward(batch)
    program.optimizer_step()
    assert not lock.__enter__.called
    program.close()


def test_a_batch_whose_state_found_no_memory_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = batch_for("llama", size=8, length=64), batch_for("llama")
    alone = compiled(build("llama"), example_batch=small)
    program = compiled(build("llama"))
    with monkeypatch.context() as patch, pytest.raises(megacompile.BudgetError, match="no memory"):
        patch.setattr(session, "allocate", mock.Mock(side_effect=megacompile.BudgetError("no memory")))
        program.prepare(large)
    assert program._session.decided.cuts is None
    program.prepare(small)
    assert len(program._session.decided.programs) == 1 and program.source == alone.source
    alone.close()
    program.close()


@pytest.mark.slow_cases(r"0\.(5|15)")
@pytest.mark.parametrize("fraction", [0.5, 0.25, 0.15])
def test_budget_is_kept_and_predicted(fraction: float) -> None:
    model, batch = build("llama"), batch_for("llama", size=8, length=64)
    parameters = sum(p.numel() for p in model.parameters())
    plain = compiled(copy.deepcopy(model), example_batch=batch).memory.predicted_peak_bytes
    budget = int(fraction * (plain + 12 * parameters))
    try:
        program = compiled(model, f"{budget}B", example_batch=batch)
    except megacompile.BudgetError as error:
        budget = int(str(error).split("batch is ")[1].split(" bytes")[0])
        program = compiled(model, f"{budget}B", example_batch=batch)
    for _ in range(2):
        program.train_step(batch)
    memory = program.memory
    assert memory.device_peak_bytes <= memory.predicted_peak_bytes <= budget
    assert memory.device_peak_bytes >= 0.97 * memory.predicted_peak_bytes
    program.close()


@pytest.mark.slow
def test_schedule_does_not_change_numbers() -> None:
    batch = batch_for("gpt2-dropout", size=4, length=48)
    states = []
    with pytest.raises(megacompile.BudgetError) as info:
        compiled(build("gpt2-dropout"), "1kB", max_grad_norm=1.0, example_batch=batch)
    least = int(str(info.value).split("batch is ")[1].split(" bytes")[0])
    for budget in ("1GB", f"{int(1.3 * least)}B", f"{least}B"):
        program = compiled(build("gpt2-dropout"), budget, max_grad_norm=1.0)
        for _ in range(3):
            program.train_step(batch)
        states.append((program.plan, program.state_dict()))
        program.close()
    assert len({p for p, _ in states}) == 3
    for _, state in states[1:]:
        assert all(torch.equal(state[n], v) for n, v in states[0][1].items())


def test_param_groups_frozen_parts_and_scheduler() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = build("llama", layers=2)  # equal ones, the first of which gives no gradient of its input
        model.model.embed_tokens.weight.requires_grad_(False)
        decay = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
        rest = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
        optimizer = torch.optim.AdamW(
            [{"params": decay, "lr": 1e-2, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}], lr=1.0
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1.0 / (1 + s))
        return model, optimizer, scheduler

    eager_model, eager_optimizer, eager_schedule = make()
    trainer = EagerTrainer(eager_model, eager_optimizer)
    model, optimizer, schedule = make()
    program = compiled(model, optimizer=optimizer)
    for step in range(4):
        batch = batch_for("llama", step)
        assert float(program.train_step(batch).loss) == trainer.train_step([batch])
        schedule.step()  # while updates are in flight: lr was taken when the step was issued
        eager_schedule.step()
    assert program.optimizer is optimizer
    assert_equal(program, eager_model)
    program.close()


def test_accumulation_by_hand() -> None:
    model = build("gpt2", layers=1)
    eager = copy.deepcopy(model)
    trainer = EagerTrainer(eager, adamw(eager), max_grad_norm=0.5)
    program = compiled(model, max_grad_norm=0.5)
    for step in range(3):
        batches = [batch_for("gpt2", 10 * step + i) for i in range(3)]
        for batch in batches:
            program.forward_backward(batch, weight=1 / 3)
        program.evaluate(batches[0])  # must not touch the gradients that wait
        out = program.optimizer_step()
        trainer.backward(batches, [1 / 3] * 3)
        norm = nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        trainer.update()
        assert out.grad_norm is not None
        assert float(out.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    for name, value in eager.named_parameters():
        assert torch.allclose(program.state_dict()[name], value, atol=1e-5), name
    with pytest.raises(megacompile.ProgramError, match="No gradient"):
        program.optimizer_step()
    program.forward_backward(batch)
    with pytest.raises(megacompile.ProgramError, match="optimizer_step"):
        program.train_step(batch)
    program.close()


def test_evaluate_between_steps_and_train_mode() -> None:
    model, batch = build("gpt2-dropout", layers=1), batch_for("gpt2-dropout")
    eager = copy.deepcopy(model).eval()
    program = compiled(model)
    before = program.evaluate(batch)
    assert float(before) == float(eager(**batch).loss.detach())
    losses = [float(program.train_step(batch).loss) for _ in range(3)]
    after = program.evaluate(batch)
    assert after < before
    assert float(program.evaluate(batch)) == float(after)
    assert len(set(losses)) == 3
    program.close()


def test_loss_fn_and_tuple_batch() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 3))
    eager = copy.deepcopy(model)

    def loss_fn(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return (outputs - batch[:, :3]).square().mean()

    trainer = EagerTrainer(eager, adamw(eager), loss_fn=loss_fn)
    program = compiled(model, loss_fn=loss_fn)
    for step in range(3):
        x = batch_for("plain", step)["x"]
        assert float(program.train_step(x).loss) == trainer.train_step([x])
    assert_equal(program, eager)
    program.close()


def test_varying_lengths_compile_few_programs() -> None:
    model = build("llama", layers=1)
    eager = copy.deepcopy(model)
    trainer = EagerTrainer(eager, adamw(eager))
    program = compiled(model, max_seq_len=48)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (24, 17, 23, 33, 40, 38, 41, 48, 24):
            batch = batch_for("llama", length, length=length)
            loss = float(program.train_step(batch).loss)
            assert loss == pytest.approx(trainer.train_step([batch]), rel=1e-4)
    assert sum("another program" in str(w.message) for w in caught) <= 4
    with pytest.raises(megacompile.BudgetError):
        compiled(build("llama", layers=1), "400kB", max_seq_len=4096, example_batch=batch_for("llama"))
    program.close()


def test_gathered_gradients_can_be_dropped() -> None:
    batch, other = batch_for("plain"), batch_for("plain", 1)
    with (
        compiled(build("plain"), max_grad_norm=0.5) as program,
        compiled(build("plain"), max_grad_norm=0.5) as fresh,
    ):
        program.forward_backward(other)
        program.drop_gradients()
        with pytest.raises(megacompile.ProgramError, match="No gradient is waiting"):
            program.optimizer_step()
        program.train_step(batch)
        fresh.train_step(batch)
        expected = fresh.state_dict()
        assert all(torch.equal(v, expected[n]) for n, v in program.state_dict().items())
    with pytest.raises(megacompile.ProgramError, match="closed"):
        program.train_step(batch)
    with pytest.raises(KeyError, match="first"), compiled(build("plain")) as program:
        raise KeyError("first")


def test_state_round_trip_and_sync() -> None:
    model, batch = build("qwen3"), batch_for("qwen3")
    program = compiled(model)
    first = program.state_dict()
    program.train_step(batch)
    trained = program.state_dict()
    assert any(not torch.equal(first[n], trained[n]) for n in first)
    program.load_state_dict(first)
    assert all(torch.equal(v, first[n]) for n, v in program.state_dict().items())
    other = build("qwen3", seed=5)
    program.sync_to(other)
    assert all(torch.equal(p, first[n]) for n, p in other.named_parameters())
    with pytest.raises(megacompile.MegacompileError, match="does not fit"):
        program.load_state_dict({"nothing": torch.zeros(1)})
    program.close()


def test_bf16_masters_stay_fp32() -> None:
    model, batch = build("llama", layers=1), batch_for("llama")
    exact = {n: p.detach().clone() for n, p in model.named_parameters()}
    program = megacompile.compile(model, "1GB", optimizer=torch.optim.AdamW(model.parameters(), lr=0.0))
    program.train_step(batch)
    state = program.state_dict()
    assert all(v.dtype == torch.float32 for v in state.values() if v.is_floating_point())
    assert all(torch.equal(state[n], v) for n, v in exact.items())
    program.close()


def test_nonfinite_loss_stops_before_the_backward() -> None:
    program = compiled(build("plain"))
    batch = batch_for("plain")
    program.train_step(batch)
    before = program.state_dict()
    with pytest.raises(megacompile.NonFiniteError, match="no parameter was changed"):
        program.train_step({**batch, "y": torch.full((2, 3), math.nan)})
    assert all(torch.equal(v, before[n]) for n, v in program.state_dict().items())
    assert math.isfinite(program.train_step(batch).loss)
    program.close()


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_nonfinite_gradient_leaves_the_state_whole(policy: str) -> None:
    program = compiled(build("plain"), on_nonfinite=policy)
    batch = batch_for("plain")
    program.train_step(batch)
    before = program.state_dict()
    program.train_step({**batch, "y": torch.full((2, 3), math.inf)})
    if policy == "raise":
        with pytest.raises(megacompile.NonFiniteError, match="not applied"):
            program.synchronize()
    assert all(torch.equal(v, before[n]) for n, v in program.state_dict().items())
    assert math.isfinite(program.train_step(batch).loss)
    program.close()


@pytest.mark.parametrize("where", ["prefetch", "push_grad", "update"])
def test_worker_exception_reaches_the_caller(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiler, "_may_reside", lambda *_: ())  # everything streams
    program = compiled(build("plain"), max_grad_norm=1.0)
    batch = batch_for("plain")
    program.train_step(batch)
    program.synchronize()

    owner, name = {
        "prefetch": (cpu, "_copy"),
        "push_grad": (master_layout, "slot_view"),
        "update": (type(program._session.runtime.state), "update"),  # type: ignore[union-attr]
    }[where]
    check_fault_is_told(program, batch, owner, name)
    if where == "update":
        with pytest.raises(megacompile.ProgramError, match="load_state_dict"):
            program.train_step(batch)
    else:
        assert math.isfinite(program.train_step(batch).loss)
    program.close()


def test_interrupt_leaves_no_hung_thread(request: pytest.FixtureRequest) -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, usual))
    before = set(threading.enumerate())
    program = compiled(build("llama"), max_grad_norm=1.0)
    batch = batch_for("llama", size=8, length=64)
    program.train_step(batch)
    timer = threading.Timer(0.02, signal.raise_signal, (signal.SIGINT,))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            program.train_step(batch)
    timer.join()
    assert math.isfinite(program.train_step(batch).loss)
    program.close()
    left = [t for t in threading.enumerate() if t not in before and t.name != "tqdm_monitor"]
    for thread in left:  # one may just close what an earlier test dropped
        thread.join(60)
    assert not any(thread.is_alive() for thread in left)


def test_dump_is_complete_and_deterministic(tmp_path: Path) -> None:
    texts = []
    for run in ("a", "b"):
        (tmp_path / run / "train").mkdir(parents=True)
        (tmp_path / run / "train" / f"05_0_{run}.txt").touch()  # of a pass that is gone
        program = compiled(build("llama"), "400kB", dump=tmp_path / run, example_batch=batch_for("llama"))
        files = sorted((tmp_path / run / "train").iterdir())
        texts.append({f.name: f.read_text() for f in files if f.name != "timeline.json"})
        program.close()
    assert {"00_capture.py.txt", "03_blocks.py", "09_step.py", "plan.json", "memory.txt"} <= set(texts[0])
    assert texts[0]["09_step.py"] == texts[1]["09_step.py"]
    assert texts[0] == texts[1]
    assert "for i in range" in texts[0]["09_step.py"]
    timeline = json.loads((tmp_path / "a" / "train" / "timeline.json").read_text())
    assert timeline["traceEvents"]
    plan = megacompile.Plan.from_json(texts[0]["plan.json"])
    assert plan.to_json() + "\n" == texts[0]["plan.json"]


def test_two_programs_in_one_process() -> None:
    batch = batch_for("plain")
    one, two = compiled(Plain()), compiled(build("plain", seed=3))
    for _ in range(2):
        assert float(one.train_step(batch).loss) != float(two.train_step(batch).loss)
    one.close()
    assert math.isfinite(two.train_step(batch).loss)
    two.close()
    assert "rt.forward" in two.source
    assert "verified" in str(two.schedule)
    assert len(two.schedule.graph.nodes) > 10

"""``save(wait=False)``: the checkpoint of the moment of the call, written while training goes on."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.errors import ProgramError
from megacompile.state import checkpoint, write_throttle
from megacompile.state.atomic_folder import replacing
from megacompile.state.snapshot import Snapshot
from tests.support.scripts import run_script

WIDTH, LAYERS = 96, 4
Program = megacompile.Program


class Stack(nn.Module):
    """Four equal layers, each a group of 74 kB, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.layers[0][0].weight.dtype)  # type: ignore[index]
        for layer in self.layers:
            x = x + layer(x)
        return (x**2).mean() * self.scale


def batch(index: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))


def compiled(budget: str = "least", **options: Any) -> Program:
    if budget == "least":
        budget = least(**options)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    options = {"compute_dtype": torch.float32, "example_batch": batch(0)} | options
    return megacompile.compile(model, budget, optimizer=optimizer, **options)


@functools.cache
def least(**options: Any) -> str:
    with pytest.raises(megacompile.BudgetError) as error:
        compiled("1kB", **options)
    return f"{error.value.least_bytes}B"


def without_room() -> Program:
    """A program whose host budget leaves nothing for copies."""
    program = compiled()
    nbytes = program._session.runtime.state.arena.nbytes  # type: ignore[union-attr]
    program.close()
    return compiled(host_budget=f"{nbytes}B")


def steps_of(program: Program) -> list[int]:
    """By group; its parameters have a gradient in every step."""
    steps = program._session.runtime.state.steps  # type: ignore[union-attr]
    return [count for of_group in steps for count in set(of_group)]


def snapshot_of(program: Program) -> Snapshot:
    return program._session.runtime.state._snapshot  # type: ignore[union-attr]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def digest(program: Program) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in program.state_dict().items()}


class Gate:
    """Holds writers, before they read anything or at each file, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self._patch = monkeypatch
        monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1 << 17)  # two layers

    def before_all(self) -> None:
        @contextlib.contextmanager
        def held(folder: Path) -> Iterator[Path]:
            self.opened.wait()
            with replacing(folder) as fresh:
                yield fresh

        self._patch.setattr(checkpoint, "replacing", held)

    def at_each_file(self) -> None:
        save = checkpoint.save_shard

        def held(path: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
            self.reached.set()
            self.opened.wait()
            return save(path, tensors)

        self._patch.setattr(checkpoint, "save_shard", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


@pytest.mark.slow_cases(r"(int[48]|resident, clipped)")
@pytest.mark.parametrize(
    ("budget", "options"),
    [
        ("least", {}),
        ("1GB", {}),
        ("least", {"max_grad_norm": 0.1}),
        ("1GB", {"max_grad_norm": 0.1}),
        ("least", {"optimizer_state": "int8", "compute_dtype": torch.bfloat16}),
        ("least", {"optimizer_state": "int4"}),
    ],
    ids=["immediate", "resident", "clipped", "resident, clipped", "int8", "int4"],
)
def test_updates_go_on_over_copies_while_nothing_is_written(
    budget: str, options: dict[str, Any], gate: Gate, tmp_path: Path
) -> None:
    program = compiled(budget, **options)
    assert bool(program.schedule.step.resident) == (budget == "1GB")
    program.train_step(batch(0))
    program.save(tmp_path / "waited")
    gate.before_all()
    program.save(tmp_path / "run", wait=False)
    for index in (1, 2):
        program.train_step(batch(index))
    program._session.synchronize()  # of the steps alone
    assert steps_of(program) == [3] * len(steps_of(program))
    assert snapshot_of(program).copied == len(steps_of(program)) > 2
    assert not (tmp_path / "run").exists()
    gate.opened.set()
    program.synchronize()
    assert contents(tmp_path / "run") == contents(tmp_path / "waited")
    straight, after = compiled(budget, **options), digest(program)
    for index in range(3):
        straight.train_step(batch(index))
    assert digest(straight) == after
    program.load(tmp_path / "run")
    for index in (1, 2):
        program.train_step(batch(index))
    assert digest(program) == after


@pytest.mark.parametrize("hold", ["before_all", "at_each_file"])
def test_an_update_without_room_for_a_copy_waits(
    hold: str, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = without_room() if hold == "before_all" else compiled()
    program.train_step(batch(0))
    program.save(tmp_path / "waited")
    getattr(gate, hold)()
    before, waiting, seen = steps_of(program), threading.Event(), []
    wait_for = threading.Condition.wait_for

    def noted(self: threading.Condition, *given: Any) -> Any:
        waiting.set()
        return wait_for(self, *given)

    def watch() -> None:
        waiting.wait()
        seen.append(steps_of(program))
        gate.opened.set()

    monkeypatch.setattr(threading.Condition, "wait_for", noted)
    watcher = threading.Thread(target=watch)
    watcher.start()
    program.save(tmp_path / "run", wait=False)
    if hold == "at_each_file":
        gate.reached.wait()  # a file is being written
    program.train_step(batch(1))
    watcher.join()
    program.synchronize()
    # before all, nothing is updated; else what one file holds is not: the groups that are updated last
    assert seen == [before] if hold == "before_all" else sorted(seen[0]) == [1, 1, 2, 2]
    assert snapshot_of(program).copied == 0 or hold == "at_each_file"
    assert steps_of(program) == [2] * len(before)
    assert contents(tmp_path / "run") == contents(tmp_path / "waited")


@pytest.mark.parametrize("call", ["close", "synchronize", "save", "load", "another program"])
def test_calls_that_wait_for_the_folder(call: str, gate: Gate, tmp_path: Path) -> None:
    program = compiled()
    program.train_step(batch(0))
    program.save(tmp_path / "waited")
    gate.at_each_file()
    program.save(tmp_path / "run", wait=False)
    thread = program._session.saving._thread  # type: ignore[union-attr]
    join = thread.join

    def opening() -> None:
        assert not (tmp_path / "run").exists()
        gate.opened.set()
        join()

    thread.join = opening  # type: ignore[method-assign]
    if call in ("save", "load"):
        getattr(program, call)(tmp_path / {"save": "second", "load": "waited"}[call])
    elif call == "another program":
        program.evaluate(batch(0))
    else:
        getattr(program, call)()
    assert contents(tmp_path / "run") == contents(tmp_path / "waited")


@pytest.mark.parametrize("call", ["finish_saving", "close", "an update without room"])
def test_a_writer_that_rests_is_hurried_by_who_waits(
    call: str, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_throttle, "SHARE", 1e-9)  # as good as never
    program = without_room() if call == "an update without room" else compiled()
    program.train_step(batch(0))
    program.save(tmp_path / "run", wait=False)
    thread = program._session.saving._thread  # type: ignore[union-attr]
    program.train_step(batch(1))
    program._session.synchronize()  # of the steps alone
    if call != "an update without room":
        assert thread.is_alive() and not (tmp_path / "run").exists()
        getattr(program, call)()
    thread.join()
    assert (tmp_path / "run").exists()
    program.close()


@pytest.mark.slow_cases(r"(synchronize|close|save)")
@pytest.mark.parametrize("call", ["train_step", "synchronize", "close", "save"])
def test_a_full_disk_is_told_by_the_next_call(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled()
    program.save(tmp_path / "run")
    before = contents(tmp_path / "run")
    program.train_step(batch(0))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_shard", full)
        program.save(tmp_path / "run", wait=False)
        program._session.saving._thread.join()  # type: ignore[union-attr]
    calls = {"train_step": (batch(1),), "save": (tmp_path / "other",)}
    with pytest.raises(ProgramError, match=r"not written to .*run: .*No space left"):
        getattr(program, call)(*calls.get(call, ()))
    assert contents(tmp_path / "run") == before and [p.name for p in tmp_path.iterdir()] == ["run"]
    if call != "close":
        program.train_step(batch(1))  # it is told once
        program.save(tmp_path / "run", wait=False)
        program.close()
        assert steps_of(program) == [2] * len(steps_of(program))
        assert contents(tmp_path / "run") != before


def full(path: Path, tensors: dict[str, Tensor]) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("fails", [False, True])
def test_who_asked_is_told_in_the_thread_and_nobody_else(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, told = compiled(), []

    def then(error: BaseException | None) -> None:
        told.append((threading.current_thread().name, str(error), (tmp_path / "run").exists()))

    with monkeypatch.context() as patch:
        if fails:
            patch.setattr(checkpoint, "save_shard", full)
        program.save(tmp_path / "run", wait=False, then=then)
        program.synchronize()
    ((thread, error, there),) = told
    assert (thread, there) == ("megacompile-save", not fails)
    assert ("No space left" if fails else "None") in error
    program.save(tmp_path / "run", then=then)
    assert told[1][1:] == ("None", True)
    program.close()


def test_a_thread_that_has_not_begun_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, waited, begin = compiled(), threading.Event(), Snapshot.begin

    def late(self: Snapshot) -> bool:
        waited.wait(60)  # rather than hang where the test fails
        return begin(self)

    monkeypatch.setattr(Snapshot, "begin", late)
    program.save(tmp_path / "run", wait=False)
    thread = program._session.saving._thread  # type: ignore[union-attr]
    join = thread.join
    monkeypatch.setattr(thread, "join", lambda: (waited.set(), join()))
    program.synchronize()
    assert (tmp_path / "run").is_dir()
    waited.set()
    program.close()


def test_what_nobody_asks_for_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = compiled()
    monkeypatch.setattr(checkpoint, "save_shard", full)
    program.save(tmp_path / "run", wait=False)
    program._session.saving._thread.join()  # type: ignore[union-attr]
    del program
    gc.collect()
    assert "not written to" in capsys.readouterr().err


def test_what_can_be_refused_is_refused_at_the_call(tmp_path: Path) -> None:
    program = compiled()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(megacompile.MegacompileError, match="holds no checkpoint"):
        program.save(tmp_path, wait=False)
    program.forward_backward(batch(0))
    with pytest.raises(ProgramError, match="Gradients are waiting"):
        program.save(tmp_path / "run", wait=False)
    program.close()


def test_a_save_that_is_interrupted_as_it_begins_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: threading.Thread) -> None:
        raise KeyboardInterrupt

    program = compiled()
    program.train_step(batch(0))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            program.save(tmp_path / "run", wait=False)
    program.train_step(batch(1))
    program.close()
    assert not any(tmp_path.iterdir())


def test_state_on_nvme_is_written_before_the_call_returns(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    program = compiled(host_budget="300kB", offload_dir=tmp_path / "scratch")
    assert program.memory.storage_bytes > 0
    program.train_step(batch(0))
    program.save(tmp_path / "a", wait=False)
    assert program._session.saving is None
    program.save(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    program.close()


ENDS = """
import os, signal, sys
from pathlib import Path
from megacompile.state import checkpoint
from tests.e2e.test_background_save import batch, compiled
folder, end = Path(sys.argv[1]), sys.argv[2]
program = compiled("1GB")
program.train_step(batch(0))
program.save(folder / "first")
program.save(folder / "run")
save, checkpoint.SHARD_BYTES = checkpoint.save_shard, 1 << 17
def second(path, tensors):
    if end == "killed" and path.name == "state-00002.safetensors":
        os.kill(os.getpid(), signal.SIGKILL)
    return save(path, tensors)
checkpoint.save_shard = second
program.train_step(batch(1))
program.save(folder / "run", wait=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "returns"])
def test_the_end_of_the_process(end: str, tmp_path: Path) -> None:
    """A killed one leaves the checkpoint before; one that returns from its script ends the writing first."""
    process = run_script(ENDS, tmp_path, end)
    assert process.returncode == (-9 if end == "killed" else 0), process.stderr
    program = compiled("1GB")
    program.load(tmp_path / "run")
    assert steps_of(program) == [1 if end == "killed" else 2] * len(steps_of(program))
    assert (contents(tmp_path / "run") == contents(tmp_path / "first")) == (end == "killed")
    program.close()


def test_a_process_that_is_forked_while_one_writes_keeps_no_lock(tmp_path: Path) -> None:
    """As workers of a data loader are, which live on."""
    (reads, parent), (ready, child) = os.pipe(), os.pipe()
    with replacing(tmp_path / "a") as fresh:
        (fresh / "f").write_text("first")
        pid = os.fork()
        if pid == 0:
            os.close(parent)
            os.write(child, b"1")
            os.read(reads, 1)  # until the parent is done
            os._exit(0)
        os.read(ready, 1)
        held = [handle.readlink().name for handle in Path(f"/proc/{pid}/fd").iterdir()]
        assert ".a.saving" in held
    with replacing(tmp_path / "a") as fresh:
        (fresh / "f").write_text("second")
    os.close(parent)
    os.waitpid(pid, 0)
    assert (tmp_path / "a" / "f").read_text() == "second"
    for handle in (reads, ready, child):
        os.close(handle)

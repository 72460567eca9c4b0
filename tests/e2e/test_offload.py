"""Training with state on NVMe: bitwise the in-RAM run, within the host budget, whole after faults."""

from __future__ import annotations

import errno
import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.api.program import Program
from megacompile.errors import BudgetError, MegacompileError, ProgramError, StorageError
from megacompile.schedule.plan import Plan
from tests.support.models import Residual, Stack
from tests.support.ranks import run_ranks, saved, whole


def batch(step: int = 0) -> Tensor:
    return torch.randn(16, Stack.width, generator=torch.Generator().manual_seed(step))


def compiled(host: str, folder: Path | None = None, **options: Any) -> Program:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return megacompile.compile(
        model, "20MB", optimizer=optimizer, host_budget=host, offload_dir=folder, **options
    )


def trained(program: Program, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    for step in range(steps):
        losses.append(float(program.train_step(batch(step)).loss))
        losses.append(float(program.evaluate(batch(9))))
    state = program.state_dict()
    program.close()
    return losses, state


def states(program: Program) -> set[str]:
    return {group.state for group in program.plan.groups}


@pytest.mark.slow_cases(r"\S+options[03]")
@pytest.mark.parametrize(
    ("host", "where", "options"),
    [
        ("4MB", "nvme", {}),
        ("2.6MB", "nvme-all", {}),
        ("6MB", "nvme", {"max_grad_norm": 0.1}),
        ("4.2MB", "nvme", {"compute_dtype": torch.float32, "optimizer_state": "int8"}),
    ],
)
def test_bitwise_the_run_in_ram(host: str, where: str, options: dict[str, Any], tmp_path: Path) -> None:
    expected = trained(compiled("100MB", **options))
    program = compiled(host, tmp_path, **options)
    program.prepare(batch())
    assert where in states(program)
    losses, state = trained(program)
    assert losses == expected[0]
    assert state.keys() == expected[1].keys()
    assert all(torch.equal(state[name], expected[1][name]) for name in state)
    memory = program.memory
    assert sum(memory.host_bytes.values()) <= memory.host_budget_bytes
    assert len(list(tmp_path.glob("*.scratch"))) == 1  # the state can still be read
    del program
    gc.collect()
    assert not list(tmp_path.glob("*.scratch"))


class Adapted(nn.Module):
    """A frozen weight with an adapter, both of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(64, 64), nn.Linear(64, 64)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.frozen(x) + self.adapter(x))


def test_frozen_and_trained_weights_of_a_block_have_regions_of_their_own(tmp_path: Path) -> None:
    values = []
    for folder in (None, tmp_path):
        torch.manual_seed(0)
        layers = [Adapted() for _ in range(4)]
        model = nn.Sequential(*layers, nn.Linear(64, 1))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        program = megacompile.compile(
            model, "1MB", optimizer=optimizer, loss_fn=lambda y, _: y.square().mean(), offload_dir=folder,
            host_budget="100MB" if folder is None else "150kB", compute_dtype=torch.float32,
        )  # fmt: skip
        for step in range(3):
            program.train_step(torch.randn(4, 64, generator=torch.Generator().manual_seed(step)))
        if folder is not None:
            assert "host" not in states(program)
        values.append(program.state_dict())
        program.close()
    assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())


def test_accumulated_gradients_and_loaded_state(tmp_path: Path) -> None:
    results = []
    for folder in (None, tmp_path):
        program = compiled("100MB" if folder is None else "7MB", folder)
        micro = [(batch(0),), (batch(1),)]
        program.prepare(micro)  # leaves room for the gradients of all later calls
        program.load_state_dict({n: 0.5 * v for n, v in program.state_dict().items()})
        program.train_step(micro)
        program.forward_backward(batch(2))
        program.optimizer_step()
        results.append(program.state_dict())
        program.close()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_what_a_step_writes_is_said_with_what_it_means_for_the_drive(tmp_path: Path) -> None:
    program = compiled("4MB", tmp_path)
    program.train_step(batch())
    program.synchronize()
    offload = program._session.runtime.state.offload  # type: ignore[union-attr]
    assert offload is not None
    taken = offload.storage.written_bytes
    program.train_step(batch())
    program.synchronize()
    written = sum(op.nbytes for op in program.schedule.step.on("nvme_write"))
    padded = offload.storage.written_bytes - taken  # arrays end at whole pages
    assert 0 < written <= padded < 1.01 * written
    for text in (str(program.memory), str(program.schedule)):
        assert "written per step" in text and "a drive rated for" in text
    program.close()


def offloading(plan: Plan, window: int) -> Plan:
    """The plan with everything saved, on NVMe, and all state on the device."""
    blocks = tuple(replace(block, checkpoint="all", saved_on="nvme") for block in plan.blocks)
    groups = tuple(replace(group, state="device") for group in plan.groups)
    return replace(plan, blocks=blocks, groups=groups, window=window)


@pytest.mark.slow_cases(r"[12]")
@pytest.mark.parametrize("window", [1, 2, 3])
def test_offloads_to_storage_change_no_bit(window: int, tmp_path: Path) -> None:
    program = compiled("100MB")
    program.train_step(batch(0))
    plan = program.plan
    expected, state = trained(program)
    program = compiled("100MB", tmp_path, plan=offloading(plan, window))
    program.train_step(batch(0))
    moved = [op.nbytes for op in program.schedule.step.on("nvme_write")]
    assert program.memory.host_bytes["offloaded"] == window * max(moved)
    assert program.memory.storage_bytes == sum(moved)
    losses, got = trained(program)
    assert losses == expected
    assert all(torch.equal(v, got[n]) for n, v in state.items())


@pytest.mark.slow
@pytest.mark.parametrize(("host", "gone"), [("6.1MB", 5), ("5MB", 6)])
def test_offloads_leave_for_storage_where_ram_is_too_small_for_them(
    host: str, gone: int, tmp_path: Path
) -> None:
    """8 blocks with inputs of 1 MB, of which the device has room for one, and RAM for one or two.

    In FP32, as products of this size take seconds in bf16 on CPUs without instructions for it.
    """
    rows = torch.randn(2048, Stack.width, generator=torch.Generator().manual_seed(0))
    losses = {}
    for budget, folder in (("1GB", None), (host, tmp_path)):
        model = nn.Sequential(*(Residual(Stack.width) for _ in range(8)))
        for i, parameter in enumerate(model.parameters()):
            nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(i))
        program = megacompile.compile(
            model,
            "18.5MB",
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
            compute_dtype=torch.float32,
            loss_fn=lambda out, batch: out.square().mean(),
            host_budget=budget,
            offload_dir=folder,
        )
        losses[budget] = [float(program.train_step(rows).loss) for _ in range(3)]
        program.close()
    assert [block.saved_on for block in program.plan.blocks].count("nvme") == gone
    assert sum(program.memory.host_bytes.values()) <= program.memory.host_budget_bytes
    assert losses["1GB"] == losses[host]


def test_an_offload_that_is_lost_on_storage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled("100MB")
    program.train_step(batch(0))
    plan = program.plan
    program.close()
    program = compiled("100MB", tmp_path, plan=offloading(plan, 2), max_grad_norm=1.0)
    program.train_step(batch(0))
    before = program.state_dict()

    def garbled(file: int, buffers: list[memoryview], offset: int) -> int:
        count = read(file, buffers, offset)
        buffers[0][0] ^= 1
        return count

    read = os.preadv
    monkeypatch.setattr(os, "preadv", garbled)
    with pytest.raises(
        StorageError,
        match=r"of the offloaded activations of block 2, micro-batch 0 .* is not what was written",
    ):
        program.train_step(batch(1))
    monkeypatch.undo()
    assert all(torch.equal(v, before[n]) for n, v in program.state_dict().items())
    program.train_step(batch(1))
    program.close()


def test_nothing_is_stored_where_ram_suffices(tmp_path: Path) -> None:
    program = compiled("100MB", tmp_path)
    program.train_step(batch())
    assert states(program) == {"host"} and not list(tmp_path.iterdir())
    program.close()


def test_too_little_ram_is_refused_with_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"give an offload_dir \(then [0-9.]+ MB suffice\)"):
        compiled("3MB").train_step(batch())
    with pytest.raises(BudgetError, match=r"too small even with all state on NVMe: .* take [0-9.]+ MB"):
        compiled("1MB", tmp_path).train_step(batch())
    with pytest.raises(MegacompileError, match="is no directory: make it first"):
        compiled("4MB", tmp_path / "nowhere")
    with pytest.raises(MegacompileError, match="names no directory"):
        compiled("4MB", 3)  # type: ignore[arg-type]


def test_programs_of_one_process_share_a_directory(tmp_path: Path) -> None:
    """A closed one too, whose state can still be read."""
    with compiled("4MB", tmp_path) as first:
        first.train_step(batch())
    with compiled("4MB", tmp_path) as second:
        second.train_step(batch(1))
        assert len(list(tmp_path.glob("*.scratch"))) == 2
    for program, number in ((first, 0), (second, 1)):
        with compiled("100MB") as plain:
            plain.train_step(batch(number))
        state = program.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())


def fails_with_an_inconsistent_program(program: Program, words: str) -> None:
    """A step or the wait after it raises, the program refuses to go on, and a loaded state heals it."""
    with pytest.raises(StorageError, match=words):
        program.train_step(batch(1))
        program.synchronize()
    with pytest.raises(ProgramError, match="load a checkpoint"):
        program.train_step(batch(1))


def test_a_flipped_bit_is_never_trained_on(tmp_path: Path) -> None:
    program = compiled("4MB", tmp_path)
    program.train_step(batch())
    saved = program.state_dict()
    (path,) = tmp_path.glob("*.scratch")
    with path.open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))
    fails_with_an_inconsistent_program(program, rf"Block 0 of the state of .* \(byte 0 of {path}\)")
    with pytest.warns(
        UserWarning, match="was lost on storage: what of it is not loaded now starts from zero"
    ):
        program.load_state_dict(saved)
    assert all(torch.equal(v, saved[n]) for n, v in program.state_dict().items())
    program.close()


def test_a_disk_that_fills_up_in_the_middle_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled("4MB", tmp_path)
    program.train_step(batch())
    saved = program.state_dict()
    calls = 0

    def full(file: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, buffers, offset)

    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", full)
    fails_with_an_inconsistent_program(program, "cannot write: No space left")
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="was lost on storage"):
        program.load_state_dict(saved)
    program.train_step(batch())
    program.close()


def test_an_update_that_is_skipped_writes_nothing(tmp_path: Path) -> None:
    program = compiled("6MB", tmp_path, on_nonfinite="skip")
    program.train_step(batch())
    before = program.state_dict()
    program.train_step(batch() * float("inf"))
    program.synchronize()
    assert all(torch.equal(v, before[n]) for n, v in program.state_dict().items())
    program.close()


def test_checkpoints_pass_between_ram_and_storage(tmp_path: Path) -> None:
    """Saved from storage, loaded in RAM and the other way round: the runs go on bit for bit."""
    stored = compiled("2.6MB", tmp_path)
    stored.train_step(batch(0))
    stored.save(tmp_path / "a")
    expected = trained(stored)
    kept = compiled("100MB")
    kept.prepare(batch(0))
    kept.load(tmp_path / "a")
    kept.save(tmp_path / "b")
    assert trained(kept)[0] == expected[0]
    (tmp_path / "second").mkdir()
    again = compiled("2.6MB", tmp_path / "second")
    again.prepare(batch(0))
    again.load(tmp_path / "b")
    losses, state = trained(again)
    assert losses == expected[0]
    assert all(torch.equal(state[n], expected[1][n]) for n in state)


def on_rank(rank: int, folder: Path, host: str | None, options: dict[str, Any]) -> tuple[list[float], Any]:
    """Steps with a checkpoint in between, and what is on the drive."""
    (folder / "drive").mkdir(exist_ok=True)
    program = compiled(host or "100MB", folder / "drive" if host else None, **options)
    losses = []
    for step in range(3):
        micro = [(batch(4 * step + 2 * m + rank),) for m in range(2)]
        losses.append(float(program.train_step(micro).loss))
        if step == 1:
            program.save(folder / "saved")
            program.train_step(micro)
            program.load(folder / "saved")
    program.save(folder / "last")
    return losses, states(program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "where", "options"),
    [
        ("6MB", {"nvme"}, {}),
        ("4.4MB", {"nvme", "nvme-all"}, {"max_grad_norm": 0.1}),
        ("4.4MB", {"nvme-all"}, {"compute_dtype": torch.float32}),
    ],
)
def test_ranks_have_their_shares_on_a_drive(
    host: str, where: set[str], options: dict[str, Any], tmp_path: Path
) -> None:
    """Bit for bit the ranks whose state is in RAM, a checkpoint in between."""
    folders = tmp_path / "ram", tmp_path / "stored"
    for folder in folders:
        folder.mkdir()
    expected = whole(run_ranks(2, on_rank, folders[0], None, options))
    found = whole(run_ranks(2, on_rank, folders[1], host, options))
    assert [losses for losses, _ in found] == [losses for losses, _ in expected]
    assert found[0][1] == where
    assert {path.name for path in (folders[1] / "drive").iterdir()} == {"rank-0", "rank-1"}
    before, after = (saved(folder / "last") for folder in folders)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)

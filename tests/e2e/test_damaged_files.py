"""Every kind of file that is read: with a byte flipped, its end lost or a number changed it is refused by
name, or means what was written. What people may edit is refused by name, or taken if its numbers can be."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import megacompile
from megacompile.bench.kernel_bench import Row
from megacompile.bench.program_targets import read_calls
from megacompile.bench.results import read_rows
from megacompile.blocks.kernel_calls import KernelCall
from megacompile.cli.inspect import read_schedule
from megacompile.hardware.catalog import MachineProfile, profile_json, read_profile
from megacompile.hardware.kept_profile import keep_profile, kept_profile
from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import simulate
from megacompile.json_codec import to_plain
from megacompile.planner import plan_cache
from megacompile.planner.baselines import read_plan
from megacompile.schedule.plan import Plan
from megacompile.state.model_export import describe
from megacompile.state.saved_values import saved_values
from tests.support.damage import flipped, renumbered, truncated, unsealed
from tests.support.models import Plain
from tests.unit.report.test_page import schedule_of

Size = tuple[int, int, int | None]
SIZES = [
    pytest.param((6, 4, 12), id="few"),
    pytest.param((200, 200, None), id="all", marks=pytest.mark.nightly),
]
"""Of flipped bytes, of truncations, of places with numbers."""
MACHINE = Machine("a card", 1e14, 1e12, 2e10, 2e10, 1e11, 1e-5, 1e-5, processors=132, chip=90)
BATCH = {"x": torch.ones(2, 16), "y": torch.ones(2, 3)}


@dataclass
class Kind:
    """A kind of file: where one is, what is read of it, and whether people may edit it."""

    file: Path
    read: Callable[[], Any]
    edited: bool = False  # then other numbers are taken, where they can be
    left_out: bool = False  # what is damaged is as if it were not there


def harmed(content: bytes, size: Size, text: bool) -> Iterator[bytes]:
    flips, cuts, places = size
    yield from itertools.chain(flipped(content, flips), truncated(content, cuts))
    if text:
        yield from renumbered(content, places)


def check(kind: Kind, size: Size) -> None:
    """Read a file as it was written, and in each way damaged."""
    content, expected = kind.file.read_bytes(), kind.read()
    assert expected is not None
    for harm in harmed(content, size, kind.file.suffix in (".json", ".jsonl")):
        if harm == content:
            continue
        kind.file.write_bytes(harm)
        try:
            found = kind.read()
        except megacompile.MegacompileError as error:
            assert str(kind.file.parent) in str(error) and "\n" not in str(error)
        else:
            assert found == expected or kind.edited or (kind.left_out and found is None)
    kind.file.write_bytes(content)
    assert kind.read() == expected


def program() -> megacompile.Program:
    torch.manual_seed(0)
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return megacompile.compile(
        model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, example_batch=BATCH, seed=3
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[megacompile.Program, Path]]:
    one = program()
    one.train_step(BATCH)
    folder = tmp_path_factory.mktemp("checkpoint") / "saved"
    one.save(folder)
    yield one, folder
    one.close()


def loaded(one: megacompile.Program, folder: Path) -> Any:
    """All that a checkpoint gives to a program: bits, steps, settings, the place among seeds."""
    one.optimizer.param_groups[0] |= {"lr": 0.5, "betas": (0.5, 0.5), "eps": 0.5, "weight_decay": 0.5}
    one.load(folder)
    session = one._session
    assert session.runtime is not None
    state = session.runtime.state
    arrays = [
        (name, array, tensor.numpy().tobytes())
        for group in state.parts()
        for name, of_name in group.items()
        for array, tensor in of_name.items()
    ]
    settings = [
        g[name] for g in one.optimizer.param_groups for name in ("lr", "betas", "eps", "weight_decay")
    ]
    return arrays, [list(s) for s in state.steps], settings, session.seed, session.calls


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["checkpoint.json", "state-00001.safetensors"])
def test_a_checkpoint(name: str, size: Size, trained: tuple[megacompile.Program, Path]) -> None:
    one, folder = trained
    check(Kind(folder / name, lambda: loaded(one, folder)), size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["checkpoint.json", "state-00001.safetensors"])
def test_what_is_exported(name: str, size: Size, trained: tuple[megacompile.Program, Path]) -> None:
    model, folder = describe(Plain()), trained[1]

    def exported() -> Any:
        return [(name, v.shape, v.dtype, v.numpy().tobytes()) for name, v in saved_values(folder, model)]

    check(Kind(folder / name, exported), size)


@pytest.mark.parametrize("size", SIZES)
def test_a_manifest_of_an_older_version(size: Size, tmp_path: Path) -> None:
    """Without a digest another rate may be taken, and what could not be saved is refused."""
    one = program()
    one.train_step(BATCH)
    one.save(tmp_path / "saved")
    unsealed(tmp_path / "saved" / "checkpoint.json")
    with warnings.catch_warnings(record=True):
        check(
            Kind(tmp_path / "saved" / "checkpoint.json", lambda: loaded(one, tmp_path / "saved"), True), size
        )
    one.close()


@pytest.mark.parametrize("size", SIZES)
def test_what_a_trainer_adds(size: Size, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
    pytest.importorskip("accelerate", reason="accelerate is missing: pip install accelerate")
    from megacompile.integrations.resume import Resume
    from megacompile.integrations.trainer_checkpoints import check_checkpoint
    from tests.e2e.test_trainer import Trainer, trainer
    from tests.support import kills

    trainer(
        Trainer,
        tmp_path,
        make=kills.small,
        max_steps=1,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="no",
    ).train()
    folder = tmp_path / "checkpoint-1"

    def resumed() -> Any:
        check_checkpoint(folder)
        assert Resume.steps(str(folder)) == 1
        names = ("trainer_state.json", "scheduler.pt", "rng_state.pth")
        return [(folder / name).read_bytes() for name in names]

    for name in ("checksums.json", "trainer_state.json", "scheduler.pt", "rng_state.pth"):
        check(Kind(folder / name, resumed), size)


@pytest.mark.parametrize("size", SIZES)
def test_answers_to_prompts(size: Size, tmp_path: Path) -> None:
    samples = pytest.importorskip("megacompile.integrations.samples")
    lines = [{"step": step, "prompt": "a fox", "answer": "jumps\u2028over\n"} for step in (1, 2)]
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    assert samples.read_samples(file) == lines
    check(Kind(file, lambda: samples.read_samples(file), edited=True), size)


@pytest.mark.parametrize("size", SIZES)
def test_a_schedule(size: Size, tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(schedule_of(2, 1).to_json())
    check(Kind(file, lambda: read_schedule(file)), size)


@pytest.mark.parametrize("size", SIZES)
def test_a_plan_and_a_machine_that_caches_keep(
    size: Size, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "plan.json"
    plan_cache.write(file, schedule_of(3, 1).plan)
    check(Kind(file, lambda: plan_cache.read(file), left_out=True), size)
    file = keep_profile(MachineProfile(MACHINE, "mine", device_bytes=10**10))
    check(Kind(file, lambda: kept_profile("a card", 132), left_out=True), size)


@pytest.mark.parametrize("size", SIZES)
def test_a_plan_file(size: Size, tmp_path: Path) -> None:
    """It leads to a step, whatever is in it, or to a sentence."""
    schedule, file = schedule_of(2, 1), tmp_path / "plan.json"
    file.write_text(schedule.plan.to_json())
    (tmp_path / "schedule.json").write_text(schedule.to_json())

    def planned() -> Plan:
        shown = read_schedule(file)
        assert shown.plan == read_plan(file) and shown.peak_bytes > 0 and shown.predicted_seconds > 0
        return shown.plan

    check(Kind(file, planned, edited=True), size)


@pytest.mark.parametrize("size", SIZES)
def test_a_machine_file(size: Size, tmp_path: Path) -> None:
    """Times are predicted by it, whatever is in it, or it is refused."""
    step, file = schedule_of(2, 1).step, tmp_path / "machine.json"
    file.write_text(profile_json(MachineProfile(MACHINE, "mine", device_bytes=10**10)))

    def predicted() -> MachineProfile:
        profile = read_profile(file)
        seconds = simulate(step, profile.machine).step_seconds
        assert 0 < seconds < float("inf")
        return profile

    check(Kind(file, predicted, edited=True), size)


@pytest.mark.parametrize("size", SIZES)
def test_what_kernels_are_measured_by(size: Size, tmp_path: Path) -> None:
    calls = [to_plain(KernelCall("glu", "bfloat16", ((48, 64), (48, 64)), ("silu",))) | {"calls": 4}]
    (tmp_path / "plan.json").write_text(schedule_of(2, 1).plan.to_json())
    (tmp_path / "kernel_calls.json").write_text(json.dumps(calls, indent=1))
    read = Kind(tmp_path / "kernel_calls.json", lambda: read_calls(tmp_path / "plan.json"), edited=True)
    check(read, size)
    rows = [to_plain(Row("glu", "bf16", "48 x 64", "ours", "forward", 0.1, 0.1, 0.2))]
    (tmp_path / "kernels.json").write_text(json.dumps({"hardware": {}, "rows": rows}, indent=1))
    check(Kind(tmp_path / "kernels.json", lambda: read_rows(tmp_path / "kernels.json"), edited=True), size)

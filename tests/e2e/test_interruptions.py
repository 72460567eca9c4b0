"""What interrupts the Trainer: kills, full disks, signals, damaged checkpoints; the run goes on unchanged."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import resource
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megacompile
from megacompile.state.model_ownership import is_owned
from tests.e2e.test_trainer import Trainer, logs, trainer
from tests.support.damage import resealed, unsealed
from tests.support.scripts import run_script

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
pytest.importorskip("accelerate", reason="accelerate is missing: pip install accelerate")
last_checkpoint = pytest.importorskip("megacompile.integrations.trainer_checkpoints").last_checkpoint
saving = pytest.importorskip("megacompile.integrations.saving")
kills = pytest.importorskip("tests.support.kills")

STEPS = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "no"}


def of(folder: Path, **given: Any) -> Any:
    return trainer(Trainer, folder, make=kills.small, **STEPS | given)


def assert_same_run(one: Any, other: Any) -> None:
    assert logs(one)[:-1] == logs(other)[:-1]  # the last has the mean of the steps made here
    values = other.program.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in one.program.state_dict().items())


class At(transformers.TrainerCallback):  # type: ignore[misc]
    """Call a function once, at an event of a step, counted from 1."""

    def __init__(self, event: str, step: int, call: Callable[[], Any]) -> None:
        self.step, self.call = step, call
        setattr(self, event, self._at)

    def _at(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.step = 0
            self.call()


def digest(folder: Path) -> str:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def sends(number: int, step: int, event: str = "on_substep_end") -> At:
    return At(event, step, lambda: os.kill(os.getpid(), number))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "times"), [("train", 1), ("train", 20), ("several", 4), ("learn", 4)])
def test_killed_at_random_moments_a_run_ends_as_the_undisturbed(
    kind: str, times: int, tmp_path: Path
) -> None:
    """At file operations and updates; by reinforcement within rollouts too."""
    pytest.importorskip("trl" if kind == "learn" else "transformers")
    code = "import runpy; runpy.run_module('tests.support.kills', run_name='__main__', alter_sys=True)"
    output = run_script(code, tmp_path, times, 0, kind)
    assert output.returncode == 0, output.stderr
    done, equal, other = map(int, output.stdout.splitlines()[-1].split())
    assert (done, other) == (times, 0)
    assert equal >= 1


def test_at_each_file_operation_a_kill_would_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    """Looked at where a kill could come: the newest whole one never changes, and none is taken back.

    The first takes the place of one of an earlier run.
    """
    of(tmp_path, max_steps=1, learning_rate=1e-3).train()
    seen: set[str] = set()
    found: list[tuple[str, str]] = []
    lock = threading.Lock()

    def look(name: str) -> None:
        with lock:
            seen.add(name)
            newest, content = last_checkpoint(str(tmp_path)), ""
            if newest is not None:
                with contextlib.suppress(FileNotFoundError):
                    content = digest(Path(newest))
            if newest == last_checkpoint(str(tmp_path)) and newest is not None:
                found.append((Path(newest).name, content))  # else the other thread had another one whole

    one = of(
        tmp_path, save_total_limit=1, max_steps=4, callbacks=[At("on_step_end", 2, lambda: kills.watch(look))]
    )
    try:
        one.train()
    finally:
        kills.watch(None)
    assert seen >= {
        "open",
        "write",
        "pwrite",
        "ftruncate",
        "write_record",
        "replace",
        "rename",
        "rmdir",
        "unlink",
    }
    assert list(dict.fromkeys(name for name, _ in found)) == [f"checkpoint-{n}" for n in range(1, 5)]
    assert len(set(found)) == 5
    assert [name for name, _ in found] == sorted(name for name, _ in found)


class Disk:
    """Takes files of ``limit`` bytes, and says what a full one does of longer ones."""

    def __init__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def takes(self, limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, self.before[1]))

    def takes_all(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.fixture
def disk() -> Iterator[Disk]:
    one = Disk()
    yield one
    one.takes_all()


FULL = {  # by step: from which call on how much is taken, and what is written then
    2: ("_save_optimizer_and_scheduler", 0, "iostream error"),
    3: ("export_model", 2000, "The model was not exported"),
    4: ("go_on", 2000, "The checkpoint was not written"),
    5: ("_save_rng_state", 0, "inline_container"),
    6: ("state", 100, "File too large"),  # trainer_state.json
}


def fill_at_its_steps(disk: Disk, one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the steps of FULL the disk takes no more, from the call on that stands there."""

    def full(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            where, limit, _ = FULL.get(one.state.global_step, ("", 0, ""))
            if where == name:
                disk.takes(limit)
            result = method(*args, **kwargs)
            if where == "state" and name == "_save_rng_state":
                disk.takes(limit)
            return result

        return called

    places = [(one, "_save_optimizer_and_scheduler"), (one, "_save_rng_state")]
    for place, name in [*places, (saving, "export_model"), (saving.Writing, "go_on")]:
        monkeypatch.setattr(place, name, full(name, getattr(place, name)))


@pytest.mark.slow
def test_a_full_disk_costs_a_checkpoint_and_not_the_training(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "num_train_epochs": 3,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so later ones are better, as the rows to evaluate on are noise
    }
    one = of(tmp_path, **settings)
    fill_at_its_steps(disk, one, monkeypatch)
    save = one._save_checkpoint
    kept: list[str | None] = []

    def checked(*args: Any) -> None:
        save(*args)
        one._saving.finish()
        disk.takes_all()
        kept.append(last_checkpoint(str(tmp_path)))
        assert Path(one.state.best_model_checkpoint).is_dir()

    monkeypatch.setattr(one, "_save_checkpoint", checked)
    with pytest.warns(UserWarning, match="The disk did not take") as caught:
        one.train()
    said = [str(w.message) for w in caught if "The disk did not take" in str(w.message)]
    assert len(said) == len(FULL)
    for text, (step, (_, _, reason)) in zip(said, FULL.items(), strict=True):
        assert f"{tmp_path / f'checkpoint-{step}'}, which was removed; training goes on" in text
        assert reason in text
    first, *_, last = (str(tmp_path / f"checkpoint-{n}") for n in (1, 7, 8, 9))
    assert kept[:6] == [first] * 6
    assert kept[-1] == last
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"checkpoint-{n}" for n in (1, 7, 8, 9)]
    again = of(tmp_path / "undisturbed", **settings)
    again.train()
    assert_same_run(one, again)
    disk.takes(2000)
    with pytest.raises(megacompile.ProgramError, match="The model was not exported"):
        one.save_model(str(tmp_path / "model"))


def test_what_fails_after_a_checkpoint_is_whole_is_raised(tmp_path: Path, monkeypatch: Any) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(saving, "rotate_checkpoints", unreachable)
    with pytest.raises(ConnectionError):
        of(tmp_path, max_steps=1).train()
    assert last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-1")


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Any]]:
    """Python's own handlers, which a suite's runner may have replaced."""
    found = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in found.items()}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def installed() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


def test_a_signal_saves_stops_and_changes_nothing(
    defaults: dict[int, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the middle of an epoch, and at its end, where an evaluation and a checkpoint are due anyway."""
    by_epoch = {"save_strategy": "epoch", "eval_strategy": "epoch"}
    whole = of(tmp_path / "whole", **by_epoch)
    whole.train()
    for number, step in ((signal.SIGINT, 2), (signal.SIGTERM, 3)):
        one = of(tmp_path / "run", callbacks=[sends(number, step)], **by_epoch)
        one.train(resume_from_checkpoint=step > 2)
        assert one.state.global_step == step
        said = f"{number.name} stopped the training after update {step}: train(resume_from_checkpoint=True)"
        assert f"{said} goes on from {tmp_path / 'run' / f'checkpoint-{step}'}." in capfd.readouterr().err
        assert installed() == defaults
    one = of(tmp_path / "run", **by_epoch)
    one.train(resume_from_checkpoint=True)
    assert_same_run(one, whole)


def test_an_interrupted_training_keeps_the_best_and_the_last(defaults: Any, tmp_path: Path) -> None:
    settings = {
        "save_strategy": "best",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "greater_is_better": False,  # so the first one is the best, as the rows to evaluate on are noise
        "metric_for_best_model": "eval_loss",
        "save_total_limit": 1,
    }
    one = of(tmp_path, callbacks=[sends(signal.SIGTERM, 4)], **settings)
    one.train()
    assert Path(one.state.best_model_checkpoint).name == "checkpoint-1"
    assert last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-4")
    assert one.args.save_total_limit == 1


def test_without_checkpoints_a_signal_only_stops(
    defaults: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = of(tmp_path, callbacks=[sends(signal.SIGINT, 1)], save_strategy="no")
    one.train()
    assert one.state.global_step == 1
    assert "stopped the training after update 1: no checkpoint was saved." in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
    one.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_a_second_ctrl_c_ends_at_once(defaults: dict[int, Any], tmp_path: Path) -> None:
    twice = [sends(signal.SIGINT, 2), sends(signal.SIGINT, 2)]
    one = of(tmp_path, callbacks=twice)
    with pytest.raises(KeyboardInterrupt):
        one.train()
    assert installed() == defaults
    assert last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-1")


def test_a_script_keeps_its_own_handlers(defaults: Any, tmp_path: Path) -> None:
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    one = of(tmp_path, callbacks=[sends(signal.SIGTERM, 1)], max_steps=2, enable_jit_checkpoint=True)
    one.train()
    assert got == [signal.SIGTERM]
    assert one.state.global_step == 2


def test_training_in_another_thread_takes_no_signal(defaults: dict[int, Any], tmp_path: Path) -> None:
    found: list[dict[int, Any]] = []
    one = of(tmp_path, callbacks=[At("on_step_begin", 1, lambda: found.append(installed()))], max_steps=1)
    thread = threading.Thread(target=one.train)
    thread.start()
    thread.join()
    assert found == [defaults]
    assert one.state.global_step == 1


class Runs:
    """A pickle that runs code where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def edited(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def renamed_shard(folder: Path) -> None:
    def rename(fields: dict[str, Any]) -> None:
        fields["files"] = {"../../outside.safetensors": next(iter(fields["files"].values()))}

    resealed(folder / "checkpoint.json", rename)


def older(harm: Callable[[Path], Any]) -> Callable[[Path], None]:
    """The harm, to a checkpoint of a version that kept no checksums of small files."""

    def harmed(folder: Path) -> None:
        (folder / "checksums.json").unlink()
        harm(folder)

    return harmed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    of(folder, max_steps=1).train()
    return folder / "checkpoint-1"


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut state": (
        older(lambda c: cut(c / "trainer_state.json")),
        "trainer_state.json is damaged, or of another ver",
    ),
    "newer state": (
        older(lambda c: edited(c / "trainer_state.json", invented=1)),
        "of another version of transformers",
    ),
    "empty state": (older(lambda c: (c / "trainer_state.json").write_text("{}")), "global_step is 0"),
    "deep state": (
        older(lambda c: (c / "trainer_state.json").write_text("[" * 10**5)),
        "trainer_state.json is damaged",
    ),
    "path": (
        older(lambda c: edited(c / "trainer_state.json", global_step="../../x")),
        "global_step is '../../x'",
    ),
    "cut schedule": (older(lambda c: cut(c / "scheduler.pt")), "scheduler.pt is damaged, or of another"),
    "cut numbers": (older(lambda c: cut(c / "rng_state.pth")), "rng_state.pth is damaged, or of another"),
    "no numbers": (lambda c: (c / "rng_state.pth").unlink(), "it has no rng_state.pth"),
    "code": (
        older(lambda c: torch.save(Runs(c.parent / "ran"), c / "scheduler.pt")),
        "scheduler.pt is damaged, or of another",
    ),
    "bare code": (
        older(lambda c: (c / "rng_state.pth").write_bytes(pickle.dumps(Runs(c.parent / "ran")))),
        "rng_state.pth is damaged, or of another",
    ),
    "another step": (
        lambda c: edited(c / "trainer_state.json", global_step=2),
        "trainer_state.json is damaged, or was changed: its checksum is not that in checksums.json",
    ),
    "another rate": (
        lambda c: torch.save(torch.load(c / "scheduler.pt") | {"last_epoch": 7}, c / "scheduler.pt"),
        "scheduler.pt is damaged, or was changed: its checksum",
    ),
    "other checksums": (
        lambda c: edited(c / "checksums.json", sha256={}),
        "checksums.json is damaged, or was changed: its digest",
    ),
    "a lost file": (
        lambda c: resealed(c / "checksums.json", lambda f: f["sha256"].update({"rng_state_1.pth": "0"})),
        "lacks rng_state_1.pth, which was written with it",
    ),
    "unfinished": (lambda c: (c / "unfinished").touch(), "was not written to its end"),
    "no program": (lambda c: shutil.rmtree(c / "program"), "it has no program"),
    "newer program": (lambda c: edited(c / "program" / "checkpoint.json", version=99), "version 99; this"),
    "cut program": (lambda c: cut(c / "program" / "state-00001.safetensors"), "bytes long instead of"),
    "outside": (
        lambda c: renamed_shard(c / "program"),
        "names '../../outside.safetensors', which is no file",
    ),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name(damage: str, saved: Path, tmp_path: Path) -> None:
    """Before anything is compiled: the model is as it was, and no code of the checkpoint has run."""
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoint-1"))
    harm, says = DAMAGE[damage]
    harm(folder)
    one = of(tmp_path)
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    with pytest.raises(megacompile.MegacompileError, match=says):
        one.train(resume_from_checkpoint=str(folder))
    assert one.program is None and not is_owned(one.model)
    assert all(torch.equal(value, before[name]) for name, value in one.model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_a_checkpoint_of_an_older_version_goes_on_and_says_that_it_is_unchecked(
    saved: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoint-1"))
    (folder / "checksums.json").unlink()
    unsealed(folder / "program" / "checkpoint.json")
    runs = []
    for checkpoint in (saved, folder):
        one = of(tmp_path / "out", max_steps=2, save_strategy="no")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            one.train(resume_from_checkpoint=str(checkpoint))
        said = [str(w.message) for w in told if "unchecked" in str(w.message)]
        assert len(said) == (checkpoint == folder) and all(str(folder) in text for text in said)
        runs.append(one)
    assert_same_run(*runs)


def test_a_checkpoint_of_another_model_leaves_the_model_as_it_was(saved: Path, tmp_path: Path) -> None:
    one = trainer(Trainer, tmp_path, **STEPS)
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    with pytest.raises(megacompile.MegacompileError, match="is of another model"):
        one.train(resume_from_checkpoint=str(saved))
    assert all(torch.equal(value, before[name]) for name, value in one.release().state_dict().items())


def test_without_a_whole_checkpoint_training_starts_from_the_beginning(saved: Path, tmp_path: Path) -> None:
    cut(Path(shutil.copytree(saved, tmp_path / "checkpoint-9")) / "trainer_state.json")
    one = of(tmp_path, max_steps=1)
    with pytest.warns(UserWarning, match="no whole checkpoint: training starts from the beginning"):
        one.train(resume_from_checkpoint=True)
    assert one.state.global_step == 1

"""Links under names that megacompile chooses: where they lead nothing changes, and nothing is published."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megacompile
from megacompile.bench import results
from megacompile.errors import DiskError, MegacompileError
from megacompile.state.atomic_folder import adding_to, recover, replacing
from megacompile.state.model_export import copy_processor
from megacompile.state.nvme import Storage
from megacompile.state.scratch_files import folders_of
from tests.support.models import Plain, batch_for


@pytest.fixture(scope="module")
def program() -> Iterator[megacompile.Program]:
    model = Plain()
    made = megacompile.compile(
        model, "1GB", optimizer=torch.optim.AdamW(model.parameters()), compute_dtype=torch.float32
    )
    made.train_step(batch_for("plain"))
    yield made
    made.close()


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Path]:
    """A folder that links lead to; it must stay as it is."""
    folder = tmp_path / "theirs"
    (folder / "inner").mkdir(parents=True)
    names = ("precious", "05_0_precious.txt", "model.safetensors", "inner/precious", "megacompile-1.scratch")
    for name in names:
        (folder / name).write_text("precious")
    yield folder
    assert {os.fspath(p.relative_to(folder)) for p in folder.rglob("*")} == {"inner", *names}
    assert all((folder / name).read_text() == "precious" for name in names)


def save(program: megacompile.Program, folder: Path) -> None:
    program.save(folder)


def export(program: megacompile.Program, folder: Path) -> None:
    program.export(folder)


def export_beside(program: megacompile.Program, folder: Path) -> None:
    program.export(folder, beside=True)


@pytest.mark.parametrize("write", [save, export, export_beside])
def test_a_link_in_the_place_of_a_working_folder_is_refused(
    write: Callable[[megacompile.Program, Path], None],
    program: megacompile.Program,
    theirs: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "saved"
    link = tmp_path / ".saved.saving"
    if write is export_beside:
        folder.mkdir()
        link = folder / ".saving"
    link.symlink_to(theirs)
    with pytest.raises(DiskError, match=rf"is a link, which is not followed: remove it.*{link.name}"):
        write(program, folder)
    link.unlink()
    write(program, folder)
    assert len(list(folder.iterdir())) >= 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone gives folders away: run it as root")
def test_a_working_folder_of_another_user_is_refused(program: megacompile.Program, tmp_path: Path) -> None:
    (tmp_path / ".saved.saving").mkdir()
    os.chown(tmp_path / ".saved.saving", os.geteuid() + 1, -1)
    with pytest.raises(DiskError, match="belongs to another user: remove it"):
        program.save(tmp_path / "saved")


def test_what_was_moved_aside_is_no_link(theirs: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / ".saved.previous").symlink_to(theirs)
    recover(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    monkeypatch.setattr("megacompile.state.atomic_folder._exchange", lambda one, other: False)
    for text in ("old", "new"):
        with replacing(tmp_path / "saved") as fresh:
            (fresh / "file").write_text(text)
    assert (tmp_path / "saved" / "file").read_text() == "new"


def test_files_of_a_folder_replace_links_in_it(theirs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").symlink_to(theirs / "precious")
    (folder / "new").symlink_to(theirs / "new")
    with adding_to(folder) as fresh:
        (fresh / "within").mkdir()
        for name in ("config.json", "new", "within/file"):
            (fresh / name).write_text("ours")
    assert [(folder / name).read_text() for name in ("config.json", "new", "within/file")] == ["ours"] * 3
    (folder / "linked").symlink_to(theirs)
    with pytest.raises(OSError, match="is a link"), adding_to(folder) as fresh:
        (fresh / "linked").mkdir()
        (fresh / "linked" / "precious").write_text("ours")


def test_a_folder_that_is_itself_a_link_is_written_to(program: megacompile.Program, tmp_path: Path) -> None:
    (tmp_path / "disk" / "saved").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    (tmp_path / "saved").symlink_to(tmp_path / "disk" / "saved")
    program.save(tmp_path / "saved")
    program.save(tmp_path / "runs" / "2")
    program.export(tmp_path / "runs" / "exported")
    assert (tmp_path / "saved").is_symlink()
    assert all((tmp_path / "disk" / name / "checkpoint.json").is_file() for name in ("saved", "2"))
    program.load(tmp_path / "saved")
    storage = Storage([tmp_path / "runs"], {"state": 4096})
    assert storage.paths[0].parent == tmp_path / "disk"
    storage.close()


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "link to nothing"])
def test_a_lock_that_is_no_file_of_its_own_is_refused(kind: str, theirs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "drive"
    folder.mkdir()
    lock, precious = folder / "megacompile.lock", theirs / "precious"
    if kind == "hard link":
        lock.hardlink_to(precious)
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.symlink_to(precious if kind == "link" else theirs / "new")
    with pytest.raises(
        MegacompileError, match=r"offload_dir=.*drive.*megacompile\.lock in it.*: remove it\."
    ):
        Storage([folder], {})
    lock.unlink()
    Storage([folder], {}).close()


def test_a_ranks_folder_that_is_a_link_is_refused(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "rank-1").symlink_to(theirs)
    world: Any = SimpleNamespace(size=2, rank=1)
    with pytest.raises(MegacompileError, match=r"rank-1.*is a link, which is not followed"):
        folders_of(world, [str(tmp_path)])


def test_a_dump_follows_no_link(theirs: Path, tmp_path: Path) -> None:
    def dumped(folder: Path) -> None:
        model = Plain()
        optimizer = torch.optim.SGD(model.parameters())
        batch = batch_for("plain")
        megacompile.compile(model, "1GB", optimizer=optimizer, dump=folder, example_batch=batch).close()

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train").symlink_to(theirs)
    with pytest.raises(
        MegacompileError, match=r"The dump was not written .*is a link, which is not followed"
    ):
        dumped(tmp_path / "a")
    (tmp_path / "b" / "train").mkdir(parents=True)
    for name in ("09_step.py", "schedule.json"):
        (tmp_path / "b" / "train" / name).symlink_to(theirs / "precious")
    dumped(tmp_path / "b")
    assert "def step" in (tmp_path / "b" / "train" / "09_step.py").read_text()


def test_benchmarks_follow_no_link(theirs: Path, tmp_path: Path) -> None:
    names = ("kernels.json", "kernels.csv", "kernels.md")
    for name in names:
        (tmp_path / name).symlink_to(theirs / "precious")
    results.write(tmp_path, [], {"device": "a card"})
    assert not any((tmp_path / name).is_symlink() for name in names)


FILES = ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt")


def test_links_of_a_models_folder_are_not_published(tmp_path: Path) -> None:
    """But for those that lead to a file of the model itself; what is left out is said, once."""
    source, secret, exported = tmp_path / "model", tmp_path / "secret", tmp_path / "exported"
    source.mkdir()
    exported.mkdir()
    secret.write_text("secret")
    (source / "plain").write_text("of the model")
    (source / "tokenizer.json").symlink_to("plain")
    (source / "tokenizer.model").symlink_to(secret)
    (source / "merges.txt").symlink_to(tmp_path / "nothing")
    (tmp_path / "alias").symlink_to(source)
    with pytest.warns(UserWarning, match=r"tokenizer\.model was not copied.*is a link to .*secret") as told:
        copy_processor(tmp_path / "alias", exported, known=exported)
    assert len(told) == 1
    assert [p.name for p in exported.iterdir()] == ["tokenizer.json"]
    assert not (exported / "tokenizer.json").is_symlink()
    assert (exported / "tokenizer.json").read_text() == "of the model"


@pytest.mark.parametrize(
    ("snapshot", "owner"),
    [
        ("snapshots/0123", "models--a--b"),
        ("snapshots/0123/part", "models--a--b"),
        ("snapshots/0123", "models--c--d"),
    ],
)
def test_a_snapshot_in_the_hubs_cache_has_its_own_files(snapshot: str, owner: str, tmp_path: Path) -> None:
    source, blobs, exported = (
        tmp_path / "models--a--b" / snapshot,
        tmp_path / owner / "blobs",
        tmp_path / "out",
    )
    for folder in (source, blobs, exported):
        folder.mkdir(parents=True)
    for name in FILES:
        (blobs / f"sha-of-{name}").write_text(name)
        (source / name).symlink_to(os.path.relpath(blobs / f"sha-of-{name}", source))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        copy_processor(source, exported, known=exported)
    copied = {p.name for p in exported.iterdir()}
    assert (copied, len(told)) == ((set(FILES), 0) if owner == "models--a--b" else (set(), len(FILES)))


def test_an_export_writes_through_no_link(theirs: Path, tmp_path: Path) -> None:
    source, exported = tmp_path / "model", tmp_path / "exported"
    for folder in (source, exported):
        folder.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (exported / "tokenizer.json").symlink_to(theirs / "new")
    copy_processor(source, exported, known=exported)


def test_a_trainer_follows_no_link(theirs: Path, tmp_path: Path) -> None:
    """In a checkpoint, in the folder of a model, in what ``megacompile train`` writes."""
    pytest.importorskip("accelerate", reason="accelerate is missing: pip install accelerate")
    report = pytest.importorskip("megacompile.integrations.training_report")
    from megacompile.integrations.transformers import Trainer
    from tests.e2e.test_trainer import lora, trainer
    from tests.support.text import tokenizer

    steps = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "eval_strategy": "no"}
    given = {"processing_class": tokenizer()}
    one = trainer(Trainer, tmp_path / "run", make=lora, of_trainer=given, **steps)
    for name in ("checkpoint-2", "model"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-1").symlink_to(theirs)
    names = ("adapter_config.json", "README.md", "tokenizer.json", "training_args.bin", "trainer_state.json")
    for folder in ("checkpoint-2", "model"):
        for name in names:
            (tmp_path / "run" / folder / name).symlink_to(theirs / "precious")
    with pytest.warns(UserWarning, match="is a link, which is not followed"):
        one.train()
    one.save_model(str(tmp_path / "run" / "model"))
    written = [tmp_path / "run" / f / name for f in ("checkpoint-2", "model") for name in names]
    assert [path for path in written if path.is_symlink()] == [written[-1]]  # no model has a trainer's state
    assert json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())["r"] == 2

    for name in ("log.csv", "report.md", "loss.png", "schedule.html"):
        (tmp_path / "run" / name).symlink_to(theirs / "precious")
    logbook = report.Logbook(tmp_path / "run" / "log.csv")
    logbook.on_save(one.args, one.state, one.control)
    report.write_report(one, logbook, tmp_path / "run")
    assert "| parameters |" in (tmp_path / "run" / "report.md").read_text()

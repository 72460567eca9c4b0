"""Checkpoints: a run goes on bit for bit, nothing that was saved is lost, what does not fit is named.

Neither a kill at any moment nor a full disk costs the last one, and none takes a second copy in memory.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.state import checkpoint, safetensors_io
from megacompile.state.atomic_folder import recover, replacing
from tests.support.damage import resealed
from tests.support.models import Plain
from tests.support.scripts import Script, output_of

RESUME = """
import sys
from tests.e2e.test_checkpoint import digest, start, step
program = start(seed=4)
step(program, 9)  # to be loaded over, the seed too
program.load(sys.argv[1])
print(*(step(program, i).hex() for i in range(2, 5)))
print(digest(program))
"""


class Dropping(nn.Module):
    """What a resumed run could get wrong: dropout, a buffer, parameters of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Plain(width=80, depth=2)
        self.dropout = nn.Dropout(0.2)
        self.unused = nn.Parameter(torch.arange(3.0))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.body(self.dropout(x), y)
        return loss * self.scale


def batches(index: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(index)
    return [{k: torch.randn(4, n, generator=generator) for k, n in (("x", 16), ("y", 3))} for _ in range(2)]


def start(seed: int = 3) -> megacompile.Program:
    """Clipping, accumulation, coded moments and two param groups besides."""
    torch.manual_seed(0)
    model = Dropping()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=1e-2)
    return megacompile.compile(
        model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, max_grad_norm=0.2,
        optimizer_state="int8", seed=seed, example_batch=batches(0),
    )  # fmt: skip


def step(program: megacompile.Program, index: int) -> float:
    """Two micro-batches, and a learning rate that changes with every step."""
    loss = float(program.train_step(batches(index)).loss)
    for group in program.optimizer.param_groups:
        group["lr"] *= 0.7
    return loss


def digest(program: megacompile.Program) -> str:
    content = b"".join(v.numpy().tobytes() for _, v in sorted(program.state_dict().items()))
    return hashlib.sha256(content).hexdigest()


def test_a_new_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    program = start()
    straight = [step(program, i).hex() for i in range(5)]
    final = digest(program)
    program.close()
    program = start()
    first = [step(program, i).hex() for i in range(2)]
    program.save(tmp_path / "a")
    assert [*first, step(program, 2).hex()] == straight[:3]  # saving changes nothing
    program.close()
    assert output_of(RESUME, tmp_path / "a").splitlines() == [" ".join(straight[2:]), final]


@pytest.mark.slow_cases(r"(?!lambda)")
@pytest.mark.parametrize("kind", ["lambda", "one cycle", "chained"])
def test_a_scheduler_whose_state_is_saved_beside_goes_on_as_well(kind: str, tmp_path: Path) -> None:
    """As the architecture page says: its state_dict in a file of the user's, loaded after the checkpoint."""

    def run(steps: range, saved: Path | None) -> list[str]:
        program = plain()
        schedule = scheduler(kind, program.optimizer)
        if saved is not None:
            program.load(saved)
            schedule.load_state_dict(json.loads((tmp_path / "scheduler.json").read_text()))
        seen = []
        for i in steps:
            batch = {"x": torch.full((2, 16), i / 7), "y": torch.ones(2, 3)}
            loss = float(program.train_step(batch).loss)
            seen.append(f"{loss.hex()} {program.optimizer.param_groups[0]['lr'].hex()}")
            schedule.step()
        if saved is None:
            program.save(tmp_path / f"after {steps.stop}")
            (tmp_path / "scheduler.json").write_text(json.dumps(schedule.state_dict()))
        seen.append(digest(program))
        program.close()
        return seen

    straight = run(range(6), None)
    first = run(range(3), None)
    assert first[:3] + run(range(3, 6), tmp_path / "after 3") == straight


def scheduler(kind: str, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    from torch.optim import lr_scheduler as schedulers

    if kind == "lambda":
        return schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if kind == "one cycle":
        return schedulers.OneCycleLR(optimizer, 0.05, total_steps=8)
    warmup, decay = (
        schedulers.LinearLR(optimizer, 0.1, total_iters=2),
        schedulers.ExponentialLR(optimizer, 0.8),
    )
    return schedulers.SequentialLR(optimizer, [warmup, decay], [2])


def plain(width: int = 80, **options: Any) -> megacompile.Program:
    torch.manual_seed(0)
    model = Plain(width=width)
    options.setdefault("compute_dtype", torch.float32)
    options.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=1e-2))
    batch = {"x": torch.ones(2, 16), "y": torch.ones(2, 3)}
    if options["compute_dtype"] == torch.bfloat16:
        batch = {k: v.bfloat16() for k, v in batch.items()}
    return megacompile.compile(model, "1GB", example_batch=batch, **options)


@pytest.fixture(scope="module")
def trained() -> Iterator[megacompile.Program]:
    program = plain()
    program.train_step({"x": torch.ones(2, 16), "y": torch.ones(2, 3)})
    yield program
    program.close()


@pytest.fixture(scope="module")
def saved(trained: megacompile.Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "saved"
    trained.save(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"width": 72}, "does not fit at first.weight: shape is"),
        ({"optimizer_state": "int8"}, "optimizer_state='fp32'.*'int8'.*compile with"),
        ({"compute_dtype": torch.bfloat16}, "computes_in is float32 in the checkpoint and bfloat16"),
    ],
)
def test_another_program_is_refused(saved: Path, options: dict[str, Any], says: str) -> None:
    program = plain(**options)
    before = program.state_dict()
    with pytest.raises(megacompile.MegacompileError, match=says):
        program.load(saved)
    assert all(torch.equal(v, before[n]) for n, v in program.state_dict().items())
    program.close()


def cut(parameters: dict[str, Any]) -> dict[str, Any]:
    """The first weight's first three rows alone, as a piece."""
    piece = parameters["first.weight"] | {"shape": [3, 16], "whole": "first.weight", "first_row": 0}
    return {n: p for n, p in parameters.items() if n != "first.weight"} | {"first.weight[0:3]": piece}


def damage(folder: Path, what: str) -> None:
    shard, manifest = folder / "state-00001.safetensors", folder / "checkpoint.json"
    if what == "truncated":
        os.truncate(shard, shard.stat().st_size - 100)
    elif what == "header":
        resealed(manifest, lambda m: m["files"][shard.name].update(bytes=8))
        shard.write_bytes(b"\xff" * 8)
    elif what == "bit":
        content = bytearray(shard.read_bytes())
        content[-5] ^= 4
        shard.write_bytes(content)
    elif what == "missing":
        shard.unlink()
    elif what == "manifest":
        manifest.write_text('{"version": 2, "files"')
    elif what == "deep":
        manifest.write_text("[" * 100_000)
    elif what == "version":
        resealed(manifest, lambda m: m.update(version=99))
    elif what == "path":
        resealed(manifest, lambda m: m["files"].update({"../../etc/passwd": m["files"].pop(shard.name)}))
    elif what == "fields":
        resealed(manifest, lambda m: m["layout"].pop("parameters"))
    elif what == "types":
        resealed(manifest, lambda m: m["progress"].update(seed="x"))
    elif what == "groups":
        resealed(manifest, lambda m: m["progress"]["param_groups"].append({}))
    elif what == "kinds":
        resealed(manifest, lambda m: m["progress"]["param_groups"][0].update(betas=0.9))
    elif what == "ranges":
        resealed(manifest, lambda m: m["progress"]["param_groups"][0].update(betas=[0.9, 1.5]))
    elif what == "digit":
        manifest.write_text(manifest.read_text().replace('"lr": 0.01', '"lr": 0.02'))
    elif what == "row":
        resealed(manifest, lambda m: m["layout"]["parameters"]["first.weight"].update(first_row=1))
    elif what == "steps":
        resealed(manifest, lambda m: m["layout"]["parameters"]["first.weight"].update(step=-1))
    elif what == "swapped":
        resealed(manifest, lambda m: m["layout"]["parameters"].pop("first.weight"))
    elif what == "cut":
        resealed(manifest, lambda m: m["layout"].update(parameters=cut(m["layout"]["parameters"])))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("truncated", "state-00001.safetensors is .* bytes long instead of"),
        ("header", "state-00001.safetensors is damaged: the checksum of its header is wrong"),
        ("bit", "state-00001.safetensors is damaged: the checksum of"),
        ("missing", "state-00001.safetensors is missing"),
        ("manifest", "checkpoint.json is no JSON"),
        ("deep", "checkpoint.json is no JSON"),
        ("version", "version 99; this megacompile reads version 2"),
        ("path", "names '../../etc/passwd', which is no file of a checkpoint"),
        ("fields", r"checkpoint.json\.layout lacks parameters"),
        ("types", r"checkpoint.json\.progress\.seed is 'x'"),
        ("groups", "damaged has 2 param groups, the optimizer 1"),
        ("kinds", r"group 0 of \S+damaged has betas 0.9, the optimizer \[0.9, 0.999\]"),
        ("ranges", r"group 0 of \S+damaged has betas \[0.9, 1.5\]"),
        ("digit", "checkpoint.json is damaged, or was changed"),
        ("row", "checkpoint.json does not have all rows of first.weight once"),
        ("steps", r"checkpoint.json: layout.parameters.first.weight.step is -1, which cannot be"),
        ("swapped", "is of another model: only the model has the parameter first.weight"),
        ("cut", r"does not fit at first.weight: shape is \(3, 16\)"),
    ],
)
def test_damage_is_named_and_the_program_recovers(
    trained: megacompile.Program, saved: Path, tmp_path: Path, what: str, says: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(saved, folder)
    damage(folder, what)
    with pytest.raises(megacompile.MegacompileError, match=says):
        trained.load(folder)
    batch = {"x": torch.ones(2, 16), "y": torch.ones(2, 3)}
    if what == "bit":  # found while the state is overwritten: training on a mixture is refused
        with pytest.raises(megacompile.ProgramError, match="read in part only"):
            trained.train_step(batch)
    trained.load(saved)
    trained.train_step(batch)


def test_when_saving_and_loading_are_refused(saved: Path, tmp_path: Path) -> None:
    model = Plain()
    program = megacompile.compile(
        model, "1GB", compute_dtype=torch.float32, optimizer=torch.optim.AdamW(model.parameters())
    )
    with pytest.raises(megacompile.ProgramError, match="compile with example_batch"):
        program.save(tmp_path / "early")
    program = plain()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("not to be lost")
    with pytest.raises(megacompile.MegacompileError, match="holds no checkpoint"):
        program.save(tmp_path / "mine")
    with pytest.raises(megacompile.MegacompileError, match="holds no checkpoint"):
        program.load(tmp_path / "mine")
    program.forward_backward({"x": torch.ones(2, 16), "y": torch.ones(2, 3)})
    with pytest.raises(megacompile.ProgramError, match="Gradients are waiting"):
        program.save(tmp_path / "half")
    program.optimizer_step()
    program.close()
    with pytest.raises(megacompile.ProgramError, match="closed"):
        program.load(saved)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "not to be lost"


def test_a_full_disk_leaves_the_earlier_checkpoint(
    trained: megacompile.Program, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    before = (folder / "checkpoint.json").read_text()

    def full(file: int, data: Any, offset: int) -> int:
        if offset:
            raise OSError(28, "No space left on device")
        return write(file, data, offset)

    write = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_io, "BLOCK_BYTES", mmap.PAGESIZE)
        patch.setattr(os, "pwrite", full)
        with pytest.raises(megacompile.ProgramError, match="No space left"):
            trained.save(folder)
    assert (folder / "checkpoint.json").read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    trained.load(folder)


WRITER = """
import sys, itertools, torch
from pathlib import Path
from megacompile.blocks.weight_groups import GroupLayout, Parameter, Slot
from megacompile.state.checkpoint import save_checkpoint
from megacompile.state.checkpoint import RunProgress
from megacompile.state.masters import HostState
from megacompile.state import checkpoint
checkpoint.SHARD_BYTES = 1 << 18
n = 1 << 18
group = GroupLayout(0, "g", torch.float32, True, (Slot(Parameter("p", (n,), (1,), torch.float32, 0), 0),), n)
state = HostState([group])
for count in itertools.count(1):
    for tensor in state.arrays[0].values():
        tensor.fill_(count)
    state.steps[0] = [count]
    save_checkpoint(Path(sys.argv[1]), state, {}, RunProgress("m", 0, count, []))
    print(count, flush=True)
"""


@pytest.mark.slow_cases(r"6")
@pytest.mark.parametrize("times", [2, 6])
def test_killed_at_any_moment_the_last_checkpoint_is_found(times: int, tmp_path: Path) -> None:
    from megacompile.blocks.weight_groups import GroupLayout, Parameter, Slot
    from megacompile.state.masters import HostState

    n = 1 << 18
    slot = Slot(Parameter("p", (n,), (1,), torch.float32, 0), 0)
    state = HostState([GroupLayout(0, "g", torch.float32, True, (slot,), n)])
    folder, chance = tmp_path / "run", random.Random(0)
    for _ in range(times):
        writer = Script(WRITER, folder)
        writer.output.readline()  # one is complete
        time.sleep(chance.uniform(0, 0.1))
        writer.process.kill()
        promised = [int(line) for line in writer.finish().stdout.split()]
        found = checkpoint.Checkpoint(folder, state, {})
        found.read()
        assert found.progress.calls >= max(promised, default=1)
        assert state.steps == [[found.progress.calls]]
        assert all((t == found.progress.calls).all() for t in state.arrays[0].values())


def test_every_step_of_replacing_a_folder_can_be_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two renames are needed, die before each in turn: what was there before is there again."""
    monkeypatch.setattr("megacompile.state.atomic_folder._exchange", lambda one, other: False)

    class Killed(BaseException):
        pass

    def write(text: str) -> None:
        with replacing(tmp_path / "a") as fresh:
            (fresh / "f").write_text(text)

    write("old")
    rename = Path.rename
    for survived in (0, 1):
        left = [survived]

        def dying(self: Path, target: Path, left: list[int] = left) -> Path:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return rename(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", dying)
            patch.setattr("megacompile.state.atomic_folder._remove", lambda folder: None)
            with pytest.raises(Killed):
                write("new")
        recover(tmp_path / "a")
        assert (tmp_path / "a" / "f").read_text() == "old"
        write("old")
    write("new")
    assert (tmp_path / "a" / "f").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_all_is_on_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, rename = os.fsync, Path.rename

    def noted_sync(handle: int) -> None:
        done.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        sync(handle)

    def noted_rename(self: Path, target: Path) -> Path:
        done.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    with replacing(tmp_path / "a") as fresh:
        (fresh / "f").write_text("1")
        (fresh / "g").write_text("2")
    assert sorted(done[:2]) == ["f", "g"]
    assert done[2:] == [".a.saving", "rename", tmp_path.name]


def test_a_second_writer_of_one_folder_is_refused(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as fresh:
        (fresh / "f").write_text("first")
        refused = pytest.raises(megacompile.ProgramError, match="Another process is writing")
        with refused, replacing(tmp_path / "a"):
            pass
    assert (tmp_path / "a" / "f").read_text() == "first"


@pytest.mark.parametrize("swaps", [True, False])
def test_readers_do_not_disturb_a_writer(
    swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that looks all the time for what a killed writer left; where names swap it misses none."""
    folder, done, missed = tmp_path / "a", threading.Event(), []
    rename = Path.rename

    def slow(self: Path, target: Path) -> Path:
        time.sleep(0.002)  # the reader's turn
        return rename(self, target)

    def read() -> None:
        while not done.is_set():
            recover(folder)
            if not folder.exists():
                missed.append(1)

    monkeypatch.setattr(Path, "rename", slow)
    if not swaps:
        monkeypatch.setattr("megacompile.state.atomic_folder._exchange", lambda one, other: False)
    reader = threading.Thread(target=read)
    for index in range(12):
        with replacing(folder) as fresh:
            (fresh / "f").write_text(str(index))
        if index == 0:
            reader.start()
        assert (folder / "f").read_text() == str(index)
    done.set()
    reader.join()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert not (swaps and missed)


MEASURE = """
import sys, threading, time, torch
from pathlib import Path
from megacompile.state.host_arena import resident_bytes
from megacompile.blocks.weight_groups import GroupLayout, Parameter, Slot
from megacompile.state.checkpoint import Checkpoint, save_checkpoint
from megacompile.state.checkpoint import RunProgress
from megacompile.state.masters import HostState
from megacompile.state import checkpoint
checkpoint.SHARD_BYTES, checkpoint.PIECE_BYTES = 1 << 25, 1 << 23
n = 1 << 23
slots = tuple(Slot(Parameter(f"p{i}", (n,), (1,), torch.bfloat16, 0), i * n) for i in range(2))
state = HostState([GroupLayout(0, "g", torch.bfloat16, True, slots, 2 * n)])
for tensor in state.arrays[0].values():
    tensor.fill_(1)
folder, peak, done = Path(sys.argv[1]), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident_bytes())
        time.sleep(0.001)
save_checkpoint(folder / "warm", HostState([]), {}, RunProgress("m", 0, 1, []))
before = resident_bytes()
thread = threading.Thread(target=watch)
thread.start()
save_checkpoint(folder / "a", state, {}, RunProgress("m", 0, 1, []))
saving = peak - before
peak = 0
Checkpoint(folder / "a", state, {}).read()
done = True
thread.join()
print(sum(t.nbytes for t in state.arrays[0].values()), saving, peak - before)
"""


def test_saving_and_loading_take_no_second_copy(tmp_path: Path) -> None:
    state, saving, loading = map(int, output_of(MEASURE, tmp_path).split())
    assert state == 12 << 24
    assert saving < 32 << 20 and loading < 32 << 20

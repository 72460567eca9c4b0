"""The storage engine: what was written comes back, or it is said which block of which file did not."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megacompile.cli.main import main
from megacompile.errors import BudgetError, MegacompileError, StorageError
from megacompile.state import drive_benchmark, nvme
from megacompile.state.host_arena import HostArena
from megacompile.state.nvme import BLOCK_BYTES, PAGE, Storage
from tests.support.scripts import Script, output_of

SIZE = 2 * BLOCK_BYTES + 3 * PAGE


def filled(nbytes: int, seed: int = 0) -> Tensor:
    memory = HostArena(nbytes).take((nbytes,), torch.uint8)
    return memory.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def empty(nbytes: int) -> Tensor:
    return HostArena(nbytes).take((nbytes,), torch.uint8)


def stored(folder: Path, nbytes: int = SIZE) -> tuple[Storage, Tensor]:
    storage, source = Storage([folder], {"layers.0": nbytes}), filled(nbytes)
    storage.write("layers.0", source)
    return storage, source


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(1, 3), st.randoms())
def test_what_was_written_comes_back(pages: list[int], directories: int, random: Any) -> None:
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root, str(i)) for i in range(directories)]
        for folder in folders:
            folder.mkdir()
        before, nvme.BLOCK_BYTES = nvme.BLOCK_BYTES, 2 * PAGE
        try:
            storage = Storage(folders, {f"r{i}": n * PAGE for i, n in enumerate(pages)})
            sources = {f"r{i}": filled(n * PAGE, i) for i, n in enumerate(pages)}
            for name in random.sample(sorted(sources), len(sources)):
                storage.write(name, sources[name])
            for name in random.sample(sorted(sources), len(sources)):
                target = empty(sources[name].numel())
                storage.read(name, target[: sources[name].numel()])
                assert torch.equal(target, sources[name])
            assert storage.read_bytes == storage.written_bytes == storage.nbytes == sum(pages) * PAGE
            used = [path.stat().st_size for path in storage.paths]
            assert max(used) - min(used) <= 2 * PAGE * len(pages)
            storage.close()
            assert not list(Path(root).glob("*/*.scratch"))
        finally:
            nvme.BLOCK_BYTES = before


def test_a_flipped_bit_is_named_by_block_and_file(tmp_path: Path) -> None:
    storage, _ = stored(tmp_path)
    with storage.paths[0].open("r+b") as file:
        file.seek(BLOCK_BYTES + 77)
        byte = file.read(1)[0]
        file.seek(BLOCK_BYTES + 77)
        file.write(bytes([byte ^ 4]))
    target = empty(SIZE)
    with pytest.raises(StorageError) as caught:
        storage.read("layers.0", target)
    assert f"Block 1 of layers.0 (byte {BLOCK_BYTES} of {storage.paths[0]})" in str(caught.value)


def test_blocks_that_changed_places_are_noticed(tmp_path: Path) -> None:
    storage, source = stored(tmp_path)
    source.zero_()
    storage.write("layers.0", source)  # two blocks of equal content: their places still differ
    sums = storage._sums["layers.0"]
    assert sums[0] != sums[1]


@pytest.mark.parametrize("moved", [1, PAGE, PAGE + 5, 3 * PAGE])
def test_short_transfers_are_completed(moved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second transfer of a thread is short: what is left is asked for again, from a page's start."""
    calls: Counter[int] = Counter()  # of each thread, which moves one block after another

    def short(call: Callable[..., int]) -> Callable[..., int]:
        def run(file: int, buffers: list[memoryview], offset: int) -> int:
            thread = threading.get_ident()
            calls[thread] += 1
            assert offset % PAGE == 0
            if calls[thread] % 2 == 0:
                return call(file, buffers, offset)
            return min(call(file, [buffers[0][: max(PAGE, moved // PAGE * PAGE)]], offset), moved)

        return run

    monkeypatch.setattr(os, "preadv", short(os.preadv))
    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    storage, source = stored(tmp_path)
    target = empty(SIZE)
    storage.read("layers.0", target[:SIZE])
    assert torch.equal(target, source)


def test_a_file_that_lost_its_end_is_refused(tmp_path: Path) -> None:
    storage, _ = stored(tmp_path)
    os.truncate(storage.paths[0], BLOCK_BYTES + PAGE)
    with pytest.raises(StorageError, match=r"Block 1 of layers.0 .*: reads end after 4096 bytes"):
        storage.read("layers.0", empty(SIZE))


def test_a_disk_that_fills_up_later_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, source = stored(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageError, match=r"Block \d of layers.0 .*: cannot write: No space left"):
        storage.write("layers.0", source)


def test_space_is_taken_at_the_start_or_refused_with_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is planted: a file system that takes all it has before it refuses has none for others."""
    take, nbytes = os.posix_fallocate, 1 << 34

    def limited(file: int, start: int, length: int) -> None:
        if length == nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        take(file, start, length)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    with pytest.raises(BudgetError, match=rf"offload_dir=.* needs {nbytes} bytes .* and has \d+ .*No space"):
        Storage([tmp_path], {"state": nbytes})
    assert not list(tmp_path.glob("*.scratch"))
    storage = Storage([tmp_path], {"state": 1 << 20})  # and the directory is free again
    assert storage.paths[0].stat().st_blocks * 512 >= 1 << 20
    storage.close()


def test_a_task_that_holds_the_last_reference_releases_the_files(tmp_path: Path) -> None:
    """Its thread cannot wait for itself; a task holds its storage a moment longer than its caller waits."""
    held = [Storage([tmp_path], {"state": PAGE})]
    pool = held[0]._readers
    pool.submit(held.clear).result()
    assert [p.name for p in tmp_path.iterdir()] == ["megacompile.lock"]
    Storage([tmp_path], {"state": PAGE}).close()


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(MegacompileError, match=r"nowhere' is no directory: make it first"):
        Storage([tmp_path / "nowhere"], {})
    with pytest.raises(MegacompileError, match="twice"):
        Storage([tmp_path, str(tmp_path) + "/."], {})


def test_storages_of_one_process_share_a_directory(tmp_path: Path) -> None:
    first, second = (Storage([tmp_path], {"state": PAGE}) for _ in range(2))
    ones, twos = (filled(PAGE, value) for value in (1, 2))
    expected = ones.clone(), twos.clone()
    first.write("state", ones)
    second.write("state", twos)
    first.read("state", twos)
    assert torch.equal(twos, expected[0])
    first.close()
    second.read("state", ones)
    assert torch.equal(ones, expected[1])
    second.close()
    assert [p.name for p in tmp_path.iterdir()] == ["megacompile.lock"]


HOLDER = """
import sys, time
from megacompile.state.nvme import Storage
storage = Storage([sys.argv[1]], {"state": 1 << 20})
print("ready", flush=True)
time.sleep(600)
"""


def test_a_second_process_is_refused_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    holder = Script(HOLDER, tmp_path)
    assert holder.output.readline() == "ready\n"
    with pytest.raises(MegacompileError, match=f"in use by process {holder.process.pid}"):
        Storage([tmp_path], {})
    holder.process.kill()
    assert holder.finish().returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*.scratch"))) == 1
    storage = Storage([tmp_path], {"state": PAGE})
    assert list(tmp_path.glob("*.scratch")) == storage.paths


def test_a_process_that_ends_leaves_nothing(tmp_path: Path) -> None:
    code = HOLDER.replace("time.sleep(600)", "raise SystemExit")
    assert output_of(code, tmp_path) == "ready\n"
    assert [p.name for p in tmp_path.iterdir()] == ["megacompile.lock"]


def test_without_direct_io_the_page_cache_is_used_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(UserWarning, match="has no direct I/O"):
        storage, source = stored(tmp_path)
    target = empty(SIZE)
    storage.read("layers.0", target[:SIZE])
    assert torch.equal(target, source)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs: mount one at /dev/shm")
def test_a_directory_in_ram_is_said() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with pytest.warns(UserWarning, match="kept in RAM, so that it saves none"):
            storage, source = stored(Path(folder))
        target = empty(SIZE)
        storage.read("layers.0", target[:SIZE])
        assert torch.equal(target, source)
        storage.close()


def test_bench_nvme_measures_the_drive_and_the_engine_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drive_benchmark, "REGION_BYTES", 8 << 20)
    assert main(["bench", "nvme", "--dir", str(tmp_path), "--size", "16MB"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"4 MiB +16 +[0-9.]+ +[0-9.]+ +[0-9.]+\n", text)
    assert re.search(r"engine, checksums compared: read [0-9.]+ GB/s, \d+% of plain transfers alike", text)
    assert main(["bench", "nvme", "--dir", str(tmp_path), "--size", "16MB", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert len(fields["rates"]) == 6 and all(r["read"] > 0 < r["write"] for r in fields["rates"])
    assert all(x > 0 for pair in ("engine", "drive", "fractions") for x in fields[pair])
    assert [p.name for p in tmp_path.iterdir()] == ["megacompile.lock"]
    assert main(["bench", "nvme", "--dir", str(tmp_path / "nowhere")]) == 2
    assert "is no directory" in capsys.readouterr().err

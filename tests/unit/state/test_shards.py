"""Shards: files that every reader of safetensors takes, written in blocks, on any file system."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megacompile.state import safetensors_io
from megacompile.state.safetensors_io import DTYPES, checksum, open_shard, save_shard

PAGE = mmap.PAGESIZE


def tensors() -> dict[str, Tensor]:
    """More than one block, of odd lengths, so that pieces begin anywhere."""
    torch.manual_seed(0)
    return {
        "codes": torch.randint(-9, 9, (PAGE + 3,), dtype=torch.int8),
        "half": torch.randn(3, 5, 7).bfloat16().transpose(0, 2),
        "weights": torch.randn(2 * PAGE + 1),
        "none": torch.empty(0, 4),
        "step": torch.tensor(3),
    }


@pytest.mark.parametrize("block", [PAGE, 4 * PAGE, 1 << 20])
def test_safetensors_reads_what_was_written(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_io, "BLOCK_BYTES", block)
    given = tensors()
    header, sums = save_shard(tmp_path / "a", given, {"format": "pt"})
    found = load_file(tmp_path / "a")
    assert found.keys() == given.keys()
    for name, value in given.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)
        content = value.contiguous().view(-1).view(torch.uint8)
        assert sums[name] == zlib.crc32(content.numpy()) == checksum(found[name])
    with open_shard(tmp_path / "a", header) as handle:
        assert handle.metadata() == {"format": "pt"}
    content = (tmp_path / "a").read_bytes()
    assert header == zlib.crc32(content[: 8 + int.from_bytes(content[:8], "little")])


def test_every_dtype_that_safetensors_knows(tmp_path: Path) -> None:
    given = {name: torch.zeros(3, dtype=dtype) for dtype, name in DTYPES.items()}
    save_shard(tmp_path / "a", given)
    assert {name: value.dtype for name, value in load_file(tmp_path / "a").items()} == {
        name: dtype for dtype, name in DTYPES.items()
    }


@pytest.mark.parametrize("late", [False, True])
def test_a_file_system_without_direct_writes_gets_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    set_flags, write, refused = fcntl.fcntl, os.pwrite, []

    def refuse(file: int) -> None:
        refused.append(file)
        raise OSError(errno.EINVAL, "Invalid argument")

    def flags(file: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT and not late:
            refuse(file)
        return set_flags(file, command, value)

    def part(file: int, data: Any, offset: int) -> int:
        if set_flags(file, fcntl.F_GETFL) & os.O_DIRECT and late:
            refuse(file)
        return write(file, data, offset)

    save_shard(tmp_path / "a", tensors())
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", flags)
        patch.setattr(os, "pwrite", part)
        save_shard(tmp_path / "b", tensors())
    assert len(refused) == 1 and (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_write_that_leaves_something_out_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = os.pwrite, []

    def part(file: int, data: Any, offset: int) -> int:
        parts.append(whole(file, data[: 2 * PAGE], offset))
        return parts[-1] - (7 if len(data) > 2 * PAGE else 0)  # the seven are told of as if they were lost

    save_shard(tmp_path / "a", tensors())
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", part)
        save_shard(tmp_path / "b", tensors())
    assert len(parts) > 2
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_write_of_nothing_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *given: 0)
    with pytest.raises(OSError, match="No space left"):
        save_shard(tmp_path / "a", tensors())

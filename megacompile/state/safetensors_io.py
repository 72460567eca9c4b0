"""Safetensors files: written a block at a time past the page cache, checked meanwhile, mapped to be read.

In:  tensors by name. Out: a file that any reader of safetensors takes, and the CRC-32 of its header and of
each tensor: all of its bytes.

A byte is copied once, into a small buffer, and its checksum is taken on the way. From there the drive
fetches it. Filling pages of the system's cache, and writing them back, costs what computes meanwhile
several times as much. No call holds the interpreter's lock over a block.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import zlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megacompile.errors import MegacompileError
from megacompile.state.checked_copies import copy_checked
from megacompile.state.host_arena import HostArena
from megacompile.state.write_throttle import rest

BLOCK_BYTES = 4 << 20
DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def save_shard(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[int, dict[str, int]]:
    """Write a safetensors file and return the checksums of its header and of each tensor; :class:`OSError`
    where the disk is full."""
    # the widest first: each begins at a multiple of its elements' size
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    sums = {}
    with _Blocks(path) as file:
        header = file.append(_header(dict(ordered), metadata))
        for name, tensor in ordered:
            sums[name] = file.append(_content(tensor))
    return header, sums


def checksum(tensor: Tensor, before: int = 0) -> int:
    """CRC-32 of a tensor's bytes, continued from those ``before``."""
    return zlib.crc32(_content(tensor).numpy().data, before)


def open_shard(path: Path, header: int | None = None) -> Any:
    """A safetensors file, mapped; one that is not whole, or has not the ``header`` of that checksum, is
    refused by name."""
    from safetensors import SafetensorError, safe_open

    if header is not None and _header_checksum(path) != header:
        raise MegacompileError(f"{path} is damaged: the checksum of its header is wrong.")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise MegacompileError(f"{path} is no whole safetensors file: {error}.") from error


def _header_checksum(path: Path) -> int | None:
    """CRC-32 of a file's header with its length; None where the file ends before it."""
    with path.open("rb") as file:
        length = file.read(8)
        count = int.from_bytes(length, "little")
        if count > os.fstat(file.fileno()).st_size - 8:
            return None
        return zlib.crc32(file.read(count), zlib.crc32(length))


def _content(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Tensor:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, tensor in tensors.items():
        stop = start + prod(tensor.shape) * tensor.itemsize
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # tensors begin at lines of the cache
    return torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)


class _Blocks:
    """A new file, filled from its start through one buffer."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        self._direct = _set_direct(self._file, True)
        self._buffer = HostArena(BLOCK_BYTES).tensor  # of few pages, each of which a write pins
        self._filled = self._written = 0

    def __enter__(self) -> _Blocks:
        return self

    def append(self, content: Tensor) -> int:
        """Put bytes at the end, and return their CRC-32."""
        done = crc = 0
        while done < content.numel():
            count = min(content.numel() - done, BLOCK_BYTES - self._filled)
            crc = copy_checked(self._buffer[self._filled :], content[done : done + count], crc)
            done, self._filled = done + count, self._filled + count
            if self._filled == BLOCK_BYTES:
                self._flush(BLOCK_BYTES)
        return crc

    def _flush(self, nbytes: int) -> None:
        """Write so much of the buffer; what a write leaves out is asked for again, from a page's start."""
        done = 0
        while done < nbytes:
            moved = self._write(self._buffer[done:nbytes], self._written + done)
            done += moved if done + moved == nbytes else moved // mmap.PAGESIZE * mmap.PAGESIZE
            if moved < mmap.PAGESIZE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._written, self._filled = self._written + nbytes, 0
        rest()

    def _write(self, block: Tensor, offset: int) -> int:
        try:
            return os.pwrite(self._file, block.numpy().data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        self._direct = False
        _set_direct(self._file, False)  # some file systems refuse as late as here
        return os.pwrite(self._file, block.numpy().data, offset)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                end = self._written + self._filled
                self._flush(-(-self._filled // mmap.PAGESIZE) * mmap.PAGESIZE)  # whole, as direct writes are
                os.ftruncate(self._file, end)
        finally:
            os.close(self._file)


def _set_direct(file: int, direct: bool) -> bool:
    """Write past the page cache from here on, or through it; whether the file system can."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | flag if direct else flags & ~flag)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return bool(flag)

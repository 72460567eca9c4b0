"""Measure, as ``megacompile bench nvme``, what the drive behind a directory gives, and the engine's share.

The drive's own rates come from plain direct transfers by a few threads, at several block sizes and queue
depths. The engine then moves regions, with checksums, in pairs with plain transfers of its own block size
and depth from the same memory; which of the two goes first alternates, and a fraction is the median over
the pairs, so that a drive whose speed drifts is compared with itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from megacompile.errors import MegacompileError
from megacompile.state.host_arena import HostArena
from megacompile.state.nvme import BLOCK_BYTES, DEPTH, Storage
from megacompile.state.scratch_files import check_directories

BLOCKS = (1 << 20, 4 << 20)
DEPTHS = (1, 4, 16)
REGION_BYTES = 128 << 20  # what the engine moves in one call: a layer's state
ROUNDS = 5


@dataclass(frozen=True)
class Rate:
    """Bytes per second of the drive at one setting: reading, writing, and both at once, summed."""

    block_bytes: int
    depth: int
    read: float
    write: float
    both: float


@dataclass(frozen=True)
class DriveReport:
    """The drive's rates, and the engine's beside it at the engine's block size and depth.

    ``engine`` and ``drive`` hold medians of (read, write) in bytes per second, ``fractions`` the medians of
    the engine's part of the drive's rate over pairs of neighbouring transfers.
    """

    folder: str
    direct: bool
    rates: tuple[Rate, ...]
    engine: tuple[float, float]
    drive: tuple[float, float]
    fractions: tuple[float, float]

    def __str__(self) -> str:
        lines = [
            f"{self.folder}, {'direct' if self.direct else 'through the page cache'}, GB/s",
            f"{'block':>8}{'depth':>7}{'read':>8}{'write':>8}{'both':>8}",
        ]
        for r in self.rates:
            figures = "".join(f"{x / 1e9:>8.2f}" for x in (r.read, r.write, r.both))
            lines.append(f"{r.block_bytes >> 20:>4} MiB{r.depth:>7}{figures}")
        for i, name in enumerate(("read", "write")):
            lines.append(
                f"engine, checksums compared: {name} {self.engine[i] / 1e9:.2f} GB/s, "
                f"{self.fractions[i]:.0%} of plain transfers alike, {self.drive[i] / 1e9:.2f}"
            )
        return "\n".join(lines)


def measure_drive(folder: str | os.PathLike[str], nbytes: int) -> DriveReport:
    """Measure with a scratch file of ``nbytes`` (rounded to whole regions), removed afterwards."""
    (path,) = check_directories([folder])
    count = max(2, nbytes // REGION_BYTES)
    count += count % 2
    regions = {f"region {i}": REGION_BYTES for i in range(count)}
    storage = Storage([path], regions)
    memory = HostArena(REGION_BYTES).take((REGION_BYTES,), torch.uint8).random_(0, 256)
    half = count // 2 * REGION_BYTES
    try:
        file, direct = _open(storage.paths[0])
        try:
            rates = tuple(_rate(_Drive(file, b, d, memory), half) for b in BLOCKS for d in DEPTHS)
            plain = _Drive(file, BLOCK_BYTES, DEPTH, memory)
            compared = _compare(storage, plain, list(regions)[: count // 2], memory)
        finally:
            os.close(file)
    finally:
        storage.close()
    return DriveReport(str(path), direct, rates, *compared)


def _open(path: Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT), True
    except OSError:
        return os.open(path, os.O_RDWR), False


class _Drive:
    """Plain direct transfers: ``depth`` threads each way that take one block after the other."""

    def __init__(self, file: int, block: int, depth: int, memory: Tensor) -> None:
        self.block, self.depth, self._file, self._memory = block, depth, file, memory
        self._pools = [ThreadPoolExecutor(depth) for _ in range(2)]

    def seconds(self, start: int, nbytes: int, *calls: Callable[..., int]) -> float:
        """Time to move a part of the file once with each of ``calls``, all of them at once."""
        began = time.perf_counter()
        tasks = [
            pool.submit(self._move, call, start, offset)
            for pool, call in zip(self._pools, calls, strict=False)
            for offset in range(0, nbytes, self.block)
        ]
        for task in tasks:
            task.result()
        return time.perf_counter() - began

    def _move(self, call: Callable[..., int], start: int, offset: int) -> None:
        place = offset % REGION_BYTES
        part = self._memory.numpy().data[place : place + self.block]
        if call(self._file, [part], start + offset) != self.block:
            raise MegacompileError(f"The drive moves less than a block at byte {start + offset}: is it full?")


def _rate(drive: _Drive, half: int) -> Rate:
    """Return the rate of the second half of the file, which is as large as the first."""
    write = half / drive.seconds(half, half, os.pwritev)  # first, so that there is something to read
    read = half / drive.seconds(half, half, os.preadv)
    both = 2 * half / drive.seconds(half, half, os.preadv, os.pwritev)
    return Rate(drive.block, drive.depth, read, write, both)


def _compare(
    storage: Storage, drive: _Drive, regions: list[str], memory: Tensor
) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
    """The engine on the first half of the file, the drive alone on the rest, region by region in pairs."""
    half = len(regions) * REGION_BYTES
    times: list[list[tuple[float, float]]] = [[], []]  # reading, writing: (engine, drive)

    def engine(move: Callable[[str, Tensor], None], region: str) -> float:
        began = time.perf_counter()
        move(region, memory)
        return time.perf_counter() - began

    for turn in range(ROUNDS):
        for way, move, call in ((1, storage.write, os.pwritev), (0, storage.read, os.preadv)):
            for number, region in enumerate(regions):
                place = half + number * REGION_BYTES
                if (turn + number) % 2:
                    alone = drive.seconds(place, REGION_BYTES, call)
                    times[way].append((engine(move, region), alone))
                else:
                    ours = engine(move, region)
                    times[way].append((ours, drive.seconds(place, REGION_BYTES, call)))
    read, write = (tuple(REGION_BYTES / median(each) for each in zip(*pairs, strict=True)) for pairs in times)
    parts = [median(alone / ours for ours, alone in pairs) for pairs in times]
    return (read[0], write[0]), (read[1], write[1]), (parts[0], parts[1])

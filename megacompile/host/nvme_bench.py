"""``megacompile bench nvme``: what the drive behind a directory gives, and how much of it the engine reaches.

The drive's own rates come from plain direct transfers by a few threads, at several block sizes and
queue depths. The engine then moves regions, with checksums, in turns with the drive's best setting, so
that a drive whose speed drifts is compared with itself.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from megacompile.errors import MegacompileError
from megacompile.host.arena import HostArena
from megacompile.host.nvme import Storage, check_directories

BLOCKS = (1 << 20, 4 << 20)
DEPTHS = (1, 4, 16)
REGION_BYTES = 128 << 20  # what the engine moves in one call: a layer's state
ROUNDS = 3


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
    """The drive's rates, and the engine's beside the best of them in medians over alternating rounds.

    ``engine`` and ``drive`` hold (read, write) in bytes per second.
    """

    folder: str
    direct: bool
    rates: tuple[Rate, ...]
    engine: tuple[float, float]
    drive: tuple[float, float]

    @property
    def fractions(self) -> tuple[float, float]:
        return self.engine[0] / self.drive[0], self.engine[1] / self.drive[1]

    def __str__(self) -> str:
        lines = [f"{self.folder}, {'direct' if self.direct else 'through the page cache'}, GB/s",
                 f"{'block':>8}{'depth':>7}{'read':>8}{'write':>8}{'both':>8}"]  # fmt: skip
        for r in self.rates:
            figures = "".join(f"{x / 1e9:>8.2f}" for x in (r.read, r.write, r.both))
            lines.append(f"{r.block_bytes >> 20:>4} MiB{r.depth:>7}{figures}")
        for i, name in enumerate(("read", "write")):
            lines.append(
                f"engine, checksums compared: {name} {self.engine[i] / 1e9:.2f} GB/s, "
                f"{self.fractions[i]:.0%} of the {self.drive[i] / 1e9:.2f} the drive gave in between"
            )
        return "\n".join(lines)


def measure_drive(folder: str | os.PathLike[str], nbytes: int) -> DriveReport:
    """Measure with a scratch file of ``nbytes`` (rounded to whole regions), removed afterwards."""
    (path,) = check_directories([folder])
    count = max(2, nbytes // REGION_BYTES)
    count += count % 2
    regions = {f"region {i}": REGION_BYTES for i in range(count)}
    storage = Storage([path], regions)
    try:
        file, direct = _open(storage.paths[0])
        try:
            half = count // 2 * REGION_BYTES
            rates = tuple(_rate(file, half, half, b, d) for b in BLOCKS for d in DEPTHS)
            engine, drive = _compare(storage, file, half, rates)
        finally:
            os.close(file)
    finally:
        storage.close()
    return DriveReport(str(path), direct, rates, engine, drive)


def _open(path: Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT), True
    except OSError:
        return os.open(path, os.O_RDWR), False


class _Drive:
    """Plain direct transfers of a part of a file: ``depth`` threads, one block each at a time."""

    def __init__(self, file: int, block: int, depth: int) -> None:
        self.block, self.depth, self._file = block, depth, file
        self._pool = ThreadPoolExecutor(2 * depth)
        self._memory = [mmap.mmap(-1, block) for _ in range(2 * depth)]
        noise = os.urandom(block)
        for memory in self._memory:
            memory.write(noise)

    def seconds(self, start: int, nbytes: int, *calls: Callable[..., int]) -> float:
        """Time to move the part once with each of ``calls``, all of them at once."""
        began = time.perf_counter()
        tasks = [
            self._pool.submit(self._lane, call, self._memory[i * self.depth + lane], start, lane, nbytes)
            for i, call in enumerate(calls)
            for lane in range(self.depth)
        ]
        for task in tasks:
            task.result()
        return time.perf_counter() - began

    def _lane(self, call: Callable[..., int], memory: mmap.mmap, start: int, lane: int, nbytes: int) -> None:
        for offset in range(start + lane * self.block, start + nbytes, self.depth * self.block):
            if call(self._file, [memory], offset) != self.block:
                raise MegacompileError(f"The drive moves less than a block at byte {offset}: is it full?")


def _rate(file: int, start: int, nbytes: int, block: int, depth: int) -> Rate:
    drive = _Drive(file, block, depth)
    write = nbytes / drive.seconds(start, nbytes, os.pwritev)  # first, so that there is something to read
    read = nbytes / drive.seconds(start, nbytes, os.preadv)
    both = 2 * nbytes / drive.seconds(start, nbytes, os.preadv, os.pwritev)
    return Rate(block, depth, read, write, both)


def _compare(
    storage: Storage, file: int, start: int, rates: tuple[Rate, ...]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Region by region in turns: the engine on the first half of the file, the drive alone on the rest."""
    memory = HostArena(REGION_BYTES).take((REGION_BYTES,), torch.uint8).random_(0, 256)
    regions = list(storage.regions)[: start // REGION_BYTES]
    best = [max(rates, key=lambda r: r.read), max(rates, key=lambda r: r.write)]
    drives = [_Drive(file, r.block_bytes, r.depth) for r in best]
    moves = (storage.read, storage.write)
    engine: list[list[float]] = [[], []]
    alone: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for way, call in ((1, os.pwritev), (0, os.preadv)):
            for number, region in enumerate(regions):
                began = time.perf_counter()
                moves[way](region, memory)
                engine[way].append(time.perf_counter() - began)
                place = start + number * REGION_BYTES
                alone[way].append(drives[way].seconds(place, REGION_BYTES, call))
    read, write, drive_read, drive_write = (REGION_BYTES / median(t) for t in (*engine, *alone))
    return (read, write), (drive_read, drive_write)

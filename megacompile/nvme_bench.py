"""``megacompile bench nvme``: what the drive behind a directory gives, and how much of it the engine reaches.

The drive's own rates come from plain direct transfers by a few threads, at several block sizes and
queue depths; the engine then moves regions of the same total size, with checksums, in turns with the
drive's best setting, so that a drive whose speed drifts is compared with itself.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from megacompile.arena import HostArena
from megacompile.errors import MegacompileError
from megacompile.nvme import Storage, check_directories

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
    regions = {f"region {i}": REGION_BYTES for i in range(count)}
    storage = Storage([path], regions)
    try:
        file, direct = _open(storage.paths[0])
        try:
            rates = tuple(_rate(file, count * REGION_BYTES, b, d) for b in BLOCKS for d in DEPTHS)
            engine, drive = _compare(storage, file, rates)
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


def _rate(file: int, total: int, block: int, depth: int) -> Rate:
    def move(calls: list[Callable[..., int]]) -> float:
        with ThreadPoolExecutor(depth * len(calls)) as pool:
            start = time.perf_counter()
            tasks = [
                pool.submit(_lane, call, file, range(lane * block, total, depth * block), block)
                for call in calls
                for lane in range(depth)
            ]
            moved = sum(task.result() for task in tasks)
        return moved / (time.perf_counter() - start)

    write = move([os.pwritev])  # first, so that there is something to read
    return Rate(block, depth, move([os.preadv]), write, move([os.preadv, os.pwritev]))


def _lane(call: Callable[..., int], file: int, offsets: range, block: int) -> int:
    """One thread's transfers, each as long as the one before took."""
    memory = mmap.mmap(-1, block)
    memory.write(os.urandom(1 << 20) * (block >> 20))
    moved = 0
    for offset in offsets:
        size = call(file, [memory], offset)
        if size <= 0:
            raise MegacompileError(f"The drive moves nothing at byte {offset}: is it full?")
        moved += size
    return moved


def _compare(
    storage: Storage, file: int, rates: tuple[Rate, ...]
) -> tuple[tuple[float, float], tuple[float, float]]:
    memory = HostArena(REGION_BYTES).take((REGION_BYTES,), torch.uint8).random_(0, 256)
    total = storage.nbytes
    best = [max(rates, key=lambda r: r.read), max(rates, key=lambda r: r.write)]
    found: dict[str, list[float]] = {"read": [], "write": [], "drive read": [], "drive write": []}
    for _ in range(ROUNDS):
        for name, move in (("write", storage.write), ("read", storage.read)):
            start = time.perf_counter()
            for region in storage.regions:
                move(region, memory)
            found[name].append(total / (time.perf_counter() - start))
        rate = _rate(file, total, best[0].block_bytes, best[0].depth)
        found["drive read"].append(rate.read)
        rate = _rate(file, total, best[1].block_bytes, best[1].depth)
        found["drive write"].append(rate.write)
    middle = {name: statistics.median(values) for name, values in found.items()}
    return (middle["read"], middle["write"]), (middle["drive read"], middle["drive write"])

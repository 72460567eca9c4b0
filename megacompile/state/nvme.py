"""State on NVMe: scratch files, reads and writes past the page cache, and a benchmark of a drive."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from megacompile.distributed.world import World
from megacompile.errors import BudgetError, MegacompileError, StorageError
from megacompile.own_files import make_own_folder, refuse_link
from megacompile.printable import printable
from megacompile.state.host_arena import HostArena
from megacompile.text_files import path_of
from megacompile.units import format_bytes

# ------------------------------------------------------------------------------------------------------------
# Where scratch files of the storage engine lie: its directories, their locks, the space that files take.
#
# In:  directories. Out: their absolute paths, a lock on each, and files whose space is taken at once. An
# error names the directory as ``offload_dir`` has it.


_LOCK = "megacompile.lock"
_PATTERN = "megacompile-*.scratch"
_NUMBERS = itertools.count()  # of the files of this process, each a program's


def check_directories(directories: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Absolute paths, or :class:`MegacompileError` for one that is missing or named twice."""
    folders = [path_of(d, "offload_dir").resolve() for d in directories]
    for given, folder in zip(directories, folders, strict=True):
        if not folder.is_dir():
            raise MegacompileError(f"offload_dir={os.fspath(given)!r} is no directory: make it first.")
        if folders.count(folder) > 1:
            raise MegacompileError(f"offload_dir names {folder} twice: name each directory once.")
    return folders


def folders_of(world: World, directories: Sequence[str]) -> tuple[str, ...]:
    """The directories themselves; of several ranks a folder of this one's own in each."""
    if world.size == 1:
        return tuple(directories)
    own = [Path(directory) / f"rank-{world.rank}" for directory in directories]
    for folder in own:
        try:
            make_own_folder(folder)
        except OSError as error:
            raise _unusable(folder, error) from error
    return tuple(str(folder) for folder in own)


def _unusable(folder: Path, error: OSError, what: str = "") -> MegacompileError:
    return MegacompileError(f"offload_dir={str(folder)!r} cannot be used: {what}{error.strerror}.")


class FolderLock:
    """A folder that this process has, for as long as any of its programs holds this."""

    def __init__(self, folder: Path) -> None:
        weakref.finalize(self, os.close, _locked(folder))


_LOCKS: weakref.WeakValueDictionary[tuple[int, Path], FolderLock] = weakref.WeakValueDictionary()


def lock_folder(folder: Path) -> FolderLock:
    """Take the folder for this process, or say which one has it; what a dead process left is removed."""
    key = os.getpid(), folder
    lock = _LOCKS.get(key)
    if lock is None:
        lock = _LOCKS[key] = FolderLock(folder)
    return lock


def _locked(folder: Path) -> int:
    try:
        refuse_link(folder / _LOCK)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise _unusable(folder, error, f"{_LOCK} in it: ") from error
    status = os.fstat(lock)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # what has another name may be anybody's
        os.close(lock)
        raise MegacompileError(
            f"offload_dir={str(folder)!r} cannot be used: {_LOCK} in it is no file of its own: remove it."
        )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = printable(os.read(lock, 32).decode(errors="replace").strip())
        os.close(lock)
        raise MegacompileError(
            f"offload_dir={str(folder)!r} is in use by process {owner}: give each process its own directory."
        ) from error
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    for stale in folder.glob(_PATTERN):
        stale.unlink(missing_ok=True)
    return lock


def create_file(path: Path, nbytes: int) -> int:
    """A new file whose space is taken at once, opened past the page cache where that is possible."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    folder = path.parent
    try:
        file = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise _unusable(folder, error) from error
        path.unlink(missing_ok=True)
        file = os.open(path, flags, 0o600)
        warnings.warn(
            f"offload_dir={str(folder)!r} has no direct I/O: transfers pass the page cache and are slower.",
            stacklevel=2,
        )
    if _file_system(folder) in ("tmpfs", "ramfs"):
        warnings.warn(f"offload_dir={str(folder)!r} is kept in RAM, so that it saves none.", stacklevel=2)
    try:
        take_space(file, folder, nbytes)
    except BudgetError:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return file


def take_space(file: int, folder: Path, nbytes: int) -> None:
    """Make a file at least so long, its space taken at once."""
    status = os.fstatvfs(file)
    free = status.f_bavail * status.f_frsize
    try:
        if nbytes > os.fstat(file).st_size:
            os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        raise BudgetError(
            f"offload_dir={str(folder)!r} needs {nbytes} bytes ({format_bytes(nbytes)}) and has {free} "
            f"({format_bytes(free)}): {error.strerror}. Free some space, or name further directories."
        ) from error


def _file_system(folder: Path) -> str:
    """The type of the file system that a folder is on, "" where the system does not say."""
    mounts = Path("/proc/self/mounts")
    best = ("", "")
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        _, place, kind, *_ = line.split(" ")
        if folder.is_relative_to(place) and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]


# ------------------------------------------------------------------------------------------------------------
# The storage engine: named regions of scratch files, moved in large direct blocks with a deep queue.
#
# In:  directories and the size of each region. Out: :class:`Storage`, whose ``read`` and ``write`` move a
# whole region from and to host memory. A region is cut into blocks that go round the directories (striping).
# Every block's checksum is kept in RAM when it is written and compared when it is read, so that nothing that
# storage changed is ever trained on.
#
# The files are scratch: they belong to one process, are removed when it ends, and one that a killed process
# left is removed by the next that uses the directory. A lock file keeps others out meanwhile.


try:
    import xxhash

    checksum: Callable[..., int] = xxhash.xxh3_64_intdigest  # 26 GB/s on a core
except ImportError:
    checksum = zlib.crc32  # 4 GB/s on a core; it gives up the GIL, and blocks are checked in parallel

BLOCK_BYTES = 4 << 20
PAGE = 4096  # direct transfers start and end at multiples of this, in memory and in the file
DEPTH = 8  # blocks under way at once, each way
_STALLS = 8  # transfers in a row that may move nothing


@dataclass(frozen=True, slots=True)
class DriveBlock:
    """A part of a region: which file it is in, where, and its place in the region."""

    file: int
    offset: int
    start: int
    nbytes: int


class Storage:
    """Scratch space for regions of given sizes, striped over one or several directories.

    Raises :class:`MegacompileError` for a directory that is missing or in use, :class:`BudgetError`
    where the space is not there; from ``read`` and ``write`` :class:`StorageError`.
    """

    def __init__(self, directories: Sequence[str | os.PathLike[str]], regions: Mapping[str, int]) -> None:
        folders = check_directories(directories)
        self.regions, self._ends = _blocks(regions, [0] * len(folders))
        self._sums: dict[str, list[int | None]] = {n: [None] * len(b) for n, b in self.regions.items()}
        self._passing: set[str] = set()  # regions of one program
        self.read_bytes = self.written_bytes = 0
        self.paths: list[Path] = []
        self._files: list[int] = []
        self._readers = ThreadPoolExecutor(DEPTH, "megacompile-read")
        self._writers = ThreadPoolExecutor(DEPTH, "megacompile-write")
        locks: list[FolderLock] = []
        pools = [self._readers, self._writers]
        self._close = weakref.finalize(self, _release, os.getpid(), self.paths, self._files, locks, pools)
        try:
            for folder, nbytes in zip(folders, self._ends, strict=True):
                locks.append(lock_folder(folder))
                self.paths.append(folder / f"megacompile-{os.getpid()}-{next(_NUMBERS)}.scratch")
                self._files.append(create_file(self.paths[-1], nbytes))
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes on storage."""
        return sum(b.nbytes for blocks in self.regions.values() for b in blocks)

    def nbytes_of(self, region: str) -> int:
        """Bytes of one region."""
        return sum(b.nbytes for b in self.regions[region])

    def lay_over(self, regions: Mapping[str, int]) -> None:
        """Make regions behind the lasting ones, over those of an earlier call, which nothing may use."""
        placed, ends = _blocks(regions, self._ends)
        for path, file, nbytes in zip(self.paths, self._files, ends, strict=True):
            take_space(file, path.parent, nbytes)
        for name in self._passing:
            del self.regions[name], self._sums[name]
        self.regions |= placed
        self._sums |= {name: [None] * len(blocks) for name, blocks in placed.items()}
        self._passing = set(placed)

    def read(self, region: str, into: Tensor) -> None:
        """Fill ``into`` (uint8, page-aligned, as long as the region) and compare all checksums."""
        self._move(self._readers, self._read_block, region, into)
        self.read_bytes += into.nbytes

    def write(self, region: str, source: Tensor) -> None:
        """Store a region from ``source`` (uint8, page-aligned, as long as the region)."""
        self._move(self._writers, self._write_block, region, source)
        self.written_bytes += source.nbytes

    def close(self) -> None:
        """Remove the files and let others use the directories."""
        self._close()

    def _move(
        self,
        pool: ThreadPoolExecutor,
        run: Callable[[str, int, memoryview], None],
        region: str,
        memory: Tensor,
    ) -> None:
        blocks = self.regions[region]
        assert memory.nbytes == self.nbytes_of(region) and memory.data_ptr() % PAGE == 0
        view = memory.numpy().data
        parts = [view[b.start : b.start + b.nbytes] for b in blocks]
        tasks = [pool.submit(run, region, i, part) for i, part in enumerate(parts)]
        failures = [e for e in [task.exception() for task in tasks] if e is not None]
        if failures:
            raise failures[0]

    def _read_block(self, region: str, index: int, memory: memoryview) -> None:
        block, expected = self.regions[region][index], self._sums[region][index]
        assert expected is not None, f"{region} is read before it was written"
        self._transfer("read", os.preadv, region, index, memory)
        if checksum(memory, block.start) != expected:
            raise StorageError(
                f"{self._place(region, index)} is not what was written there: the drive or its cable "
                "is failing. Check the drive, and go on from a checkpoint."
            )

    def _write_block(self, region: str, index: int, memory: memoryview) -> None:
        block = self.regions[region][index]
        self._sums[region][index] = checksum(memory, block.start)
        self._transfer("write", os.pwritev, region, index, memory)

    def _transfer(
        self, verb: str, call: Callable[..., int], region: str, index: int, memory: memoryview
    ) -> None:
        """Move one block; what a transfer leaves out is asked for again, from a page's start."""
        block = self.regions[region][index]
        done = stalls = 0
        while done < block.nbytes:
            try:
                moved = done + call(self._files[block.file], [memory[done:]], block.offset + done)
            except OSError as error:
                raise StorageError(
                    f"{self._place(region, index)}: cannot {verb}: {error.strerror}."
                ) from error
            moved = moved if moved == block.nbytes else moved // PAGE * PAGE
            stalls = stalls + 1 if moved == done else 0
            if stalls > _STALLS:
                raise StorageError(f"{self._place(region, index)}: {verb}s end after {done} bytes.")
            done = moved

    def _place(self, region: str, index: int) -> str:
        block = self.regions[region][index]
        return f"Block {index} of {region} (byte {block.offset} of {self.paths[block.file]})"


def _blocks(
    regions: Mapping[str, int], taken: Sequence[int]
) -> tuple[dict[str, tuple[DriveBlock, ...]], list[int]]:
    """Blocks of every region, dealt round the files behind what is taken of them; where each file ends."""
    ends, files = list(taken), len(taken)
    placed: dict[str, tuple[DriveBlock, ...]] = {}
    turn = 0
    for name, nbytes in regions.items():
        assert nbytes % PAGE == 0, f"{name} has {nbytes} bytes, which is no number of pages"
        blocks = []
        for start in range(0, nbytes, BLOCK_BYTES):
            file, turn = turn, (turn + 1) % files
            size = min(BLOCK_BYTES, nbytes - start)
            blocks.append(DriveBlock(file, ends[file], start, size))
            ends[file] += size
        placed[name] = tuple(blocks)
    return placed, ends


def _release(
    owner: int, paths: list[Path], files: list[int], locks: list[FolderLock], pools: list[ThreadPoolExecutor]
) -> None:
    if os.getpid() != owner:
        return  # a forked child leaves its parent's files alone
    for pool in pools:
        with contextlib.suppress(RuntimeError):  # a thread of its own, which held the last reference
            pool.shutdown()
    for file in files:
        os.close(file)
    for path in paths:
        path.unlink(missing_ok=True)
    locks.clear()


# ------------------------------------------------------------------------------------------------------------
# ``megacompile bench nvme``: what the drive behind a directory gives, and how much of it the engine reaches.
#
# The drive's own rates come from plain direct transfers by a few threads, at several block sizes and queue
# depths. The engine then moves regions, with checksums, in pairs with plain transfers of its own block size
# and depth from the same memory; which of the two goes first alternates, and a fraction is the median over
# the pairs, so that a drive whose speed drifts is compared with itself.


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

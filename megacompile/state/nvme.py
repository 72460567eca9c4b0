"""The storage engine: named regions of scratch files, moved in large direct blocks with a deep queue.

In:  directories and the size of each region. Out: :class:`Storage`, whose ``read`` and ``write`` move a
whole region from and to host memory. A region is cut into blocks that go round the directories (striping).
Every block's checksum is kept in RAM when it is written and compared when it is read, so that nothing that
storage changed is ever trained on.

The files are scratch: they belong to one process, are removed when it ends, and one that a killed process
left is removed by the next that uses the directory. A lock file keeps others out meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megacompile.errors import StorageError
from megacompile.state.scratch_files import (
    FolderLock,
    check_directories,
    create_file,
    lock_folder,
    take_space,
)

try:
    import xxhash

    checksum: Callable[..., int] = xxhash.xxh3_64_intdigest  # 26 GB/s on a core
except ImportError:
    checksum = zlib.crc32  # 4 GB/s on a core; it gives up the GIL, and blocks are checked in parallel

_NUMBERS = itertools.count()  # of the files of this process, each a program's
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
        """Lay regions behind the lasting ones, over those of an earlier call, which nothing may use."""
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

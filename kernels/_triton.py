"""The one place that knows whether triton is there, and what launchers share.

In: nothing. Out: ``triton`` and ``tl`` (stubs where triton is missing: ``jit`` then returns the function
unchanged, and only the torch references can run), and ``runs_triton``, which says for a tensor which of the
two implementations an operator takes.
"""

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

for _path in Path(__file__).parent.glob("*.py"):
    # torch and triton ask for the module of each operator's and kernel's file; for one that is not in this
    # table, inspect looks through all modules of the process: 3 ms beside transformers
    inspect.modulesbyfile.setdefault(str(_path), f"{__package__}.{_path.stem}")

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Language:
        """Stands in for ``triton.language`` in annotations such as ``BLOCK: tl.constexpr``."""

        def __getattr__(self, name: str) -> Any:
            return object

    class _Triton:
        """Stands in for ``triton`` where kernels are only defined."""

        @staticmethod
        def jit(fn: Any = None, **_: Any) -> Any:
            return fn if fn is not None else (lambda kernel: kernel)

    tl = _Language()
    triton = _Triton()

__all__ = ["tl", "triton"]  # what type checkers may import from here beside what is defined here

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


_gave_up = False


def runs_triton(x: Tensor) -> bool:
    """Return whether an operator on ``x`` launches its Triton kernel; otherwise it runs the reference."""
    if _recording is not None and _recording.processors is not None:
        return not _gave_up
    return HAS_TRITON and (x.is_cuda or INTERPRETED)


def on_gpu(x: Tensor) -> bool:
    """Return whether ``x`` is on a GPU, or stands for a tensor that is (see ``recording``)."""
    return x.is_cuda or (_recording is not None and _recording.processors is not None)


def give_up() -> None:
    """Run the references from now on: triton is missing on this machine, or does not work."""
    global HAS_TRITON, _gave_up
    HAS_TRITON, _gave_up = False, True


def accumulator(dtype: torch.dtype) -> Any:
    """The Triton type that a kernel computes in: float64 for float64 data, otherwise float32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def wide(dtype: torch.dtype) -> torch.dtype:
    """The torch type that a reference computes in; the counterpart of ``accumulator``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(n: int, d: int) -> int:
    """n / d, rounded up."""
    return -(-n // d)


def processors(device: torch.device) -> int:
    """The multiprocessors of a device, or of what launches are recorded for (4 for the interpreter)."""
    if _recording is not None:
        return _recording.processors or _recording.chip_processors
    return _device_processors(device) if device.type == "cuda" else 4


@functools.cache
def _device_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def as_rows(x: Tensor) -> Tensor:
    """``x`` as [rows, columns] with unit column stride; copies only where no view does."""
    width = x.shape[-1]
    rows = x.reshape(x.numel() // width if width else 0, width)
    return rows if rows.stride(-1) == 1 or width <= 1 else rows.contiguous()


def as_tiles(*tensors: Tensor) -> list[Tensor]:
    """[rows, columns] each; a single row where all are contiguous, so that no tile is ragged."""
    if all(x.is_contiguous() for x in tensors):
        return [x.view(1, -1) for x in tensors]
    return [as_rows(x) for x in tensors]


def pointer(x: Tensor | None, stand_in: Tensor) -> Tensor:
    """``x`` for a kernel that reads it densely; where there is none, what the kernel never follows."""
    return stand_in if x is None else x.contiguous()


def row_vector(x: Tensor | None, rows: Tensor) -> Tensor:
    """``pointer`` to one element per column of ``rows``; a kernel would read past a shorter one."""
    if x is not None and x.shape != rows.shape[1:]:
        raise ValueError(f"rows of {rows.shape[1]} columns take a weight of that shape, not {list(x.shape)}")
    return pointer(x, rows)


@triton.jit
def tile_at(columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row, first column) of this program in a flat grid of rows x tiles of BLOCK columns, as int64.

    A flat grid, since CUDA ends at 65535 in its other dimensions; no cdiv, which adds before it
    divides and so wraps where ``columns`` is just below 2**31.
    """
    tiles = (columns - 1) // BLOCK + 1
    program = tl.program_id(0).to(tl.int64)
    return program // tiles, program % tiles * BLOCK


@dataclass(frozen=True)
class Launch:
    """A launch that was recorded instead of done: what the ahead-of-time gate compiles."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    fuses: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """The options that Triton compiles by beside the constants. Products and sums are fused, as the gate
        has, but
        in kernels that have to give another code's bits: Triton's own default comes from the environment, and
        3.10 turns it off."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": self.fuses}


class Gpu(NamedTuple):
    """A GPU that other tensors stand for: its multiprocessors and its chip (90: compute capability 9.0)."""

    processors: int
    arch: int = 80


@dataclass(frozen=True)
class Recording:
    """The launches of a dry run, and what it is for: the chip, and the multiprocessors of the GPU that CPU
    tensors stand for, None where they stand for themselves."""

    launches: list[Launch]
    arch: int
    processors: int | None
    chip_processors: int


_recording: Recording | None = None


@contextlib.contextmanager
def recording(arch: int = 80, gpu: Gpu | None = None, chip_processors: int = 4) -> Iterator[list[Launch]]:
    """Within, ``launch`` appends to the yielded list and runs nothing: meta tensors will do.

    ``chip_processors`` are the multiprocessors of the chip, on which grids of persistent kernels depend.
    With ``gpu``, operators on any tensors choose their kernels and allocate as on that GPU, and nothing is
    appended, which would keep their tensors alive.
    """
    global _recording
    made = Recording([], gpu.arch, gpu.processors, 4) if gpu else Recording([], arch, None, chip_processors)
    outer, _recording = _recording, made
    try:
        yield _recording.launches
    finally:
        _recording = outer


def gpu_of(device: torch.device) -> Gpu | None:
    """Return what a device is to plans; None for a CPU."""
    return Gpu(_device_processors(device), _device_arch(device)) if device.type == "cuda" else None


@functools.cache
def _device_arch(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def arch_of(x: Tensor) -> int:
    """The chip that a launch on ``x`` is for; 80 where the interpreter stands in."""
    if _recording is not None:
        return _recording.arch
    return _device_arch(x.device) if x.is_cuda else 80


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 3,
    fuses: bool = True,
    **constants: Any,
) -> None:
    """Launch ``kernel`` on the device of its first tensor argument; an empty grid does nothing. ``fuses``:
    the compiler may make one operation of a product and a sum."""
    one = Launch(kernel, grid, args, constants, num_warps, num_stages, fuses)
    if _recording is not None:
        if _recording.processors is None:  # else the tensors' lives are what is looked at
            _recording.launches.append(one)
        return
    if 0 in grid:
        return
    first = next(arg for arg in args if isinstance(arg, Tensor))
    with torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext():
        kernel[grid](*args, **one.options, **constants)


def launch_columns(
    kernel: Any, rows: int, columns: int, block: int, dtype: torch.dtype, *args: Any, **constants: Any
) -> None:
    """Launch a kernel on the flat grid that ``tile_at`` reads, computing in the accumulator of ``dtype``."""
    constants |= {"ACC": accumulator(dtype), "BLOCK": block}
    launch(kernel, (rows * ceil_div(columns, block),), *args, **constants)


@dataclass(frozen=True)
class RowTile:
    """The tile of a kernel that holds whole rows: BLOCK_M rows of BLOCK_N columns."""

    block_m: int
    block_n: int
    num_warps: int

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of ``launch``."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "num_warps": self.num_warps}


def persistent(tile: RowTile, rows: int, device: torch.device) -> int:
    """Return the number of programs of a persistent kernel: enough per multiprocessor to ask for some 32 KiB
    at a time.

    With less in flight a memory that answers after 800 ns is not kept busy; more would not be resident.
    """
    each = min(4, 24 // tile.num_warps, 8192 // (tile.block_m * tile.block_n))
    return max(1, min(processors(device) * max(1, each), ceil_div(rows, tile.block_m)))


MAX_ROW = 32768


def row_tile(columns: int, per_thread: int = 16) -> RowTile:
    """A tile of whole rows with about ``per_thread`` elements per thread and tensor.

    Narrow rows (the heads of a query norm) share a program: one warp for a 128-wide row would
    leave most of a processor idle.
    """
    block_n = next_power_of_2(columns)
    block_m = max(1, 2048 // block_n)
    warps = block_m * block_n // (32 * per_thread)
    return RowTile(block_m, block_n, min(max(warps, 4), 32))

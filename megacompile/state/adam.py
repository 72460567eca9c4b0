"""Host Adam: one pass over flat state in host memory, in place, bitwise the same however it runs.

In:  weights, moments and a gradient as contiguous 1-D CPU tensors of one length; `AdamHyper`.
Out: the same tensors, one optimizer step later.

Weights have two layouts: one fp32 tensor, or its two 16-bit halves `(hi, lo)`: `hi` is the bf16
weight that is streamed to the device, `lo` what bf16 leaves out (`split`, `join`).

Invariant: a result depends neither on the thread count nor on the cuts of buffers. If torch runs its AVX2 or
AVX-512 code and the compiler builds for this CPU, it does not depend on the backend either: it is bitwise
that of torch's fused kernel on whole vectors. (torch itself computes the last elements of each thread's share
in double precision; here every element takes the vector path.)
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megacompile.cache_dir import cache_folder

Kernel = Literal["fp32", "int8", "int4", "muon", "copy", "rows"]
# What each kernel is built from, when it is first called for.
SOURCES: dict[Kernel, tuple[str, ...]] = {
    "fp32": ("adam.c", "squares.c"),
    "int8": ("adam_coded.c", "-DBITS=8"),
    "int4": ("adam_coded.c", "-DBITS=4"),
    "muon": ("muon.c",),
    "copy": ("copy.c",),
    "rows": ("embedding_rows.c",),
}
HERE = Path(__file__).parent
FLAGS = "-O3 -shared -fPIC -ffp-contract=off -fno-math-errno -fno-trapping-math -fschedule-insns"
TARGETS = ("-march=native -fopenmp", "-mcpu=native -fopenmp", "-march=native -fopenmp-simd", "")
STEP_BYTES = 24  # that a step moves per element, beside the gradient: weights and both moments
TILE = 1 << 19  # elements of the torch backend's tiles: 4 MB of scratch, which stays in cache
DTYPES: dict[str, tuple[torch.dtype, ...]] = {"lo": (torch.int16,)}
DTYPES |= dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), (torch.float32,))
DTYPES |= {"hi": (torch.bfloat16, torch.int16), "grad": (torch.float32, torch.bfloat16)}
_choice: Literal["auto", "c", "torch"] = "auto"


@dataclass(frozen=True)
class AdamHyper:
    """One step's hyper-parameters; `step` counts from 1 and is the step being taken.

    `decoupled` is AdamW's weight decay, otherwise it is added to the gradient (Adam). The gradient
    is first multiplied by `grad_scale` in fp32, as `clip_grad_norm_` does with its coefficient.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int = 1
    decoupled: bool = True
    maximize: bool = False
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"Betas must be in [0, 1), not {self.beta1} and {self.beta2}.")
        if self.step < 1:
            raise ValueError(f"The step being taken counts from 1, not {self.step}.")


def split(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Write fp32 `master` (n) to `hi` (n, bf16 or int16) and `lo` (n, int16).

    On the bits, modulo 2**32: hi = (bits + 0x8000) >> 16, which is bf16 rounded to nearest, ties
    away from zero, and lo = bits - (hi << 16). Look for values that are not finite before: hi of
    the largest floats is infinite, of some NaNs -0.
    """
    check(master=master, hi=hi, lo=lo)
    if backend() == "c":
        call_kernel("mc_split", master.numel(), master, hi, lo, torch.get_num_threads())
    else:
        bits = master.detach().view(torch.int32)
        lo.copy_(bits)
        hi.detach().view(torch.int16).copy_((bits + 0x8000).bitwise_right_shift_(16))


def join(hi: Tensor, lo: Tensor, out: Tensor) -> Tensor:
    """Write to fp32 `out` (n), and return, what `split` was given: all 2**32 bit patterns."""
    check(hi=hi, lo=lo, master=out)
    if backend() == "c":
        call_kernel("mc_join", out.numel(), hi, lo, out, torch.get_num_threads())
    else:
        bits = out.detach().view(torch.int32)
        bits.copy_(hi.detach().view(torch.int16)).bitwise_left_shift_(16).add_(lo)
    return out


@torch.no_grad()
def adamw_step(
    master: Tensor | tuple[Tensor, Tensor],
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    hyper: AdamHyper,
    threads: int | None = None,
) -> None:
    """Take one Adam step in place on `master`: fp32 (n), or the halves (hi, lo) of `split`.

    `exp_avg`, `exp_avg_sq`: fp32 (n); `grad`: fp32 or bf16 (n), left as it is. `threads` defaults
    to torch's. Memory traffic: 26 bytes per parameter with a bf16 gradient, 28 with fp32.
    """
    hi, lo = (master, None) if isinstance(master, Tensor) else master
    state = {"master": hi} if lo is None else {"hi": hi, "lo": lo}
    state |= {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
    check(**state)
    if threads is not None and threads < 1:
        raise ValueError(f"At least one thread is needed, not {threads}.")
    run = _c_step if backend() == "c" else _torch_step
    run([*state.values()], hyper, threads or torch.get_num_threads())


@torch.no_grad()
def adamw_rows(
    master: Tensor | tuple[Tensor, Tensor],
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rows: Tensor,
    width: int,
    grad: Tensor | None,
    hyper: AdamHyper,
    threads: int | None = None,
) -> None:
    """Take the step of :func:`adamw_step` for some rows of a table alone, in place and with the same bits.

    `master` and the moments are of the whole table, flat (rows * width); `rows` (n, int64) are different
    ones; `grad` (n, width) has their gradients, None stands for zeros.
    """
    hi, lo = (master, None) if isinstance(master, Tensor) else master
    state = {"master": hi} if lo is None else {"hi": hi, "lo": lo}
    check(**state, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    count = threads or torch.get_num_threads()
    if backend() == "c":
        flags = (grad is not None and grad.dtype == torch.bfloat16, hyper.decoupled, hyper.maximize)
        call_kernel(
            "mc_adam_rows", len(rows), rows.contiguous(), width, hi, lo, exp_avg, exp_avg_sq,
            None if grad is None else grad.contiguous(), scalars(hyper), *flags, count,
        )  # fmt: skip
        return
    tables = [x.view(-1, width) for x in (*state.values(), exp_avg, exp_avg_sq)]
    step = max(1, TILE // width)
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        taken = [table[some].view(-1) for table in tables]
        own = hi.new_zeros(taken[0].numel()) if grad is None else grad[start : start + step].reshape(-1)
        _torch_step([*taken, own], hyper, count)
        for table, values in zip(tables, taken, strict=True):
            table[some] = values.view(-1, width)


def check(**tensors: Tensor) -> None:
    """Refuse tensors that the kernels cannot take: wrong dtype, not flat, of different lengths."""
    first, numel = next((name, x.numel()) for name, x in tensors.items())
    for name, x in tensors.items():
        if x.dtype not in DTYPES[name]:
            allowed = " or ".join(map(str, DTYPES[name]))
            raise ValueError(f"{name} must be {allowed}, not {x.dtype}.")
        if x.device.type != "cpu" or x.dim() != 1 or not x.is_contiguous():
            raise ValueError(f"{name} must be a contiguous 1-D CPU tensor.")
        if x.numel() != numel:
            raise ValueError(f"{name} has {x.numel()} elements, but {first} has {numel}.")


def _c_step(state: list[Tensor], h: AdamHyper, threads: int) -> None:
    weight, *low, m, v, grad = state
    flags = (grad.dtype == torch.bfloat16, h.decoupled, h.maximize)
    parts = (weight, low[0] if low else None, m, v, grad)
    call_kernel("mc_adam", m.numel(), *parts, scalars(h), *flags, threads)


def scalars(h: AdamHyper) -> ctypes.Array[ctypes.c_double]:
    """The kernels' ``Hyper``."""
    values = (h.lr, h.beta1, h.beta2, h.eps, h.weight_decay, h.step, h.grad_scale)
    return (ctypes.c_double * len(values))(*values)


def call_kernel(
    name: str, *arguments: Tensor | ctypes.Array[Any] | int | None, kernel: Kernel = "fp32"
) -> int:
    """Pass tensors as addresses and integers as 64 bits; ctypes releases the GIL."""
    values: list[object] = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    values = [ctypes.c_int64(x) if isinstance(x, int) else x for x in values]
    return int(getattr(_library(kernel)[0], name)(*values))


@functools.cache
def _library(kernel: Kernel = "fp32") -> tuple[ctypes.CDLL | None, str]:
    """A kernel's library or None, and what built it or why nothing did."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None, "no C compiler (cc, gcc, clang) was found"
    with tempfile.TemporaryDirectory() as passing:  # for where the cache cannot be written
        for folder in (cache_folder(), Path(passing)):
            try:
                return _load(kernel, compiler, folder)
            except (OSError, subprocess.SubprocessError) as error:
                reason = str(error)
    return None, f"the C kernel could not be built ({reason})"


def _load(kernel: Kernel, compiler: str, folder: Path) -> tuple[ctypes.CDLL, str]:
    """The library from `folder`, compiled where it is missing, is not what was built or cannot be loaded."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    texts = [path.read_text() for path in sorted(HERE.glob("*.[ch]"))]
    key = "\n".join([*texts, _cpu(), compiler, version, FLAGS, *TARGETS])
    path = folder / f"adam-{kernel}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.so"
    try:
        library = _opened(_read_library(path))
    except OSError:
        library = _opened(_compile(kernel, compiler, path))
    threads = "" if library.mc_has_threads() else ", on one thread for want of OpenMP"
    return library, version.partition("\n")[0] + threads


def _cpu() -> str:
    """Return what -march=native depends on, so that a cache shared by several machines is safe."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    kept = {x for x in lines if x.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.system(), platform.machine(), platform.processor(), *sorted(kept)])


def _read_library(path: Path) -> bytes:
    """A library that was built before; OSError where the SHA-256 at the file's end is of other bytes."""
    content = path.read_bytes()
    built = content[: -hashlib.sha256().digest_size]
    if content != _with_digest(built):
        raise OSError(f"{path} is damaged")
    return built


def _with_digest(built: bytes) -> bytes:
    return built + hashlib.sha256(built).digest()  # loaders leave out what follows a library


@functools.cache
def _opened(built: bytes) -> ctypes.CDLL:
    """The library of these very bytes, from memory: a file may be changed after it was checked, and one that
    is cut off while it is mapped ends the process."""
    handle = os.memfd_create("megacompile-adam")  # stays open, as loaders know a library by its path
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(built)
        return ctypes.CDLL(f"/proc/self/fd/{handle}")
    except OSError:
        os.close(handle)
        raise


def _compile(kernel: Kernel, compiler: str, path: Path) -> bytes:
    """Build into a temporary folder beside `path` and rename, so that processes may race; the library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        for target in TARGETS:
            built = Path(folder, "adam.so")
            flags = [*FLAGS.split(), *target.split()]
            command = [compiler, *flags, *SOURCES[kernel], "-o", str(built.absolute()), "-lm"]
            result = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=120)
            if result.returncode == 0:
                library = built.read_bytes()
                built.write_bytes(_with_digest(library))
                built.replace(path)
                return library
    raise OSError(f"{compiler}: {result.stderr.strip()[-300:]}")


def set_backend(name: Literal["auto", "c", "torch"]) -> None:
    """Choose the backend: "auto" takes C where it builds. Looks for a compiler again."""
    global _choice
    _library.cache_clear()
    if name == "c" and _library()[0] is None:
        raise RuntimeError(f"The C backend cannot run: {_library()[1]}.")
    _choice = name


def backend(kernel: Kernel = "fp32") -> Literal["c", "torch"]:
    """Return which code runs: the C kernel or tiled torch."""
    return "torch" if _choice == "torch" or _library(kernel)[0] is None else "c"


def describe_backend() -> str:
    """One sentence for reports: what runs, why, and what it costs."""
    if backend() == "c":
        return f"Host Adam runs its C kernel at memory speed, built by {_library()[1]}."
    why = "it was asked to" if _choice == "torch" else _library()[1]
    return f"Host Adam runs tiled torch, about 3 times slower than its C kernel, because {why}."


def torch_fused(weight: Tensor, m: Tensor, v: Tensor, grad: Tensor, h: AdamHyper) -> None:
    """torch's fused kernel (private API, called only here) on fp32 (n); without `grad_scale`."""
    fused = torch._fused_adamw_ if h.decoupled else torch._fused_adam_
    step = torch.tensor(float(h.step), dtype=torch.float32)
    fused(
        [weight], [grad], [m], [v], [], [step], lr=h.lr, beta1=h.beta1,
        beta2=h.beta2, weight_decay=h.weight_decay, eps=h.eps, amsgrad=False, maximize=h.maximize,
    )  # fmt: skip


def _torch_step(state: list[Tensor], h: AdamHyper, threads: int) -> None:
    """Tiles that are whole vectors on every thread; what remains is padded to one."""
    unit, numel = 64 * threads, state[0].numel()
    tile = max(TILE // unit, 1) * unit
    whole = numel // unit * unit
    padded = [torch.cat([x[whole:], x.new_zeros(unit - numel + whole)]) for x in state]
    tiles = [[x[:whole][i : i + tile] for x in state] for i in range(0, whole, tile)]
    scratch = torch.empty(2, tile, dtype=torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for master, *low, m, v, grad in [*tiles, padded]:
            weight, gradient = scratch[:, : m.numel()]
            weight = join(master, low[0], weight) if low else master
            torch_fused(weight, m, v, gradient.copy_(grad).mul_(h.grad_scale), h)
            if low:
                split(weight, master, low[0])
    finally:
        torch.set_num_threads(before)
    for x, result in zip(state[:-1], padded[:-1], strict=True):
        x[whole:] = result[: numel - whole]

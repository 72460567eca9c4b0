"""Host Adam: one pass over flat state in host memory, in place, bitwise the same however it runs.

In:  weights, moments and a gradient as contiguous 1-D CPU tensors of one length; `AdamHyper`.
Out: the same tensors, one optimizer step later.

Weights have two layouts: one fp32 tensor, or its two 16-bit halves `(hi, lo)`: `hi` is the bf16
weight that is streamed to the device, `lo` what bf16 leaves out (`split`, `join`).

Invariant: a result depends neither on the thread count nor on where buffers are cut, nor on the
backend where torch runs its AVX2 or AVX-512 code: it is bitwise that of torch's fused kernel on
whole vectors. (torch itself computes the last few elements of each thread's share in double
precision; here every element takes the vector path.)
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = "-O3 -shared -fPIC -ffp-contract=off -fno-math-errno -fno-trapping-math"
TARGETS = ("-march=native -fopenmp", "-mcpu=native -fopenmp", "-fopenmp", "-fopenmp-simd")
TILE = 1 << 19  # elements of the torch backend's tiles: 4 MB of scratch, which stays in cache
HALF = (torch.bfloat16, torch.int16)
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
    _check_weights((hi, lo), master.numel())
    _check_weights((master,), master.numel())
    if backend() == "c":
        return _call("mc_split", master.numel(), master, hi, lo, torch.get_num_threads())
    bits = master.detach().view(torch.int32)
    lo.copy_(bits)
    hi.detach().view(torch.int16).copy_((bits + 0x8000) >> 16)


def join(hi: Tensor, lo: Tensor, out: Tensor) -> None:
    """Write to fp32 `out` (n) what `split` was given, for each of the 2**32 bit patterns."""
    _check_weights((hi, lo), out.numel())
    _check_weights((out,), out.numel())
    if backend() == "c":
        return _call("mc_join", out.numel(), hi, lo, out, torch.get_num_threads())
    bits = out.detach().view(torch.int32)
    bits.copy_(hi.detach().view(torch.int16)).bitwise_left_shift_(16).add_(lo)


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
    weights = master if isinstance(master, tuple) else (master,)
    _check_weights(weights, weights[0].numel())
    _check("exp_avg", exp_avg, weights[0].numel(), torch.float32)
    _check("exp_avg_sq", exp_avg_sq, weights[0].numel(), torch.float32)
    _check("grad", grad, weights[0].numel(), torch.float32, torch.bfloat16)
    if threads is not None and threads < 1:
        raise ValueError(f"At least one thread is needed, not {threads}.")
    run = _c_step if backend() == "c" else _torch_step
    run([*weights, exp_avg, exp_avg_sq, grad], hyper, threads or torch.get_num_threads())


def _check_weights(weights: tuple[Tensor, ...], numel: int) -> None:
    if len(weights) == 1:
        return _check("The fp32 weight", weights[0], numel, torch.float32)
    _check("hi", weights[0], numel, *HALF)
    _check("lo", weights[1], numel, torch.int16)


def _check(name: str, x: Tensor, numel: int, *dtypes: torch.dtype) -> None:
    if x.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, not {x.dtype}.")
    if x.device.type != "cpu" or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"{name} must be a contiguous 1-D CPU tensor.")
    if x.numel() != numel:
        raise ValueError(f"{name} has {x.numel()} elements where {numel} are needed.")


# ---- The C kernel -------------------------------------------------------------------------------


def _c_step(state: Sequence[Tensor], h: AdamHyper, threads: int) -> None:
    coupled = not h.decoupled and h.weight_decay != 0
    kind = (len(state) == 5) + 2 * (state[-1].dtype == torch.bfloat16) + 4 * coupled
    weight, low, *rest = state if len(state) == 5 else (state[0], None, *state[1:])
    lerp = ctypes.c_float(1 - h.beta1).value
    constants = (ctypes.c_float * 10)(  # the fields of `Constants`, each rounded once from double
        -h.grad_scale if h.maximize else h.grad_scale,
        1 - h.lr * h.weight_decay,
        h.weight_decay,
        lerp if lerp < 0.5 else lerp - 1,
        lerp >= 0.5,
        h.beta2,
        1 - h.beta2,
        (1 - h.beta2**h.step) ** 0.5,
        h.eps,
        -h.lr / (1 - h.beta1**h.step),
    )
    _call("mc_adam", weight.numel(), weight, low, *rest, constants, kind, threads)


def _call(name: str, *arguments: Tensor | ctypes.Array[ctypes.c_float] | int | None) -> None:
    """Pass tensors as addresses and integers as 64 bits; ctypes releases the GIL."""
    getattr(_kernel().library, name)(*(
        ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor)
        else ctypes.c_int64(x) if isinstance(x, int) else x
        for x in arguments
    ))  # fmt: skip


@dataclass(frozen=True)
class _Kernel:
    """The loaded library or None, and how that came about, as a part of a sentence."""

    library: ctypes.CDLL | None
    origin: str


@functools.cache
def _kernel() -> _Kernel:
    """The library from the user's cache, or from a passing folder where that cannot be written."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return _Kernel(None, "no C compiler (cc, gcc, clang) was found")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megacompile"
    with tempfile.TemporaryDirectory() as passing:
        for folder in (cache, Path(passing)):
            try:
                return _load(compiler, folder)
            except (OSError, subprocess.SubprocessError) as error:
                reason = str(error)
    return _Kernel(None, f"the C kernel could not be built ({reason})")


def _load(compiler: str, folder: Path) -> _Kernel:
    """The library from `folder`, compiled where it is missing or cannot be loaded."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    key = "\n".join([SOURCE.read_text(), _cpu(), compiler, version, FLAGS, *TARGETS])
    path = folder / f"host_adam-{hashlib.sha256(key.encode()).hexdigest()[:20]}.so"
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        folder.mkdir(parents=True, exist_ok=True)
        _compile(compiler, path)
        library = ctypes.CDLL(str(path))
    threads = "" if library.mc_has_threads() else ", on one thread for want of OpenMP"
    return _Kernel(library, f"{version.partition(chr(10))[0]}{threads}")


def _cpu() -> str:
    """What -march=native depends on, so that a cache shared by several machines is safe."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kept = {x for x in lines if x.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.system(), platform.machine(), platform.processor(), *sorted(kept)])


def _compile(compiler: str, path: Path) -> None:
    """Build into a temporary file and rename it, so that processes may race."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        for target in TARGETS:
            flags = [*FLAGS.split(), *target.split()]
            command = [compiler, *flags, str(SOURCE), "-o", temporary, "-lm"]
            result = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if result.returncode == 0:
                Path(temporary).replace(path)
                return
        raise OSError(f"{compiler}: {result.stderr.strip()[-300:]}")
    finally:
        Path(temporary).unlink(missing_ok=True)


def set_backend(name: Literal["auto", "c", "torch"]) -> None:
    """Choose the backend: "auto" takes C where it builds. Looks for a compiler again."""
    global _choice
    _kernel.cache_clear()
    if name == "c" and _kernel().library is None:
        raise RuntimeError(f"The C backend cannot run: {_kernel().origin}.")
    _choice = name


def backend() -> Literal["c", "torch"]:
    """Which code runs: the C kernel or tiled torch."""
    return "torch" if _choice == "torch" or _kernel().library is None else "c"


def describe_backend() -> str:
    """One sentence for reports: what runs, why, and what it costs."""
    if backend() == "c":
        return f"Host Adam runs its C kernel at memory speed, built by {_kernel().origin}."
    why = "it was asked to" if _choice == "torch" else _kernel().origin
    return f"Host Adam runs torch's fused kernel in tiles, COST, because {why}."


# ---- torch --------------------------------------------------------------------------------------


def torch_fused(weight: Tensor, m: Tensor, v: Tensor, grad: Tensor, h: AdamHyper) -> None:
    """torch's fused kernel (private API, called only here) on fp32 (n); without `grad_scale`."""
    fused = torch._fused_adamw_ if h.decoupled else torch._fused_adam_
    fused(
        [weight], [grad], [m], [v], [], [torch.tensor(float(h.step))], lr=h.lr, beta1=h.beta1,
        beta2=h.beta2, weight_decay=h.weight_decay, eps=h.eps, amsgrad=False, maximize=h.maximize,
    )  # fmt: skip


def _torch_tile(state: Sequence[Tensor], scratch: Tensor, h: AdamHyper) -> None:
    *weights, m, v, grad = state
    weight = weights[0] if len(weights) == 1 else scratch[0]
    if len(weights) == 2:
        join(*weights, weight)
    torch_fused(weight, m, v, scratch[1].copy_(grad).mul_(h.grad_scale), h)
    if len(weights) == 2:
        split(weight, *weights)


def _torch_step(state: Sequence[Tensor], h: AdamHyper, threads: int) -> None:
    """Tiles of whole vectors on every thread; what remains is padded to one."""
    unit = 64 * threads
    tile = max(TILE // unit, 1) * unit
    scratch = torch.empty(2, tile)
    numel = state[0].numel()
    whole = numel // unit * unit
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            for begin in range(0, whole, tile):
                end = min(begin + tile, whole)
                _torch_tile([x[begin:end] for x in state], scratch[:, : end - begin], h)
            padded = [torch.cat([x[whole:], x.new_zeros(unit - numel + whole)]) for x in state]
            _torch_tile(padded, scratch[:, :unit], h)
            for x, result in zip(state[:-1], padded[:-1], strict=True):
                x[whole:] = result[: numel - whole]
    finally:
        torch.set_num_threads(before)

"""Check at compile time, not within a step, that Triton can compile and launch on this machine."""

from __future__ import annotations

import ctypes
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from megacompile.errors import MegacompileError
from megacompile.kernels import _triton
from megacompile.kernels.dropout import dropout_triton


def check_triton(device: torch.device, *, needed: bool) -> bool:
    """Launch one small kernel, which takes all that the large ones take: a C compiler, Python's headers and
    the driver's library. Whether that went well; False where Triton is not installed.

    Where that fails, Triton is not used in this process any more if it is not ``needed``; else
    :class:`MegacompileError` says what is missing.
    """
    if not _triton.HAS_TRITON:
        _triton.give_up()
        return False
    try:
        rng = torch.zeros(2, dtype=torch.int64, device=device)
        dropout_triton(torch.ones(1, device=device), rng, 0, 0.5)
        torch.cuda.synchronize(device)
    except Exception as error:  # of Triton, of the compiler that it calls, or of the driver
        if needed:
            raise MegacompileError(
                f"Triton is installed and cannot launch a kernel: {reason(error)}, or "
                "give compile kernels=False without inductor=True to run plain torch."
            ) from error
        _triton.give_up()
        return False
    return True


def reason(error: BaseException) -> str:
    """Say why Triton fails, and the cure: what is missing on this machine, else the error's first line."""
    return _missing() or _first_line(error.__cause__ or error)


def _missing() -> str:
    """Say what Triton's launcher is built from and is not there, with the cure; empty where all is."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"no C compiler is found (looked for {', '.join(compilers)}): install gcc, or set CC to one"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"Python's headers are missing ({header}): install python3-dev"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 is not found: install the driver's libraries, or add their folder with ldconfig"
    return ""


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}; mend that"

"""Triton compiles and launches before anything is planned. Each process keeps what it built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import torch, megacompile
from tests.support.models import Plain, batch_for
try:
    program = megacompile.compile(Plain(), "1GB", device="cuda", kernels={kernels})
    print("compiled")
except megacompile.MegacompileError as error:
    print(error)
"""


def compiled(cache: Path, kernels: bool | None, **environment: str) -> str:
    command = [sys.executable, "-c", COMPILE.format(kernels=kernels)]
    own = os.environ | {"TRITON_CACHE_DIR": str(cache)} | environment
    return subprocess.run(command, env=own, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("missing", [{}, {"CC": "/nowhere/cc"}, {"PATH": "/nowhere"}])
def test_a_kernel_is_launched_at_compile_time(missing: dict[str, str], tmp_path: Path) -> None:
    said = compiled(tmp_path, None, **missing)
    assert said.startswith("compiled" if not missing else "Triton is installed and cannot launch")
    assert ("install gcc" in said) == bool(missing)
    assert missing or list(tmp_path.rglob("dropout_kernel.cubin"))


def test_without_kernels_nothing_needs_a_compiler(tmp_path: Path) -> None:
    assert compiled(tmp_path, False, CC="/nowhere/cc").startswith("compiled")

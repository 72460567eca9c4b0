"""The ahead-of-time gate, in a process of its own: see ``megacompile/kernels/aot.py``."""

import importlib.util
import os
import subprocess
import sys

import pytest

from megacompile.kernels.aot import SHARED_LIMIT, Resources, changes, faults

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton's compiler")


def test_every_kernel_compiles_and_holds_its_resources() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "megacompile.kernels.aot"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "0 faults" in done.stdout


def row(**changed: object) -> Resources:
    values = {
        "module": "m",
        "case": "c",
        "kernel": "k",
        "arch": 90,
        "registers": 64,
        "local": 0,
        "shared": 1024,
        "load": 16,
        "narrow_loads": 0,
        "store": 16,
    }
    return Resources(**{**values, **changed})


def test_faults_are_found() -> None:
    assert not faults([row()])
    assert "spills" in faults([row(local=8)])[0]
    assert "shared" in faults([row(shared=SHARED_LIMIT[90] + 1)])[0]
    assert "widest load" in faults([row(load=2)])[0]


def test_changes_are_found() -> None:
    assert not changes([row()], [row()])
    assert len(changes([row()], [row(registers=80)])) == 1
    assert len(changes([row()], [row(arch=80)])) == 2

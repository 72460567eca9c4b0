"""A machine on which Triton cannot launch is told so at compile time; see also ``tests/simulated``."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import megacompile
from megacompile.kernels import _triton
from megacompile.runtime import triton_check

CPU = torch.device("cpu")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is installed, and a launch fails."""

    def launch(*_: object) -> None:
        raise RuntimeError("the launcher could not be built\nand much more")

    monkeypatch.setattr(_triton, "HAS_TRITON", True)
    monkeypatch.setattr(_triton, "_gave_up", False)  # and again after the test
    monkeypatch.setattr(triton_check, "dropout_triton", launch)


def refusal() -> str:
    with pytest.raises(megacompile.MegacompileError) as error:
        triton_check.check_triton(CPU, needed=True)
    assert "kernels=False" in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_compiler_is_named(broken: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install gcc" in refusal()
    (tmp_path / "mycc").touch(mode=0o755)
    monkeypatch.setenv("CC", "mycc")
    assert "install gcc" not in refusal()
    monkeypatch.setenv("CC", "othercc")
    assert "othercc" in refusal()


def test_missing_headers_are_named(broken: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gcc").touch(mode=0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "python3-dev" in refusal()
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("ctypes.CDLL", Mock(side_effect=OSError))
    assert "libcuda.so.1" in refusal()
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    assert "RuntimeError: the launcher could not be built; mend that" in refusal()


def test_who_needs_no_triton_goes_without(broken: None) -> None:
    triton_check.check_triton(CPU, needed=False)
    assert not _triton.HAS_TRITON
    triton_check.check_triton(CPU, needed=True)  # nothing is launched any more

"""Runs ``interpreted/`` in processes of their own, where triton starts as an interpreter.

By hand: ``TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted``.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
SHARDS = 2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="triton is missing, or interprets this very process",
)


@pytest.fixture(scope="module")
def shards() -> Iterator[list[subprocess.Popen[str]]]:
    """Every test module, dealt out by size to processes that run side by side."""
    files = sorted(FOLDER.glob("test_*.py"), key=lambda file: (-file.stat().st_size, file.name))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files[part::SHARDS]],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in range(SHARDS)
    ]
    yield started
    for process in started:
        process.kill()


@pytest.mark.parametrize("part", range(SHARDS))
def test_kernels_in_the_interpreter(shards: list[subprocess.Popen[str]], part: int) -> None:
    output, _ = shards[part].communicate(timeout=600)
    assert shards[part].returncode == 0, output[-6000:]
    assert " passed" in output, output[-6000:]

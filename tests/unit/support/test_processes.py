"""An interrupted suite leaves no process behind: neither its workers nor what their children started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PATIENCE = 120  # seconds, on a busy machine

HOLDER = """
import os, sys
pipe = os.open(sys.argv[1], os.O_WRONLY)  # as long as this process lives
if len(sys.argv) == 2:
    os.write(pipe, b"1")
    os.read(os.open(sys.argv[1] + ".never", os.O_RDWR), 1)
else:
    import subprocess
    subprocess.run([sys.executable, __file__, sys.argv[1]], start_new_session=True)
"""

SUITE = """
import os, subprocess, sys
import pytest

@pytest.mark.parametrize("worker", range(2))
def test_starts_children_that_do_not_end(worker):
    folder = os.path.dirname(__file__)
    subprocess.run([sys.executable, folder + "/holder.py", folder + "/pipe", "parent"])
"""


@pytest.mark.slow_cases(r"(2-2|15-0)")
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where a process can adopt orphans")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_suite_leaves_nothing_behind(number: int, workers: int, tmp_path: Path) -> None:
    """Every process of the tree holds one pipe open: it ends when the last of them has."""
    for name, text in (("holder.py", HOLDER), ("test_suite.py", SUITE)):
        (tmp_path / name).write_text(text)
    for name in ("pipe", "pipe.never"):
        os.mkfifo(tmp_path / name)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.processes", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(tmp_path), "--numprocesses", str(workers), str(tmp_path)]
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    # what runs in the background ignores Ctrl-C, and its children inherit that
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        suite = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        for _ in range(max(workers, 1)):
            assert read(pipe) == b"1"
        suite.send_signal(number)
        assert suite.wait(PATIENCE) == pytest.ExitCode.INTERRUPTED
        assert read(pipe) == b"", "a process that the suite started lives on"
    finally:
        suite.kill()
        never = os.open(tmp_path / "pipe.never", os.O_RDWR)
        os.write(never, b"12")  # whoever is left may go
        os.close(never)
        os.close(pipe)


def read(pipe: int) -> bytes:
    """The next byte of a pipe; none where nothing can write it any longer."""
    ready, _, _ = select.select([pipe], [], [], PATIENCE)
    assert ready, "neither a byte nor the end came"
    return os.read(pipe, 1)

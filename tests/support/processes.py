"""Nothing that a suite started outlives it, however the suite ends short of SIGKILL.

The pytest process that was started first ends on SIGTERM as it does on SIGINT; on Linux it adopts what its
tree leaves behind and kills all that is left of it at its own end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, <sys/prctl.h>


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        adopt_orphans()


def pytest_keyboard_interrupt() -> None:
    end_descendants()  # at once: workers would first end the tests that they are at


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        end_descendants()


def adopt_orphans() -> None:
    """Make this process the one that orphans of its tree come to, and let SIGTERM interrupt it."""
    here = os.getpid()

    def interrupt(number: int, frame: object) -> None:
        if os.getpid() != here:  # a fork, which is none of ours
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end has begun
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """The processes below ``root``, parents first; none where there is no /proc."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        children[parent].append(int(entry.parent.name))
    found = [root]
    for process in found:  # grows
        found += children[process]
    return found[1:]


def end_descendants() -> None:
    """Kill whatever is left below this process; what ends late comes to it as an orphan and is killed too."""
    while left := descendants(os.getpid()):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:  # collect the dead, or they stay listed
                os.waitpid(-1, 0)

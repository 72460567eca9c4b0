"""What a stage learns, written as soon as it is learnt, and the diagnosis of what failed.

A finding is a line of ``results.jsonl`` with the stage's name, ``what`` was tried, whether it is ``right``,
and figures. One that raised has its traceback, the memory of device and host, and the last operations of
each stream.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.campaign import append, entries

Finding = dict[str, Any]
_RESTARTED = "GPU_STAGE_FINDINGS"  # the findings of a stage before it was started anew
_LATE = 4.0  # seconds before a stage is stopped
_LAST = 4  # operations of each stream
_CARD = "memory.used,temperature.gpu,clocks.sm,power.draw,ecc.errors.uncorrected.volatile.total"
_programs: weakref.WeakSet[Any] = weakref.WeakSet()  # whose streams a diagnosis shows


class Recorder:
    """The results of one stage, in a folder; ``until`` is the time at which it will be stopped."""

    def __init__(self, folder: Path, stage: str, until: float | None = None) -> None:
        self.folder, self.stage = folder, stage
        self._right: dict[str, bool] = json.loads(os.environ.get(_RESTARTED, "{}"))
        self._fresh = False
        if until is not None:  # what a stage that hangs was doing, before it is stopped
            watch = threading.Timer(max(until - time.time() - _LATE, 0), self._late)
            watch.daemon = True
            watch.start()

    def note(self, what: str, **figures: Any) -> None:
        """Record figures that cannot be wrong."""
        append(self.folder, stage=self.stage, what=what, **figures)
        print(what, {k: v for k, v in figures.items() if k != "trace"}, flush=True)

    @contextlib.contextmanager
    def finding(self, what: str, **figures: Any) -> Iterator[Finding]:
        """Record what goes into the yielded dict, right unless it says otherwise, or what was raised."""
        finding: Finding = dict(figures)
        start = time.perf_counter()
        try:
            yield finding
            finding.setdefault("right", True)
        except Exception as error:
            traceback.print_exc()
            finding |= {"right": False, "error": f"{type(error).__name__}: {error}"[:800]}
            finding |= {"trace": traceback.format_exc()[-4000:]} | diagnosis()
        finding["took"] = round(time.perf_counter() - start, 3)
        self._right[what], self._fresh = finding["right"], True
        self.note(what, **finding)

    def known(self) -> list[dict[str, Any]]:
        """All results so far, of all stages."""
        return entries(self.folder)

    @property
    def all_right(self) -> bool:
        """Whether no finding so far is wrong."""
        return all(self._right.values())

    @property
    def some_right(self) -> bool:
        """Whether one of them is right."""
        return any(self._right.values())

    def done(self, what: str) -> bool:
        """Whether the stage had this finding before its device was lost; start it anew where it is lost now.

        An error of the device stays with a process: all later findings would be wrong.
        """
        import torch

        from megacompile.runtime.device_failures import failure_of

        if self._fresh and failure_of(torch.device("cuda")):
            sys.stdout.flush()
            os.environ[_RESTARTED] = json.dumps(self._right)
            os.execv(sys.executable, sys.orig_argv)
        return what in self._right

    def require(self, *names: str) -> None:
        """Raise where one of these findings is wrong: nothing can build on the stage."""
        missing = [name for name in names if not self._right.get(name)]
        if missing:
            raise RuntimeError(f"This does not work here: {', '.join(missing)}.")

    def _late(self) -> None:
        append(self.folder, stage=self.stage, what="nearly out of time", **diagnosis())


def watch(program: Any) -> None:
    """Note this program's streams for a diagnosis."""
    _programs.add(program)


def diagnosis() -> dict[str, Any]:
    """Memory of device and host, the card's own report, the last operations of each stream; raise nothing."""
    said: dict[str, Any] = {"memory": memory()}
    with contextlib.suppress(Exception):
        said["nvidia-smi"] = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_CARD}", "--format=csv,noheader"], capture_output=True, text=True,
            timeout=5,
        ).stdout.strip()  # fmt: skip
    for program in list(_programs):
        with contextlib.suppress(Exception):
            said["streams"] = last_operations(program)
    return said


def memory() -> dict[str, Any]:
    """Bytes of the device as its driver and as torch's allocator count them, and of the host."""
    said: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        import torch

        free, total = torch.cuda.mem_get_info()
        said = {"used": total - free, "total": total, "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
                "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0)}  # fmt: skip
    with contextlib.suppress(OSError, ValueError):
        rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        said |= {name: rows[name].strip() for name in ("MemTotal", "MemAvailable")}
    return said


def last_operations(program: Any) -> dict[str, list[str]]:
    """By stream, the last operations of the last run that have ended."""
    runtime = program._session.runtime
    if runtime is None or not runtime.traces:
        return {}
    step, trace = runtime.traces[-1]
    streams = {op.event: op.stream for op in step.ops}
    said: dict[str, list[str]] = defaultdict(list)
    for event, _, end in sorted(trace, key=lambda entry: entry[2]):
        said[streams.get(event, "?")].append(f"{event} at {end:.3f}")
    return {stream: operations[-_LAST:] for stream, operations in said.items()}

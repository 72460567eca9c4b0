"""Byte budgets as people write them, and what this machine really has."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from megacompile.errors import BudgetError
from megacompile.user_warning import warn_user

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_TEXT = re.compile(r"^\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*([A-Za-z]+|%)\s*$", re.IGNORECASE)
_MOST = 1 << 62  # bytes: what plans and files count in
_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
RESERVE = 0.1  # part of what is free that "auto" and the default host budget leave alone


def parse_bytes(value: float | str, *, what: str, available: int, grows: bool = False) -> int:
    """Bytes of a budget: a number is GB (1e9); "24GiB", "512MB", "90%" and "auto" also work.

    ``available`` is what exists: percentages refer to it, and no budget may exceed it. If it ``grows``, as a
    virtual machine's memory may with its use, a budget beyond it is warned of instead.
    """
    nbytes = _parse(value, what, available)
    if nbytes > available and grows:
        warn_user(
            f"{what}={value!r} is {format_bytes(nbytes)}, and only {format_bytes(available)} are free here "
            "now: unless this machine's memory grows as it is used, the system may end the process."
        )
    elif nbytes > available:
        raise BudgetError(
            f"{what}={value!r} is {format_bytes(nbytes)}, but only {format_bytes(available)} exist "
            "here: give at most that."
        )
    return nbytes


def _parse(value: float | str, what: str, available: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise BudgetError(f"{what}={value!r} is no budget: give a number of GB, or text as '24GiB'.")
    if isinstance(value, str):
        return _parse_text(value, what, available)
    if not 0 < value < 1e300:
        raise BudgetError(f"{what}={value!r} is no budget: it must be a positive number of GB.")
    if value >= 1e6:
        raise BudgetError(
            f"{what}={value!r} would be {value:g} GB: did you mean {value / 1e9:g} (a number is GB)?"
        )
    if isinstance(value, float) and value < 1:
        raise BudgetError(
            f"{what}={value!r} would be {value * 1000:g} MB: did you mean '{value:.0%}'? "
            f"(For so few bytes write '{value * 1000:g}MB'.)"
        )
    return int(value * 10**9)


def _parse_text(value: str, what: str, available: int) -> int:
    if value.strip().lower() == "auto":
        return int(available * (1 - RESERVE))
    match = _TEXT.match(value)
    unit = match.group(2).upper() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        raise BudgetError(
            f"{what}={value!r} is not understood: write a number of GB, or one of "
            "'24GiB', '512MB', '90%', 'auto'."
        )
    number = float(match.group(1))
    if unit == "%" and 100 < number < math.inf:
        raise BudgetError(f"{what}={value!r} is more than all there is: give at most '100%'.")
    nbytes = available * number / 100 if unit == "%" else number * _UNITS[unit]
    if not 1 <= nbytes < _MOST:
        raise BudgetError(f"{what}={value!r} is no budget: it must be positive, and a number of bytes.")
    return int(nbytes)


def format_bytes(nbytes: float) -> str:
    """Bytes in the decimal unit that reads best: 57.3 MB, 1.25 GB."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 100 * size else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes:.0f} B"


def host_available() -> int:
    """Bytes this process may still take: free memory, or what its control groups or limits leave if less."""
    free = min([_meminfo("MemAvailable"), *_limits_leave()])
    for folder, version in _control_groups("memory"):
        names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        with contextlib.suppress(OSError, ValueError):  # no limit there, or "max"
            limit, usage = (int((folder / f"memory.{name}").read_text()) for name in names)
            free = min(free, limit - usage)
    return max(free, 0)


def usable_cores() -> int:
    """CPUs that this process may keep busy: by affinity, or by its control groups' quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder, version in _control_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # no quota there, or "max"
            names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if int(quota) > 0:
                cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def update_threads(cores: int) -> int:
    """Threads that update state on the host beside a GPU: its driver and who issues work have the others."""
    return max(1, cores - 4)


def _control_groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Folders of this process's control group and of those around it, with their version, 1 or 2."""
    for line in _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _GROUPS / controllers
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield folder, 1 if controllers else 2


def _limits_leave() -> list[int]:
    """Return what the limits on address space and data (``ulimit -v``, ``-d``) leave, where they are set."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return []
    sizes = Path("/proc/self/statm").read_text().split()
    left = []
    for limit, pages in ((resource.RLIMIT_AS, sizes[0]), (resource.RLIMIT_DATA, sizes[5])):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            left.append(max(0, most - int(pages) * resource.getpagesize()))
    return left


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise BudgetError(f"This system does not report {field}: give host_budget yourself.")


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of consecutive numbers; they are given in ascending order."""
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return runs


def format_seconds(value: float) -> str:
    """``79.1 ms``, ``1.30 s``."""
    if value < 0.1:
        return f"{value * 1e3:.3g} ms" if value >= 1e-4 else f"{value * 1e6:.3g} µs"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f} s"


def format_hours(hours: float) -> str:
    """``3.2 h``, ``14.1 days``."""
    return f"{hours:,.1f} h" if hours < 48 else f"{hours / 24:,.1f} days"


def format_count(parameters: int) -> str:
    """``70.6 B``, ``846 k``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)

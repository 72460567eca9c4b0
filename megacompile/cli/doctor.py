"""``megacompile doctor``: in one screen, what this machine would limit."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path

from megacompile.errors import MegacompileError
from megacompile.tested_versions import TESTED, describe_tested, is_newer
from megacompile.units import format_bytes, host_available, usable_cores

_CGROUP = Path("/sys/fs/cgroup")
_PROBE = 256_000_000
_IN_A_ROW = 2  # packages
_STATE = 12  # host bytes per parameter: master and two moments, FP32


def run_doctor(options: argparse.Namespace) -> int:
    """Print the screen, with ``--gpu`` also whether a tiny model trains there as by plain PyTorch."""
    print(examine())
    return int(options.gpu and not _trains_on_gpu())


def _trains_on_gpu() -> bool:
    import torch

    from megacompile.cli.gpu_doctor import findings

    if not torch.cuda.is_available():
        print(f"{'gpu':<15} FAILED: torch {torch.__version__} finds no CUDA device")
        return False
    print(f"{'link':<15} {_link()}", flush=True)
    good = True
    for found in findings("cuda"):
        print(f"{'gpu':<15} {'OK' if found.good else 'FAILED'}: {found.what}: {found.text}", flush=True)
        good = good and found.good
    return good


def _link() -> str:
    from megacompile.hardware.measure import measure_link

    try:
        return str(measure_link())
    except Exception as error:  # of page-locking, say; what follows has to be shown all the same
        return f"unknown: {type(error).__name__}: {error}"


def examine() -> str:
    """The screen: memory, cores, host Adam, packages, accelerator, disk, with what each one limits."""
    rows = [*_host_memory(), ("pinned memory", _memlock()), ("cores", _cores()), ("host Adam", _adam())]
    rows += [("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    rows += [*_packages(), ("accelerator", _accelerator()), ("disk here", _disk())]
    return "\n".join(f"{name:<15} {text}" for name, text in rows)


def _host_memory() -> list[tuple[str, str]]:
    try:
        free = host_available()
    except (MegacompileError, OSError) as error:
        return [("memory", f"unknown: {error}")]
    most = free / _STATE / 1e9
    room = f"room for the FP32 state of {most:.2g} B parameters, {most * 0.75:.2g} B with clipping"
    rows = [("memory", f"{_total()}{format_bytes(free)} free for this process"), ("", room)]
    limit = _read_value(_CGROUP / "memory.max") or _read_value(_CGROUP / "memory/memory.limit_in_bytes")
    if limit is not None and limit.isdigit() and int(limit) < 1 << 60:
        rows.append(("cgroup", f"limits this process to {format_bytes(int(limit))}: beyond it, it is killed"))
    else:
        rows.append(("cgroup", "no limit"))
    return rows


def _total() -> str:
    try:
        return f"{format_bytes(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} in all, "
    except (ValueError, OSError, AttributeError):
        return ""


def _memlock() -> str:
    try:
        import resource
    except ImportError:
        return "this system does not tell"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    wsl = "microsoft" in platform.release().lower()
    note = "; WSL2 refuses to page-lock large regions" if wsl else ""
    return f"memlock limit {text} (ulimit -l){note}{_page_locking()}"


def _page_locking() -> str:
    """Say what a GPU's driver answers to page-locking 256 MB in place, and what follows from a refusal."""
    import torch

    if not torch.cuda.is_available():
        return ""
    from megacompile.runtime.pinned_memory import page_lock, page_unlock
    from megacompile.runtime.staging import PIECE_BYTES, PIECES
    from megacompile.state.host_arena import HostArena

    probe = HostArena(_PROBE).tensor
    pieces, code = page_lock(probe)
    for start, _ in pieces:
        page_unlock(start)
    if code == 0:
        return f"; {format_bytes(_PROBE)} were page-locked in place"
    staged = format_bytes(2 * PIECES * PIECE_BYTES)
    return f"; page-locking in place is refused (CUDA error {code}): copies pass through {staged} of buffers"


def _cores() -> str:
    return f"{usable_cores()} of {os.cpu_count() or 1} usable"


def _adam() -> str:
    from megacompile.state.adam import describe_backend

    return describe_backend()


def _packages() -> list[tuple[str, str]]:
    """What is there of the packages that are used, and the versions that the tests run with."""
    found = []
    for name in (*TESTED, "matplotlib"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
            continue
        newer = "newer than tested: " if is_newer(name, version) else "tested: "
        found.append(
            f"{name} {version} ({newer}{describe_tested(name)})" if name in TESTED else f"{name} {version}"
        )
    rows = [", ".join(found[i : i + _IN_A_ROW]) for i in range(0, len(found), _IN_A_ROW)]
    return [("packages" if i == 0 else "", row) for i, row in enumerate(rows)]


def _accelerator() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device: planning works, training runs on the CPU backend"
    p = torch.cuda.get_device_properties(0)
    return f"{p.name}, {format_bytes(p.total_memory)}, compute capability {p.major}.{p.minor}"


def _disk() -> str:
    usage = shutil.disk_usage(Path.cwd())
    return f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} in {Path.cwd()}"


def _read_value(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None

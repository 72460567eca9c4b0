"""The driver: run stages one after the other, each in a process with a time limit, within a time for all.

In: stages in the order of their worth, and a folder. Out, in the folder: ``results.jsonl``, a line per
finding and per stage that ended; ``campaign.log``, all that the stages printed. A stage that fails, hangs or
loses the device costs itself, and what needs it is left out. A later call goes on: what is missing first,
then what failed. What a stage learns takes the place of what it learnt in a call before.

It imports the standard library alone, so that a broken environment is the finding of a stage and ends no
campaign.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = Path(f"/tmp/megacompile-packages-{sys.version_info.major}{sys.version_info.minor}")  # carried
RESULTS, LOG = "results.jsonl", "campaign.log"
TIMELINE = "timeline of a step"  # a finding of the results that neither page nor screen shows
OK, WRONG = "ok", "wrong"  # it ran whole; it ran, and some of its findings are wrong
STATUS_WRONG, STATUS_USELESS = (
    3,
    4,
)  # exit status of a stage: some findings are wrong; nothing can build on it
_PAGE_SECONDS = 3.0  # kept for the page at the end
_LAST_LINES, _LAST_BYTES = 25, 2500  # of a failed stage's output, on the screen


@dataclass(frozen=True)
class Stage:
    """One process: ``call`` names a function here as "module.function", ``settings`` its arguments.

    It is stopped after ``limit`` seconds, expected to take ``expected``, and not begun with less than that
    left. ``needs`` names a stage without which it is of no use. One with ``beside`` runs beside the stages
    that follow, up to the one of that name. What a stage with ``here`` learns holds for this machine, until
    it is started anew; one with ``checks`` says whether the source is right, and is run again where that has
    changed.
    """

    name: str
    call: str
    settings: dict[str, Any] = field(default_factory=dict)
    limit: int = 60
    expected: int = 30
    needs: str = ""
    beside: str = ""
    here: bool = False
    checks: bool = False


def drive(
    stages: Sequence[Stage],
    folder: Path,
    seconds: float,
    *,
    only: Sequence[str] = (),
    copies: Path | None = None,
    command: Sequence[str] = (sys.executable, "-m", "benchmarks.gpu"),
) -> dict[str, str]:
    """Run what is missing of ``stages``, or those in ``only`` whatever is there; the status of each by name.

    ``command`` starts a stage: it is given the stage's name, and when it will be stopped. Files are copied to
    ``copies`` after each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    status = earlier(stages, folder)
    beside: dict[str, threading.Thread] = {}
    for stage in _in_order(stages, status, only):
        for other in stages:
            if other.beside == stage.name and other.name in beside:
                beside.pop(other.name).join()
        left = seconds - (time.monotonic() - start) - _PAGE_SECONDS
        if status.get(stage.needs, OK) not in (OK, WRONG):
            status[stage.name] = f"left out: {stage.needs} failed"
        elif left < min(stage.expected, stage.limit):
            status[stage.name] = f"left out: {max(left, 0):.0f} s were left"
        elif stage.beside:
            beside[stage.name] = threading.Thread(
                target=_run, args=(stage, min(stage.limit, left), folder, command, status, start)
            )
            beside[stage.name].start()
            continue
        else:
            _run(stage, min(stage.limit, left), folder, command, status, start)
            _copy(folder, copies)
            continue
        _say(start, stage.name, status[stage.name])
    for thread in beside.values():
        thread.join()
    _copy(folder, copies)
    return status


def earlier(stages: Sequence[Stage], folder: Path) -> dict[str, str]:
    """The statuses that earlier calls left, without those that held for another machine or source."""
    ended = {e["stage"]: e for e in entries(folder) if "status" in e}
    past = {s.name for s in stages if s.here and ended.get(s.name, {}).get("boot") != boot()}
    past |= {s.name for s in stages if s.checks and ended.get(s.name, {}).get("source") != source(s)}
    return {name: entry["status"] for name, entry in ended.items() if name not in past}


def _in_order(stages: Sequence[Stage], status: dict[str, str], only: Sequence[str]) -> list[Stage]:
    """What is to be run: what was never run, and what other stages need, then what failed."""
    if only:
        unknown = sorted(set(only) - {s.name for s in stages})
        if unknown:
            raise SystemExit(
                f"There is no stage {unknown[0]!r}: there are {', '.join(s.name for s in stages)}."
            )
        return [s for s in stages if s.name in only]
    needed = {s.needs for s in stages}
    missing = [s for s in stages if status.get(s.name) not in (OK, WRONG)]
    return sorted(missing, key=lambda s: s.name in status and s.name not in needed)


def _run(
    stage: Stage, limit: float, folder: Path, command: Sequence[str], status: dict[str, str], start: float
) -> None:
    """Run a stage; its status, in ``status``, in the results and on the screen."""
    begun = time.monotonic()
    append(folder, stage=stage.name, begun=True)
    own_log = folder / f"{stage.name.replace(' ', '_')}.log"
    with own_log.open("wb") as log:
        child = subprocess.Popen(
            [*command, "--stage", stage.name, "--until", f"{time.time() + limit:.1f}", "--out", str(folder)],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=environment(),
            cwd=ROOT,
        )  # fmt: skip
        status[stage.name] = _ended(child, limit)
    text = own_log.read_bytes()
    own_log.unlink()
    with (folder / LOG).open("ab") as log:
        log.write(f"\n==== {stage.name}: {status[stage.name]}\n".encode() + text)
    tail = _tail(text.decode(errors="replace"))
    taken = round(time.monotonic() - begun, 1)
    more = {"tail": tail} if status[stage.name] not in (OK, WRONG) else {}
    more |= {"boot": boot(), "source": source(stage)}
    append(folder, stage=stage.name, status=status[stage.name], seconds=taken, **more)
    _say(start, stage.name, f"{status[stage.name]}, {taken:.0f} s")
    if "tail" in more:
        print(tail, flush=True)


def _ended(child: subprocess.Popen[bytes], limit: float) -> str:
    """The status of a child that has ended, by itself or for its time; nothing of its session stays."""
    try:
        code = child.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGABRT)  # faulthandler writes where each thread is
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if code is None:
        return f"not over after {limit:.0f} s"
    known = {0: OK, STATUS_WRONG: WRONG, STATUS_USELESS: "failed"}
    return known.get(code, f"failed: exit status {code}")


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_LAST_LINES:])[-_LAST_BYTES:]


def _say(start: float, name: str, text: str) -> None:
    print(f"[{time.monotonic() - start:4.0f} s] {name}: {text}", flush=True)


def _copy(folder: Path, copies: Path | None) -> None:
    if copies is None:
        return
    copies.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file():
            shutil.copy2(path, copies)


def append(folder: Path, **entry: Any) -> None:
    """Add a line to the results, on disk when this returns."""
    with (folder / RESULTS).open("a") as file:
        file.write(json.dumps(entry, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def entries(folder: Path) -> list[dict[str, Any]]:
    """The results that hold, in their order: of a stage, those since it was begun last.

    A line that a kill cut off is left out.
    """
    path = folder / RESULTS
    read: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            entry = json.loads(line)
            if "begun" in entry:
                read = [e for e in read if e["stage"] != entry["stage"]]
            else:
                read.append(entry)
    return read


def source(stage: Stage) -> str:
    """Sixteen digits that stand for the sources of the package and of the stage."""
    own = ROOT / "benchmarks" / "gpu" / f"{stage.call.split('.')[0]}.py"
    return hashlib.sha256((_package() + own.read_text()).encode()).hexdigest()[:16]


@functools.cache
def _package() -> str:
    """A digest of all that the package computes with, by file."""
    said = hashlib.sha256()
    for folder in ("kernels", "megacompile", "passes"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                said.update(f"{path.relative_to(ROOT)} {path.stat().st_size} ".encode() + path.read_bytes())
    return said.hexdigest()


def boot() -> str:
    """What tells a machine that was started anew from this one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def environment() -> dict[str, str]:
    """The environment of stages: this checkout is imported, installed or not; nothing is downloaded."""
    paths = [str(_importable()), str(ROOT)]
    given = os.environ.get("PYTHONPATH")
    more = {
        "PYTHONSAFEPATH": "1",  # the checkout itself has no kernels and passes below megacompile
        "PYTHONPATH": os.pathsep.join([*paths, *([given] if given else []), str(PACKAGES)]),
        "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),  # ninja
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", "/tmp/megacompile-extensions"),
        "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    return {**os.environ, **more}


def _importable() -> Path:
    """A folder from which ``megacompile`` imports uninstalled: links to what pyproject.toml maps."""
    package = ROOT / "build" / "importable" / "megacompile"
    package.mkdir(parents=True, exist_ok=True)
    parts = [p for p in (ROOT / "megacompile").iterdir() if p.name != "__pycache__"]
    for part in [*parts, ROOT / "kernels", ROOT / "passes"]:
        link = package / part.name
        if not link.is_symlink():
            link.symlink_to(part)
    return package.parent

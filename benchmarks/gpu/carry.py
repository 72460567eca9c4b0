"""Kernels compiled ahead: ``python -m benchmarks.gpu.carry`` packs them for a machine with a GPU.

Triton's keys are the source, the options, the chip, and Triton's own build, so an archive made by the same
wheel on the simulated device, whose chip is an H100's, is hit. Its files name each other by absolute paths:
it has one place.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.gpu.campaign import ROOT, environment

CACHE = Path("/tmp/megacompile-triton")
ARCHIVE = ROOT / "build" / "gpu-carried" / "triton.tar.gz"
_KEY = "TRITON_KEY"


def triton_key() -> str:
    """Sixteen digits that stand for the installed Triton in its own keys."""
    from triton.runtime.cache import triton_key as key

    return hashlib.sha256(key().encode()).hexdigest()[:16]


def carried_key() -> str:
    """Return the key of the Triton that made the kernels in the cache; "nothing" if none were carried."""
    path = CACHE / _KEY
    return path.read_text().strip() if path.exists() else "nothing"


def unpack() -> None:
    """Put carried kernels where Triton looks for them in stages."""
    if ARCHIVE.exists() and not CACHE.exists():
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(CACHE.parent, filter="data")
    os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE))


def make() -> None:
    """Compile what the stages launch, each in a process of its own, and pack it."""
    from benchmarks.gpu.stages import compiled_ahead

    CACHE.mkdir(exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(CACHE)
    for call in compiled_ahead():
        print(call, flush=True)
        subprocess.run([sys.executable, "-c", call], env=environment(), cwd=ROOT, check=True)
    (CACHE / _KEY).write_text(triton_key() + "\n")
    ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(ARCHIVE, "w:gz") as archive:
        archive.add(CACHE, CACHE.name)
    print(f"{ARCHIVE.relative_to(ROOT)}: {ARCHIVE.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    make()

"""What a machine with a GPU starts from: ``python -m benchmarks.gpu.carry`` packs it, kernels and packages.

Kernels are compiled ahead: Triton's keys are the source, the options, the chip, and Triton's own build, so an
archive made by the same wheel on the simulated device, whose chip is an H100's, is hit. Its files name each
other by absolute paths: it has one place. Packages are what stages of peers and of ``megacompile train``
import, for machines that have no network.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.gpu.campaign import PACKAGES, ROOT, environment

CACHE = Path("/tmp/megacompile-triton")
CARRIED = ROOT / "build" / "gpu-carried"
_KEY = "TRITON_KEY"
# the newest commit, of April 2026
_MEGATRAIN = "megatrain @ git+https://github.com/DLYuanGod/MegaTrain@919520f"
_NEEDED = [
    "deepspeed==0.19.8", "hjson", "pydantic", "pydantic-core", "annotated-types", "typing-inspection",
    "trl", "datasets", "dill", "multiprocess",
]  # fmt: skip


def triton_key() -> str:
    """Sixteen digits that stand for the installed Triton in its own keys."""
    from triton.runtime.cache import triton_key as key

    return hashlib.sha256(key().encode()).hexdigest()[:16]


def carried_key() -> str:
    """Return the key of the Triton that made the kernels in the cache; "nothing" if none were carried."""
    path = CACHE / _KEY
    return path.read_text().strip() if path.exists() else "nothing"


def unpack() -> None:
    """Put carried kernels where Triton looks for them in stages, and packages where these import them."""
    for folder in (CACHE, PACKAGES):
        archive = _archive(folder)
        if archive.exists() and not folder.exists():
            with tarfile.open(archive) as packed:
                packed.extractall(folder.parent, filter="data")
    os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE))


def make_kernels() -> None:
    """Compile what the stages launch, each in a process of its own, and pack it."""
    from benchmarks.gpu.stages import compiled_ahead

    CACHE.mkdir(exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(CACHE)
    for call in compiled_ahead():
        print(call, flush=True)
        subprocess.run([sys.executable, "-c", call], env=environment(), cwd=ROOT, check=True)
    (CACHE / _KEY).write_text(triton_key() + "\n")
    _pack(CACHE)


def make_packages(megatrain: str) -> None:
    """Install packages without what they need, as torch and numpy are there, and pack them.

    Neither they nor DeepSpeed's operators, which its Adam is one of, are compiled here.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade",
               "--no-deps", "--no-build-isolation", "--no-compile", "--target", str(PACKAGES),
               "--constraint", "constraints.txt", *_NEEDED, megatrain]  # fmt: skip
    without = {"DS_BUILD_OPS": "0", "CUDASIM_DEVICES": "0"}  # without a device nothing is built for one
    subprocess.run(command, env=os.environ | without, cwd=ROOT, check=True)
    _pack(PACKAGES)


def _archive(folder: Path) -> Path:
    return CARRIED / f"{folder.name}.tar.gz"


def _pack(folder: Path) -> None:
    CARRIED.mkdir(parents=True, exist_ok=True)
    path = _archive(folder)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    make_packages(os.environ.get("MEGATRAIN", _MEGATRAIN))
    make_kernels()

"""Builds the simulated CUDA runtime for an installed torch: ``python build.py ENVIRONMENT HEADERS OUT``.

In: a virtual environment with a CUDA build of torch, a folder with the CUDA runtime's headers. Out: one
shared object in ``OUT`` with a link for each of NVIDIA's libraries that torch names; run with
``LD_LIBRARY_PATH=OUT``. What torch needs is read from its own libraries, so a new version needs no new
list. What ``runtime/*.c`` does not define is a stub that answers with the library's code for "not
supported".
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

RUNTIME = Path(__file__).parent / "runtime"
_PREFIX = re.compile(
    r"(__cuda|cuda|cudnn|cublas|cusparse|cusolver|cufft|curand|nccl|cuFile|nvshmem|cupti|nvrtc|nvJit|nvml|cu[A-Z])"
)
_REFUSAL = {  # each library's "not supported", or success for cuBLAS, whose calls return nothing but that
    "cudnn": 3000, "cublas": 0, "cusparse": 10, "cusolver": 9, "cufft": 16, "curand": 102, "nccl": 3,
    "cuFile": 5027, "cupti": 0, "nvml": 3, "nvrtc": 4, "nvshmem": 1,
}  # fmt: skip
_NOT_SUPPORTED = 801
_SETTERS = re.compile(
    r"cudnn(Set|Destroy|CreateT|GetProperty)|cusolverDnSet|cusparse(Set|Create$|Destroy)|cublas"
)
_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
_BY_NAME = re.compile(rb"\0((?:cu[A-Z]|nvml[A-Z])[A-Za-z0-9_]+)(?=\0)")
_EXPORTED = "cudasim_* cu* __cuda* nvshmem* nccl* nvml* nvrtc*"


def build(torch_lib: Path, headers: Path, out: Path) -> None:
    """Compile the runtime and the stubs, and link them under every library's name."""
    out.mkdir(parents=True, exist_ok=True)
    core = []
    for source in sorted(RUNTIME.glob("*.c")):
        core.append(out / f"{source.stem}.o")
        flags = ["-O1", "-g", "-fPIC", "-fvisibility=hidden", "-w", f"-I{headers}"]
        _run("cc", *flags, "-c", source, "-o", core[-1])
    versions, libraries = _needed(torch_lib)
    defined = {
        line.split()[-1] for line in _run("nm", "--defined-only", "-g", *core).splitlines() if line.strip()
    }
    stubs, script = out / "stubs.c", out / "version.map"
    stubs.write_text(_stubs(sorted(versions.keys() - defined)))
    script.write_text(_version_script(versions))
    _run("cc", "-O0", "-fPIC", "-w", "-c", stubs, "-o", out / "stubs.o")
    whole = out / "libcudasim.so"
    flags = [f"-Wl,--version-script={script}", "-lpthread", "-ldl"]
    _run("cc", "-shared", "-o", whole, *core, out / "stubs.o", *flags)
    for name in libraries:
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(whole.name)


def _needed(torch_lib: Path) -> tuple[dict[str, str], list[str]]:
    """(symbol -> version of NVIDIA's libraries that torch's ask for, names of these libraries)."""
    asked: dict[str, str] = {}
    given, names = set(), set()
    for library in sorted(torch_lib.glob("*.so")):
        for line in _run("nm", "-D", "--with-symbol-versions", library).splitlines():
            *_, kind, symbol = line.split()
            name, _, version = symbol.partition("@")
            if kind in "Uw":
                asked[name] = version
            else:
                given.add(name)
        names.update(re.findall(r"NEEDED.*\[(.*)\]", _run("readelf", "-d", library)))
    for found in _BY_NAME.findall((torch_lib / "libc10_cuda.so").read_bytes()):
        asked.setdefault(found.decode(), "")
    missing = {n: v for n, v in asked.items() if n not in given and _PREFIX.match(n)}
    absent = sorted(n for n in names if _LIBRARY.match(n) and not (torch_lib / n).exists())
    return missing, ["libnvidia-ml.so.1", *absent]


def _stubs(names: list[str]) -> str:
    lines = ["long cudasim_stub(const char *, long);"]
    for name in names:
        prefix = _PREFIX.match(name)
        assert prefix is not None
        code = 0 if _SETTERS.match(name) else _REFUSAL.get(prefix[1], _NOT_SUPPORTED)
        visible = '__attribute__((visibility("default")))'
        lines.append(f'{visible} long {name}() {{ return cudasim_stub("{name}", {code}); }}')
    return "\n".join(lines)


def _version_script(versions: dict[str, str]) -> str:
    nodes = defaultdict(list)
    for name, version in sorted(versions.items()):
        nodes[version].append(name)
    named = [f"{v} {{ global: {' '.join(f'{n};' for n in ns)} }};" for v, ns in nodes.items() if v]
    rest = "".join(f"{pattern}; " for pattern in _EXPORTED.split())
    return "\n".join([*named, f"CUDASIM {{ global: {rest}local: *; }};"])


def _run(*command: object) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.rglob(pattern))
    if not found:
        sys.exit(f"{folder} holds no {pattern}: make simulated installs it.")
    return found[0].parent


if __name__ == "__main__":
    environment, headers, out = map(Path, sys.argv[1:4])
    build(_only(environment, "libc10_cuda.so"), _only(headers, "cuda_runtime_api.h"), out)

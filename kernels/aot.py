"""The ahead-of-time gate: compile every kernel for every chip, without a GPU, and hold the result.

    python -m megacompile.kernels.aot            # compile, say what differs from resources.csv
    python -m megacompile.kernels.aot --update   # accept: rewrite resources.csv

In: the launches that the registered cases make on meta tensors. Out: one row per (case, kernel,
chip) with registers, bytes of local memory (spills), bytes of shared memory and the widths of its
global loads and stores. Needs triton (whose wheel carries ptxas and cuobjdump) and a process
without TRITON_INTERPRET. Compiled kernels are kept in triton's own cache, keyed by their source. The table's
first line says which sources and which triton it was made of: while both are the same, so is the rest.
"""

import argparse
import csv
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from megacompile.kernels._triton import AOT_CASES, Launch, recording, triton

TABLE_TRITON = "3.9."
TABLE = Path(__file__).with_name("resources.csv")
# Dynamic shared memory that one block may ask for, in bytes (CUDA C programming guide, table of
# technical specifications per compute capability, less the 1 KiB that the system keeps).
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
# Kernels whose widest load may be narrower than 16 bytes, and why.
NARROW = {
    # Random numbers come out of nothing but the seed, 8 bytes.
    ("uniform", "bf16", "uniform_kernel"): 8,
    ("uniform", "fp32", "uniform_kernel"): 8,
}
POINTER = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
WIDTH = re.compile(r"(?:ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)\b")


@dataclass(frozen=True, order=True)
class Resources:
    """One row of the table; ``variant`` counts the launches of a kernel that one case makes."""

    module: str
    case: str
    kernel: str
    variant: int
    arch: int
    registers: int
    local: int
    shared: int
    load: int
    narrow_loads: int
    store: int

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        return self.module, self.case, self.kernel, self.variant, self.arch


@dataclass(frozen=True)
class Job:
    """A kernel to compile, by the position of its case: kernels themselves do not pickle."""

    registry: int
    case: int
    launch: int
    name: str
    variant: int


def _record(registry: int, case: int, arch: int = 80) -> list[Launch]:
    with recording(arch) as launches:
        AOT_CASES[registry]()[case][1]()
    return launches


def jobs() -> list[Job]:
    """Every distinct launch of every registered case."""
    found = []
    for registry, make in enumerate(AOT_CASES):
        for case, (name, _) in enumerate(make()):
            seen: dict[str, set[str]] = defaultdict(set)
            for index, launch in enumerate(_record(registry, case)):
                spec = repr((_specialise(launch), launch.num_warps, launch.num_stages))
                known = seen[launch.kernel.__name__]
                if spec not in known:
                    found.append(Job(registry, case, index, name, len(known)))
                    known.add(spec)
    return found


def _specialise(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """(signature, constants, attributes) as triton's launcher derives them from arguments."""
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    attributes: dict[Any, Any] = {}
    for index, (name, value) in enumerate(zip(launch.kernel.arg_names, launch.args, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = POINTER[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
            continue
        elif value == 1:
            signature[name], constants[name] = "constexpr", 1
            continue
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or value % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(launch.constants, "constexpr")
    return signature, constants, attributes


def _widths(ptx: str, prefix: str) -> list[int]:
    """Bytes per instruction of the global loads (``ld``) or stores (``st``) in ``ptx``."""
    lines = (line for line in ptx.splitlines() if f"{prefix}.global" in line)
    found = [match for line in lines if (match := WIDTH.search(line))]
    widths = [int(vector or 1) * int(bits) // 8 for vector, bits in (m.groups() for m in found)]
    if prefix == "ld":
        widths += map(int, re.findall(r"cp\.async\S*global\S*.*?, (?:0x)?(\d+)\b(?=[,;\s])", ptx))
    return widths


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of local memory per thread), from cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", text)
    assert found, text
    registers, stack, local = map(int, found.groups())
    return registers, max(stack, local)


def compile_job(job: Job, archs: Sequence[int]) -> list[Resources]:
    """Compile one kernel for each of ``archs``."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    rows = []
    for arch in archs:
        launch = _record(job.registry, job.case, arch)[job.launch]
        source = ASTSource(launch.kernel, *_specialise(launch))
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        registers, local = _usage(built.asm["cubin"])
        loads, stores = _widths(built.asm["ptx"], "ld"), _widths(built.asm["ptx"], "st")
        rows.append(
            Resources(
                module=AOT_CASES[job.registry].__module__.rpartition(".")[2],
                case=job.name,
                kernel=launch.kernel.__name__,
                variant=job.variant,
                arch=arch,
                registers=registers,
                local=local,
                shared=built.metadata.shared,
                load=max(loads, default=0),
                narrow_loads=sum(width < 16 for width in loads),
                store=max(stores, default=0),
            )
        )
    return rows


def measure(archs: Sequence[int] = tuple(SHARED_LIMIT)) -> list[Resources]:
    """Compile everything, on two processes, in a fixed order."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    work = jobs()
    with ProcessPoolExecutor(max_workers=2) as pool:
        groups = pool.map(compile_job, work, [archs] * len(work), chunksize=4)
        return sorted(row for group in groups for row in group)


def faults(rows: Sequence[Resources]) -> list[str]:
    """What no table excuses: spills, too much shared memory, no 16-byte load."""
    found = []
    for row in rows:
        name = f"{row.module}/{row.case}/{row.kernel} sm_{row.arch}"
        if row.local:
            found.append(f"{name}: {row.local} bytes of local memory per thread (spills)")
        if row.shared > SHARED_LIMIT[row.arch]:
            found.append(f"{name}: {row.shared} bytes of shared memory > {SHARED_LIMIT[row.arch]}")
        if row.load < NARROW.get((row.module, row.case, row.kernel), 16):
            found.append(f"{name}: widest load is {row.load} bytes")
    return found


def sources() -> str:
    """A hash of this folder's modules: kernels, launchers, and this one, which says what is measured."""
    found = hashlib.sha256()
    for file in sorted(TABLE.parent.glob("*.py")):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]


def made_of(path: Path = TABLE) -> tuple[str, str]:
    """The sources and the version of triton that a table was made of."""
    with path.open() as file:
        words = file.readline().split()
    return words[2], words[-1]


def read_table(path: Path = TABLE) -> list[Resources]:
    """The checked-in rows."""
    with path.open(newline="") as file:
        file.readline()
        rows = list(csv.DictReader(file))
    return sorted(
        Resources(**{f.name: f.type(row[f.name]) for f in fields(Resources)})  # type: ignore[operator]
        for row in rows
    )


def write_table(rows: Sequence[Resources], path: Path = TABLE) -> None:
    """Write what the rows were made of, then them in their order, one line each."""
    names = [f.name for f in fields(Resources)]
    with path.open("w", newline="") as file:
        file.write(f"# sources {sources()} triton {triton.__version__}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)


def changes(old: Sequence[Resources], new: Sequence[Resources]) -> list[str]:
    """One line per row that came, went or differs."""
    before, after = ({row.key: row for row in rows} for rows in (old, new))
    lines = []
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            lines.append(f"{before.get(key, 'new')}\n  -> {after.get(key, 'gone')}")
    return lines


def comparable() -> bool:
    """Whether this triton is the one that the table was made with: others allocate otherwise."""
    return TABLE.exists() and bool(triton.__version__.startswith(TABLE_TRITON))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Ahead-of-time gate of the kernels.")
    parser.add_argument("--update", action="store_true", help="rewrite resources.csv")
    update = parser.parse_args().update
    rows = measure()
    moved = changes(read_table(), rows) if comparable() else []
    broken = faults(rows)
    if update:
        write_table(rows)
    print(*moved, *broken, sep="\n")
    compared = f"{len(moved)} changed" if comparable() else "table made with another triton"
    print(f"{len(rows)} rows, {compared}, {len(broken)} faults")
    return 1 if broken or (moved and not update) else 0


if __name__ == "__main__":
    sys.exit(main())

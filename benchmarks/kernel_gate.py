"""The ahead-of-time gate: compile every kernel for every chip, without a GPU, and hold the result.

    python -m benchmarks.kernel_gate            # compile, say what differs from the tables
    python -m benchmarks.kernel_gate --update   # accept: rewrite resources.csv and ceilings.csv

In: the launches that the cases of ``gate_cases.py`` make on meta tensors. Out: one row per (case, kernel,
chip) with registers, bytes of local memory (spills), bytes of shared memory and the widths of its
global loads and stores, and one with its ceiling. Needs triton (whose wheel carries ptxas,
cuobjdump and nvdisasm) and a process without TRITON_INTERPRET. Compiled kernels are kept in triton's own
cache, keyed by their source. A table's first line has the hash of the kernels and launches, and the triton,
that it was made of: while both are the same, so is the rest.
"""

import argparse
import functools
import hashlib
import inspect
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import hopper_attention
from benchmarks.gate_cases import CASES
from benchmarks.gate_rules import SHARED_LIMIT, changes, comparable, faults, slow, worse, write_table
from benchmarks.kernel_ceilings import arrives_together, ceiling, chain, meets_alone, needed_flops, resident
from benchmarks.machine_code import Flow, Instruction, Product, disassemble, in_flight, parse, tool
from megacompile import kernels
from megacompile.bench.ceilings import CEILINGS, CHIPS, TABLE, Ceiling, Resources, read_ceilings, read_table
from megacompile.kernels._triton import Launch, recording, tl, triton

POINTER = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.bool: "*i1",
}
ACCESS_WIDTH = re.compile(r"(?:ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)\b")


@dataclass(frozen=True)
class Job:
    """A kernel to compile for a chip, by the position of its case: kernels themselves do not pickle."""

    arch: int
    operator: str
    case: int
    launch: int
    name: str
    variant: int


def _record(operator: str, case: int, arch: int) -> list[Launch]:
    with recording(arch, chip_processors=CHIPS[arch].processors) as launches:
        CASES[operator][case][1]()
    return launches


def jobs(arch: int) -> list[Job]:
    """Every distinct launch of every registered case on a chip."""
    found = []
    for operator, cases in sorted(CASES.items()):
        for case, (name, _) in enumerate(cases):
            seen: dict[str, set[str]] = defaultdict(set)
            for index, launch in enumerate(_record(operator, case, arch)):
                spec = repr((_specialise(launch), launch.num_warps, launch.num_stages))
                known = seen[launch.kernel.__name__]
                if spec not in known:
                    found.append(Job(arch, operator, case, index, name, len(known)))
                    known.add(spec)
    return found


def _specialise(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """(signature, constants, attributes) as triton's launcher derives them from arguments."""
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    attributes: dict[Any, Any] = {}
    names = [(i, name) for i, name in enumerate(launch.kernel.arg_names) if name not in constants]
    for (index, name), value in zip(names, launch.args, strict=True):
        if isinstance(value, torch.Tensor):
            signature[name] = POINTER[value.dtype]
        elif hasattr(value, "block_shape"):  # a tensor whose tiles are copied
            tile = f"{POINTER[value.base.dtype][1:]}{list(value.block_shape)}"
            signature[name] = f"tensordesc<{tile},{value.layout!r}>"
            continue
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


@functools.cache
def sources() -> str:
    """Return a hash of what the tables' rows depend on: kernels, launches, and how they are measured. Equal
    kernels give an equal hash, whichever module they stand in."""
    found = hashlib.sha256()
    written = set()
    of_kernels = sorted(name for name in sys.modules if name.startswith(f"{kernels.__name__}."))
    for module in (*of_kernels, hopper_attention.__name__):
        for name, value in vars(sys.modules[module]).items():
            if hasattr(value, "arg_names"):  # a kernel or a function of kernels
                around = value.fn.__globals__
                read = {n: around.get(n) for n in value.fn.__code__.co_names}
                constants = {n: x for n, x in read.items() if isinstance(x, tl.constexpr)}
                written.add(f"{name}\0{inspect.getsource(value.fn)}\0{constants}\0")
            elif isinstance(value, tl.constexpr):
                written.add(f"{name}\0{value}\0")
    found.update("".join(sorted(written)).encode())
    for measure in (
        disassemble,
        Product,
        Instruction,
        parse,
        Flow,
        in_flight,
        needed_flops,
        resident,
        ceiling,
        meets_alone,
        arrives_together,
        chain,
        _specialise,
        _widths,
        _usage,
        compile_launch,
    ):
        found.update(inspect.getsource(measure).encode())
    found.update(repr(CHIPS).encode())
    for arch in SHARED_LIMIT:
        for operator, cases in sorted(CASES.items()):
            for case, (name, _) in enumerate(cases):
                for one in _record(operator, case, arch):
                    found.update(f"{name}\0{_specialise(one)}\0{one.grid}\0{one.options}\0".encode())
    return found.hexdigest()[:16]


def _widths(ptx: str, prefix: str) -> list[int]:
    """Bytes per instruction of the global loads (``ld``) or stores (``st``) in ``ptx``."""
    lines = (line for line in ptx.splitlines() if f"{prefix}.global" in line)
    found = [match for line in lines if (match := ACCESS_WIDTH.search(line))]
    widths = [int(vector or 1) * int(bits) // 8 for vector, bits in (m.groups() for m in found)]
    if prefix == "ld":
        copies = re.findall(r"cp\.async\S*global\S*.*?, (0x[0-9a-f]+|\d+)\b(?=[,;\s])", ptx)
        widths += [int(size, 0) for size in copies]
        widths += [16] * len(re.findall(r"cp\.async\.bulk\.tensor\S*global", ptx))  # by rows of a tile
    return widths


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of local memory per thread), from cuobjdump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool("cuobjdump")), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", text)
    assert found, text
    registers, stack, local = map(int, found.groups())
    return registers, max(stack, local)


def compile_job(job: Job) -> tuple[Resources, Ceiling]:
    """Compile one kernel of ours for one chip."""
    launch = _record(job.operator, job.case, job.arch)[job.launch]
    return compile_launch(launch, job.arch, (job.operator, job.name, launch.kernel.__name__, job.variant))


def compile_launch(launch: Launch, arch: int, head: tuple[str, str, str, int]) -> tuple[Resources, Ceiling]:
    """The rows of a kernel for one chip, called ``head``."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    form = GluonASTSource if isinstance(launch.kernel, GluonJITFunction) else ASTSource
    source = form(launch.kernel, *_specialise(launch))
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    cubin = built.asm["cubin"]
    registers, local = _usage(cubin)
    loads, stores = _widths(built.asm["ptx"], "ld"), _widths(built.asm["ptx"], "st")
    row = Resources(
        *head,
        arch=arch,
        registers=registers,
        local=local,
        shared=built.metadata.shared,
        load=max(loads, default=0),
        narrow_loads=sum(width < 16 for width in loads),
        store=max(stores, default=0),
    )
    return row, ceiling(launch, cubin, arch, (registers, row.shared), head)


def measure(archs: Sequence[int] = tuple(SHARED_LIMIT)) -> tuple[list[Resources], list[Ceiling]]:
    """Compile everything, on two processes, in a fixed order."""
    work = [job for arch in archs for job in jobs(arch)]
    with ProcessPoolExecutor(max_workers=2) as pool:
        rows = list(pool.map(compile_job, work, chunksize=4))
    return sorted(row for row, _ in rows), sorted(row for _, row in rows)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Ahead-of-time gate of the kernels.")
    parser.add_argument("--update", action="store_true", help="rewrite the tables")
    update = parser.parse_args().update
    rows, limits = measure()
    moved = changes(read_table(), rows) + changes(read_ceilings(), limits) if comparable() else []
    moved += worse(read_ceilings(), limits) if comparable() else []
    broken = faults(rows) + slow(limits)
    if update:
        write_table(rows, TABLE, sources())
        write_table(limits, CEILINGS, sources())
    print(*moved, *broken, sep="\n")
    compared = f"{len(moved)} changed" if comparable() else "table made with another triton"
    print(f"{len(rows)} rows, {compared}, {len(broken)} faults")
    return 1 if broken or (moved and not update) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The ahead-of-time gate: compile every kernel for every chip, without a GPU, and hold the result.

    python -m benchmarks.kernel_gate            # compile, say what differs from the tables
    python -m benchmarks.kernel_gate --update   # accept: rewrite resources.csv and ceilings.csv

In: the launches that the registered cases make on meta tensors. Out: one row per (case, kernel,
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
import math
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx
import torch

from megacompile import kernels
from megacompile.kernels._triton import AOT_CASES, Launch, ceil_div, recording, tl, triton
from megacompile.kernels.chips import (
    CEILINGS,
    CHIPS,
    LATENCY,
    SHARED_LIMIT,
    TABLE,
    Ceiling,
    Chip,
    Resources,
    changes,
    comparable,
    faults,
    read_ceilings,
    read_table,
    slow,
    worse,
    write_table,
)

# ------------------------------------------------------------------------------------------------------------
# What a compiled kernel executes, counted from its machine code (SASS).
#
# In: a cubin. Out: the instructions of one hot iteration: of the innermost loop with most of the work, or of
# the whole kernel where none does work. "Work" is flops of MMA instructions, or else bytes of global memory.
# Where the loop branches, the path is the one with most work and then the fewest instructions: what a block
# takes that needs no mask. Needs the ``nvdisasm`` of triton's wheel.


LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
LABEL = re.compile(r"^\s*(\.L_x_\w+):")
WIDTH = re.compile(r"\.(8|16|32|64|128|256)\b|\.[US](8|16)\b")
REGISTER = re.compile(r"\bR(\d+)(\.64)?")
ENDS = ("EXIT", "RET")
FMA = ("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2", "FFMA32I")
SLOW_FMA = ("IMAD", "FFMA2", "FMUL2", "FADD2", "FSWZADD")  # half the rate, or two operations a lane
SPECIAL = ("MUFU", "I2F", "F2I", "F2F", "FRND", "POPC", "FLO")
ALU = (
    "ISETP", "FSETP", "SEL", "FSEL", "FMNMX", "FMNMX3", "LOP3", "SHF", "SHL", "SHR", "IADD", "IADD3", "LEA",
    "PRMT", "VIADD", "VIMNMX", "VIMNMX3", "VIADDMNMX", "IMNMX", "F2FP", "PLOP3", "IABS", "MOV", "I2FP",
    "SGXT", "BMSK", "LOP", "HSETP2", "HMNMX2", "P2R", "R2P",
)  # fmt: skip
LOCAL = ("LDL", "STL")
SHARED = ("LDS", "STS", "LDSM", "STSM", "LDGSTS")
MMA = ("HMMA", "HGMMA", "UTCHMMA")


def tool(name: str) -> Path:
    """A program of NVIDIA's that triton's wheel carries."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise FileNotFoundError(f"{name} is missing at {path}: the wheel of triton for Linux carries it.")
    return path


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin, as nvdisasm prints it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool("nvdisasm")), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Product:
    """An MMA instruction: m x n x k, its first operand in shared memory or not."""

    kind: str
    m: int
    n: int
    k: int
    shared: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class Instruction:
    """One instruction of a warp; ``descriptor`` is the constant that tells the shape of a UTCHMMA."""

    name: str
    operands: str
    guarded: bool = False
    descriptor: int = 0

    @property
    def opcode(self) -> str:
        return self.name.partition(".")[0]

    @property
    def lane_bytes(self) -> int:
        """Bytes that one lane reads or writes."""
        if self.opcode in ("LDSM", "STSM"):
            return 4 * int((re.search(r"\.([24])$", self.name) or [0, 1])[1])
        found = WIDTH.search(self.name)
        return int(found[1] or found[2]) // 8 if found else 4

    @property
    def global_bytes(self) -> int:
        """Bytes of global memory that a warp reads or writes."""
        return 32 * self.lane_bytes if self.opcode in ("LDG", "STG", "LDGSTS") else 0

    @property
    def product(self) -> Product | None:
        """The MMA that this is; UTCHMMA's shape stands in its descriptor (PTX ISA, tcgen05)."""
        if self.opcode == "UTCHMMA":
            return Product("UTCHMMA", (self.descriptor >> 24 & 31) * 16, (self.descriptor >> 17 & 63) * 8, 16)
        if self.opcode == "HGMMA":
            m, n, k = map(int, re.findall(r"\d+", self.name)[:3])
            return Product("HGMMA", m, n, k, bool(re.match(r"R\d+, gdesc", self.operands)))
        if self.opcode == "HMMA":
            digits = self.name.split(".")[1]
            return Product("HMMA", 16, 8, int(digits[3:]))
        return None


def parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """(instructions, the position of each label)."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    constants: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := LINE.match(line):
            guard, name, operands = match.groups()
            target = operands.split(",")[0].strip()
            if moved := re.match(r"UMOV\s+(UR\d+), (0x[0-9a-f]+)", f"{name} {operands}"):
                constants[moved[1]] = int(moved[2], 16)
            elif name.startswith("U") and not guard:
                constants.pop(target, None)
            holder = re.search(r"idesc\[(UR\d+)\]", operands)
            descriptor = constants[holder[1]] if holder else 0
            found.append(Instruction(name, operands, guard is not None, descriptor))
    return found, labels


def _work(block: Sequence[Instruction]) -> tuple[int, int]:
    """(flops of MMA instructions, bytes of global memory)."""
    return sum(i.product.flops for i in block if i.product), sum(i.global_bytes for i in block)


class Flow:
    """The control flow of a kernel: blocks of instructions by their first position."""

    def __init__(self, text: str) -> None:
        self.code, labels = parse(text)
        starts = {0, *labels.values()}
        starts |= {i + 1 for i, x in enumerate(self.code) if x.opcode in ("BRA", *ENDS)}
        self.starts = sorted(s for s in starts if s < len(self.code))
        self.graph = nx.DiGraph()
        self.graph.add_node(0)
        for start, end in zip(self.starts, [*self.starts[1:], len(self.code)], strict=True):
            last = self.code[end - 1]
            jumps = last.opcode == "BRA"
            target = re.search(r"\.L_x_\w+", last.operands) if jumps else None
            if target and labels.get(target[0], len(self.code)) < len(self.code):
                self.graph.add_edge(start, labels[target[0]])
            always = not last.guarded and (
                last.opcode in ENDS or (jumps and last.operands.strip().startswith("`"))
            )
            if not always and end < len(self.code):
                self.graph.add_edge(start, end)
        self.graph = self.graph.subgraph(nx.descendants(self.graph, 0) | {0}).copy()

    def block(self, start: int) -> Sequence[Instruction]:
        """The instructions from ``start`` to the next block."""
        at = self.starts.index(start)
        end = self.starts[at + 1] if at + 1 < len(self.starts) else len(self.code)
        return self.code[start:end]

    @cached_property
    def back_edges(self) -> list[tuple[int, int]]:
        """Edges to a block that every way to their source passes: one per loop."""
        above = nx.immediate_dominators(self.graph, 0)

        def dominates(block: int, other: int) -> bool:
            while other not in (block, 0):
                other = above[other]
            return other == block

        return [(a, b) for a, b in self.graph.edges if dominates(b, a)]

    def _path(self, blocks: set[int], first: int, last: Sequence[int]) -> list[Instruction]:
        """The instructions from ``first`` to one of ``last`` with most work, then the fewest."""
        graph = self.graph.subgraph(blocks).copy()
        graph.remove_edges_from(self.back_edges)
        best: dict[int, tuple[tuple[int, int, int], list[int]]] = {}
        for block in nx.topological_sort(graph):
            ways = [best[x] for x in graph.predecessors(block) if x in best]
            if block == first:
                ways = [((0, 0, 0), [])]
            if ways:
                (flops, moved, fewer), path = max(ways)
                body = self.block(block)
                more, also = _work(body)
                best[block] = (flops + more, moved + also, fewer - len(body)), [*path, block]
        _, path = max(best[x] for x in last if x in best)
        return [i for block in path for i in self.block(block)]

    def _loop(self, source: int, head: int) -> set[int]:
        """The blocks of the loop that jumps back from ``source`` to ``head``."""
        inside = self.graph.subgraph(set(self.graph) - ({head} - {source}))
        return {*nx.ancestors(inside, source), source, head} if source != head else {head}

    def hottest(self) -> list[Instruction]:
        """An iteration of the innermost loop with most work; of loops with as much, of the shortest."""
        ends = [x for x in self.graph if not self.graph.out_degree(x) or self.block(x)[-1].opcode == "EXIT"]
        whole = self._path(set(self.graph), 0, ends)
        bodies = [self._loop(*edge) for edge in self.back_edges]
        paths = [
            self._path(body, head, [source])
            for body, (source, head) in zip(bodies, self.back_edges, strict=True)
        ]
        kind = 0 if any(_work(path)[0] for path in [whole, *paths]) else 1
        least = _work(whole)[1] // 4 * kind
        busy = [(body, path) for body, path in zip(bodies, paths, strict=True) if _work(path)[kind] > least]
        inner = [path for body, path in busy if not any(other < body for other, _ in busy)]
        return max(inner, key=lambda path: (_work(path)[kind], -len(path)), default=whole)


def in_flight(code: Sequence[Instruction], stages: int) -> int:
    """Bytes that one warp can have asked for and not yet waited for.

    A load is waited for by the first instruction that names a register of its result; asynchronous copies
    run ahead by one stage less than the pipeline has.
    """
    copies = sum(x.global_bytes for x in code if x.opcode == "LDGSTS") * max(1, stages - 1)
    waiting: dict[int, tuple[int, int]] = {}
    most = 0
    for place, x in enumerate([*code, *code]):
        named = {
            int(n) + more for n, pair in REGISTER.findall(x.operands) for more in range(2 if pair else 1)
        }
        late = [waiting[r][0] for r in named if r in waiting]
        if late:
            waiting = {r: load for r, load in waiting.items() if load[0] > max(late)}
        if x.opcode == "LDG":
            first = int(REGISTER.findall(x.operands)[0][0])
            for r in range(first, first + max(1, x.lane_bytes // 4)):
                waiting[r] = place, x.global_bytes
        most = max(most, sum(dict(waiting.values()).values()))
    return most + copies


# ------------------------------------------------------------------------------------------------------------
# How fast a compiled kernel can be at most, and what binds: from its machine code and a model of the chip.
#
# An iteration of the hot loop costs each part of a multiprocessor some cycles. Were they to overlap entirely,
# the longest would be the time: the ceiling. Latencies, bank conflicts, waits at barriers and what is outside
# the loop come on top, so no run is faster and most are slower.
#
#     issue    instructions / 4 schedulers              alu, fma, special    lanes of that kind of
#     instruction
#     tensor   MMA instructions                         shared               bytes through shared memory
#
# Kernels with products are held to TFLOP/s of the products that the formula needs, the others to GB/s, which
# bytes in flight bound too: a multiprocessor that asks for few bytes at a time waits for memory.


MAX_CTAS = 32
REGISTERS = 65536


def _of_delta_rule(launch: Launch) -> int:
    """Of the gated delta rule's kernels: some columns of a chunk's products, or a chunk's way through."""
    given = launch.constants
    width, chunk = given["DIM"], given["CHUNK"]
    name = launch.kernel.__name__.removeprefix("gated_delta_").removesuffix("_kernel")
    if name == "chunk":
        return int(2 * 2 * chunk**2 * given["BLOCK_D"])
    through = 3 * width + 2 * chunk
    widths = {"forward": through, "states": 2 * width + chunk, "backward_state": through,
              "backward_pairs": 2 * chunk, "backward_q": width, "backward_k": width}  # fmt: skip
    return int(2 * chunk * given["BLOCK_V"] * widths[name])


def _of_mamba2(launch: Launch) -> int:
    """Of Mamba-2's kernels: what a chunk adds to some columns of a state, pairs of two chunks, these by some
    columns, and a head's pairs and columns of a state; none of what goes from span to span and of sums."""
    given, chunk = launch.constants, launch.constants.get("CHUNK", 0)
    sizes = {
        "states": ("DIM", "BLOCK_V"),
        "scores": ("DIM", "CHUNK"),
        "scan": ("CHUNK", "BLOCK_V"),
        "backward_x": ("CHUNK", "BLOCK_V"),
        "backward_pairs": ("CHUNK", "V_DIM"),
        "backward_groups": ("BLOCK_D", "V_DIM"),
    }.get(launch.kernel.__name__.removeprefix("mamba2_").removesuffix("_kernel"))
    return int(2 * chunk * given[sizes[0]] * given[sizes[1]]) if sizes else 0


def needed_flops(launch: Launch) -> int:
    """Flops of products that one iteration of a kernel's loop needs; 0 for kernels without products.

    Where dk and dv are launched apart, the scores are needed once: for dk.
    """
    given = launch.constants
    if launch.kernel.__name__.startswith("mamba2"):
        return _of_mamba2(launch)
    if "DIM" not in given:
        return 0
    if "CHUNK" in given:
        return _of_delta_rule(launch)
    if launch.kernel.__name__ == "attention_forward_kernel":
        keys, values = 1, 1
    elif launch.kernel.__name__ == "attention_backward_q_kernel":
        keys, values = 2, 1
    else:
        dk, dv = given["KEYS"], given["VALUES"]
        keys, values = 2 * dk, dk + dv
    widths = keys * given["DIM"] + values * given["V_DIM"]
    return int(2 * given["BLOCK_M"] * given["BLOCK_N"] * widths)


def resident(chip: Chip, registers: int, shared: int, warps: int) -> int:
    """CTAs that a multiprocessor holds at a time; registers come in blocks of 8 per thread."""
    per_warp = 32 * -(-registers // 8) * 8
    held = min(REGISTERS // (per_warp * warps), chip.warps // warps, MAX_CTAS)
    return min(held, chip.shared_bytes // (shared + 1024))


def _tensor(product: Product, chip: Chip, warps: int) -> float:
    """Cycles that an MMA instruction of all warps takes: its operands in shared memory are read meanwhile."""
    cycles = product.flops / chip.products[product.kind]
    if product.kind == "UTCHMMA":  # one thread asks for it; 64 rows use half of the unit
        return cycles * (2 if product.m == 64 else 1)
    if product.kind == "HMMA":
        return cycles * warps
    rows = product.n + (product.m if product.shared else 0)
    return max(cycles, rows * product.k * 2 / 128) * warps / 4


def _cycles(code: Sequence[Instruction], chip: Chip, warps: int) -> dict[str, int]:
    """Cycles of each part of a multiprocessor for one iteration of a CTA."""
    names = [x.opcode for x in code]
    fma = 32 * sum(n in FMA for n in names) / chip.lanes
    fma += 32 * sum(n in SLOW_FMA for n in names) / 64
    products = [x.product for x in code if x.product]
    found = {
        "issue": len(names) / 4 * warps,
        "alu": 32 * sum(n in ALU for n in names) / 64 * warps,
        "fma": fma * warps,
        "special": 32 * sum(n in SPECIAL for n in names) / 16 * warps,
        "tensor": sum(_tensor(p, chip, warps) for p in products),
        "shared": 32 * sum(x.lane_bytes for x in code if x.opcode in SHARED) / 128 * warps,
    }
    return {name: round(cycles) for name, cycles in found.items()}


def ceiling(
    launch: Launch, cubin: bytes, arch: int, usage: tuple[int, int], head: tuple[str, str, str, int]
) -> Ceiling:
    """The row of a kernel that was compiled for ``arch``; ``usage`` is its registers and shared memory."""
    chip, warps = CHIPS[arch], launch.num_warps
    code = Flow(disassemble(cubin)).hottest()
    cycles = _cycles(code, chip, warps)
    products = [x.product for x in code if x.product]
    executed = sum(p.flops * {"HMMA": warps, "HGMMA": warps // 4}.get(p.kind, 1) for p in products)
    needed = needed_flops(launch)
    moved = warps * sum(x.global_bytes for x in code)
    ctas = min(resident(chip, *usage, warps), ceil_div(math.prod(launch.grid), chip.processors))
    flying = ctas * warps * in_flight(code, launch.num_stages)
    slowest = max(cycles, key=lambda name: cycles[name])
    per_second = chip.processors * chip.clock / max(cycles[slowest], 1)
    if needed:
        rate, binds = needed * per_second / 1e12, slowest
    else:
        limits = {
            "memory": chip.bandwidth,
            "latency": flying * chip.processors / LATENCY if flying else chip.bandwidth,
            slowest: moved * per_second,
        }
        binds = min(limits, key=lambda name: limits[name])
        rate = limits[binds] / 1e9
    return Ceiling(
        *head, arch, "/".join(sorted({p.kind for p in products})) or "-",
        round(executed / needed, 2) if needed else 0.0,
        cycles["issue"], cycles["alu"], cycles["fma"], cycles["special"], cycles["tensor"], cycles["shared"],
        spills=sum(x.opcode in LOCAL for x in code),
        bytes=moved, ctas=ctas, in_flight=flying, rate=round(rate), binds=binds,
    )  # fmt: skip


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
        AOT_CASES[operator]()[case][1]()
    return launches


def jobs(arch: int) -> list[Job]:
    """Every distinct launch of every registered case on a chip."""
    found = []
    for operator, make in sorted(AOT_CASES.items()):
        for case, (name, _) in enumerate(make()):
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
    for module in sorted(name for name in sys.modules if name.startswith(f"{kernels.__name__}.")):
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
        _specialise,
        _widths,
        _usage,
        compile_launch,
    ):
        found.update(inspect.getsource(measure).encode())
    found.update(repr(CHIPS).encode())
    for arch in SHARED_LIMIT:
        for operator, make in sorted(AOT_CASES.items()):
            for case, (name, _) in enumerate(make()):
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

    source = ASTSource(launch.kernel, *_specialise(launch))
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

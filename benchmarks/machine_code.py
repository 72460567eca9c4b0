"""Count what a compiled kernel executes, from its machine code (SASS).

In: a cubin. Out: the instructions of one hot iteration: of the innermost loop with most of the work, or of
the whole kernel where none does work. "Work" is flops of MMA instructions, or else bytes of global memory.
Where the loop branches, the path is the one with most work and then the fewest instructions: what a block
takes that needs no mask. Needs the ``nvdisasm`` of triton's wheel.
"""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx as nx

from megacompile.kernels._triton import triton

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

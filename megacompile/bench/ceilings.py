"""Read what the ahead-of-time gate found of each kernel on each chip: what it uses, how fast it can be.

``resources.csv`` and ``ceilings.csv`` lie beside this module, one row per case, kernel and chip.
``benchmarks/kernel_gate.py`` writes them.
"""

import csv
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar, get_type_hints

TABLE, CEILINGS = (Path(__file__).with_name(name) for name in ("resources.csv", "ceilings.csv"))


@dataclass(frozen=True)
class Chip:
    """A multiprocessor and how many there are.

    ``products``: flop per cycle of each MMA instruction, 16-bit to float32. ``lanes``: float32 operations per
    cycle; integers, comparisons and conversions run on 64, exponentials and the like on 16 (CUDA programming
    guide, throughput of native arithmetic instructions). ``shared_bytes``, ``warps``: what it holds (there,
    technical specifications). Bytes of shared memory per cycle are 128, on each.
    """

    name: str
    processors: int
    clock: float
    bandwidth: float
    products: dict[str, int]
    lanes: int
    shared_bytes: int
    warps: int
    peak: str


# Flop per cycle are the datasheet's dense rate / (multiprocessors x clock). mma.sync on 9.0 reaches 0.629 of
# wgmma (arXiv:2402.13499); for 10.0 nothing is published: taken to be as fast as there.
CHIPS = {
    80: Chip("A100 SXM", 108, 1.41e9, 2.039e12, {"HMMA": 2048}, 64, 164 << 10, 64, "312 TFLOP/s"),
    86: Chip("RTX 3090", 82, 1.695e9, 0.936e12, {"HMMA": 512}, 128, 100 << 10, 48, "71 TFLOP/s"),
    89: Chip("RTX 4090", 128, 2.52e9, 1.008e12, {"HMMA": 512}, 128, 100 << 10, 48, "165.2 TFLOP/s"),
    90: Chip(
        "H100 SXM", 132, 1.83e9, 3.35e12, {"HGMMA": 4096, "HMMA": 2576}, 128, 228 << 10, 64, "989 TFLOP/s"
    ),
    100: Chip(
        "B200", 148, 1.855e9, 7.7e12, {"UTCHMMA": 8192, "HMMA": 2576}, 128, 228 << 10, 64, "2250 TFLOP/s"
    ),
    120: Chip("RTX 5090", 170, 2.407e9, 1.792e12, {"HMMA": 512}, 128, 100 << 10, 48, "209.5 TFLOP/s"),
}


@dataclass(frozen=True, order=True)
class CompiledKernel:
    """A kernel as compiled for a chip; ``variant`` counts the launches of it that one case makes."""

    operator: str
    case: str
    kernel: str
    variant: int
    arch: int

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        return self.operator, self.case, self.kernel, self.variant, self.arch


@dataclass(frozen=True, order=True)
class Ceiling(CompiledKernel):
    """One row of the table; cycles are per CTA and iteration of the hot loop, bytes too.

    ``executed``: flops of MMA instructions / flops that the formula needs (0 without products).
    ``spills``: loads and stores of local memory. ``in_flight``: bytes that a multiprocessor can wait for at a
    time. ``rate``: TFLOP/s with products, GB/s without. ``binds``: a column, "memory" (its bandwidth) or
    "latency" (too few bytes in flight).
    """

    mma: str
    executed: float
    issue: int
    alu: int
    fma: int
    special: int
    tensor: int
    shared: int
    spills: int
    bytes: int
    ctas: int
    in_flight: int
    rate: float
    binds: str

    @property
    def text(self) -> str:
        """The rate with its unit, and what binds."""
        return f"{self.rate:,.0f} {'TFLOP/s' if self.executed else 'GB/s'} ({self.binds})"


@dataclass(frozen=True, order=True)
class Resources(CompiledKernel):
    """One row of the table."""

    registers: int
    local: int
    shared: int
    load: int
    narrow_loads: int
    store: int


Row = TypeVar("Row", Resources, Ceiling)


def read_table(path: Path = TABLE) -> list[Resources]:
    """The checked-in rows."""
    return _read_rows(Resources, path)


def read_ceilings(path: Path = CEILINGS) -> list[Ceiling]:
    """The checked-in rows."""
    return _read_rows(Ceiling, path)


def _read_rows(kind: type[Row], path: Path) -> list[Row]:
    with path.open(newline="") as file:
        file.readline()
        rows = list(csv.DictReader(file))
    types = get_type_hints(kind)
    return sorted(kind(**{f.name: types[f.name](row[f.name]) for f in fields(kind)}) for row in rows)

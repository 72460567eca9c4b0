"""Find how fast a compiled kernel can be at most, and what binds: by its machine code and a model of chips.

An iteration of the hot loop costs each part of a multiprocessor some cycles. Were they to overlap entirely,
the longest would be the time: the ceiling. Latencies, bank conflicts, waits at barriers and what is outside
the loop come on top, so no run is faster and most are slower.

    issue    instructions / 4 schedulers              alu, fma, special    lanes of that kind of instruction
    tensor   MMA instructions                         shared               bytes through shared memory

Kernels with products are held to TFLOP/s of the products that the formula needs, the others to GB/s, which
bytes in flight bound too: a multiprocessor that asks for few bytes at a time waits for memory.

Warp-specialised kernels have groups of warps that only overlap with each other. One group's iteration, its
products and then its other instructions, is a chain; where all groups meet at a barrier, it holds the
products of all. A chain longer than any part is the time.
"""

import math
from collections.abc import Sequence

from benchmarks.machine_code import (
    ALU,
    FMA,
    LOCAL,
    SHARED,
    SLOW_FMA,
    SPECIAL,
    Flow,
    Instruction,
    Product,
    disassemble,
    in_flight,
)
from megacompile.bench.ceilings import (
    CHIPS,
    Ceiling,
    Chip,
)
from megacompile.kernels._triton import Launch, ceil_div

LATENCY = 800e-9  # seconds from a load to its value in a busy memory: 20 KB per multiprocessor fill an H100's
MAX_CTAS = 32
REGISTERS = 65536
GROUPS = (
    2  # of four warps that compute in a warp-specialised kernel; as many registers go to the one that fetches
)
WAITS = 150  # cycles of a chain in which barriers, products and shuffles answer


def _of_delta_rule(launch: Launch) -> int:
    """Count flops of the gated delta rule's kernels: some columns of a chunk's products, or a chunk's way
    through."""
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
    """Count flops of Mamba-2's kernels: a chunk's share in some columns of a state, pairs of two chunks,
    these by some columns, and a head's pairs and columns of a state; none of the kernels from span to span
    and of sums."""
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
    name = launch.kernel.__name__.removeprefix("hopper_")
    if name == "attention_forward_kernel":
        keys, values = 1, 1
    elif name == "attention_backward_q_kernel":
        keys, values = 2, 1
    else:
        dk, dv = given.get("KEYS", 1), given.get("VALUES", 1)
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


def meets_alone(code: Sequence[Instruction]) -> bool:
    """Return whether all barriers of warps are those of one group, by the number of their threads."""
    return all(x.operands.strip().endswith(", 0x80") for x in code if x.opcode == "BAR")


def arrives_together(code: Sequence[Instruction]) -> bool:
    """Return whether a barrier of the group's warps lies between each wait and the arrival that follows.

    One thread arrives for all. A warp that waits for the phase before would miss its end (triton#10035).
    """
    together = True
    for x in code:
        if x.opcode == "BAR":
            together = True
        elif x.name.startswith("SYNCS.PHASECHK"):
            together = False
        elif x.name.startswith("SYNCS.ARRIVE") and not together:
            return False
    return True


def chain(code: Sequence[Instruction], cycles: dict[str, int]) -> int:
    """Cycles of an iteration of one group, one thing after the other."""
    products = cycles["tensor"] // (GROUPS if meets_alone(code) else 1)
    return products + len(code) + WAITS


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
    chip, warps, held = CHIPS[arch], launch.num_warps, launch.num_warps
    code = Flow(disassemble(cubin)).hottest()
    specialised = launch.kernel.__name__.startswith("hopper_")
    if specialised:
        warps, held = GROUPS * warps, (GROUPS + 1) * warps
    cycles = _cycles(code, chip, warps)
    if specialised:
        assert arrives_together(code), f"{head}: a warp arrives before those beside it have waited"
        cycles["chain"] = chain(code, cycles)
    products = [x.product for x in code if x.product]
    executed = sum(p.flops * {"HMMA": warps, "HGMMA": warps // 4}.get(p.kind, 1) for p in products)
    needed = needed_flops(launch)
    moved = warps * sum(x.global_bytes for x in code)
    ctas = min(resident(chip, *usage, held), ceil_div(math.prod(launch.grid), chip.processors))
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

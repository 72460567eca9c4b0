"""Judge the rows of the ahead-of-time gate: what is wrong with them, what changed, what fell.

The tables themselves, ``resources.csv`` and ``ceilings.csv``, lie in ``megacompile/bench``, because
``megacompile bench kernels`` prints them. Their first line says which sources and which triton they were made
of.
"""

import csv
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from megacompile.bench.ceilings import CEILINGS, TABLE, Ceiling, Resources, Row
from megacompile.kernels._triton import triton

TABLE_TRITON = "3.9."
# Dynamic shared memory that one block may ask for, in bytes (CUDA C programming guide, table of
# technical specifications per compute capability, less the 1 KiB that the system keeps).
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
# Kernels whose widest load may be narrower than 16 bytes, and why.
NARROW = {
    # Random numbers come out of nothing but the seed, 8 bytes.
    ("uniform", "bf16", "uniform_kernel"): 8,
    ("uniform", "fp32", "uniform_kernel"): 8,
    # Eight elements, stored together, are four bytes of codes.
    ("decode_4bit", "bf16", "decode_4bit_kernel"): 4,
    ("decode_4bit", "fp32", "decode_4bit_kernel"): 4,
}
# Kernels that execute more products than their formula needs, by head widths and chip, and why: warps compute
# the same rows of the scores where a tile has fewer than 16 per warp; 192 columns are padded to 256, 96 to
# 128; dv alone needs the scores again.
_FORWARD, _Q, _KV = (f"attention_{name}_kernel" for name in ("forward", "backward_q", "backward_kv"))
_HOPPER_FORWARD, _HOPPER_Q, _HOPPER_KV = (f"hopper_{name}" for name in (_FORWARD, _Q, _KV))
_DELTA = {"forward": 1.23, "states": 1.25, "backward_state": 1.23, "backward_q": 1.33, "backward_k": 1.33}
_SMALL_ARCHS = 80, 86, 89, 120
EXECUTED = {
    **{("96", name, 90): 1.34 for name in (_HOPPER_FORWARD, _HOPPER_Q, _HOPPER_KV)},
    **{("192/128", _FORWARD, arch): 1.2 for arch in SHARED_LIMIT},
    **{("192/128", _Q, arch): 2.0 if arch in _SMALL_ARCHS else 1.25 for arch in SHARED_LIMIT},
    **{("256", _Q, arch): 1.67 for arch in _SMALL_ARCHS},
    **{("128", _KV, arch): 1.5 for arch in _SMALL_ARCHS},
    **{("192/128", _KV, arch): 3.0 if arch == 90 else 1.8 for arch in SHARED_LIMIT},
    **{("256", _KV, arch): 2.0 if arch == 90 else 1.5 for arch in SHARED_LIMIT},
    **{("96/192", f"gated_delta_{name}_kernel", a): n for name, n in _DELTA.items() for a in SHARED_LIMIT},
}
# Spills that are known, bytes per thread: outside the hot loop's path, where masks and the kernel's ends are.
# All other tiles that were tried have lower ceilings.
SPILLS = {
    ("128 all bf16", _FORWARD, 100): 16,
    ("128 packed bf16", _FORWARD, 100): 16,
    ("128 window bf16", _Q, 100): 40,
    ("256 all bf16", _FORWARD, 100): 40,
    ("256 causal bf16", _FORWARD, 100): 16,
    ("256 softcap bf16", _FORWARD, 100): 16,
    ("256 window softcap bf16", _FORWARD, 100): 32,
    ("128 packed bf16", _HOPPER_Q, 90): 56,
    ("128 packed bf16", _HOPPER_KV, 90): 64,
}
# The MMA instruction that reaches a chip's peak, and who does without.
PRODUCTS = {90: "HGMMA", 100: "UTCHMMA"}
OLD_PRODUCTS = {("256", _KV, 100), ("192/128", _KV, 100)}
# The tensor cores of warp-specialised kernels never wait, except for what exponentiates too much beside them.
CHAINED = {
    *((case, _HOPPER_FORWARD) for case in ("64 causal bf16", "64 sinks bf16")),
    *((case, _HOPPER_Q) for case in ("128 softcap bf16", "128 all bf16")),
}


def slow(rows: Sequence[Ceiling]) -> list[str]:
    """List ceilings that no table excuses: spills in a hot loop, products that nobody needs, or by an older
    chip's instruction, chains longer than the tensor cores' time."""
    found = []
    for row in rows:
        name = f"{row.operator}/{row.case}/{row.kernel} sm_{row.arch}"
        key = row.case.split()[0], row.kernel, row.arch
        if row.spills:
            found.append(f"{name}: spills in its hot loop, {row.spills} loads and stores")
        allowed = EXECUTED.get(key, 1.0)
        if row.executed and not 1.0 <= row.executed <= allowed:
            found.append(f"{name}: executes {row.executed} of the products needed, at most {allowed} allowed")
        wanted = PRODUCTS.get(row.arch, row.mma)
        if row.executed and row.mma != wanted and key not in OLD_PRODUCTS:
            found.append(f"{name}: products by {row.mma}, not by {wanted}")
        if row.binds == "chain" and (row.case, row.kernel) not in CHAINED:
            found.append(f"{name}: a group of warps takes longer than the tensor cores, {row.tensor} cycles")
    return found


def faults(rows: Sequence[Resources]) -> list[str]:
    """List rows that no table excuses: spills, too much shared memory, no 16-byte load."""
    found = []
    for row in rows:
        name = f"{row.operator}/{row.case}/{row.kernel} sm_{row.arch}"
        if row.local > SPILLS.get((row.case, row.kernel, row.arch), 0):
            found.append(f"{name}: {row.local} bytes of local memory per thread (spills)")
        if row.shared > SHARED_LIMIT[row.arch]:
            found.append(f"{name}: {row.shared} bytes of shared memory > {SHARED_LIMIT[row.arch]}")
        if row.load < NARROW.get((row.operator, row.case, row.kernel), 16):
            found.append(f"{name}: widest load is {row.load} bytes")
    return found


def made_of(path: Path = TABLE) -> tuple[str, str]:
    """The sources and the version of triton that a table was made of."""
    with path.open() as file:
        words = file.readline().split()
    return words[2], words[-1]


def write_table(rows: Sequence[Resources] | Sequence[Ceiling], path: Path, sources: str) -> None:
    """Write what the rows were made of, then them in their order, one line each."""
    names = [f.name for f in fields(rows[0])]
    with path.open("w", newline="") as file:
        file.write(f"# sources {sources} triton {triton.__version__}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)


def changes(old: Sequence[Row], new: Sequence[Row]) -> list[str]:
    """One line per row that came, went or differs."""
    before, after = ({row.key: row for row in rows} for rows in (old, new))
    lines = []
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            lines.append(f"{before.get(key, 'new')}\n  -> {after.get(key, 'gone')}")
    return lines


def worse(old: Sequence[Ceiling], new: Sequence[Ceiling]) -> list[str]:
    """Rows that fell: more products executed than before, or a lower ceiling."""
    before = {row.key: row for row in old}
    lines = []
    for row in new:
        past = before.get(row.key, row)
        name = f"worse: {row.operator}/{row.case}/{row.kernel} sm_{row.arch}"
        if row.executed > past.executed:
            lines.append(f"{name}: executes {row.executed} of the products needed, {past.executed} before")
        if row.rate < past.rate:
            lines.append(f"{name}: {row.text}, {past.text} before")
    return lines


def comparable() -> bool:
    """Return whether this triton is the one that the table was made with: others allocate otherwise."""
    return CEILINGS.exists() and bool(triton.__version__.startswith(TABLE_TRITON))

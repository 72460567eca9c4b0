"""Prices of our kernels on a machine: by the ceilings of the ahead-of-time gate, which needs no GPU.

In:  an operator, a dtype, what its speed depends on, a machine whose chip is known. Out: bytes per second, of
attention and of recurrences floating-point operations per second. The row of ``ceilings.csv`` that is nearest
to a call counts: its parts of a multiprocessor, and its bytes in flight, as many times as the machine has
multiprocessors, and never more than the machine's memory gives. On a machine that was measured recurrences
are as fast as attention's backward.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from functools import cache

from megacompile.errors import MegacompileError
from megacompile.hardware.catalog import REACHED, REACHED_BACKWARD, REACHED_BY_RECURRENCES
from megacompile.hardware.machine import Machine
from megacompile.kernels.chips import CHIPS, LATENCY, Ceiling
from megacompile.kernels.gate_tables import read_ceilings
from megacompile.kernels.registry import CALLED, Called, Kernel
from megacompile.schedule.step import Op
from megacompile.schedule.workload import Call, KernelWork

_EVERYTHING = {"window", "softcap", "sinks", "packed"}  # what a case "all" has


def kernel_delay(call: Call | Op, machine: Machine, *, attends: bool) -> float:
    """Seconds that a function's kernels of ours take beyond nominal ones: those that attend beyond the rates
    of attention or, in recurrences, of products, or the others, which move bytes, beyond the memory's
    bandwidth."""
    known = _has_ceilings(machine)
    if not (known or attends):
        return 0.0
    delay = 0.0
    for kernel in call.kernels:
        op = CALLED[kernel.op]
        products = op.spec.runs_kernels is not None and (known or op.part.chunk is not None)
        if products == attends:
            delay += kernel_seconds(kernel, machine) - _nominal_seconds(kernel, machine)
    return delay


def kernel_seconds(kernel: KernelWork, machine: Machine) -> float:
    """Seconds that calls of one kernel take."""
    found = rate(kernel.op, kernel.dtype, kernel.variant, machine)
    if found is None and CALLED[kernel.op].part.chunk is not None:
        found = machine.attention_backward
    return kernel.amount / found if found else _nominal_seconds(kernel, machine)


def _nominal_seconds(kernel: KernelWork, machine: Machine) -> float:
    op = CALLED[kernel.op]
    if op.spec.runs_kernels is None:
        return kernel.amount / machine.memory_bandwidth
    backward = op.part is op.spec.backward
    attention = machine.attention_backward if backward else machine.attention_forward
    nominal = (attention if op.part.chunk is None else None) or machine.flops
    return kernel.amount / nominal


def _has_ceilings(machine: Machine) -> bool:
    return machine.chip in CHIPS and not machine.measured


@cache
def rate(op: str, dtype: str, variant: str, machine: Machine) -> float | None:
    """Bytes, or FLOPs of products, per second of an operator; None where no kernel of it is in the table."""
    if machine.chip is None or not _has_ceilings(machine):
        return None
    call = CALLED[op]
    if call.part.chunk is not None:
        return _recurrence_rate(call, dtype, variant, machine)
    if call.spec.runs_kernels is not None:
        return _attention_rate(call, dtype, variant, machine)
    rows = (
        r for k in call.part.kernels for r in nearest(_ceilings_of(call, k, machine.chip), dtype, variant)
    )
    return min((_bytes_rate(row, machine) for row in rows), default=None)


def _bytes_rate(row: Ceiling, machine: Machine) -> float:
    """Bytes per second of a kernel: the slowest part of a multiprocessor, or what it can wait for."""
    processors = machine.processors or CHIPS[row.arch].processors
    part = max(row.issue, row.alu, row.fma, row.special, row.tensor, row.shared)
    flying = row.in_flight * processors / LATENCY or math.inf
    return min(machine.memory_bandwidth, flying, row.bytes * processors * CHIPS[row.arch].clock / part)


def _attention_rate(call: Called, dtype: str, variant: str, machine: Machine) -> float:
    """FLOPs of the formula per second: of the kernels one after the other, at what is reached of ceilings."""
    assert machine.chip is not None
    chip = CHIPS[machine.chip]
    more = (machine.processors or chip.processors) / chip.processors
    seconds = 0.0
    for kernel in call.part.kernels:
        rows = nearest(_ceilings_of(call, kernel, machine.chip), dtype, variant)
        if len(rows) == len(kernel.products):
            seconds += sum(p / (row.rate * 1e12) for p, row in zip(kernel.products, rows, strict=True))
    return (REACHED if call.part is call.spec.forward else REACHED_BACKWARD) * more / seconds


def _recurrence_rate(call: Called, dtype: str, variant: str, machine: Machine) -> float:
    """FLOPs of the formula per second, of a chunk: of the kernels one after the other, each at what is
    reached of its ceilings' mean, and of the states that are moved beside."""
    assert machine.chip is not None and call.part.chunk is not None
    chip, chunk = CHIPS[machine.chip], call.part.chunk
    (width, *_, inner) = 2 * _read_case(variant)[0]
    sizes, seconds = (chunk.tokens * width, chunk.tokens * inner, width * inner), 0.0
    for kernel in call.part.kernels:
        rows = nearest(_ceilings_of(call, kernel, machine.chip), dtype, variant)
        work = 2 * chunk.tokens * sum(map(operator.mul, kernel.products, sizes))
        seconds += work * sum(1e-12 / row.rate for row in rows) / len(rows)
    seconds /= REACHED_BY_RECURRENCES * (machine.processors or chip.processors) / chip.processors
    kept = chunk.heads * width * inner * chunk.tokens / chunk.span
    seconds += chunk.moved_bytes * kept / machine.memory_bandwidth
    return chunk.flops(width, inner) / seconds


@cache
def _table() -> dict[tuple[str, str, int], list[Ceiling]]:
    found: dict[tuple[str, str, int], list[Ceiling]] = {}
    for row in read_ceilings():
        found.setdefault((row.operator, row.kernel, row.arch), []).append(row)
    return found


def _ceilings_of(call: Called, kernel: Kernel, chip: int) -> list[Ceiling]:
    rows = _table().get((call.spec.name, kernel.name, chip))
    if rows is None:
        raise MegacompileError(
            f"kernels/ceilings.csv has no row of {kernel.name} on sm_{chip}, so nothing prices it: run "
            "python -m benchmarks.kernel_gate --update."
        )
    return rows


def nearest(rows: Iterable[Ceiling], dtype: str, variant: str) -> list[Ceiling]:
    """The rows of the case that is nearest to a call: one whose sizes hold the call's, the least of them, and
    of these one that lacks nothing that the call has and has little beside."""
    words = f"{variant} {'fp32' if dtype in ('float32', 'float64') else 'bf16'}"
    cases: dict[str, list[Ceiling]] = {}
    for row in sorted(rows):
        cases.setdefault(row.case, []).append(row)
    return cases[min(cases, key=lambda case: _distance(case, words))]


def _distance(case: str, words: str) -> tuple[bool, float, int]:
    (sizes, has), (wanted, needs) = _read_case(case), _read_case(words)
    pairs = [(sizes[i], wanted[i]) for i in (0, -1)] if sizes and wanted else []
    narrow = any(a < b for a, b in pairs)
    return narrow, sum(abs(math.log2(a / b)) for a, b in pairs), 4 * len(needs - has) + len(has - needs)


@cache
def _read_case(words: str) -> tuple[tuple[int, ...], frozenset[str]]:
    """The sizes of a case, and what else its name says."""
    sizes, has = tuple[int, ...](), set[str]()
    for word in words.split():
        if word[0].isdigit():
            sizes = tuple(map(int, re.findall(r"\d+", word)))
        else:
            has |= _EVERYTHING if word == "all" else {word}
    return sizes, frozenset(has - {"causal", "terms"})

"""How fast a machine runs our kernels: by the ceilings of the ahead-of-time gate, which needs no GPU.

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
from dataclasses import dataclass
from functools import cache

from megacompile.assemble.workload import Call, KernelWork
from megacompile.kernels.chips import CHIPS, LATENCY, Ceiling
from megacompile.kernels.gated_delta_reference import CHUNK, SPAN
from megacompile.kernels.gated_delta_rule import gated_delta_rule_backward_flops, gated_delta_rule_flops
from megacompile.kernels.mamba2_chunk_scan import mamba2_chunk_scan_backward_flops, mamba2_chunk_scan_flops
from megacompile.kernels.tables import read_ceilings
from megacompile.machine.rates import Machine
from megacompile.step.operations import Op

# What attention reaches of a ceiling, assumed: FlashAttention 2 on an H100 reaches 306 and, in its
# deterministic backward, 166 TFLOP/s (catalog.py) of the 622 that mma.sync gives there (arXiv:2402.13499).
REACHED, REACHED_BACKWARD = 0.49, 0.27
_ATTENTION = {  # kernels of an operator, and the products of each as parts of those that its formula counts
    "attention": (("attention_forward_kernel", (1.0,)),),
    "attention_backward": (
        ("attention_backward_q_kernel", (0.6,)),  # scores, their gradient, dq
        ("attention_backward_kv_kernel", (0.8,)),  # scores, their gradient, dk, dv
        ("attention_backward_kv_kernel", (0.6, 0.2)),  # dk and dv apart
    ),
}


@dataclass(frozen=True)
class _Recurrence:
    """How a recurrence's operator is priced, for value heads that share keys.

    ``kernels``: how many products each forms for a token of these heads: of its chunk's tokens with Dk, with
    Dv, and of Dk with Dv. ``moved_bytes`` beside products, of each number of a state that is kept.
    """

    kernels: dict[str, tuple[float, float, float]]
    heads: int = 1
    moved_bytes: int = 0


# Recurrences are assumed to reach what attention's backward does: nobody has timed them. In Mamba-2's (Dk is
# N, Dv is P) a token sees 2.5 chunks of its span; two chunks cost the kernel of pairs 0.37 of what one with
# itself does, whose row counts.
_RECURRENCES = {
    "gated_delta_rule": _Recurrence({"gated_delta_chunk": (2, 0, 0), "gated_delta_forward": (0, 2, 3)}),
    "gated_delta_rule_backward": _Recurrence(
        {
            "gated_delta_chunk": (2, 0, 0),
            "gated_delta_states": (0, 1, 2),
            "gated_delta_backward_state": (0, 2, 3),
            "gated_delta_backward_pairs": (2, 2, 0),
            "gated_delta_backward_q": (1, 0, 1),
            "gated_delta_backward_k": (2, 0, 2),
        }
    ),
    "mamba2_chunk_scan": _Recurrence(
        {"mamba2_states": (0, 0, 16), "mamba2_scores": (2.5, 0, 0), "mamba2_scan": (0, 40, 16)},
        heads=16,
        moved_bytes=8,
    ),
    "mamba2_chunk_scan_backward": _Recurrence(
        {
            "mamba2_states": (0, 0, 16),
            "mamba2_scores": (2.5, 0, 0),
            "mamba2_backward_x": (0, 40, 16),
            "mamba2_backward_pairs": (0, 25, 0),
            "mamba2_backward_groups": (5, 0, 32),
        },
        heads=16,
        moved_bytes=12,
    ),
}
_KERNELS = {  # operator: module and kernel, as the table names them
    **{
        name + suffix: (name, f"{kernel}_{'backward' if suffix else 'forward'}_kernel")
        for name, kernel in (
            ("rms_norm", "rms_norm"),
            ("add_rms_norm", "rms_norm"),
            ("layer_norm", "layer_norm"),
            ("glu", "glu"),
            ("clamped_glu", "clamped_glu"),
            ("qk_norm_rope", "qk_norm_rope"),
        )
        for suffix in ("", "_backward")
    },
    "rope": ("rope", "rope_kernel"),
    "rope_backward": ("rope", "rope_kernel"),
    "linear_cross_entropy": ("cross_entropy_tiles", "accumulate_kernel"),
    "linear_cross_entropy_backward": ("cross_entropy_tiles", "gradient_kernel"),
    "dropout": ("dropout", "dropout_kernel"),
    "uniform": ("uniform", "uniform_kernel"),
}
_EVERYTHING = {"window", "softcap", "sinks", "packed"}  # what a case "all" has


def kernel_delay(call: Call | Op, machine: Machine, *, attends: bool) -> float:
    """Seconds that a function's kernels of ours take beyond nominal ones: those that attend beyond the rates
    of attention or, in recurrences, of products, or the others, which move bytes, beyond the memory's
    bandwidth."""
    known = machine.chip in CHIPS
    if not (known or attends):
        return 0.0
    kernels = (k for k in call.kernels if (k.op in _RECURRENCES or (known and k.op in _ATTENTION)) == attends)
    return sum(kernel_seconds(kernel, machine) - _nominal_seconds(kernel, machine) for kernel in kernels)


def kernel_seconds(kernel: KernelWork, machine: Machine) -> float:
    """Seconds that calls of one kernel take."""
    found = rate(kernel.op, kernel.dtype, kernel.variant, machine)
    if found is None and kernel.op in _RECURRENCES:
        found = machine.attention_backward
    return kernel.amount / found if found else _nominal_seconds(kernel, machine)


def _nominal_seconds(kernel: KernelWork, machine: Machine) -> float:
    rates = {"attention": machine.attention_forward, "attention_backward": machine.attention_backward}
    nominal = machine.flops if kernel.op in _RECURRENCES else machine.memory_bandwidth
    if kernel.op in rates:
        nominal = rates[kernel.op] or machine.flops
    return kernel.amount / nominal


@cache
def rate(op: str, dtype: str, variant: str, machine: Machine) -> float | None:
    """Bytes, or FLOPs of products, per second of an operator; None where no kernel of it is in the table."""
    if machine.chip not in CHIPS:
        return None
    if op in _ATTENTION:
        return _attention_rate(op, dtype, variant, machine)
    if op in _RECURRENCES:
        return _recurrence_rate(op, dtype, variant, machine)
    if op not in _KERNELS:
        return None
    rows = _rows(*_KERNELS[op], machine.chip)
    return min(_bytes_rate(row, machine) for row in nearest(rows, dtype, variant))


def _bytes_rate(row: Ceiling, machine: Machine) -> float:
    """Bytes per second of a kernel: the slowest part of a multiprocessor, or what it can wait for."""
    processors = machine.processors or CHIPS[row.arch].processors
    part = max(row.issue, row.alu, row.fma, row.special, row.tensor, row.shared)
    flying = row.in_flight * processors / LATENCY or math.inf
    return min(machine.memory_bandwidth, flying, row.bytes * processors * CHIPS[row.arch].clock / part)


def _attention_rate(op: str, dtype: str, variant: str, machine: Machine) -> float:
    """FLOPs of the formula per second: of the kernels one after the other, at what is reached of ceilings."""
    assert machine.chip is not None
    chip = CHIPS[machine.chip]
    more = (machine.processors or chip.processors) / chip.processors
    seconds = 0.0
    for kernel, parts in _ATTENTION[op]:
        found = nearest(_rows("attention", kernel, machine.chip), dtype, variant)
        if len(found) == len(parts):
            seconds += sum(part / (row.rate * 1e12) for part, row in zip(parts, found, strict=True))
    return (REACHED if op == "attention" else REACHED_BACKWARD) * more / seconds


def _recurrence_rate(op: str, dtype: str, variant: str, machine: Machine) -> float:
    """FLOPs of the formula per second, of a chunk: of the kernels one after the other, each at what is
    reached of its ceilings' mean, and of the states that are moved beside."""
    assert machine.chip is not None
    chip, name, of = CHIPS[machine.chip], op.removesuffix("_backward"), _RECURRENCES[op]
    (width, *_, inner) = 2 * _read(variant)[0]
    sizes, seconds = (CHUNK * width, CHUNK * inner, width * inner), 0.0
    for kernel, products in of.kernels.items():
        rows = nearest(_rows(name, f"{kernel}_kernel", machine.chip), dtype, variant)
        work = 2 * CHUNK * sum(map(operator.mul, products, sizes))
        seconds += work * sum(1e-12 / row.rate for row in rows) / len(rows)
    seconds /= REACHED_BACKWARD * (machine.processors or chip.processors) / chip.processors
    kept = of.heads * width * inner * CHUNK / SPAN
    seconds += of.moved_bytes * kept / machine.memory_bandwidth
    return _FORMULAS[name](of.heads, width, inner, op != name) / seconds


def _delta_rule(heads: int, width: int, inner: int, backward: bool) -> int:
    q, v = (1, CHUNK, heads, width), (1, CHUNK, heads, inner)
    return gated_delta_rule_backward_flops(v, q, q, v) if backward else gated_delta_rule_flops(q, q, v)


def _scan(heads: int, width: int, inner: int, backward: bool) -> int:
    x, B = (1, CHUNK, heads, inner), (1, CHUNK, 1, width)
    given = x, x[:3], (heads,), B
    return mamba2_chunk_scan_backward_flops(x, *given) if backward else mamba2_chunk_scan_flops(*given)


_FORMULAS = {"gated_delta_rule": _delta_rule, "mamba2_chunk_scan": _scan}


@cache
def _table() -> dict[tuple[str, str, int], list[Ceiling]]:
    found: dict[tuple[str, str, int], list[Ceiling]] = {}
    for row in read_ceilings():
        found.setdefault((row.module, row.kernel, row.arch), []).append(row)
    return found


def _rows(module: str, kernel: str, chip: int) -> list[Ceiling]:
    return _table()[module, kernel, chip]


def nearest(rows: Iterable[Ceiling], dtype: str, variant: str) -> list[Ceiling]:
    """The rows of the case that is nearest to a call: one whose sizes hold the call's, the least of them, and
    of these one that lacks nothing that the call has and has little beside."""
    words = f"{variant} {'fp32' if dtype in ('float32', 'float64') else 'bf16'}"
    cases: dict[str, list[Ceiling]] = {}
    for row in sorted(rows):
        cases.setdefault(row.case, []).append(row)
    return cases[min(cases, key=lambda case: _distance(case, words))]


def _distance(case: str, words: str) -> tuple[bool, float, int]:
    (sizes, has), (wanted, needs) = _read(case), _read(words)
    pairs = [(sizes[i], wanted[i]) for i in (0, -1)] if sizes and wanted else []
    narrow = any(a < b for a, b in pairs)
    return narrow, sum(abs(math.log2(a / b)) for a, b in pairs), 4 * len(needs - has) + len(has - needs)


@cache
def _read(words: str) -> tuple[tuple[int, ...], frozenset[str]]:
    """The sizes of a case, and what else its name says."""
    sizes, has = tuple[int, ...](), set[str]()
    for word in words.split():
        if word[0].isdigit():
            sizes = tuple(map(int, re.findall(r"\d+", word)))
        else:
            has |= _EVERYTHING if word == "all" else {word}
    return sizes, frozenset(has - {"causal", "terms"})

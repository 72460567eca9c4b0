"""A measured step beside its lower bound, from the rates that the part ``machine`` measured."""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.gpu.record import Result
from megacompile.cli.figures import ADAM_BYTES, lower_bound
from megacompile.machine.rates import Machine
from megacompile.schedule.schedule import Schedule

_TIMED_BYTES = 26
"""What the part ``machine`` counts per parameter of host Adam: split masters, moments, a bf16 gradient."""


def beside_bound(schedule: Schedule, flops: float, seconds: float, rates: Result, *, adam: bool) -> Result:
    """The bound of this step's mode (with or without clipping), what binds it, and its share of the step.

    Groups whose state the plan keeps on the device neither travel nor burden the host. ``adam`` counts the
    host's updates; left out, the bound is lower and still holds. Without ``rates`` those of the
    machine's profile stand in, which ``bound_from`` says.
    """
    machine = _measured(schedule.machine, rates) if rates else schedule.machine
    bound = lower_bound(schedule.work, flops, schedule.mode, _relieved(machine, schedule, adam=adam))
    return {
        "lower_bound_seconds": bound.seconds, "bound_by": bound.binding,
        "fraction_of_bound": bound.seconds / seconds,
        "bound_from": "measured rates" if rates else machine.name,
    }  # fmt: skip


def _measured(machine: Machine, rates: Result) -> Machine:
    adam = max(v for k, v in rates.items() if k.startswith("host_adam_"))
    return replace(
        machine,
        flops=rates["gemm_tflops"] * 1e12,
        h2d_bandwidth=rates["h2d_gbps"] * 1e9,
        d2h_bandwidth=rates["d2h_gbps"] * 1e9,
        host_bandwidth=adam * 1e9 * ADAM_BYTES / _TIMED_BYTES,
    )


def _relieved(machine: Machine, schedule: Schedule, *, adam: bool) -> Machine:
    """As if rates were higher by as much as there is less to do for groups that stay on the device."""
    work, kept = schedule.work, set(schedule.step.resident)
    groups = {g: work.groups[g] for g in work.contributions}
    size = sum(g.nbytes for g in groups.values())
    streamed = sum(g.nbytes for i, g in groups.items() if i not in kept)
    relief = size / streamed if streamed else math.inf
    return replace(
        machine,
        h2d_bandwidth=machine.h2d_bandwidth * relief,
        d2h_bandwidth=machine.d2h_bandwidth * relief,
        host_bandwidth=machine.host_bandwidth * relief if adam else math.inf,
    )

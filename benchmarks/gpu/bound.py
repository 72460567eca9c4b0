"""A measured step beside its lower bound, from the rates that the part ``machine`` measured."""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.gpu.record import Result
from megacompile.machine.rates import Machine
from megacompile.plan.bound import lower_bound
from megacompile.schedule.schedule import Schedule

_TIMED_BYTES, _BOUND_BYTES = 26, 28
"""What the part ``machine`` counts per parameter of host Adam, with a bf16 gradient, and what the bound
counts, with one in FP32."""


def beside_bound(schedule: Schedule, flops: float, seconds: float, rates: Result, *, adam: bool) -> Result:
    """The bound of this step's mode (with or without clipping), what binds it, and its share of the step.

    Groups whose state the plan keeps on the device neither travel nor burden the host. ``adam`` counts the
    host's updates; left out, the bound is lower and still holds. Without ``rates`` those of the
    machine's profile stand in, which ``bound_from`` says.
    """
    machine = _measured(schedule.machine, rates) if rates else schedule.machine
    machine = machine if adam else replace(machine, host_bandwidth=math.inf)
    bound = lower_bound(schedule.work, schedule.mode, machine, model_flops=flops, plan=schedule.plan)
    return {
        "lower_bound_seconds": bound.seconds,
        "bound_by": bound.binding,
        "fraction_of_bound": bound.seconds / seconds,
        "bound_from": "measured rates" if rates else machine.name,
    }


def _measured(machine: Machine, rates: Result) -> Machine:
    adam = max(v for k, v in rates.items() if k.startswith("host_adam_"))
    return replace(
        machine,
        flops=rates["gemm_tflops"] * 1e12,
        h2d_bandwidth=rates["h2d_gbps"] * 1e9,
        d2h_bandwidth=rates["d2h_gbps"] * 1e9,
        host_bandwidth=adam * 1e9 * _BOUND_BYTES / _TIMED_BYTES,
    )

"""Price our kernels whose speed is that of products: by what they reached on an H100, on any GPU.

A kernel reaches the share of a machine's products that it reached of an H100's (``OpPass.teraflops``).
Kernels without products move bytes at the memory's bandwidth, as all other operators, and have no price here.
"""

from __future__ import annotations

from megacompile.hardware.catalog import PROFILES
from megacompile.hardware.machine import Machine
from megacompile.schedule.step import Op
from megacompile.schedule.workload import Call, KernelWork

_H100_FLOPS = PROFILES["h100-sxm"].machine.flops


def kernel_delay(call: Call | Op, machine: Machine) -> float:
    """Seconds that a function's kernels of ours take beyond the nominal ones of their FLOPs."""
    return sum(kernel_seconds(k, machine) - k.flops / _nominal(k, machine)[0] for k in call.kernels)


def kernel_seconds(kernel: KernelWork, machine: Machine) -> float:
    """Seconds that calls of one kernel take. Attention that was measured on the machine itself keeps that
    rate, and so does attention on a GPU whose chip is not known: who runs it depends on the chip."""
    rate, attends = _nominal(kernel, machine)
    if attends and (machine.measured or machine.chip is None):
        return kernel.flops / rate
    return kernel.flops / (kernel.teraflops * 1e12) * _H100_FLOPS / machine.flops


def _nominal(kernel: KernelWork, machine: Machine) -> tuple[float, bool]:
    """FLOPs per second at which a call's FLOPs are counted; whether as attention's."""
    rates = {"attention": machine.attention_forward, "attention_backward": machine.attention_backward}
    return rates.get(kernel.op) or machine.flops, kernel.op in rates

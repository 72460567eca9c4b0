"""Backends by device: what a budget refers to, what is planned for, and how a runtime's device opens."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from megacompile.distributed.world import World
from megacompile.errors import MegacompileError
from megacompile.hardware.caching_allocator import Request
from megacompile.hardware.catalog import PROFILES, Dtype
from megacompile.hardware.kept_profile import kept_profile
from megacompile.hardware.machine import Machine
from megacompile.runtime.cpu import CpuDevice
from megacompile.runtime.device import Device
from megacompile.schedule.step import Step

Lacking = Callable[[int, Step, Sequence[Request]], int]


def nothing_spare(budget_bytes: int) -> int:
    """Leave a driver no bytes of a budget: there is none."""
    return 0


@dataclass(frozen=True)
class Backend:
    """``device_bytes`` is the device's own memory and ``machine`` what it is planned as; None on a CPU.

    ``plan_bytes`` tells what of a budget a plan may use, ``open`` opens the device under a budget, for a rank
    of a world. ``lacking_bytes`` tells by how much bytes are too few for a step and what it asks the
    device's allocator for; None where that takes what it is asked for. ``loose_bytes`` are the allocator's
    beside a plan's, ``spare_bytes`` tells what of a budget is the driver's for what it takes after the plan.
    """

    device: torch.device
    device_bytes: int | None
    machine: Machine | None
    plan_bytes: Callable[[int], int]
    open: Callable[[int, World], Device]
    lacking_bytes: Lacking | None = None
    loose_bytes: int = 0
    spare_bytes: Callable[[int], int] = nothing_spare


def open_backend(device: str | torch.device | None, compute_dtype: torch.dtype) -> Backend:
    """The backend of a device; None takes a GPU if there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise MegacompileError(f"device={device!r} is not supported: use 'cuda' or 'cpu'.") from error
    if target.type == "cpu":
        return Backend(target, None, None, lambda budget: budget, CpuDevice)
    if target.type != "cuda":
        raise MegacompileError(f"device={str(device)!r} is not supported: use 'cuda' or 'cpu'.")
    if not torch.cuda.is_available():
        raise MegacompileError("device='cuda' was asked for, and torch finds no GPU: check the driver.")
    index = _own_gpu() if target.index is None else target.index
    return _cuda(torch.device("cuda", index), compute_dtype)


def _own_gpu() -> int:
    """Return this process's GPU, if none is named: by its number among the processes that ``torchrun``
    started on this machine, each of which may see its own GPU alone; else torch's current one."""
    local, count = os.environ.get("LOCAL_RANK"), torch.cuda.device_count()
    if local is None or count == 1:
        return torch.cuda.current_device()
    if int(local) >= count:
        raise MegacompileError(
            f"Process {local} of this machine has no GPU of its own, as torch finds {count}: start no more "
            "processes than there are GPUs."
        )
    return int(local)


def _cuda(device: torch.device, compute_dtype: torch.dtype) -> Backend:
    from megacompile.runtime.cuda import CudaDevice
    from megacompile.runtime.cuda_memory import LOOSE_BYTES, TorchCuda, lacking_bytes, plan_bytes, spare_bytes

    api = TorchCuda(device)
    dtype: Dtype = "bf16" if compute_dtype == torch.bfloat16 else "fp32"
    machine = _machine_of(device, dtype)
    return Backend(
        device,
        torch.cuda.get_device_properties(device).total_memory,
        machine,
        lambda budget: plan_bytes(api, budget),
        lambda budget, world: CudaDevice(api, budget, world, machine.adam_threads),
        lacking_bytes,
        LOOSE_BYTES,
        functools.partial(spare_bytes, growing=api.growing),
    )


def _machine_of(device: torch.device, dtype: Dtype) -> Machine:
    """Return the machine that ``megacompile profile`` measured. Otherwise, and for links to other cards,
    return the built-in profile whose name fits the card's best, an H100's if none does, with the card's
    number of multiprocessors."""
    name = torch.cuda.get_device_name(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    words = name.lower().replace("-", " ").split()
    shared = {name: sum(part in words for part in name.split("-")) for name in PROFILES}
    best = max(shared, key=lambda name: (shared[name], "sxm" in name))
    known = PROFILES[best if shared[best] else "h100-sxm"].rates(dtype)
    measured = kept_profile(name, processors)
    if measured is None:
        return replace(known, processors=processors)
    own = measured.rates(dtype)
    return replace(own, fabric_bandwidth=own.fabric_bandwidth or known.fabric_bandwidth)

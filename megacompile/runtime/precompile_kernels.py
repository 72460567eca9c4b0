"""Compile the Triton kernels of a program on threads before its first step, which else compiles one by one.

In: a step with its blocks' functions, which run once on fake tensors of the GPU, their launches recorded:
so what is compiled is what the step launches. Out: kernels in Triton's memory and in its cache on disk, and
on the device. An eighth of the work holds Python's lock (0.9 of 7.4 s of CPU for the 24 kernels of a Llama of
width 2048; Triton 3.6, an Intel Xeon); the rest is LLVM, ptxas and a C compiler.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megacompile.blocks import inductor
from megacompile.blocks.differentiated_template import DifferentiatedTemplate, PolicyFunctions
from megacompile.blocks.joint_graph import Ref
from megacompile.blocks.memory_meter import implementation
from megacompile.blocks.partition import Partition, Template
from megacompile.blocks.weight_groups import Assembly, GroupLayout
from megacompile.errors import MegacompileError
from megacompile.kernels._triton import Launch, recording
from megacompile.kernels.adamw import Constants, adamw_triton
from megacompile.runtime.device_failures import failure_of
from megacompile.runtime.triton_check import reason
from megacompile.schedule.op_table import COMPUTES, PassingGrad
from megacompile.schedule.step import Step
from megacompile.state.moment_formats import shard_runs
from megacompile.units import usable_cores

_LOG = logging.getLogger("megacompile.compiler.kernels")  # a trainer's bar shows what the compiler tells
_PATIENCE = 2.0  # seconds after which it is said what is waited for
_ALIGNED = 16  # bytes, and a multiple of integers, that Triton compiles kernels of their own for


def launches_of(
    step: Step,
    part: Partition,
    templates: Sequence[DifferentiatedTemplate],
    assembly: Assembly,
    mode: FakeTensorMode,
    device: torch.device,
) -> list[Launch]:
    """Return the launches of a step on a GPU, with fake tensors; blocks of one template and policy are asked
    once."""
    calls: dict[tuple[int, Any], set[str]] = defaultdict(set)
    for op in step.ops:
        if op.kind in COMPUTES:
            calls[part.blocks[op.block].template, op.policy].add(op.kind)
    card = torch.cuda.get_device_properties(device)
    arch = 10 * card.major + card.minor
    clips = any(op.kind == "clip_scale" for op in step.ops)
    with mode, torch.no_grad(), recording(arch, chip_processors=card.multi_processor_count) as launches:
        with _Bodies():  # type: ignore[no-untyped-call]
            for (template, policy), kinds in calls.items():
                _call_on_fakes(templates[template].policies[policy], part.templates[template], kinds, device)
        for op in step.ops:
            if op.kind == "adam" and op.stream == "compute":
                passing = isinstance(op.reads[0], PassingGrad)
                _update(assembly.groups[op.group], passing, clips and not passing, device)
    return [launch for launch in launches if 0 not in launch.grid]


class _Bodies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs our own operators as their Python bodies, which launch kernels, where fake tensors skip these."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        body = implementation(func)
        if body is None:
            return func(*args, **(kwargs or {}))
        with self:
            return body(*args, **(kwargs or {}))


def _call_on_fakes(
    policy: PolicyFunctions, template: Template, kinds: set[str], device: torch.device
) -> None:
    """Call a template's functions as a step does, each on what those before it left."""

    def like(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    functions = [getattr(policy, kind) for kind in ("forward", "recompute", "backward") if kind in kinds]
    if not any(function.kernels for function in functions):
        return
    known: dict[Ref, Tensor] = {("in", i): like(x) for i, x in enumerate(template.examples)}
    known |= {("grad", i): like(x) for i, x in enumerate(template.results)}
    for function in functions:
        run = inductor.dry(function.source, []) if function.fused else function.load(device)
        results = run([known[ref] for ref in function.inputs])
        known |= zip(function.outputs, results, strict=True)


def _update(group: GroupLayout, passing: bool, clips: bool, device: torch.device) -> None:
    """AdamW of a group that is on the device; gradients that wait there are FP32, and may be clipped."""
    constants = Constants.of(1e-3, 0.9, 0.999, 1e-8, 0.0, 1)
    for run in shard_runs(group, "fp32", 0):
        moment = torch.empty(run.place.elements, device=device)
        weights = moment.to(group.dtype)
        low = None if group.dtype == torch.float32 else moment.to(torch.int16)
        grad = weights if passing else moment
        for scale in (None, moment[:1])[: 1 + clips]:
            adamw_triton((weights, low, moment, moment), grad, constants, scale)


@dataclass(frozen=True)
class _Pointer:
    """A tensor as Triton sees it where it only compiles; its memory begins at a multiple of 16 bytes."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        return self.offset


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Pointer(value.dtype, int(value.storage_offset()) * value.itemsize % _ALIGNED)
    return value


def _argument_kind(argument: Any) -> Any:
    """Return what of an argument Triton compiles a kernel of its own for; pointers equal those of their
    kind."""
    if isinstance(argument, int) and not isinstance(argument, bool):
        return argument == 1, argument % _ALIGNED == 0, -(1 << 31) <= argument < 1 << 31
    return type(argument) if isinstance(argument, float) else argument


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """One launch for each kernel that Triton compiles, without its tensors."""
    found: dict[Any, Launch] = {}
    for launch in launches:
        args = tuple(map(_argument, launch.args))
        kind = (launch.kernel, tuple(map(_argument_kind, args)), repr(sorted(launch.constants.items())),
                launch.num_warps, launch.num_stages, launch.fuses)  # fmt: skip
        found.setdefault(kind, Launch(launch.kernel, launch.grid, args, launch.constants, *kind[3:]))
    return list(found.values())


def compile_kernels(launches: Iterable[Launch], device: torch.device) -> None:
    """Compile and load each kernel; :class:`MegacompileError` names the first that the GPU cannot run.

    When this returns or raises, nothing is under way any more.
    """
    kernels = distinct(launches)
    for kernel in kernels:
        kernel.kernel.device_caches[device.index]  # threads that meet there first would make several
    threads = max(1, min(len(kernels), usable_cores()))
    pool = ThreadPoolExecutor(threads, "megacompile-triton", torch.cuda.set_device, (device,))
    try:
        built = [pool.submit(_compile, kernel) for kernel in kernels]
        if wait(built, _PATIENCE).not_done:
            _LOG.info("compiling %d kernels for the GPU", len(kernels))
        wait(built)
    finally:
        pool.shutdown(cancel_futures=True)
    for kernel, future in zip(kernels, built, strict=True):
        if future.exception() is not None:
            _compile_alone(kernel, device)


def _compile_alone(launch: Launch, device: torch.device) -> None:
    """Once more: Python 3.11 counts the depth of a parse for all threads together, and so may fail one."""
    try:
        with torch.cuda.device(device):
            _compile(launch)
    except Exception as error:
        if failure_of(device):
            raise
        raise MegacompileError(
            f"Triton cannot compile {launch.kernel.__name__} for this GPU: {reason(error)}, or give compile "
            "kernels=False, which leaves all out but those of attention, random numbers and AdamW."
        ) from error


def _compile(launch: Launch) -> None:
    built = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options, **launch.constants)
    built.run  # noqa: B018  # builds the launcher in C and loads the kernel

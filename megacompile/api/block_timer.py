"""Measure the seconds of each block function on this machine, in place of FLOPs over a rate: for ``profile``.

In: a compiled batch on the CPU backend. Out: its workload with ``seconds`` in every call, and how much
slower its functions are beside a copy. Each function of each template runs on made-up values of the right
shapes; blocks that share a template share its times.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megacompile.api.frontend import Compiled
from megacompile.blocks.block_functions import BlockFunction
from megacompile.blocks.differentiated_template import DifferentiatedTemplate, PolicyFunctions
from megacompile.blocks.joint_graph import Ref
from megacompile.blocks.memory_meter import StorageMeter
from megacompile.blocks.partition import Template
from megacompile.hardware.machine import Machine, copies_beside
from megacompile.schedule.workload import BlockWork, Call, CheckpointPolicy, Workload
from megacompile.state.host_arena import trim_heap

_CPU = torch.device("cpu")
_REPEATS = 5  # of each function, of which the median counts
_CACHES = 64 << 20  # bytes that no cache near a core holds


def calibrated(compiled: Compiled, machine: Machine) -> tuple[Workload, Machine]:
    """The workload with measured seconds, and the machine with what these functions lose beside copies.

    Medians of several runs of each function: alone, beside a thread that copies, and alone once more,
    since a shared CPU is not equally fast at all times.
    """
    timers = [_Timer(p, t) for p, t in zip(compiled.part.templates, compiled.templates, strict=True)]
    before = [timer.run() for timer in timers]
    with copies_beside() as slower:
        beside = [timer.run() for timer in timers]
    after = [timer.run() for timer in timers]
    alone = [{call: (a[call] + b[call]) / 2 for call in a} for a, b in zip(before, after, strict=True)]
    blocks = compiled.assembly.work.blocks
    work = replace(compiled.assembly.work, blocks=tuple(_timed(b, alone[b.template]) for b in blocks))
    total, together = (sum(sum(t[b.template].values()) for b in blocks) for t in (alone, beside))
    return work, replace(machine, compute_beside=max(1.0, together / total), others_beside=slower())


def _timed(block: BlockWork, times: dict[tuple[str, str], float]) -> BlockWork:
    def call(policy: CheckpointPolicy, part: str) -> Call | None:
        given: Call | None = getattr(policy, part)
        return given and replace(given, seconds=times[policy.name, part])

    policies = tuple(
        replace(c, forward=call(c, "forward") or c.forward, recompute=call(c, "recompute"),
                backward=call(c, "backward"))
        for c in block.policies
    )  # fmt: skip
    return replace(block, policies=policies)


class _Timer:
    """Runs the functions of one template on values that it makes up."""

    def __init__(self, template: Template, functions: DifferentiatedTemplate) -> None:
        self.template, self.functions = template, functions
        self.others = torch.zeros(_CACHES // 4)
        self.inputs = [_made_up(t) for t in template.examples]
        self.loaded = {f.name: f.load(_CPU) for f in functions.functions()}

    def run(self) -> dict[tuple[str, str], float]:
        """Seconds by (policy, part)."""
        found: dict[tuple[str, str], float] = {}
        for name, policy in self.functions.policies.items():
            values = self._values(policy)
            for part in ("forward", "recompute", "backward"):
                function: BlockFunction | None = getattr(policy, part)
                if function is not None:
                    found[name, part] = self._seconds(function, values)
        return found

    def _values(self, policy: PolicyFunctions) -> dict[Ref, Any]:
        """Inputs, outputs, saved tensors, and a gradient for each output that has one."""
        values: dict[Ref, Any] = {("in", i): t for i, t in enumerate(self.inputs)}
        for function in (policy.forward, policy.recompute):
            if function is not None:
                results = self._call(function, values)
                values |= dict(zip(function.outputs, results, strict=True))
        for kind, k in policy.backward.inputs if policy.backward is not None else ():
            if kind == "grad":
                values[kind, k] = torch.full_like(values["out", k], 1e-3)
        return values

    def _call(self, function: BlockFunction, values: dict[Ref, Any]) -> list[Any]:
        # as the CPU backend runs it: counting takes time too
        with function.products(), StorageMeter(), torch.no_grad():
            return self.loaded[function.name]([values[ref] for ref in function.inputs])

    def _seconds(self, function: BlockFunction, values: dict[Ref, Any]) -> float:
        """As in a step: inputs that other blocks have driven out of the caches, results in fresh memory."""
        kept, found = [self._call(function, values)], []
        trim_heap()
        for _ in range(_REPEATS):
            self.others.add_(1.0)
            start = time.perf_counter()
            kept.append(self._call(function, values))
            found.append(time.perf_counter() - start)
        return statistics.median(found)


def _made_up(example: Tensor) -> Tensor:
    """A tensor of an example's form: small values, zeros where they are indices or seeds."""
    made = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype)
    return made.normal_(0, 0.02) if example.is_floating_point() else made.zero_()

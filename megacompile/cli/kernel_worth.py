"""What each of our kernels is worth in a step: its seconds beside those of the same in plain torch.

In: the kernels' calls of a planned step, a machine. Out: a :class:`Worth` per operator. A kernel moves bytes
at the memory's bandwidth, or is priced by :mod:`~megacompile.hardware.kernel_prices`. Plain torch is the
operator's eager form (:mod:`~megacompile.kernels.eager_form`), traced on fake tensors: what its operators
read and write at the memory's bandwidth, and its products; for attention without softcap torch's own kernels,
at the rates of the machine. Launches count on neither side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from megacompile.blocks.costs import flops, moved
from megacompile.blocks.kernel_calls import Calls, KernelCall, eager_use
from megacompile.hardware.kernel_prices import kernel_seconds
from megacompile.hardware.machine import Machine
from megacompile.kernels.eager_check import inputs_of
from megacompile.kernels.eager_form import Shape
from megacompile.kernels.registry import CALLED, EAGER_FORMS
from megacompile.schedule.workload import KernelWork

_TRACED = 512  # tokens of a recurrence, whose cost grows with them: its loop over chunks takes long to trace
_Cost = tuple[int, int]
"""Bytes that operators read and write, floating-point operations of products."""


@dataclass(frozen=True)
class Worth:
    """Calls of one operator in a step, forward and backward; their seconds with our kernels and without."""

    calls: int
    seconds: float
    without: float


def worth(calls: Calls, machine: Machine) -> dict[str, Worth]:
    """Return what each operator is worth that a kernel of ours runs and that has an eager form."""
    found: dict[str, Worth] = {}
    for call, count in calls:
        without = _without(call, machine) if call.work else None
        if without is None:
            continue
        name = call.op.removesuffix("_backward")
        past = found.get(name, Worth(0, 0.0, 0.0))
        found[name] = Worth(
            past.calls + count,
            past.seconds + count * _seconds_of_call(call, machine),
            past.without + count * without,
        )
    return found


def _seconds_of_call(call: KernelCall, machine: Machine) -> float:
    """Return the time of one call, with products that are the library's."""
    if call.teraflops:
        return kernel_seconds(KernelWork(call.op, call.work, call.teraflops), machine)
    beside = CALLED[call.op].part.flops
    products = 0 if beside is None else beside(*call.shapes)
    return call.work / machine.memory_bandwidth + products / machine.flops


def _without(call: KernelCall, machine: Machine) -> float | None:
    """The time of the same pass in plain torch; None where there is no eager form."""
    found = eager_use(call)
    if call.op in ("attention", "attention_backward"):
        backward = call.op == "attention_backward"
        _scale, _causal, _window, softcap, *_ = (text for text in call.constants if text != "None")
        if softcap == "0.0":
            rate = machine.attention_backward if backward else machine.attention_forward
            return call.work / (rate or machine.flops)
        (batch, heads, tokens, width), (_, groups, *_) = call.shapes[backward:][:2]
        shape = batch, heads, groups, tokens, width
        found = "capped_attention", shape, "backward" if backward else "forward"
    if found is None:
        return None
    nbytes, products = _eager_cost(*found, call)
    return nbytes / machine.memory_bandwidth + products / machine.flops


def _eager_cost(operation: str, shape: Shape, kind: str, call: KernelCall) -> _Cost:
    """The cost of a call's eager form, the forward or the backward."""
    spec = CALLED[call.op].spec
    recurrent = spec.runs_kernels is not None and operation == spec.name  # not attention with a softcap
    tokens = shape[3] if recurrent else 1
    few = min(tokens, _TRACED)
    shape = (*shape[:3], few, *shape[4:]) if recurrent else shape
    nbytes, products = _traced(operation, shape, call.dtype)[kind == "backward"]
    return nbytes * tokens // few, products * tokens // few


@cache
def _traced(operation: str, shape: Shape, dtype: str) -> tuple[_Cost, _Cost]:
    """The costs of an eager form's forward and backward."""
    case = EAGER_FORMS[operation]

    def run(*inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        made = case.eager(*inputs)
        outputs = made if isinstance(made, tuple) else (made,)
        grads = [torch.zeros((), dtype=o.dtype).expand_as(o) for o in outputs]
        return outputs, torch.autograd.grad(outputs, inputs[: case.trained], grads)

    with FakeTensorMode():
        inputs = inputs_of(case, shape, getattr(torch, dtype), torch.device("cpu"))
        graph = make_fx(run)(*inputs).graph
    nodes = list(graph.nodes)
    results: Any = graph.output_node().args[0]
    ends = 1 + max(map(nodes.index, results[0]))
    return _cost(nodes[:ends]), _cost(nodes[ends:])


def _cost(nodes: Sequence[fx.Node]) -> _Cost:
    called = [n for n in nodes if n.op == "call_function"]
    return sum(map(moved, called)), sum(map(flops, called))

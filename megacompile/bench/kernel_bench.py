"""Run every provider of an operation, first for correctness, then for time.

In: operations, shapes, dtypes, providers and a timer. Out: :class:`Row` per provider and pass. A provider
that is wrong (:mod:`~megacompile.kernels.eager_check`) or fails is not timed, and says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megacompile.bench.operations import Cost, Operation
from megacompile.bench.providers import Provider
from megacompile.bench.timing import Roofline, Timer
from megacompile.kernels.eager_check import check, first_line, gradients_like, inputs_of, outputs_of
from megacompile.kernels.eager_form import Function, Shape

MODES = ("forward", "backward", "full")


@dataclass(frozen=True)
class Row:
    """One provider's result. Times in milliseconds (zero where nothing was timed), ``roofline`` the
    share of the best possible time, ``error`` the worst against float64 as a share of a tensor's largest
    element, ``note`` why something is missing."""

    operation: str
    dtype: str
    shape: str
    provider: str
    mode: str
    median_ms: float = 0.0
    low_ms: float = 0.0
    high_ms: float = 0.0
    gigabytes_per_second: float = 0.0
    teraflops: float = 0.0
    roofline: float = 0.0
    peak_bytes: int = 0
    error: float = 0.0
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return self.operation, self.dtype, self.shape, self.provider, self.mode


def shape_text(shape: Shape) -> str:
    return "x".join(map(str, shape))


@dataclass(frozen=True)
class Bench:
    """The settings of a run; ``timer`` and ``roof`` are None where correctness alone is checked."""

    providers: Mapping[str, Provider]
    device: torch.device
    timer: Timer | None
    roof: Roofline | None

    def rows(self, operation: Operation, shape: Shape, dtype: torch.dtype) -> Iterator[Row]:
        """Every provider of one operation on one shape; one row that says why where the operation fails."""
        try:
            yield from self._rows(operation, shape, dtype)
        except Exception as error:  # the operations after it are worth having
            head = operation.name, str(dtype).removeprefix("torch."), shape_text(shape)
            yield Row(*head, "megacompile", "full", note=f"fails: {first_line(error)}")

    def _rows(self, operation: Operation, shape: Shape, dtype: torch.dtype) -> Iterator[Row]:
        functions = {n: f for n, p in self.providers.items() if (f := p(operation.name)) is not None}
        head = operation.name, str(dtype).removeprefix("torch."), shape_text(shape)
        for name, (error, note) in check(operation.form, shape, dtype, functions, self.device).items():
            if note or self.timer is None:
                yield Row(*head, name, "full", error=error, note=note or "checked")
                continue
            try:
                yield from self._timed(operation, shape, dtype, functions[name], (*head, name), error)
            except torch.OutOfMemoryError:
                yield Row(*head, name, "full", error=error, note="out of memory")
            except Exception as raised:  # the other providers' times are worth having
                yield Row(*head, name, "full", error=error, note=f"fails: {first_line(raised)}")

    def _timed(
        self,
        operation: Operation,
        shape: Shape,
        dtype: torch.dtype,
        function: Function,
        head: tuple[str, str, str, str],
        error: float,
    ) -> Iterator[Row]:
        assert self.timer is not None and self.roof is not None
        inputs = inputs_of(operation.form, shape, dtype, self.device)
        wanted = [x for x in inputs if x.requires_grad]
        with self.timer.scope():
            outputs = outputs_of(function(*inputs))
        grads = gradients_like(outputs)

        def forward() -> Any:
            return function(*inputs)

        def backward() -> Any:
            return torch.autograd.grad(outputs, wanted, grads, retain_graph=True)

        def full() -> Any:
            return torch.autograd.grad(outputs_of(function(*inputs)), wanted, grads)

        costs = operation.costs(shape, inputs[0].element_size())
        passes = zip(MODES, (forward, backward, full), (*costs, costs[0] + costs[1]), strict=True)
        for mode, call, cost in passes if wanted else itertools.islice(passes, 1):
            times, peak = self.timer.time(call), self.timer.peak_bytes(call)
            rates = self._rates(cost, times.median, dtype)
            note = "" if times.graph else "timed without a graph"
            yield Row(*head, mode, times.median, times.low, times.high, *rates, peak, error, note)

    def _rates(self, cost: Cost, median_ms: float, dtype: torch.dtype) -> tuple[float, float, float]:
        assert self.roof is not None
        seconds = median_ms / 1e3
        best = self.roof.best_seconds(cost.nbytes, cost.flops, dtype)
        return cost.nbytes / seconds / 1e9, cost.flops / seconds / 1e12, best / seconds

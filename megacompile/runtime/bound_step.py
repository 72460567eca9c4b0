"""Bind an emitted step to the functions, layouts and constants that it refers to.

In: a step, its source, and what the stages before left. Block functions are loaded for the device that they
run on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacompile.blocks.block_functions import BlockFunction, Boxed
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.partition import Block, Partition
from megacompile.blocks.weight_groups import Assembly
from megacompile.schedule.op_table import COMPUTES, HostGrad
from megacompile.schedule.step import Step, kept_gradients, pushed_rows


@dataclass(frozen=True)
class BoundCall:
    """One function of one block, ready to be called."""

    block: Block
    function: BlockFunction
    run: Boxed


class BoundStep:
    """An emitted step with the functions, layouts and constants that its operations refer to.

    ``function`` takes a runtime and makes the calls of the step on it. ``constants`` are the model's
    own buffers and constants, on the host, of which the step changes those in ``changed``. ``kept`` are its
    :func:`~megacompile.schedule.step.kept_gradients`, ``rows`` its
    :func:`~megacompile.schedule.step.pushed_rows`.
    """

    def __init__(
        self,
        step: Step,
        source: str,
        part: Partition,
        templates: Sequence[DifferentiatedTemplate],
        assembly: Assembly,
        constants: dict[str, Tensor],
        parameter_order: Sequence[str],
        device: torch.device,
    ) -> None:
        namespace: dict[str, Any] = {}
        exec(compile(source, "<megacompile step>", "exec"), namespace)
        self.function: Callable[[Any], None] = namespace["step"]
        self.step = step
        self.part = part
        self.assembly = assembly
        self.constants = constants
        self.changed = part.changed if "forward" in {op.kind for op in step.ops} else frozenset()
        self.norm_order = tuple(n for n in parameter_order if n in assembly.places)
        self.kinds = frozenset(op.kind for op in step.ops)
        self.kept = kept_gradients(step)
        self.updates = sum(op.kind in ("adam", "adam_rest") for op in step.ops)
        self.rows = pushed_rows(step)
        gives_results = "copy_result" in self.kinds
        self.loss_block = -1 if gives_results else part.values[part.results[0]].producer
        self._templates = templates
        self._loaded: dict[str, Boxed] = {}  # by source
        keys: set[tuple[int, str, str]] = {
            (op.block, op.policy, op.kind) for op in step.ops if op.kind in COMPUTES
        }
        self._calls = {key: self._bind(*key, device) for key in sorted(keys)}

    def rows_of(self, block: int) -> int:
        """The value of gathered rows that a block is given."""
        (value,) = (i.value for i in self.part.blocks[block].inputs if i.value in self.part.rows)
        return value

    def lookups(self, group: int) -> list[int]:
        """The values of gathered rows whose gradients land in a group's."""
        pushes = {op.block for op in self.step.ops if op.kind == "push_rows" and HostGrad(group) in op.writes}
        return sorted(map(self.rows_of, pushes))

    def call(self, block: int, checkpoint: str, part: str) -> BoundCall:
        """The bound function for one operation."""
        return self._calls[block, checkpoint, part]

    def _bind(self, block: int, checkpoint: str, part: str, device: torch.device) -> BoundCall:
        bound = self.part.blocks[block]
        policy = self._templates[bound.template].policies[checkpoint]  # type: ignore[index]
        function: BlockFunction | None = getattr(policy, part)
        assert function is not None
        if function.source not in self._loaded:
            self._loaded[function.source] = function.load(device)
        return BoundCall(bound, function, self._loaded[function.source])

"""What a plan is made for: blocks, values and weight groups as plain numbers.

No tensor and no graph: planning, passes, verification and simulation work on this alone, so they run
without weights, without a GPU, and on instances that tests make up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Call:
    """One function of a block: the values and weight groups it reads, and its cost.

    ``peak_bytes`` is the most it holds beyond what is alive at entry, ``end_bytes`` what it leaves
    beyond that when it returns (negative where it frees more than it returns).
    """

    reads: tuple[int, ...]
    groups: tuple[int, ...]
    peak_bytes: int
    end_bytes: int
    flops: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a block: what it keeps between forward and backward."""

    name: str
    forward: Call
    recompute: Call | None
    backward: Call | None
    saved_bytes: int


@dataclass(frozen=True)
class BlockWork:
    """A block's dataflow and choices.

    ``tangents`` are the outputs whose gradient the backward reads, ``grad_values`` the inputs whose
    gradient it writes, ``grad_groups`` pairs of (weight group, bytes of its gradient).
    """

    name: str
    template: int
    outputs: tuple[int, ...]
    tangents: tuple[int, ...]
    grad_values: tuple[int, ...]
    grad_groups: tuple[tuple[int, int], ...]
    choices: tuple[Choice, ...]

    def choice(self, name: str) -> Choice:
        """The choice of that name; a block that lacks it has none that keeps less than "none"."""
        found = {c.name: c for c in self.choices}
        return found.get(name) or found["none"]


@dataclass(frozen=True, slots=True)
class ValueWork:
    """A tensor between blocks; ``batch`` marks a leaf of the batch."""

    nbytes: int
    requires_grad: bool
    batch: bool = False


@dataclass(frozen=True, slots=True)
class GroupWork:
    """A weight group: parameters that travel together.

    ``nbytes`` on the device; ``elements`` counts parameters; a group that is not ``trainable`` has no
    gradient and no optimizer state. ``state_bytes`` is what its masters and moments take on the host
    beyond the weights that are streamed.
    """

    name: str
    nbytes: int
    elements: int
    trainable: bool = True
    state_bytes: int = 0


@dataclass(frozen=True)
class Workload:
    """Blocks in execution order over shared values and weight groups."""

    blocks: tuple[BlockWork, ...]
    values: tuple[ValueWork, ...]
    groups: tuple[GroupWork, ...]
    loss: int
    constant_bytes: int = 0

    @cached_property
    def contributions(self) -> dict[int, tuple[int, ...]]:
        """Per trainable group, the blocks whose backward contributes to its gradient."""
        found: dict[int, list[int]] = {}
        for index, block in enumerate(self.blocks):
            for group, _ in block.grad_groups:
                found.setdefault(group, []).append(index)
        return {group: tuple(blocks) for group, blocks in found.items()}

    @cached_property
    def parameters(self) -> int:
        return sum(g.elements for g in self.groups)

"""The workload, which a plan is made for: blocks, values and weight groups as plain numbers.

No tensor and no graph: planning, passes, verification and simulation work on this alone, so they run
without weights, without a GPU, and on instances that tests make up.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from megacompile.errors import MegacompileError
from megacompile.json_codec import LATER, from_plain, parse_json, to_plain


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The work of calls of one of our kernels whose speed is that of products, counted in ``flops`` already;
    ``teraflops`` as in :class:`~megacompile.kernels.registry.OpPass`."""

    op: str
    flops: int
    teraflops: float


@dataclass(frozen=True, slots=True)
class Call:
    """One function of a block: the values and weight groups it reads, and its cost.

    ``peak_bytes`` is the most it holds beyond what is alive at entry, ``end_bytes`` what it leaves beyond
    that when it returns (negative where it frees more than it returns). ``seconds`` is what it was measured
    to take on the machine that is planned for; 0: it was not measured. ``launches`` counts the kernels that a
    GPU is asked to run. ``attention_flops`` is the part of ``flops`` in attention's forward and backward,
    which are slower than products, ``kernels`` the part in our own kernels. ``grouped`` is the part in
    experts' grouped products, with the bytes that these read and write: the slower of the two counts.
    """

    reads: tuple[int, ...]
    groups: tuple[int, ...]
    peak_bytes: int
    end_bytes: int
    flops: int
    moved_bytes: int
    seconds: float = 0.0
    launches: int = 1
    attention_flops: tuple[int, int] = (0, 0)
    kernels: tuple[KernelWork, ...] = ()
    grouped: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """A checkpoint policy: what a block saves between forward and backward, and what its functions then
    cost."""

    name: str
    forward: Call
    recompute: Call | None
    backward: Call | None
    saved_bytes: int


@dataclass(frozen=True)
class BlockWork:
    """A block's dataflow and checkpoint policies.

    ``tangents`` are the outputs whose gradient the backward reads, ``grad_values`` the inputs whose
    gradient it writes, ``grad_groups`` pairs of (weight group, bytes of its gradient); a gradient of
    gathered rows is counted to the first group of their table.
    """

    name: str
    template: int
    outputs: tuple[int, ...]
    tangents: tuple[int, ...]
    grad_values: tuple[int, ...]
    grad_groups: tuple[tuple[int, int], ...]
    policies: tuple[CheckpointPolicy, ...]

    def policy(self, name: str) -> CheckpointPolicy:
        """Return the policy of that name, or "none" for a block without a policy that saves less."""
        found = {c.name: c for c in self.policies}
        return found.get(name) or found["none"]


@dataclass(frozen=True, slots=True)
class ValueWork:
    """A tensor between blocks; ``batch`` marks what a step is given: a leaf of the batch, or rows of the
    weight groups ``rows`` that the host gathers for it. ``sum_bytes`` is what its gradient takes as a sum in
    FP32, where more than two blocks add to one of 16 bits; else 0.
    """

    nbytes: int
    requires_grad: bool
    batch: bool = False
    rows: tuple[int, ...] = ()
    sum_bytes: int = 0


Sides = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class MatrixUpdates:
    """The updates of a group's matrices that the device makes orthogonal: their rows and columns as they lie,
    and how many Newton–Schulz iterations each takes. ``momentum_bytes`` are those of a group's
    ``update_bytes`` that the host moves before it. Each of several ranks has its own matrices. ``sides`` are
    those of the rank with the most bytes on its device, ``others`` those of the rest: bytes are the most of
    any, and work is the mean, because ranks take turns to have most of a group."""

    sides: Sides
    iterations: int
    momentum_bytes: int
    others: tuple[Sides, ...] = field(default=(), metadata={LATER: True})

    @staticmethod
    def of(owners: Sequence[Sides], iterations: int, momentum_bytes: int) -> MatrixUpdates:
        """The updates of ranks' matrices."""
        first, *others = sorted(
            owners, key=lambda own: _matrix_bytes(own) + _product_bytes(own), reverse=True
        )
        return MatrixUpdates(first, iterations, momentum_bytes, tuple(others))

    @property
    def nbytes(self) -> int:
        """Bytes in bf16: to the device, and back."""
        return max(map(_matrix_bytes, (self.sides, *self.others)))

    @property
    def call(self) -> Call:
        """Work of the device, matrix after matrix, each in the place of its update.

        Per iteration three products, and the terms that two of them are added to are copied. A matrix with
        more rows than columns is turned at the end.
        """
        owners, flops, moved, turned = (self.sides, *self.others), 0, 0, 0
        for rows, columns in itertools.chain(*owners):
            m, n = min(rows, columns), max(rows, columns)
            turned += rows > columns
            moved += 4 * m * n if rows > columns else 0
            flops += self.iterations * (4 * m * m * n + 2 * m**3)
            moved += 6 * m * n + self.iterations * 4 * (m * n + m * m)
        launches = turned + sum(map(len, owners)) * (_NORMALISE + 5 * self.iterations)
        flops, moved, launches = (-(-work // len(owners)) for work in (flops, moved, launches))
        return Call((), (), max(map(_product_bytes, owners)), 0, flops, moved, launches=launches)


def _matrix_bytes(sides: Sides) -> int:
    return sum(2 * m * n for m, n in sides)


def _product_bytes(sides: Sides) -> int:
    """Bytes beside matrices, of which each is replaced: at the last product another one and a square, or two
    squares."""
    return max((2 * m * n + 2 * min(m, n) ** 2 for m, n in sides), default=0)


_NORMALISE = 5  # launches: a norm over all elements in two, its square root, its lower limit, the division


@dataclass(frozen=True, slots=True)
class GroupWork:
    """A weight group: parameters that travel together.

    ``nbytes`` on the device; ``elements`` counts parameters; a group that is not ``trainable`` has no
    gradient and no optimizer state. ``state_bytes`` is what its masters and moments take on the host
    beyond the weights that are streamed, ``gradient_bytes`` what its whole gradient takes in FP32. Where
    ``ranks`` share it, both are those of one rank. ``update_moved`` and ``update_flops`` are the bytes that
    an update by an optimizer's own class reads and writes, and its products on the host; 0: it is Adam's.
    ``matrices``: those whose updates the device makes orthogonal.
    """

    name: str
    nbytes: int
    elements: int
    trainable: bool = True
    state_bytes: int = 0
    gradient_bytes: int = 0
    ranks: int = 1
    update_moved: int = field(default=0, metadata={LATER: True})
    update_flops: int = field(default=0, metadata={LATER: True})
    matrices: MatrixUpdates | None = field(default=None, metadata={LATER: True})

    @property
    def update_bytes(self) -> int:
        """Bytes that a rank's update reads and writes: weights and state both ways, and an FP32 gradient.

        Where nothing is known of the state, masters and moments are taken to be FP32.
        """
        if self.update_moved:
            return self.update_moved
        state = self.state_bytes or (12 * self.elements - self.nbytes) // self.ranks
        return 2 * (self.nbytes // self.ranks + state) + 4 * (self.elements // self.ranks)

    @property
    def has_plain_moments(self) -> bool:
        """Return whether Adam updates the group and keeps both moments in FP32, 8 bytes per parameter; codes
        take at most 2 and their scales, beside 2 of masters' low halves."""
        return not self.update_moved and self.state_bytes >= 8 * self.elements

    @property
    def resident_bytes(self) -> int:
        """Bytes of a rank's weights, masters and moments, where its device keeps them."""
        return -(-self.nbytes // self.ranks) + self.state_bytes

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard of the gradient in FP32."""
        return self.gradient_bytes or 4 * -(-self.elements // self.ranks)


@dataclass(frozen=True)
class Workload:
    """Blocks in execution order over shared values and weight groups.

    A backward starts from ``loss``; a forward alone gives ``results`` to the host, by default the loss. Where
    the loss is computed ``outside``, training gives the results too, and is given gradients by them.
    ``loops`` are the positions of a sequence and of a chunk, where blocks run over chunks; else zeros.
    ``replicas`` of the ranks that share the groups train together, each with a copy of all state.
    ``changes``: for buffers of the model that forwards change, the blocks whose forwards use them.
    """

    blocks: tuple[BlockWork, ...]
    values: tuple[ValueWork, ...]
    groups: tuple[GroupWork, ...]
    loss: int
    constant_bytes: int = 0
    results: tuple[int, ...] = ()
    outside: bool = False
    loops: tuple[int, int] = (0, 0)
    replicas: int = 1
    changes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "results", self.results or (self.loss,))

    @cached_property
    def contributions(self) -> dict[int, tuple[int, ...]]:
        """Per trainable group, the blocks whose backward contributes to its gradient."""
        found: dict[int, list[int]] = {}
        for index in range(len(self.blocks)):
            for group in self.given(index):
                found.setdefault(group, []).append(index)
        return {group: tuple(blocks) for group, blocks in found.items()}

    @property
    def in_turn(self) -> bool:
        """Return whether the micro-batches must follow each other whole: a buffer that one block changes is
        used by another one."""
        return any(len(blocks) > 1 for blocks in self.changes)

    @cached_property
    def gathered(self) -> dict[int, tuple[int, ...]]:
        """Per block that reads gathered rows, the weight groups that they are rows of."""
        return {
            index: self.values[v].rows
            for index, block in enumerate(self.blocks)
            for v in block.policies[0].forward.reads
            if self.values[v].rows
        }

    @cached_property
    def lookups(self) -> dict[int, frozenset[int]]:
        """Per trained group of which blocks read gathered rows alone, the blocks that give gradients."""
        calls = (c for b in self.blocks for p in b.policies for c in (p.forward, p.recompute, p.backward))
        read = {group for call in calls if call is not None for group in call.groups}
        return {
            group: frozenset(blocks)
            for group, blocks in self.contributions.items()
            if group not in read and all(block in self.gathered for block in blocks)
        }

    @cached_property
    def used(self) -> frozenset[int]:
        """The weight groups that any block reads, or rows of them."""
        policies = (policy for block in self.blocks for policy in block.policies)
        calls = (call for p in policies for call in (p.forward, p.recompute, p.backward) if call is not None)
        rows = (group for groups in self.gathered.values() for group in groups)
        return frozenset(itertools.chain(rows, *(call.groups for call in calls)))

    def given(self, block: int) -> tuple[int, ...]:
        """The weight groups to whose gradient a block's backward contributes."""
        groups = tuple(group for group, _ in self.blocks[block].grad_groups)
        return self.gathered.get(block, groups) if groups else ()

    @cached_property
    def ranks(self) -> int:
        """The number of ranks that share the state; 1: one alone."""
        return max((group.ranks for group in self.groups), default=1)

    def crossing_bytes(self, group: int) -> int:
        """Return the bytes that a rank gets from the other replicas, and sends to them, for the sum of a
        group's gradient: a part of each of theirs, then their parts of the sum."""
        return 2 * self.groups[group].shard_bytes * (self.replicas - 1) // self.replicas

    @cached_property
    def parameters(self) -> int:
        return sum(g.elements for g in self.groups)

    @cached_property
    def digest(self) -> str:
        """The hash that a plan file is checked by: equal for equal numbers, but for those of the optimizer's
        state and updates."""
        groups = tuple(replace(g, **_ADAM) for g in self.groups)
        return hashlib.sha256(replace(self, groups=groups).to_json().encode()).hexdigest()[:32]

    @property
    def updates(self) -> tuple[tuple[object, ...], ...]:
        """The numbers of each group's state and update, which the digest leaves out."""
        return tuple(tuple(getattr(group, name) for name in _ADAM) for group in self.groups)

    def to_json(self) -> str:
        """Strict JSON: every dataclass as the list of its fields' values, in order."""
        plain = to_plain(self, named=False)
        if not self.changes:  # a later field: the digests of earlier workloads stand
            del plain[-1]
        content = {"version": WORKLOAD_VERSION, "work": plain}
        return json.dumps(content, allow_nan=False, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Workload:
        """The exact inverse of :meth:`to_json`; :class:`MegacompileError` for anything else.

        Fields that came after a file was written take their defaults.
        """
        given = parse_json(text, "The workload file")
        if not isinstance(given, dict) or given.get("version") != WORKLOAD_VERSION:
            raise MegacompileError(f"This is no workload file of version {WORKLOAD_VERSION}.")
        work: Workload = from_plain(Workload, given.get("work"), "The workload file", partial=True)
        return work


WORKLOAD_VERSION = 1
# what the optimizer decides of a group, and the numbers that stand for it in the digest
_ADAM: Mapping[str, Any] = {"state_bytes": 0, "update_moved": 0, "update_flops": 0, "matrices": None}

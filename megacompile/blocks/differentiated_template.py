"""A differentiated template: its forward, recompute and backward functions by checkpoint policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from megacompile.blocks.block_functions import BlockFunction

PolicyName = Literal["all", "some", "narrow", "attention", "none", "least"]
CHECKPOINT_POLICIES: tuple[PolicyName, ...] = ("all", "some", "narrow", "attention", "none", "least")
"""Keep every tensor that the backward reads; keep the results of products and attention and derive
the rest again; keep those but for products that a gated activation reads, such as gate and up; keep those of
attention alone; keep nothing and recompute the first set, or the second, before the backward."""


@dataclass(frozen=True)
class PolicyFunctions:
    """A saved set: what forward keeps, and the functions that belong to it.

    ``recompute`` is None where forward itself keeps the saved set. ``saved`` holds the bytes of each
    saved tensor.
    """

    name: PolicyName
    forward: BlockFunction
    recompute: BlockFunction | None
    backward: BlockFunction | None
    saved: tuple[int, ...]

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved)


@dataclass(frozen=True)
class DifferentiatedTemplate:
    """A template's functions by checkpoint policy; ``forward`` alone serves evaluation.

    ``loops``: positions of its sequence and those of a chunk, if functions run chunk by chunk.
    ``not_looped``: the reason that none does, if that was asked for.
    """

    index: int
    name: str
    forward: BlockFunction
    policies: dict[PolicyName, PolicyFunctions]
    loops: tuple[int, int] | None = None
    not_looped: str | None = None

    def functions(self) -> Iterable[BlockFunction]:
        """Each function once."""
        every = [f for o in self.policies.values() for f in (o.forward, o.recompute, o.backward)]
        return {f.name: f for f in [*every, self.forward] if f is not None}.values()

    def with_functions(self, functions: dict[str, BlockFunction]) -> DifferentiatedTemplate:
        """The same with other functions of the same names."""

        def other(function: BlockFunction | None) -> BlockFunction | None:
            return function and functions[function.name]

        policies = {
            name: replace(policy, forward=functions[policy.forward.name], recompute=other(policy.recompute),
                          backward=other(policy.backward))
            for name, policy in self.policies.items()
        }  # fmt: skip
        return replace(self, forward=functions[self.forward.name], policies=policies)

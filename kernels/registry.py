"""One declaration for each operator: all that the compiler knows of it beside its code.

In: :func:`declare`, called in the module that registers the operator's torch operators. Out: :data:`SPECS`
by the operator's name, and :func:`called`, which finds the declaration behind a node's target. Costs, chunk
loops, in-place writes, the random numbers of a forward and prices read it; none of them names an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.flop_counter import register_flop_formula

from megacompile.kernels.eager_form import EagerForm

Arguments = Mapping[str, Any]
"""A call's arguments by their names in the schema; tensors may be fake."""


@dataclass(frozen=True)
class Twin:
    """The operator ``name``, which writes result i of another one over that one's argument ``over[i]``."""

    name: str
    over: tuple[int, ...]
    arguments: Callable[[Sequence[Any]], tuple[Any, ...]] = tuple

    @property
    def target(self) -> Any:
        """The overload that a graph calls."""
        return getattr(torch.ops.megacompile, self.name).default


@dataclass(frozen=True)
class OpPass:
    """One torch operator of a declaration: its forward, its backward, or both at once.

    ``flops`` counts its products, by shapes, and is registered with torch. ``launches`` are its kernels on a
    GPU. ``moved`` are the bytes that it reads and writes; without it, each operand counts once, or none of
    them if it has ``flops``. ``sums``: a result without positions is a sum over them. ``teraflops`` is the
    speed of a call of its kernels on an H100 SXM, if products bound it; the others move bytes as fast as the
    memory gives them (``benchmarks/results/h100-sxm-2``: 74 to 124 % of a copy).
    """

    flops: Callable[..., int] | None = None
    launches: int | Callable[[Arguments], int] = 1
    moved: Callable[[Arguments], int] | None = None
    sums: bool = False
    twin: Twin | None = None
    teraflops: float | Callable[[Arguments], float] = 0.0


@dataclass(frozen=True)
class OpSpec:
    """The operator ``megacompile::name``, with ``megacompile::name_backward`` if it has a ``backward``. If it
    can make both at once, ``megacompile::name_with_gradients`` takes the gradient of its first result and its
    arguments, and returns that result and the backward's results.

    ``along`` says how it treats the positions of a sequence: each element alone, each row of the last
    dimension alone, or together, which is always right. ``runs_kernels``, of operators whose speed is that of
    products: whether kernels of ours run a call. ``draws``: where its arguments have ``rng`` and its site,
    where it draws random numbers. ``kept``: its results are worth keeping, though no formula says what they
    cost. ``gates``: it is a gated activation of what products gave it. ``varies``: what a call allocates
    inside may depend on values. ``eager`` are its forms in plain torch.
    """

    name: str
    forward: OpPass = OpPass()
    backward: OpPass | None = None
    with_gradients: OpPass | None = None
    along: Literal["elements", "rows", "mixing"] = "mixing"
    runs_kernels: Callable[[Arguments], bool] | None = None
    draws: tuple[int, int] | None = None
    kept: bool = False
    gates: bool = False
    varies: bool = False
    eager: tuple[EagerForm, ...] = ()


@dataclass(frozen=True)
class Called:
    """A torch operator of ours: its declaration, and which of its passes it is."""

    spec: OpSpec
    part: OpPass


SPECS: dict[str, OpSpec] = {}
CALLED: dict[str, Called] = {}
"""By the names of torch operators, which dumps of a program hold too."""
EAGER_FORMS: dict[str, EagerForm] = {}
"""By their names, which are those of operators but for a second use of one."""


def declare(spec: OpSpec) -> None:
    """Register the declaration of an operator whose torch operators are registered."""
    SPECS[spec.name] = spec
    EAGER_FORMS.update((form.name, form) for form in spec.eager)
    passes = {"": spec.forward, "_backward": spec.backward, "_with_gradients": spec.with_gradients}
    for name, part in ((spec.name + suffix, part) for suffix, part in passes.items()):
        if part is None:
            continue
        CALLED[name] = Called(spec, part)
        if part.flops is not None:
            register_flop_formula(getattr(torch.ops.megacompile, name))(part.flops)


def called(target: Any) -> Called | None:
    """Return the declaration behind what a node of a graph calls, None where that is no operator of ours."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "megacompile":
        return None
    return CALLED.get(target._schema.name.partition("::")[2])

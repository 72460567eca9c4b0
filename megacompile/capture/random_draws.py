"""Random numbers of a forward: torch's own calls in a graph, written with numbers that a recompute repeats.

torch draws from a generator that advances, so a block would see other numbers when it runs twice. Ours are a
function of (seed, site, element index), as dropout's are. The distributions are those of torch, the numbers
are not: eager PyTorch draws others, as another seed would.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.kernels.registry import called
from megacompile.kernels.uniform import BITS

aten = torch.ops.aten
_APART = 1 << 32  # sites of draws lie beyond those of dropout and attention, which count from 0
_LARGEST = 1 << 32  # integers that 32 random bits reach


def site_of(target: Any, args: Sequence[Any]) -> tuple[int, int] | None:
    """Return the places of ``rng`` and the site among the arguments of a call that draws."""
    call = called(target)
    places = None if call is None or call.part is not call.spec.forward else call.spec.draws
    return None if places is None or args[places[0]] is None else places


class Numbering:
    """The sites of the draws of one forward, in their order.

    A draw is numbered by the last dropout or attention before it and the draws since, so that blocks of equal
    code differ by their first site alone.
    """

    def __init__(self) -> None:
        self._last, self._drawn = -1, 0

    def see(self, target: Any, args: Sequence[Any]) -> None:
        """Note a call that may be a dropout, or an attention with one."""
        places = site_of(target, args)
        if places is not None:
            self._last, self._drawn = args[places[1]], 0

    def next(self) -> int:
        self._drawn += 1
        return self._last + _APART * self._drawn


class Draw:
    """A random call of torch's, about to be written with ours: ``call`` runs an operator, or writes it.

    ``value`` has the shape, dtype and strides of the result.
    """

    def __init__(
        self,
        target: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        value: Tensor,
        uniform: Callable[[list[int], torch.dtype], Any],
        call: Callable[..., Any],
    ) -> None:
        arguments = target._schema.arguments
        self._given = {a.name: a.default_value for a in arguments}
        self._given |= dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs)
        self.target, self.value, self.call, self._uniform = target, value, call, uniform
        self.wide = torch.float64 if value.dtype == torch.float64 else torch.float32

    def argument(self, name: str, default: Any = None) -> Any:
        return self._given.get(name, default)

    def uniform(self, dtype: torch.dtype | None = None) -> Any:
        """Numbers from [0, 1), laid out in memory as the result is."""
        strides = self.value.stride()
        order = sorted(range(self.value.dim()), key=lambda d: -strides[d])
        drawn = self._uniform([self.value.shape[d] for d in order], dtype or self.wide)
        back = [order.index(d) for d in range(len(order))]
        return drawn if back == sorted(back) else self.call(aten.permute.default, drawn, back)

    def scaled(self, numbers: Any, factor: float, offset: float = 0.0) -> Any:
        if factor != 1:
            numbers = self.call(aten.mul.Scalar, numbers, factor)
        return numbers if offset == 0 else self.call(aten.add.Scalar, numbers, offset)

    def log_of_the_rest(self, numbers: Any) -> Any:
        """log(1 - u) of numbers u from [0, 1)."""
        return self.call(aten.log1p.default, self.call(aten.neg.default, numbers))


def draw(one: Draw) -> Any:
    """The result of a random call, in its dtype, or None where no rule knows it."""
    rule = _DISTRIBUTIONS.get(one.target)
    if rule is None or one.argument("generator") is not None:
        return None
    drawn = rule(one)
    made = drawn.meta["val"] if isinstance(drawn, fx.Node) else drawn
    if made is None or made.dtype == one.value.dtype:
        return drawn
    return one.call(aten._to_copy.default, drawn, dtype=one.value.dtype)


def replace_draws(graph: fx.Graph, rng: fx.Node) -> None:
    """Write the random calls that are known here with :func:`~megacompile.kernels.uniform.uniform_op`; others
    stay, and are refused later."""
    numbering = Numbering()
    for node in list(graph.nodes):
        numbering.see(node.target, node.args)
        if node.target in _DISTRIBUTIONS:
            _replace_draw(graph, rng, node, numbering)


def _replace_draw(graph: fx.Graph, rng: fx.Node, node: fx.Node, numbering: Numbering) -> None:
    call = functools.partial(_write_call, graph, node)

    def numbers(shape: list[int], dtype: torch.dtype) -> fx.Node:
        return call(torch.ops.megacompile.uniform.default, rng, shape, dtype, numbering.next())

    assert isinstance(node.target, torch._ops.OpOverload)
    with graph.inserting_before(node):
        new = draw(Draw(node.target, node.args, node.kwargs, node.meta["val"], numbers, call))
    if new is not None:
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _write_call(graph: fx.Graph, replaced: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call in a graph, with what it gives in fake tensors, in the place of another one."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {name: value for name, value in replaced.meta.items() if name != "tensor_meta"}
    given, options = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with replaced.meta["val"].fake_mode:
        node.meta["val"] = target(*given, **options)
    return node


def _rand(one: Draw) -> Any:
    return one.uniform(one.value.dtype) if one.value.dtype in BITS else None


def _uniform(one: Draw) -> Any:
    """In its own dtype throughout: numbers of another one could be rounded up to the end, which is not in."""
    low, high = one.argument("from"), one.argument("to")
    return one.scaled(one.uniform(one.value.dtype), high - low, low)


def _normal(one: Draw) -> Any:
    """Box and Muller's transform (Annals of Mathematical Statistics 29, 1958)."""
    if not one.value.is_floating_point():
        return None
    radius = one.call(aten.sqrt.default, one.scaled(one.log_of_the_rest(one.uniform()), -2.0))
    across = one.call(aten.cos.default, one.scaled(one.uniform(), 2 * math.pi))
    drawn = one.call(aten.mul.Tensor, radius, across)
    return one.scaled(drawn, one.argument("std", 1.0), one.argument("mean", 0.0))


def _exponential(one: Draw) -> Any:
    """Never zero, since Gumbel noise is its logarithm."""
    drawn = one.scaled(one.log_of_the_rest(one.uniform()), -1.0)
    return one.scaled(one.call(aten.clamp_min.default, drawn, 2.0**-24), 1 / one.argument("lambd"))


def _bernoulli(one: Draw) -> Any:
    """Draw by a probability that gets a gradient of zeros, as in torch: AdamW decays it."""
    p = one.argument("p", one.argument("self"))
    if isinstance(p, float):
        return one.call(aten.lt.Scalar, one.uniform(), p)
    kept = one.call(aten.lt.Tensor, one.uniform(), p)
    return one.call(aten.add.Tensor, one.call(aten.mul.Scalar, p, 0.0), kept)


def _integers(one: Draw) -> Any:
    low, high = one.argument("low", 0), one.argument("high")
    if high - low > _LARGEST:
        return None
    steps = one.call(aten.floor.default, one.scaled(one.uniform(torch.float64), float(high - low)))
    return one.scaled(steps, 1.0, float(low))


def _permutation(one: Draw) -> Any:
    return one.call(aten.argsort.default, one.uniform(torch.float64))


_DISTRIBUTIONS: dict[Any, Callable[[Draw], Any]] = {
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.uniform.default: _uniform,
    aten.randn.default: _normal,
    aten.randn_like.default: _normal,
    aten.normal_functional.default: _normal,
    aten.exponential.default: _exponential,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.randint.default: _integers,
    aten.randint.low: _integers,
    aten.randint_like.default: _integers,
    aten.randint_like.low_dtype: _integers,
    aten.randperm.default: _permutation,
}

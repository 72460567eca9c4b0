"""The prologue of a program: what the host computes from a batch alone, before the program runs.

In: the calls that a watch over the forward noted (:mod:`~megacompile.capture.host_values`). Out: a
:class:`Prologue`, which computes for each batch the values that this forward read. Numbers behind shapes and
branches are alike for all batches of the program; tensors are inputs of the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megacompile.capture.batch import described
from megacompile.capture.call_tensors import tensors_in
from megacompile.capture.host_draws import Stream
from megacompile.errors import CaptureError


class PrologueValue(NamedTuple):
    """Stands for a tensor of the prologue, or for what is drawn, by its number."""

    number: int


@dataclass
class PrologueCall:
    """A call of the prologue: its arguments with places for tensors, the numbers of the tensors among its
    results, and what the results must be, where the forward went by them. ``draws`` says that it draws random
    numbers, ``drawn`` that its result depends on such: then all of it is numbered, and its form is expected.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    written: tuple[int, ...] = ()
    expected: tuple[Any, ...] | None = None
    total: int | None = None  # that numbers which are results must have as their sum
    made: bool = False
    draws: bool = False
    drawn: bool = False

    @property
    def reads(self) -> set[int]:
        """Return the numbers of the tensors among the arguments, and of what is drawn."""
        leaves = pytree.tree_leaves((self.args, self.kwargs), is_leaf=_is_value)
        return {leaf.number for leaf in leaves if isinstance(leaf, PrologueValue)}

    def run(self, values: dict[int, Any]) -> Any:
        """Run the call on real values, and return its result."""

        def real(leaf: Any) -> Any:
            return values[leaf.number] if isinstance(leaf, PrologueValue) else leaf

        args, kwargs = pytree.tree_map(real, (self.args, self.kwargs), is_leaf=_is_value)
        return self.function(*args, **kwargs)

    def description(self, result: Any) -> tuple[Any, ...]:
        """Describe what a forward may go by in a result."""
        return _shapes_and_dtypes(result) if self.drawn else _description(result)

    def numbered(self, result: Any) -> list[Any]:
        """Return the parts of a result that have numbers."""
        return pytree.tree_leaves(result) if self.drawn else tensors_in(result)


def _is_value(value: Any) -> bool:
    return isinstance(value, PrologueValue)


def as_contiguous(leaf: Any) -> Any:
    """A result as a program can be given it."""
    return leaf.contiguous() if isinstance(leaf, Tensor) else leaf


def _shapes_and_dtypes(result: Any) -> tuple[Any, ...]:
    """Describe what a forward may go by in a result that is drawn: shapes and dtypes, and no value."""
    leaves, spec = pytree.tree_flatten(result)
    forms = [(x.shape, x.dtype) if isinstance(x, (Tensor, numpy.ndarray)) else type(x) for x in leaves]
    return (str(spec), *forms)


def _description(result: Any) -> tuple[Any, ...]:
    """Describe what a forward may go by in a result: of tensors the shapes, of all else the values."""
    leaves, spec = pytree.tree_flatten(result)
    return (str(spec), *map(described, leaves))


def _reading(kind: Any) -> Any:
    """Wrap the methods of a sequence, except its length, so that each reads it first."""
    own, base = kind.read, kind.__base__
    names = {*vars(base), "__radd__"} - {*vars(object), "__len__", "__class_getitem__"}
    for name in names | {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__"}:

        def method(self: Any, *args: Any, _name: str = name, **kwargs: Any) -> Any:
            plain = own(self)
            if _name == "__radd__":
                return args[0] + plain
            return getattr(base, _name)(self, *args, **kwargs)

        setattr(kind, name, method)
    pytree.register_pytree_node(kind, lambda x: (list(own(x)), None), lambda x, _: base(x))
    return kind


@_reading
class ReadSizes(list[int]):
    """Numbers that a call of the prologue returned; they are guards once the forward reads any of them."""

    def __init__(self, numbers: Sequence[int], call: PrologueCall) -> None:
        super().__init__(numbers)
        self.call = call
        call.expected = _description(numbers)[:1]  # as many

    def plain(self) -> list[int]:
        """Return the numbers."""
        return [*list.__iter__(self)]

    def read(self) -> list[int]:
        """Return the numbers, which are guards from now on."""
        self.call.expected = _description(self.plain())
        return self.plain()


@_reading
class SplitPieces(tuple[Tensor, ...]):
    """The pieces of a tensor that was split along a dimension, by sizes that nothing has read yet."""

    sizes: ReadSizes
    dim: int

    def plain(self) -> tuple[Tensor, ...]:
        """Return the pieces."""
        return (*tuple.__iter__(self),)

    def read(self) -> tuple[Tensor, ...]:
        """Return the pieces, whose sizes are guards from now on."""
        self.sizes.read()
        return self.plain()


def read_plain(value: Any) -> Any:
    """Read sizes or pieces, which are guards from then on; all else stays."""
    return value.read() if isinstance(value, (ReadSizes, SplitPieces)) else value


@dataclass(frozen=True)
class Prologue:
    """The calls that one forward needs of a batch, in order, and the numbers of the tensors that they give to
    the program; the batch's own leaves come first."""

    calls: tuple[PrologueCall, ...]
    inputs: tuple[int, ...]

    def __call__(self, leaves: Sequence[Any], seed: int = 0) -> list[Tensor] | None:
        """The inputs that a batch gives, with random numbers from a seed; None where the forward would go
        another way for it."""
        values: dict[int, Any] = dict(enumerate(leaves))
        drawing = any(call.draws for call in self.calls)
        with torch.no_grad(), Stream(seed).running() if drawing else contextlib.nullcontext():
            for call in self.calls:
                read = [values[n] for n in call.reads if n not in call.written]
                versions = [x._version for x in read if isinstance(x, Tensor)]
                try:
                    result = call.run(values)
                except CaptureError:
                    raise
                except Exception:  # a capture of this batch will say what is wrong
                    return None
                if call.expected is not None:
                    result = pytree.tree_map(as_contiguous, result)
                    if call.description(result)[: len(call.expected)] != call.expected:
                        return None
                    if call.total is not None and sum(result) != call.total:
                        return None
                if versions != [x._version for x in read if isinstance(x, Tensor)]:
                    raise CaptureError(
                        f"{call.function.__name__} of the model changes its arguments for this batch: let it "
                        "return new tensors."
                    )
                found = call.numbered(result)
                if len(found) != len(call.results):
                    return None
                values.update(zip(call.results, found, strict=True))
        return [values[number] for number in self.inputs]

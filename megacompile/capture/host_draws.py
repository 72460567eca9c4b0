"""Random numbers of Python and NumPy in a forward: the host draws them for each batch.

In: a seed for each forward. Out: a :class:`Stream`, from which the generators of the process draw within a
context, and :class:`Drawn`, what stands in a trace for such numbers. The forward may compute with them by
NumPy and give them to torch; it may not go by their values, as a program has one way for all steps. Seeds
are those of steps and micro-batches, so that a resumed run and one on several ranks draw what another would.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from torch import Tensor
from torch.utils import _pytree as pytree

from megacompile.capture.patches import Patch, replaced

_PYTHONS: Any = random._inst
_NUMPYS: Any = numpy.random.mtrand._rand
_STATE_FUNCTIONS = ("seed", "getstate", "setstate", "get_state", "set_state")
_WRITE = ("shuffle",)  # into what they are given
_FORM = ("dtype", "ndim", "size")
_UNIT = ("random", "rand", "random_sample")
_COMPARISONS = (numpy.less, numpy.less_equal, numpy.greater, numpy.greater_equal)


class DecidesError(Exception):
    """A forward goes by the value of a random number; the message says so without the place."""

    def __init__(self) -> None:
        super().__init__(decides())


def decides(place: str = "") -> str:
    """Say that a forward goes by a random number at a place, and what to do."""
    return (
        f"The forward draws random numbers on which shapes or branches depend{place}: set to 0 what leaves "
        "layers out at random, such as config.layerdrop, choose by torch.where, or draw before the step and "
        "put the numbers into the batch."
    )


class Stream:
    """What the process's generators draw in one forward, from a seed: as after ``random.seed(seed)``,
    ``numpy.random.seed(seed % 2**32)`` and ``torch.manual_seed(seed)`` on the CPU."""

    def __init__(self, seed: int) -> None:
        self._unseeded = random.Random(seed)  # what generators that are made without a seed begin from
        own = _generator_states()
        random.seed(seed)
        numpy.random.seed(seed % (1 << 32))  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        self._states = _generator_states()
        _restore(own)
        self.draws = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the context the process's generators go on from where the stream is, and ``draws`` says
        afterwards whether they did; those of the process itself stay as they are."""

        def entropy(theirs: Any, count: int) -> bytes:
            self.draws = True
            return self._unseeded.randbytes(count)

        def seed(theirs: Any, generator: random.Random, a: Any = None, version: int = 2) -> None:
            _SEED(generator, entropy(None, 8) if a is None else a, version)

        why = "generators without a seed begin alike in each run"
        patches = Patch(random, "_urandom", entropy, why), Patch(random.Random, "seed", seed, why)
        own, before, self.draws = _generator_states(), self._states, False
        _restore(before)
        try:
            with replaced(patches):
                yield
        finally:
            self._states = _generator_states()
            self.draws = self.draws or not _equal_states(before, self._states)
            _restore(own)


_SEED = random.Random.seed


def _generator_states() -> tuple[Any, Any, Tensor]:
    return random.getstate(), numpy.random.get_state(), torch.random.get_rng_state()  # noqa: NPY002


def _restore(states: tuple[Any, Any, Tensor]) -> None:
    python, arrays, tensors = states
    random.setstate(python)
    numpy.random.set_state(arrays)  # noqa: NPY002
    torch.random.set_rng_state(tensors)


def _equal_states(one: tuple[Any, Any, Tensor], other: tuple[Any, Any, Tensor]) -> bool:
    arrays = all(numpy.array_equal(x, y) for x, y in zip(one[1], other[1], strict=True))
    return arrays and one[0] == other[0] and torch.equal(one[2], other[2])


Compute = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(function, its arguments) -> what stands for its result."""


class Drawn(NDArrayOperatorsMixin):
    """Stands in a trace for an array or a number that depends on random ones; ``real`` is one of them,
    ``number`` its place in the prologue. ``unit`` says that it is any number between 0 and 1."""

    def __init__(self, real: Any, number: int, compute: Compute, *, unit: bool = False) -> None:
        self.real, self.number, self.unit = real, number, unit
        self._compute = compute

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes, which are the same for all batches of a program."""
        return numpy.shape(self.real)

    def __len__(self) -> int:
        return len(self.real)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if any(isinstance(x, Tensor) for x in inputs):
            return getattr(torch, ufunc.__name__)(*inputs)
        if ufunc in _COMPARISONS and self.unit:
            bounds = [x for x in inputs if x is not self]
            if bounds and not isinstance(bounds[0], Drawn) and not 0 < bounds[0] < 1:
                return bool(ufunc(*(0.5 if x is self else x for x in inputs)))
        return self._compute(getattr(ufunc, method), inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self._compute(function, args, kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self._compute(operator.getitem, (self, index), {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self.real, name):
            raise AttributeError(f"{type(self.real).__name__!r} object has no attribute {name!r}")
        if name in _FORM:
            return getattr(self.real, name)
        if callable(getattr(self.real, name)):
            return lambda *args, **kwargs: self._compute(_method, (self, name, *args), kwargs)
        return self._compute(getattr, (self, name), {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise DecidesError  # beside the watch over a forward, which takes a tensor in the place of each

    def _decides(self, *_: Any, **__: Any) -> NoReturn:
        raise DecidesError

    __hash__ = object.__hash__
    __bool__ = __int__ = __float__ = __index__ = __iter__ = __array__ = _decides


def _method(of: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(of, name)(*args, **kwargs)


ARRAYS = (Tensor, numpy.ndarray)
DRAWN = (*ARRAYS, numpy.number, numpy.bool_, bool, int, float)
"""What can be drawn anew for each batch."""


def as_operand(drawn: Any) -> Tensor:
    """Return a tensor of an array, or of a number, of the dtype by which it counts beside tensors."""
    return torch.tensor(drawn.item() if isinstance(drawn, numpy.generic) else drawn)


def between_0_and_1(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether a call draws one number between 0 and 1."""
    return function.__name__ in _UNIT and not args and not kwargs


def draws(by: Callable[..., Any]) -> Iterator[Patch]:
    """The functions of ``random`` and ``numpy.random`` that draw from the process's generators, each to be
    replaced."""
    for module, generator in ((random, _PYTHONS), (numpy.random, _NUMPYS)):
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is generator and name not in (*_STATE_FUNCTIONS, *_WRITE):
                yield Patch(module, name, by, "drawn anew for each batch")


def drawn_in(tree: Any) -> list[Drawn]:
    """The drawn numbers in a call's arguments."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Drawn)]

"""Whether a function of the user's ignores padding: found out by calling it, as its code may do anything.

In: the function, what the forward returns, a batch. Out: whether the loss of a padded batch, and its
gradient by what the forward returned, are those of the batch itself; of a function whose results are
wanted, whether these are, at the batch's positions. Two things have to hold.

**Numbers**, at short lengths: on random outputs and on labels like the batch's, the padded loss and
gradient, or the results, are equal within rounding, and the gradient is zero at padding, where the outputs
are random too. Outputs without an axis of positions are others in the padded call, and get no gradient; but
a number that the model computes itself, whose graph is judged, may be a result.

**Calls**, at each length that is relied on: the function makes the same calls of operators as at short
lengths, with sizes and numbers that grow evenly with the length. So it does not compute otherwise from some
length on.

A proof on the function's graphs at two lengths was tried in its place, with rules for what operators make of
known numbers at padding. It took as long (50 to 80 ms of a CPU for a function) and over twice the code, and
refused 9 of 31 functions that pass here: among them ``loss[ignored] = 0``, the token at the end of each row
by its index, an einsum, and a mask that is read only if the batch has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megacompile.capture.loss_value import apply_loss, divide
from megacompile.capture.padding import IGNORED, own_entries, pad_batch
from megacompile.graph.forward_outputs import Returned, split

_SHORT, _LONG = (7, 9), 12  # so long that a slice without the last few positions is no special case
_ROUNDING = 1e-5  # of sums in FP32 over so few positions


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operator that is called, and what it is given: shapes, numbers, other constants."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append(func)
        for leaf in pytree.tree_leaves((args, kwargs)):
            self.made += [leaf.dtype, *leaf.shape] if isinstance(leaf, Tensor) else [leaf]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class LossAtLengths:
    """A loss function that can be called at any length; ``returned`` is what the forward made of a batch of
    this ``length``, the size of nothing but positions; ``kwargs`` are a batch as it was given.
    """

    function: Callable[..., Any]
    model: nn.Module
    returned: Returned
    length: int
    kwargs: dict[str, Any]

    def ignores_padding(self) -> bool:
        """Return whether the numbers are equal; not, where the function fails on random outputs."""
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                return all(self._ignores(n) for n in _SHORT)
        except Exception:  # whatever a user's function raises: nothing is known of it then
            return False

    def computes_alike(self, n: int, *, padded: bool) -> bool:
        """Return whether it calls at this length what it calls at short ones."""
        try:
            short, long, found = (self._calls(at, padded) for at in (_SHORT[0], _LONG, n))
        except Exception:
            return False
        if not len(short) == len(long) == len(found):
            return False
        span, steps = _LONG - _SHORT[0], n - _SHORT[0]
        return all(_grows(*of, span, steps) for of in zip(short, long, found, strict=True))

    def _ignores(self, n: int) -> bool:
        short, batch, long, padded_batch = self._pair(n)
        loss, gradients = self._run(short, batch)
        of_padded, gradients_of_padded = self._run(long, padded_batch)
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not used or not set(used) <= set(self._with_positions) or not _close(of_padded, loss):
            return False
        for gradient, padded in zip(gradients, gradients_of_padded, strict=True):
            if gradient is None or padded is None:
                if gradient is not padded:
                    return False
            elif bool(padded[:, n:].any()) or not _close(padded[:, :n], gradient):
                return False
        return True

    def _pair(self, n: int) -> tuple[list[Tensor], dict[str, Any], list[Tensor], dict[str, Any]]:
        """Random outputs and a batch of this length, and both with padding."""
        random = torch.Generator().manual_seed(n)
        batch, long = self._batch(n, random), self._outputs(_LONG, random)
        short = self._outputs(n, random)
        for i in self._with_positions:
            short[i] = long[i][:, :n].clone()
        return short, batch, long, pad_batch(batch, _LONG, own=self._own)

    def _run(self, outputs: Sequence[Tensor], batch: dict[str, Any]) -> tuple[Tensor, list[Tensor | None]]:
        """The loss and its gradient by each output; None: it has none, or does not depend on it."""
        leaves = [x.requires_grad_(x.is_floating_point()) for x in outputs]
        loss = self._call(leaves, batch)
        floats = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(loss, floats, allow_unused=True))
        return loss.detach(), [next(found) if x.requires_grad else None for x in leaves]

    def _calls(self, n: int, padded: bool) -> list[Any]:
        """The operators that are called at a length, and what they are given; nothing is computed."""
        with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
            sizes = [(self._shape(shape, n), dtype) for shape, dtype in self.returned.tensors]
            outputs = [torch.empty(shape, dtype=dtype) for shape, dtype in sizes]
            batch = {
                name: torch.empty_like(value, device="cpu").resize_(self._rows, n) if varies else value
                for name, value, varies in self._entries
            }
            if padded:
                batch = pad_batch(batch, n, own=self._own)
            calls = _Calls()
            with calls:
                self._call(outputs, batch)
        return calls.made

    def _call(self, outputs: Sequence[Tensor], batch: dict[str, Any]) -> Any:
        rest = divide(self.model, (), batch, self.function)[2]
        return apply_loss(self.function, self.returned.structure.around(outputs), (), batch, rest)

    def _outputs(self, n: int, random: torch.Generator) -> list[Tensor]:
        """Random outputs of this length, in FP32 where they are of lower precision."""
        return [_random(self._shape(shape, n), dtype, random) for shape, dtype in self.returned.tensors]

    def _batch(self, n: int, random: torch.Generator) -> dict[str, Any]:
        """A batch of this length, without padding, of values that the batch itself holds."""
        made = dict(self.kwargs)
        for name, value, varies in self._entries:
            if varies and name == "attention_mask":
                made[name] = torch.ones(self._rows, n, dtype=value.dtype)
            elif varies:
                drawn = value[value != IGNORED] if bool((value != IGNORED).any()) else torch.zeros_like(value)
                drawn = drawn.flatten()
                made[name] = drawn[torch.randint(len(drawn), (self._rows, n), generator=random)]
        return made

    def _shape(self, shape: Sequence[int], n: int) -> list[int]:
        return [n if size == self.length else size for size in shape]

    @property
    def _with_positions(self) -> list[int]:
        """Return which outputs are [rows, positions, ...], so that padding is at their end."""
        return [
            i
            for i, (shape, dtype) in enumerate(self.returned.tensors)
            if dtype.is_floating_point
            and tuple(shape[:2]) == (self._rows, self.length)
            and tuple(shape).count(self.length) == 1
        ]

    @property
    def _entries(self) -> list[tuple[str, Any, bool]]:
        """The name and value of each entry of a batch, and whether it has one for each token."""
        tokens = self.kwargs["input_ids"].shape
        return [(n, v, isinstance(v, Tensor) and v.shape == tokens) for n, v in self.kwargs.items()]

    @property
    def _rows(self) -> int:
        rows: int = self.kwargs["input_ids"].shape[0]
        return rows

    @property
    def _own(self) -> set[str]:
        return own_entries(self.model, self.kwargs, self.function)


class OutputsAtLengths(LossAtLengths):
    """The same of a function whose results, with positions or one number each, are wanted."""

    def _ignores(self, n: int) -> bool:
        short, batch, long, padded_batch = self._pair(n)
        for i, (shape, _) in enumerate(self.returned.tensors):
            if not shape:
                short[i] = long[i]
        found, structure = split(self._call(short, batch))
        padded, of_padded = split(self._call(long, padded_batch))
        own = [x[:, : n - _LONG] if x.dim() > 1 else x for x in padded]
        alike = structure == of_padded and [x.shape for x in own] == [x.shape for x in found]
        return alike and all(_close(x.double(), y.double()) for x, y in zip(own, found, strict=True))

    def _call(self, outputs: Sequence[Tensor], batch: dict[str, Any]) -> Any:
        return self.function(self.returned.structure.around(outputs), batch)


def _random(shape: Sequence[int], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(2, shape, generator=random).to(dtype)
    return torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32), generator=random)


def _close(found: Tensor, wanted: Tensor) -> bool:
    """Within rounding, and finite."""
    largest = wanted.abs().max()
    return bool(largest.isfinite()) and bool((found - wanted).abs().max() <= _ROUNDING * largest)


def _grows(short: Any, long: Any, found: Any, span: int, steps: int) -> bool:
    """Return whether a size or number is the same at all lengths, or lies on a line with those at short
    ones."""
    if short == long == found:
        return True
    if any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in (short, long, found)):
        return False
    return bool((found - short) * span == (long - short) * steps)

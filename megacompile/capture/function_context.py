"""The ``ctx`` that a ``torch.autograd.Function`` is given, where its forward and backward are called by
capture, or by an operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from megacompile.errors import CaptureError


@dataclass
class Marks:
    """The tensors that a forward marked."""

    constant: tuple[Tensor, ...] = ()
    dirty: tuple[Tensor, ...] = ()
    materialize: bool = True


class FunctionContext:
    """Holds what a forward leaves for its backward, beside attributes of its own."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self._marks = Marks()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Keep nothing: no program differentiates forward."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self._marks.constant = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        self._marks.dirty = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._marks.materialize = value


def call_forward(function: Any, context: FunctionContext, args: Sequence[Any]) -> Any:
    """Run a function's forward as ``apply`` does, in the older form with ``ctx`` or in the newer one."""
    if function.setup_context is _SingleLevelFunction.setup_context:
        return function.forward(context, *args)
    output = function.forward(*args)
    function.setup_context(context, tuple(args), output)
    return output


def first_line_of(error: Exception) -> str:
    """Return the first line of an error's text without its full stop, or the error's type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def refuse_several(name: str, graded: dict[int, Any], marks: Marks) -> None:
    """Refuse several results with a gradient whose absent gradients are to be None."""
    if len(graded) > 1 and not marks.materialize:
        raise function_refusal(name, "has several results and set_materialize_grads(False): leave that out")


def has_gradient(result: Any, marks: Marks) -> bool:
    """Return whether a result gets a gradient."""
    differentiable = isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex())
    return differentiable and not any(result is x for x in marks.constant)


def function_refusal(name: str, why: str) -> CaptureError:
    """Return the error that refuses a call of a function by name."""
    return CaptureError(f"The forward calls {name}, which {why}.")

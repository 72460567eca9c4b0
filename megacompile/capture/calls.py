"""Calls that no graph can hold: refused by name before torch's tracing stumbles over them."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._functorch import eager_transforms
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.distributions import Distribution

from megacompile.capture.patching import in_this_thread
from megacompile.capture.recurrent import PACKED
from megacompile.errors import CaptureError

_GRADIENT = (
    "The forward computes gradients itself, by {}, and a program cannot hold them: write the derivative as a "
    "formula, or take it along a direction by torch.func.jvp."
)
_CTC = (
    "The forward calls ctc_loss, whose memory depends on the values of its lengths, so that torch cannot "
    "trace it: wrap it in a torch.library.custom_op, with another one as its gradient that calls "
    "torch.ops.aten._ctc_loss and _ctc_loss_backward."
)
_GAUSSIAN = (
    "The forward calls gaussian_nll_loss, which looks at the values of var: write it out, as "
    "0.5 * (var.log() + (input - target).square() / var).mean()."
)
_REFUSED: tuple[tuple[Any, str, str], ...] = (
    (torch.autograd, "_engine_run_backward", _GRADIENT.format("torch.autograd.grad or backward()")),
    (eager_transforms, "grad_increment_nesting", _GRADIENT.format("torch.func.grad, vjp or jacrev")),
    (eager_transforms, "_construct_standard_basis_for", _GRADIENT.format("torch.func.jacfwd")),
    (torch._VF, "_pack_padded_sequence", PACKED),
    (torch, "ctc_loss", _CTC),
    (F, "gaussian_nll_loss", _GAUSSIAN),
)
"""Functions by owner and name, each with what is said where a forward calls it."""


class _Unchecked:
    """``Distribution._validate_args`` for this thread: no checks, as their outcome is a value."""

    def __init__(self, theirs: bool) -> None:
        self._read: Callable[[], bool] = in_this_thread(lambda: False, lambda: theirs)

    def __get__(self, instance: Distribution | None, owner: type[Distribution]) -> bool:
        return self._read()


@contextlib.contextmanager
def only_calls_that_trace() -> Iterator[None]:
    """Refuse, in this thread, calls that tracing fails at or loses; distributions check no values."""
    with contextlib.ExitStack() as stack:
        for owner, name, reason in _REFUSED:
            theirs = getattr(owner, name)
            ours = in_this_thread(functools.partial(_refuse, reason, theirs), theirs)
            stack.enter_context(mock.patch.object(owner, name, ours))
        unchecked = _Unchecked(Distribution._validate_args)
        stack.enter_context(mock.patch.object(Distribution, "_validate_args", unchecked))
        try:
            yield
        except UnsupportedOperatorException as error:
            raise CaptureError(_no_fake_kernel(str(error.func))) from error
        except RuntimeError as error:
            unknown = re.search(r"no fake impl registered for <CustomOpDef\((.*?)\)>", str(error))
            if unknown is None:
                raise
            raise CaptureError(_no_fake_kernel(unknown[1])) from error


def _refuse(reason: str, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if CompileContext.current_compile_id() is not None:  # torch's own, where it traces scan
        return theirs(*args, **kwargs)
    raise CaptureError(reason)


def _no_fake_kernel(operator: str) -> str:
    return (
        f"The forward calls {operator}, which has no fake kernel, so that torch cannot trace it: give it one "
        "by torch.library.register_fake."
    )

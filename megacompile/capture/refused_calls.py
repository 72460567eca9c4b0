"""Calls that no graph can hold: refused by name before torch's tracing stumbles over them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils.checkpoint
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import _disable_current_modes

from megacompile.errors import CaptureError

_GRADIENT = (
    "The forward computes gradients itself, by {}, and a program cannot hold them: write the derivative as a "
    "formula, or take it along a direction by torch.func.jvp."
)
BACKWARD = _GRADIENT.format("torch.autograd.grad or backward()")
GRAD = _GRADIENT.format("torch.func.grad, vjp or jacrev")
JACFWD = _GRADIENT.format("torch.func.jacfwd")
CTC = (
    "The forward calls ctc_loss, whose memory depends on the values of its lengths, so that torch cannot "
    "trace it: wrap it in a torch.library.custom_op, with another one as its gradient that calls "
    "torch.ops.aten._ctc_loss and _ctc_loss_backward."
)
GAUSSIAN = (
    "The forward calls gaussian_nll_loss, which looks at the values of var: write it out, as "
    "0.5 * (var.log() + (input - target).square() / var).mean()."
)
FLEX = (
    "which is not supported: use F.scaled_dot_product_attention, with is_causal=True, or with attn_mask= "
    "what torch.nn.attention.flex_attention.create_mask makes of the mask_mod, plus what the score_mod adds"
)


CHECKPOINT = next(  # what surrounds the function of a checkpoint; its name from torch 2.15 on, and before
    name
    for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    if hasattr(torch.utils.checkpoint, name)
)


def refused(reason: str, kind: type[CaptureError] = CaptureError) -> Callable[..., Any]:
    """A function that takes no call but those of torch itself, where it traces scan: by a compilation of its
    own within the export's (:func:`forward_runs`)."""

    def refuse(theirs: Any, *args: Any, **kwargs: Any) -> Any:
        if CompileContext.current_compile_id() != _exports.get():
            return theirs(*args, **kwargs)
        raise kind(reason)

    return refuse


_exports: ContextVar[Any] = ContextVar("exports", default=None)


@contextlib.contextmanager
def none_refused() -> Iterator[None]:
    """Within the context, which is beside a forward's trace, what :func:`refused` replaces is torch's own."""
    token = _exports.set(object())
    try:
        yield
    finally:
        _exports.reset(token)


@contextlib.contextmanager
def forward_runs() -> Iterator[None]:
    """Within the context a forward is exported: what it calls, it calls in this compilation, or in none."""
    token = _exports.set(CompileContext.current_compile_id())
    try:
        yield
    finally:
        _exports.reset(token)


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Within the context torch computes for real, as it does in an eager run."""
    flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = False
    try:
        with (
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
            disable_proxy_modes_tracing(),
            torch.no_grad(),
        ):
            yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags


def unchecked(
    theirs: Any,
    distribution: Any,
    batch_shape: torch.Size = torch.Size(),  # noqa: B008
    event_shape: torch.Size = torch.Size(),  # noqa: B008
    validate_args: bool | None = None,
) -> None:
    """A distribution that checks no values, as under ``torch.compile``."""
    theirs(distribution, batch_shape, event_shape, False)


def nothing(theirs: Any, *args: Any, **kwargs: Any) -> None:
    """In the place of a look that is not taken."""


def once(theirs: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """In the place of a checkpoint: what it holds runs as it is."""
    yield


@contextlib.contextmanager
def fake_kernels_named() -> Iterator[None]:
    """Say which operator of the forward has no fake kernel."""
    try:
        yield
    except UnsupportedOperatorException as error:
        raise CaptureError(_no_fake_kernel(str(error.func))) from None
    except RuntimeError as error:
        unknown = re.search(r"no fake impl registered for <CustomOpDef\((.*?)\)>", str(error))
        if unknown is None:
            raise
        raise CaptureError(_no_fake_kernel(unknown[1])) from None


def _no_fake_kernel(operator: str) -> str:
    return (
        f"The forward calls {operator}, which has no fake kernel, so that torch cannot trace it: give it one "
        "by torch.library.register_fake."
    )

"""The error for a forward that torch cannot trace: one sentence with the user's line and module."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from megacompile.capture.host_draws import DecidesError, decides
from megacompile.capture.loss_value import CALLED
from megacompile.capture.refused_calls import FLEX
from megacompile.errors import CaptureError, UntraceableError

_AT_RANDOM = "dropped at random are not supported"


def untraceable(error: Exception, model: nn.Module, forward: CodeType) -> CaptureError:
    """Return the error to raise, where ``forward`` is the code of what export traced around the model.

    To read values of the batch does not help where modules are dropped.
    """
    text = _explain(error, model, forward)
    if _AT_RANDOM in text or isinstance(error, DecidesError):
        return CaptureError(text)
    return UntraceableError(text, module=_module_of(list(traceback.walk_tb(error.__traceback__)), model))


def _explain(error: Exception, model: nn.Module, forward: CodeType) -> str:
    """Return one sentence that names the line of the user's code, and the module, at which tracing failed."""
    stack = list(traceback.walk_tb(error.__traceback__))
    summary = traceback.StackSummary.extract(iter(stack))
    where = _users_line(summary)
    at = f" at {where}{_of(_module_of(stack, model))}" if where else ""
    called = next((note for note in getattr(error, "__notes__", ()) if note.startswith(CALLED)), "")
    what = "loss_fn" if called else f"The forward of {type(model).__name__}"
    hint = "its control flow and shapes must not depend on the values of tensors"
    if any(frame.filename.endswith("flex_attention.py") for frame in summary):
        return f"{what} calls flex attention{at}, {FLEX}."
    if isinstance(error, DecidesError):
        return decides(at)
    if isinstance(error, GuardOnDataDependentSymNode):
        made = _making(error, forward)
        if (origin := _users_line(made)) not in ("", where):
            maker = _of(_module_of(_still_running(stack, made), model))
            return (
                f"{what} cannot be captured: {origin}"
                f"{maker} makes a size that depends on the values "
                f"of tensors, and {where} needs it. Keep all rows there, and hide some by a mask, or select "
                "them before the batch comes to the program."
            )
        if "layerdrop" in at:
            hint = f"layers that are {_AT_RANDOM}: set layerdrop to 0"
        elif "module_dropout" in at:
            hint = f"adapters that are {_AT_RANDOM}: set both their dropouts to 0"
        return f"{what} cannot be captured{at}: {hint}."
    first_line = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    if isinstance(error, (TypeError, AttributeError, LookupError)):  # as it would raise without us
        return f"{what} fails{at}: {type(error).__name__}: {first_line}{called and f'; {called}'}."
    if re.search(r"dtype int|types: Long", first_line):
        hint = "token ids and labels of classes are whole numbers: give them as .long()"
    elif "cast NotImplemented" in first_line:
        hint = (
            "a tensor subclass, as torchao's weights are, lacks this operation in plain PyTorch, too: give "
            "its dequantize(), or load the model without quantization_config"
        )
    elif "should be the same" in first_line or "dtype" in first_line:
        hint = "the batch's floats must have the dtype in which the model computes, compute_dtype="
    elif called:
        hint = called
    return f"{what} cannot be captured{at}: {first_line}; {hint}."


def _users_line(stack: Iterable[traceback.FrameSummary]) -> str:
    """Return the file, number and text of the innermost line of the user's code, or nothing."""
    torch_root = str(Path(inspect.getfile(torch)).parent)
    here = str(Path(__file__).parents[1])
    frames = [
        frame
        for frame in stack
        if not frame.filename.startswith((torch_root, here)) and "<" not in frame.filename
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


def _module_of(stack: Iterable[tuple[FrameType, int]], model: nn.Module) -> str:
    """Return the path of the module below the model, the innermost, in which a stack is."""
    names = {id(vars(module)): name for name, module in model.named_modules() if name}  # export's stand-ins'
    frames = [getattr(frame.f_locals.get("self"), "__dict__", None) for frame, _ in stack]
    inside = [names.get(id(attributes), "") for attributes in frames]
    return next((name for name in reversed(inside) if name), "")


def _of(module: str) -> str:
    return module and f" of {module}"


def _still_running(
    stack: list[tuple[FrameType, int]], earlier: list[traceback.FrameSummary]
) -> list[tuple[FrameType, int]]:
    """Return the part of a stack that was under way at an earlier moment."""
    running: list[tuple[FrameType, int]] = []
    for (frame, line), before in zip(stack, earlier, strict=False):
        if frame.f_code.co_name != before.name:
            break
        running.append((frame, line))
        if line != before.lineno:
            break
    return running


def _making(error: GuardOnDataDependentSymNode, forward: CodeType) -> list[traceback.FrameSummary]:
    """Return the stack, from our forward on, at which the size was made that an error does not know."""
    mode = detect_fake_mode()
    made = mode.shape_env.var_to_stack if mode is not None and mode.shape_env is not None else {}
    symbol = min((s for s in error.cond.free_symbols if s in made), key=str, default=None)
    frames = list(made[symbol].summary()) if symbol is not None else []  # type: ignore[no-untyped-call]
    where = forward.co_filename, forward.co_name
    ours = [i for i, f in enumerate(frames) if (f.filename, f.name) == where]
    return frames[ours[-1] :] if ours else []

"""Check what a user passes to :func:`megacompile.compile`: refused by name before anything is touched."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from megacompile.capture.changes_after_compile import refuse_gradient_hooks
from megacompile.capture.quantized_weights import is_coded, rounds_inputs, why_not_coded
from megacompile.capture.weight_codings import settle
from megacompile.errors import MegacompileError
from megacompile.state.master_layout import is_dense
from megacompile.state.model_ownership import is_owned
from megacompile.state.scratch_files import check_directories
from megacompile.user_warning import warn_user


def check_settings(
    compute_dtype: Any, max_grad_norm: Any, on_nonfinite: Any, seed: Any, max_seq_len: Any, loss_fn: Any
) -> None:
    """Refuse values that no training can be told by."""
    if compute_dtype not in (torch.bfloat16, torch.float32):
        raise MegacompileError(
            f"compute_dtype={compute_dtype} is not supported: use torch.bfloat16 or torch.float32."
        )
    if max_grad_norm is not None and not (_is_number(max_grad_norm) and max_grad_norm > 0):
        raise MegacompileError(f"max_grad_norm={max_grad_norm!r} must be a positive number, or None.")
    if on_nonfinite not in (None, "skip", "raise"):
        raise MegacompileError(f"on_nonfinite={on_nonfinite!r} must be 'skip', 'raise' or None.")
    if not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 64:
        raise MegacompileError(f"seed={seed!r} must be an integer of 64 bits.")
    if max_seq_len is not None and not (isinstance(max_seq_len, int) and max_seq_len > 0):
        raise MegacompileError(f"max_seq_len={max_seq_len!r} must be a positive integer, or None.")
    if loss_fn is not None and not callable(loss_fn):
        raise MegacompileError(f"loss_fn={loss_fn!r} must be a function of outputs and batch, or None.")


def check_model(model: Any, weights: Any) -> None:
    """Refuse a model that cannot be taken over, or would train otherwise than in plain PyTorch."""
    if not isinstance(model, nn.Module):
        raise MegacompileError(f"model is a {type(model).__name__}: give a torch.nn.Module.")
    if is_owned(model):
        raise MegacompileError(
            "This model, or a part of it, already belongs to a program: use that one, or call its "
            "sync_to(model) first. "
            "If that program is gone, so are the values: make the model again."
        )
    refuse_gradient_hooks(model)
    if weights is not None and not callable(weights):
        raise MegacompileError(f"weights={weights!r} must be a function of a parameter's name, or None.")
    lazy = next((n for n, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise MegacompileError(
            f"The parameter {lazy} of a lazy module has no shape yet: run the model once, then compile."
        )
    _refuse_coded(model)
    empty = next((n for n, p in model.named_parameters() if p.is_meta), None)
    if weights is None and empty is not None:
        raise MegacompileError(
            f"The parameter {empty} is on the meta device and has no value: use megacompile.from_pretrained, "
            "give weights=, or load the model first."
        )
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise MegacompileError(
                f"The parameter {name} has a gradient, which no step would apply: call optimizer.step() or "
                "optimizer.zero_grad() before you compile."
            )
        if parameter.requires_grad and parameter.is_complex():
            raise MegacompileError(
                f"The parameter {name} is {parameter.dtype}, and no masters are kept in complex numbers: "
                "make it a real one with a last dimension of 2, and use torch.view_as_complex in the forward."
            )
    _refuse_shared_memory(model)


def _refuse_coded(model: nn.Module) -> None:
    """Refuse parameters whose values are not their memory's, but for codes that a program can keep."""
    rounding = None
    for module, name, parameter in _owned_parameters(model):
        if is_coded(parameter):
            reason = why_not_coded(module, parameter)
            if reason is not None:
                raise MegacompileError(f"The parameter {name} {reason}.")
            if rounds_inputs(parameter):
                rounding = name
            continue
        kind = type(parameter)
        if kind is not nn.Parameter and not (parameter.is_floating_point() or parameter.is_complex()):
            raise MegacompileError(
                f"The parameter {name} is a {kind.__name__} of {kind.__module__.partition('.')[0]}, and of "
                "codes programs take those of bitsandbytes' linear layers and tensor subclasses such as "
                "torchao's: load the model with BitsAndBytesConfig, or without quantization_config (frozen "
                "weights in bfloat16 take 2 bytes each), or call its dequantize()."
            )
    settle(model)
    if rounding is not None:
        warn_user(
            f"{rounding} and other 8-bit weights of bitsandbytes are decoded, and the inputs of their layers "
            "are not rounded, as where bitsandbytes trains on a CPU. On a GPU, and wherever it evaluates, it "
            "rounds these inputs to 8 bits too, so its losses there differ by that rounding."
        )


def _owned_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield each parameter with its name and the module that it belongs to."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            yield module, name, parameter


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuse dense parameters that lie in the same memory: a program would give each its own values."""
    placed = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes, name, p.requires_grad)
        for name, p in model.named_parameters()
        if not p.is_meta and p.numel() and not is_coded(p) and is_dense(p)
    )
    for (_, end, name, trains), (start, _, other, also) in itertools.pairwise(placed):
        if start < end and (trains or also):
            by_peft = ".lora_" in name and ".lora_" in other
            raise MegacompileError(
                f"The parameters {name} and {other} share memory but are two parameters, each with moments "
                f"of its own: {_UNTIED_ADAPTERS if by_peft else _ONE_OR_TWO}."
            )


_ONE_OR_TWO = "tie them by making them one, as in head.weight = embedding.weight, or clone one"
_UNTIED_ADAPTERS = (
    "set ensure_weight_tying=False, with which the embedding and the head, both named in target_modules, get "
    "an adapter each, or keep it and name the embedding in modules_to_save instead"
)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def directories(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None) -> tuple[str, ...]:
    """Directories for the state that does not fit in RAM, checked before anything is captured."""
    if given is None:
        return ()
    names = [given] if isinstance(given, (str, os.PathLike)) else given
    if (
        not isinstance(names, Sequence)
        or not names
        or not all(isinstance(name, (str, os.PathLike)) and os.fspath(name) for name in names)
    ):
        raise MegacompileError(f"offload_dir={given!r} names no directory: give a path or a list of paths.")
    return tuple(str(folder) for folder in check_directories(names))

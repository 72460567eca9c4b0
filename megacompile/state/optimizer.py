"""Adopt a ``torch.optim`` optimizer: its param groups and settings drive the host Adam, or its own class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megacompile.errors import MegacompileError
from megacompile.state.adam import AdamHyper
from megacompile.state.adam_settings import hyper_of, takes_our_steps
from megacompile.state.moment_formats import Form, StateFormat
from megacompile.state.optimizer_state import Numbers
from megacompile.state.param_group import GroupSettings, initial_state
from megacompile.state.several_optimizers import Several, members_of
from megacompile.state.torch_optimizer import TorchOptimizer
from megacompile.user_warning import warn_user

DEFAULT_LR = 1e-5


def adopt(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None, model: nn.Module
) -> torch.optim.Optimizer:
    """The optimizer whose settings drive the updates, checked; it stays as it is until a program takes over.

    None stands for AdamW with lr 1e-5 over all trainable parameters, and says so.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise MegacompileError(
            f"{type(model).__name__} has no trainable parameter: set requires_grad on what to train."
        )
    if isinstance(optimizer, (list, tuple)):
        optimizer = Several(optimizer)
    if optimizer is None:
        warn_user(f"No optimizer given: AdamW with lr={DEFAULT_LR} is used.")
        optimizer = torch.optim.AdamW(trainable, lr=DEFAULT_LR)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise MegacompileError(
            f"optimizer= is a {type(optimizer).__name__}: give a torch.optim.Optimizer, or a list of them."
        )
    for member in members_of(optimizer):
        if isinstance(getattr(member, "optimizer", None), torch.optim.Optimizer):
            raise MegacompileError(
                f"{type(member).__name__} cannot run on the host: give the optimizer that it wraps."
            )
        if member._optimizer_step_pre_hooks or member._optimizer_step_post_hooks:
            raise MegacompileError(
                "The optimizer has step hooks, which would never run: remove them, and do their work in the "
                "loop."
            )
    if any(p.requires_grad and p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        raise MegacompileError("The optimizer holds a complex parameter: train its real and imaginary parts.")
    owned = {id(p) for p in model.parameters()}
    for group in optimizer.param_groups:
        if takes_our_steps(optimizer):
            hyper_of(optimizer, group)
        if any(id(p) not in owned for p in group["params"]):
            raise MegacompileError(
                "The optimizer holds a parameter that is not the model's: build it from model.parameters()."
            )
    refuse_moments(optimizer)
    held = {id(p) for g in optimizer.param_groups for p in g["params"] if p.requires_grad}
    if not held:
        raise MegacompileError("The optimizer holds no trainable parameter of the model.")
    return optimizer


def form_of(optimizer: torch.optim.Optimizer, form: StateFormat) -> Form:
    """Return how the host keeps the state of an optimizer; Adam's moments have formats to choose from."""
    if takes_our_steps(optimizer):
        return form
    if form != "fp32":
        raise MegacompileError(
            f"optimizer_state={form!r} is a format of Adam's moments, and {type(optimizer).__name__} keeps a "
            "state of its own: leave optimizer_state out, or use torch.optim.AdamW."
        )
    return TorchOptimizer(optimizer)


def refuse_moments(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has taken steps: a program starts with a state of its own."""
    if not takes_our_steps(optimizer):
        for member in members_of(optimizer):
            for group in member.param_groups:
                initial_state(member, group)
    elif optimizer.state:
        raise MegacompileError(
            "The optimizer has already taken steps, whose moments cannot be taken over yet: give a fresh one."
        )


def settings_of(
    optimizer: torch.optim.Optimizer, model: nn.Module, numbers: Mapping[str, Numbers] | None = None
) -> list[dict[str, Any]]:
    """Each param group's settings as plain JSON values, with its parameters by name, and the ``numbers`` that
    are kept of them."""
    names = {id(p): n for n, p in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        settings = {k: _plain_setting(v) for k, v in group.items() if k not in ("params", "param_names")}
        parameters = [names[id(p)] for p in group["params"]]
        kept = {name: numbers[name] for name in parameters if numbers and name in numbers}
        groups.append(settings | {"parameters": parameters} | ({"numbers": kept} if kept else {}))
    return groups


def _plain_setting(value: Any) -> Any:
    """A tensor's number, a tuple as a list; what is no plain value is left out, as None."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_plain_setting(v) for v in value]
    return value if isinstance(value, (bool, int, float, str)) else None


def check_settings(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: list[dict[str, Any]], folder: Path
) -> None:
    """Refuse settings of param groups, saved in ``folder``, that are not this optimizer's, by name."""
    ours = settings_of(optimizer, model)
    if len(saved) != len(ours):
        raise MegacompileError(f"{folder} has {len(saved)} param groups, the optimizer {len(ours)}.")
    for index, (group, now) in enumerate(zip(saved, ours, strict=True)):
        where = f"param group {index} of {folder}"
        if group.get("parameters") != now["parameters"]:
            raise MegacompileError(f"The {where} holds other parameters than the optimizer's.")
        for key in ("lr", "eps", "weight_decay"):
            if _is_number(now.get(key)) and not _is_number(group.get(key)):
                raise MegacompileError(f"The {where} has no {key}.")
        for key, value in group.items():
            if not _of_one_kind(value, now.get(key)) or (
                key in _RANGES and not _within(value, *_RANGES[key])
            ):
                raise MegacompileError(f"The {where} has {key} {value!r}, the optimizer {now.get(key)!r}.")
        numbers = group.get("numbers", {})
        if not isinstance(numbers, dict) or not all(isinstance(n, dict) for n in numbers.values()):
            raise MegacompileError(f"The {where} has numbers of its parameters that are none.")


_RANGES = {"betas": (0.0, 1.0), "eps": (0.0, math.inf), "weight_decay": (0.0, math.inf)}
"""What a setting is at least, and below which it is."""


def _within(value: Any, least: float, below: float) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(least <= v < below for v in values if _is_number(v))


def _of_one_kind(saved: Any, now: Any) -> bool:
    """Return whether a saved setting is of the kind that the optimizer's own is; None says nothing."""
    if saved is None or now is None or (_is_number(saved) and _is_number(now)):
        return True
    if isinstance(saved, list) and isinstance(now, list):
        return len(saved) == len(now) and all(map(_of_one_kind, saved, now))
    return type(saved) is type(now)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def restore_settings(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> dict[str, Numbers]:
    """Set each param group's settings to those that were saved, as ``load_state_dict`` would; returns the
    numbers that were kept of parameters."""
    numbers: dict[str, Numbers] = {}
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        for key, value in settings.items():
            if key == "numbers":
                numbers |= value
            if key in ("parameters", "numbers") or value is None:
                continue
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    return numbers


def param_group_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Index of the optimizer's param group by ``id`` of the parameter."""
    return {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}


def hypers(optimizer: torch.optim.Optimizer, form: Form = "fp32") -> list[AdamHyper] | list[GroupSettings]:
    """Hyper-parameters as they are now, per param group; whoever makes an update says which step it is."""
    for each in {optimizer, *members_of(optimizer)}:
        # a learning-rate scheduler wants to see that the optimizer stepped before it does
        each._opt_called = True  # type: ignore[attr-defined]
    if isinstance(form, TorchOptimizer):
        return form.settings()
    return [hyper_of(optimizer, group) for group in optimizer.param_groups]

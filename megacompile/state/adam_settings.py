"""Read the hyper-parameters of torch's Adam and AdamW, whose steps the host's kernel takes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch

from megacompile.errors import MegacompileError
from megacompile.state.adam import AdamHyper

_NOT_OURS = ("amsgrad", "capturable", "differentiable")  # of Adam's options


def takes_our_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the host Adam takes an optimizer's steps: it is torch's Adam or AdamW, or a subclass
    with the same step, and keeps no maximum of second moments."""
    known = [inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW)]
    ours = isinstance(optimizer, torch.optim.Adam) and inspect.unwrap(type(optimizer).step) in known
    return ours and not any(group.get("amsgrad") for group in optimizer.param_groups)


def hyper_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> AdamHyper:
    """Return the hyper-parameters of a group of Adam's or AdamW's, for the step that counts as its first."""
    for option in _NOT_OURS:
        if group.get(option):
            raise MegacompileError(f"The optimizer's option {option}=True is not supported.")
    return AdamHyper(
        lr=_number("lr", group["lr"]),
        beta1=_number("first beta", group["betas"][0]),
        beta2=_number("second beta", group["betas"][1]),
        eps=_number("eps", group["eps"]),
        weight_decay=_number("weight_decay", group["weight_decay"]),
        decoupled=decouples(optimizer, group),
        maximize=bool(group.get("maximize", False)),
    )


def decouples(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a group's weights decay beside Adam's update: as the group says, whatever the class
    is."""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def updates_like_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the device's AdamW kernel takes the steps that this optimizer would."""
    return all(decouples(optimizer, g) or not g["weight_decay"] for g in optimizer.param_groups) and not any(
        g.get("maximize") for g in optimizer.param_groups
    )


def _number(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise MegacompileError(f"The optimizer's {what} is {value!r}: it must be a finite number.")
    return number

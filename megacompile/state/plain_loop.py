"""An ordinary training loop beside a compiled model, told of at its first step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megacompile.user_warning import warn_user

_gradient_of: Any = Tensor.grad.__get__  # type: ignore[union-attr]  # one that a program keeps refuses to be read


def watch_plain_loop(model: nn.Module) -> RemovableHandle:
    """Warn when an optimizer first steps by gradients that plain PyTorch has computed for ``model``.

    The handle that it returns ends this; a program removes it when it takes the model over.
    """
    return register_optimizer_step_pre_hook(_StepWatch(weakref.ref(model)))


def foreign_hooks(hooks: Iterable[Any]) -> bool:
    """Return whether any of the step hooks of all optimizers is another than :func:`watch_plain_loop`'s."""
    return any(not isinstance(hook, _StepWatch) for hook in hooks)


class _StepWatch:
    """The hook, which torch calls before the step of any optimizer."""

    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        self._model = model
        self._told = False  # not removed then: torch walks over the hooks

    def __call__(self, optimizer: torch.optim.Optimizer, *given: Any) -> None:
        model = self._model()
        parameters = model.parameters() if model is not None and not self._told else ()
        own = {id(p) for p in parameters if _gradient_of(p) is not None}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            return
        self._told = True
        warn_user(
            f"This step of {type(optimizer).__name__} trains the model in plain PyTorch, without the memory "
            "budget of its megacompile program, which has run nothing yet: call program.train_step(batch) in "
            "the place of forward, backward and step."
        )

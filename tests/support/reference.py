"""The reference that programs are measured against: eager PyTorch with our operators, draws and Adam."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.api.program import Program
from megacompile.capture.batch import micro_weights, read_batch
from megacompile.capture.loss_value import apply_loss, divide, find_loss
from megacompile.capture.patches import our_operators
from megacompile.runtime.step_results import step_seed
from megacompile.state.adam import adamw_step
from megacompile.state.adam_settings import hyper_of
from megacompile.state.optimizer import hypers
from tests.support.draws import OurDraws


@dataclass
class Trace:
    """Losses, norms, the gradients of the last step and the final weights of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Habits:
    """How a model is trained: clipping, and (lr, weight decay) of param groups, dealt to in turn."""

    max_grad_norm: float | None = 1.0
    rates: tuple[tuple[float, float], ...] = ((1e-3, 0.01),)

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        trained = [p for p in model.parameters() if p.requires_grad]
        turns = ((trained[i :: len(self.rates)], rate) for i, rate in enumerate(self.rates))
        return torch.optim.AdamW(
            [{"params": part, "lr": lr, "weight_decay": decay} for part, (lr, decay) in turns if part]
        )

    def trainer(self, model: nn.Module) -> EagerTrainer:
        return EagerTrainer(model, self.optimizer(model), max_grad_norm=self.max_grad_norm)


class EagerTrainer:
    """Trains a module the plain way: autograd over the whole model, then clipping, then Adam."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.max_grad_norm, self.loss_fn, self.seed = max_grad_norm, loss_fn, seed
        self.steps = 0
        self.updates: Counter[str] = Counter()  # of each parameter
        self.moments = {
            n: (torch.zeros(p.numel()), torch.zeros(p.numel())) for n, p in model.named_parameters()
        }

    def loss(self, batch: Any, micro: int = 0, call: int = 0) -> Tensor:
        one = read_batch(batch, self.model)
        rng = torch.tensor([step_seed(self.seed, self.steps + call, micro), 0])
        given = one.kwargs.get("position_ids") is not None
        with our_operators(self.model, rng, positions_given=given), OurDraws(rng):
            if self.loss_fn is None:
                return find_loss(self.model(*one.args, **one.kwargs))
            args, kwargs, rest = divide(self.model, one.args, one.kwargs, self.loss_fn)
            outputs = self.model(*args, **kwargs)
        return apply_loss(self.loss_fn, outputs, one.args, one.kwargs, rest)

    def backward(self, batches: Sequence[Any], weights: Sequence[float], *, by_hand: bool = False) -> Tensor:
        """Gradients of weighted losses, with the dropout of one ``train_step``, or of calls ``by_hand``."""
        losses = []
        for i, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            loss = self.loss(batch, call=i) if by_hand else self.loss(batch, i)
            loss.backward(torch.tensor(weight, dtype=loss.dtype))
            losses.append(weight * loss.detach())
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def train_step(self, batches: Sequence[Any], trace: Trace | None = None) -> float:
        loss = self.backward(batches, self.weights(batches))
        if trace is not None:
            trace.grads = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        norm = self.apply()
        if trace is not None:
            trace.losses.append(float(loss))
            trace.norms += [] if norm is None else [norm]
        return float(loss)

    def weights(self, batches: Sequence[Any]) -> list[float]:
        """Of the micro-batches' losses, as a program weighs them."""
        return micro_weights([read_batch(b, self.model) for b in batches], None)

    def apply(self) -> float | None:
        """Clip the gradients and update; returns their norm where they are clipped."""
        norm = None
        if self.max_grad_norm is not None:
            norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm))
        self.update()
        return norm

    def update(self) -> None:
        groups = {id(p): i for i, g in enumerate(self.optimizer.param_groups) for p in g["params"]}
        rates = hypers(self.optimizer)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and id(parameter) in groups:
                first, second = self.moments[name]
                flat = parameter.data.reshape(-1).clone()
                grad = parameter.grad.reshape(-1).contiguous().float()
                self.updates[name] += 1
                hyper = replace(rates[groups[id(parameter)]], step=self.updates[name])
                adamw_step(flat, first, second, grad, hyper)
                parameter.data.copy_(flat.view_as(parameter))
        self.model.zero_grad(set_to_none=True)
        self.steps += 1


class HostAdamW(torch.optim.AdamW):
    """AdamW for a plain loop, with the bits of torch's fused kernel, as the host takes its steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "first": torch.zeros(p.numel()), "second": torch.zeros(p.numel())}
                state["step"] += 1
                flat = p.detach().reshape(-1).clone()
                hyper = replace(hyper_of(self, group), step=state["step"])
                adamw_step(flat, state["first"], state["second"], p.grad.reshape(-1).contiguous(), hyper)
                p.copy_(flat.view_as(p))


def assert_equal(program: Program, trainer: EagerTrainer) -> None:
    """Every weight of a program is the trainer's, bit for bit."""
    state = program.state_dict()
    for name, value in trainer.model.named_parameters():
        assert torch.equal(state[name], value), name


def train_eager(trainer: EagerTrainer, steps: Sequence[Any]) -> Trace:
    """Run ``steps``, each a batch or a list of micro-batches."""
    trace = Trace()
    for batches in steps:
        trainer.train_step(batches if isinstance(batches, list) else [batches], trace)
    trace.weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    return trace


def check_beside_eager(
    program: Program, trainer: EagerTrainer, batches: Sequence[Any], *, rel: float = 1e-6
) -> None:
    """Each step's loss, and all weights after the last, are the eager trainer's; closes the program."""
    for batch in batches:
        expected = trainer.train_step([copy.deepcopy(batch)])
        assert float(program.train_step(batch).loss) == pytest.approx(expected, rel=rel)
    state = program.state_dict()
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-5, atol=1e-6)
    program.close()

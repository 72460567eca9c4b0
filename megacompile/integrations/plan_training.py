"""Plan all programs that are known of a trainer's training before its first step.

In: a trainer and the micro-batches that its training begins with. Out: nothing, or an error where one of the
programs does not fit the budget: training on the longest rows, the end of an epoch, evaluations.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from megacompile.api.program import Program
from megacompile.errors import BudgetError
from megacompile.integrations.compute_loss import MicroBatch, cancel
from megacompile.integrations.lengths import longest_row, longest_rows
from megacompile.report.schedule import Schedule


class TooManyRowsError(Exception):
    """A batch has no room in the budget, and ``auto_find_batch_size`` asks for a smaller one."""

    def __init__(self, least_bytes: int | None, budget_bytes: int) -> None:
        self.least_bytes, self.budget_bytes = least_bytes, budget_bytes


class PlannedTraining(Exception):
    """All programs of a training are planned, and it is not to begin."""

    def __init__(self, programs: list[tuple[str, Schedule]]) -> None:
        self.programs = programs


@runtime_checkable
class Forwards(Protocol):
    """A callback that runs forwards at evaluations; ``forward`` runs the one of most memory. The class's name
    says what for."""

    def forward(self) -> object: ...


def plan_training(trainer: Any, steps: Any, program: Program, micro: list[dict[str, Any]]) -> None:
    """Plan all known programs of a training, which begins with these micro-batches. Before the first step,
    refuse a budget that is too small for one of them."""
    first = {"training": functools.partial(program.prepare, micro, **steps.preparation())}
    with same_draws():
        later = trainer._later_programs(program, micro)
        if trainer.args.auto_find_batch_size and trainer._train_batch_size > 1:
            try:
                program.plan_all(first)
                program.plan_all(first | later)
            except BudgetError as error:
                raise TooManyRowsError(error.least_bytes, program.budget_bytes) from error
        programs = program.plan_all(first | later | _evaluations(trainer))
    if steps.stops_planned:
        raise PlannedTraining(programs)


def later_programs(trainer: Any, steps: Any, program: Program) -> dict[str, Callable[[], object]]:
    """Return, by name, what prepares for later updates of a training on data."""
    return {
        name: functools.partial(_prepare_update, trainer, steps, program, samples)
        for name, samples in _later_updates(trainer)
    }


def _later_updates(trainer: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield, with a name, the micro-batches of updates that may be unlike the first one, as far as they are
    known: with the longest row, and the last one of an epoch."""
    loader, updates = trainer._epochs()
    data, sampler = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    rows, steps = getattr(sampler, "batch_size", None), trainer.args.gradient_accumulation_steps
    if not rows or not hasattr(data, "__getitem__") or not isinstance(data, Sized) or not len(data):
        return
    drawn = getattr(sampler, "sampler", None)
    count = len(drawn) if isinstance(drawn, Sized) else len(data)
    alone, drops = trainer.args.world_size == 1, getattr(sampler, "drop_last", False)
    short = count % rows if alone and not drops else 0  # of several ranks batches are filled up
    full = loader.collate_fn(list(longest_rows(data, rows)))
    if longest_row(data) is not None:
        yield "training on the longest rows", [full] * steps
    if (largest := getattr(trainer.data_collator, "largest", None)) is not None:
        yield "training on the largest images", [largest(data)] * steps
    last = len(loader) % steps or steps
    if (short or last < steps) and updates >= -(-len(loader) // steps):
        end = [loader.collate_fn(list(longest_rows(data, short)))] if short else [full]
        yield "the last update of an epoch", [full] * (last - 1) + end


def _prepare_update(trainer: Any, steps: Any, program: Program, samples: list[dict[str, Any]]) -> None:
    """Prepare for an update on what upstream's loop would give these to."""
    samples, count = trainer.get_batch_samples(iter(samples), len(samples), trainer.args.device)
    waiting: list[MicroBatch] = []
    try:
        for sample in samples:  # losses of others may change what they are given
            waiting.append(steps.micro_batch(trainer._prepare_inputs(dict(sample)), count))
        batches = trainer._alike([micro.batch for micro in waiting])
        program.prepare(batches, **steps.preparation())
    finally:
        cancel(waiting)


def _evaluations(trainer: Any) -> dict[str, Callable[[], object]]:
    """Return, by name, what runs the forwards of most memory of an evaluation of this training: of full
    batches as long as the longest row of each data set, and of callbacks."""
    if trainer.args.eval_strategy == "no" or trainer.eval_dataset is None:
        return {}
    several = isinstance(trainer.eval_dataset, dict)
    data = trainer.eval_dataset if several else {"": trainer.eval_dataset}
    calls: dict[str, Callable[[], object]] = {
        f"evaluation{name and f' of {name}'}": functools.partial(trainer._predict_longest, rows)
        for name, rows in data.items()
    }
    callbacks = [c for c in trainer.callback_handler.callbacks if isinstance(c, Forwards)]
    return calls | {type(callback).__name__.lower(): callback.forward for callback in callbacks}


@contextlib.contextmanager
def in_train_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into train mode, as upstream's step does, and its modules back into theirs after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Draw again, after it, what is drawn on the host inside."""
    numbers, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 - of collators
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(numbers)
            np.random.set_state(arrays)  # noqa: NPY002


def fewer_rows(needs: Sequence[tuple[int, int]], budget_bytes: int) -> int:
    """The rows of a batch to try next, of the (rows, least bytes) that were too many so far.

    Bytes are nearly linear in rows: two batches tell what none at all would need. One row before counts as
    nothing, so that no number that fits is passed over.
    """
    rows, least = needs[-1]
    of_row, fixed = least / rows, 0.0
    if len(needs) > 1:
        slope = (needs[-2][1] - least) / (needs[-2][0] - rows)
        if 0 < slope < of_row:
            of_row, fixed = slope, least - slope * rows
    fits = int((budget_bytes - fixed) / of_row) if least else rows // 2
    return max(1, min(fits, rows - 1))

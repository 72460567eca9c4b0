"""Intake: what a user gives as a batch, read, checked, and padded where that saves compiling.

In: the batches of a step as the training loop has them, and the settings of the model's modules. Out: a
:class:`~megacompile.capture.batch.Batch` for each, whose key says which program it runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from megacompile.capture.batch import Batch, check_signature, read_batch
from megacompile.capture.loss import divides
from megacompile.capture.outputs import OutputsFn
from megacompile.capture.padding import pad_batch
from megacompile.capture.snapshot import ModelSettings
from megacompile.compiler import Compiler
from megacompile.padder import Padder


class Intake:
    """Reads the batches of one model; ``max_seq_len`` is the longest that they are padded to."""

    def __init__(self, model: nn.Module, compiler: Compiler, max_seq_len: int | None) -> None:
        self._model, self._max_seq_len = model, max_seq_len
        self._loss_fn = compiler.frontend.loss_fn
        self._padder = Padder(model, compiler, max_seq_len)

    def read(
        self,
        items: Sequence[Any],
        settings: ModelSettings,
        *,
        evaluate: bool,
        first: bool,
        outputs: OutputsFn | None = None,
    ) -> list[Batch]:
        """The micro-batches of one step, the ``first`` or a later one; padded where that saves compiling and
        is hidden, as it would not be in ``outputs``, nor from a loss function."""
        model, micro = self._model, []
        for item in items:
            kwargs = dict(item.items()) if hasattr(item, "items") else {}
            own = (outputs or self._loss_fn) if divides(kwargs, self._loss_fn, outputs) else None
            batch = read_batch(
                item,
                model,
                evaluate=evaluate,
                keep_mask=own is not None,
                settings=settings,
                outputs=outputs,
            )
            check_signature(model, batch, function=own)
            micro.append(batch)
        padded = self._loss_fn is None and outputs is None
        return self._padder.padded(micro, first=first) if padded else micro

    def longest(self, batch: Batch) -> Batch | None:
        """The batch as long as batches may become; None where it is, or where no length was promised."""
        ids = batch.kwargs.get("input_ids")
        if self._max_seq_len is None or not isinstance(ids, Tensor) or ids.shape[1] >= self._max_seq_len:
            return None
        return read_batch(
            pad_batch(batch.kwargs, self._max_seq_len),
            self._model,
            settings=batch.settings,
            outputs=batch.outputs,
        )

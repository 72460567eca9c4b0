"""Intake: what a user gives as a batch, read, checked, and padded where that saves compiling.

In: a batch as the training loop has it, and the settings of the model's modules. Out: a
:class:`~megacompile.capture.batch.Batch`, whose key says which program it runs on.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megacompile.capture.batch import Batch, check_signature, read_batch
from megacompile.capture.padding import bucketed, computes_as_libraries_do, hides_padding, pad_batch
from megacompile.capture.rotary import turning_lengths
from megacompile.capture.snapshot import ModelSettings
from megacompile.compiler import Compiler
from megacompile.errors import CaptureError


class Intake:
    """Reads the batches of one model; ``max_seq_len`` is the longest that they are padded to."""

    def __init__(self, model: nn.Module, compiler: Compiler, max_seq_len: int | None) -> None:
        self._model, self._compiler, self._max_seq_len = model, compiler, max_seq_len
        self._own_loss = compiler.frontend.loss_fn is not None
        self._pads = not self._own_loss  # until a capture shows that this model would see the padding
        self._turning = turning_lengths(model)

    def read(self, item: Any, settings: ModelSettings, *, evaluate: bool, may_pad: bool) -> Batch:
        """One batch; a longer one where its length has no program yet, another has, and padding is hidden."""
        model = self._model
        batch = read_batch(item, model, evaluate=evaluate, keep_mask=self._own_loss, settings=settings)
        if self._pads and may_pad and not self._compiler.knows(batch):
            longer = bucketed(item, batch, model, longest=self._max_seq_len, turning=self._turning)
            if longer is not None:
                padded = read_batch(longer, model, evaluate=evaluate, settings=settings)
                batch = self._padded(batch, padded, evaluate)
        check_signature(model, batch, own_loss=self._own_loss)
        return batch

    def longest(self, batch: Batch) -> Batch | None:
        """The batch as long as batches may become; None where it is, or where no length was promised."""
        ids = batch.kwargs.get("input_ids")
        if self._max_seq_len is None or not isinstance(ids, Tensor) or ids.shape[1] >= self._max_seq_len:
            return None
        return read_batch(pad_batch(batch.kwargs, self._max_seq_len), self._model)

    def _padded(self, batch: Batch, longer: Batch, evaluate: bool) -> Batch:
        """The longer batch where its padding is hidden; where it is not, this model is not padded again."""
        if not self._compiler.knows(longer):
            self._pads = computes_as_libraries_do(self._model) and self._hides_padding(longer, evaluate)
        return longer if self._pads else batch

    def _hides_padding(self, longer: Batch, evaluate: bool) -> bool:
        try:
            captured = self._compiler.frontend.captured(longer, evaluate=evaluate)
        except CaptureError:  # not of this length
            return False
        return hides_padding(self._model, captured, longer)

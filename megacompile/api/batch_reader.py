"""Read what a user gives as a batch, check it, and pad it where that saves compiling.

In: the batches of a step as the training loop has them. Out: a :class:`~megacompile.capture.batch.Batch`
for each, whose key says which program it runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from megacompile.api.frontend import Frontend
from megacompile.api.padder import Padder
from megacompile.capture.batch import (
    Batch,
    check_signature,
    documents_meet,
    is_transformers,
    of_one_kind,
    read_batch,
)
from megacompile.capture.fingerprint import model_settings
from megacompile.capture.loss_cut import LossCut, cuts
from megacompile.capture.loss_value import divides
from megacompile.errors import CaptureError, MegacompileError
from megacompile.graph.forward_outputs import OutputsFn, identity
from megacompile.user_warning import warn_user

_DOCUMENTS_MEET = (
    "position_ids start again within a row that has an attention_mask: the documents of a row see each "
    "other, as in plain transformers. A causal model keeps them apart where attention_mask is left out, as "
    "transformers' DataCollatorWithFlattening and TRL's padding_free=True do."
)


class BatchReader:
    """Reads the batches of one model; ``max_seq_len`` is the longest that they are padded to."""

    def __init__(self, model: nn.Module, frontend: Frontend, max_seq_len: int | None) -> None:
        self._model, self._max_seq_len = model, max_seq_len
        self._frontend, self._loss_fn = frontend, frontend.loss_fn
        self.padder = Padder(model, frontend, max_seq_len)
        self._told = False
        self.cut: LossCut | None = None  # where the model's loss runs outside of its programs

    def read(self, given: Any, *, evaluate: bool, outputs: OutputsFn | None = None) -> list[Batch]:
        """The micro-batches of one step."""
        cut = self.cut if outputs is None else None
        outputs = outputs or cut
        function = identity(outputs) if outputs is not None else self._loss_fn
        if cut is not None:
            function = tuple(cut.example)
        settings = model_settings(self._model, evaluate=evaluate, function=function)  # once for all of them
        model, micro = self._model, []
        for item in _items(given):
            item, withheld = (item, {}) if cut is None else cut.divided(item)
            kwargs = dict(item.items()) if hasattr(item, "items") else {}
            if not self._told and is_transformers(model) and documents_meet(kwargs):
                warn_user(_DOCUMENTS_MEET)
                self._told = True
            own = (outputs or self._loss_fn) if divides(kwargs, self._loss_fn, outputs) else None
            batch = read_batch(
                item,
                model,
                evaluate=evaluate,
                keep_mask=own is not None,
                settings=settings,
                outputs=outputs,
            )
            batch = replace(batch, withheld=withheld) if withheld else batch
            check_signature(model, batch, function=own)
            micro.append(batch)
        return of_one_kind(micro)

    def cuts(self, given: Any) -> list[LossCut]:
        """The ways to cut the model's own loss off, for a batch of this kind."""
        return [] if self._loss_fn is not None else cuts(_items(given)[0], self._model)

    def check_counts(self, micro: Sequence[Batch]) -> None:
        """Refuse to sum losses that do not read the ``num_items_in_batch`` of their micro-batches."""
        for batch in micro:
            count = batch.kwargs.get("num_items_in_batch")
            if count is None:
                continue
            captured = self._frontend.captured(batch)
            unread = all(batch.leaves[index] is not count for index in captured.inputs.values())
            if unread or isinstance(batch.outputs, LossCut):  # of a loss outside nobody knows
                raise CaptureError(
                    "The model's loss does not read num_items_in_batch, so that micro-batches would be "
                    "weighted wrongly: remove it from the batch, or give the weights yourself."
                )

    def longest(self, batch: Batch) -> Batch | None:
        """The batch as long as batches may become; None where it is, or where no length was promised."""
        ids = batch.kwargs.get("input_ids")
        if self._max_seq_len is None or not isinstance(ids, Tensor) or ids.shape[1] >= self._max_seq_len:
            return None
        return self.padder.padded_to(batch, self._max_seq_len)


def _items(given: Any) -> list[Any]:
    """The micro-batches of a list of them; anything else is one batch, also a list of tensors, as torch's
    DataLoader makes of (x, y)."""
    if not isinstance(given, list) or any(isinstance(item, Tensor) for item in given):
        return [_batch(given)]
    if not given:
        raise MegacompileError("The list of micro-batches is empty.")
    return [_batch(item) for item in given]


def _batch(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given

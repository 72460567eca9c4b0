"""Choose to which lengths the batches of one model are padded, so that few programs serve them.

In: the batches of a step as they were read. Out: the same, or longer ones whose padding the model is known
to hide. What graphs have shown of that, and the seconds that padding has cost each length, is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from megacompile.api.decisions import Decisions
from megacompile.api.frontend import Frontend
from megacompile.capture.batch import (
    Batch,
    BatchKey,
    of_one_kind,
    padded_anywhere,
    read_batch,
)
from megacompile.capture.loss_cut import LossCut
from megacompile.capture.loss_padding import LossAtLengths, OutputsAtLengths
from megacompile.capture.padded_length import PaddingCosts, bucket_length, reach, worth_one_length
from megacompile.capture.padding import (
    Function,
    computes_as_libraries_do,
    gives_positions,
    hides_padding,
    kind_of,
    length_of,
    lengths_of_kind,
    may_be_padded,
    own_entries,
    pad_batch,
    telling_length,
)
from megacompile.capture.rotary_frequencies import turning_lengths
from megacompile.errors import CaptureError
from megacompile.graph.forward_outputs import Returned, all_outputs
from megacompile.user_warning import warn_user

_COUNTS = (
    "loss_fn is not known to ignore padding, so each length of batch is compiled as a program of its own: "
    "let it leave out labels of -100, or what attention_mask hides, or pad batches to a few lengths yourself."
)


@dataclass(frozen=True)
class OfRanks:
    """The facts that several ranks' micro-batches of a step have in common: whether they are ``alike``, else
    the ``lengths`` of all where all may be padded, and whether all of their padding is at the ``right``."""

    alike: bool
    lengths: tuple[int, ...]
    right: bool


class Padder:
    """Pads the batches of one model, ``longest`` at most, to lengths that have a program or are given one."""

    def __init__(self, model: nn.Module, frontend: Frontend, longest: int | None) -> None:
        self._model, self._frontend, self._loss_fn = model, frontend, frontend.loss_fn
        limits = (longest, reach(model))
        self._longest = min((limit for limit in limits if limit is not None), default=None)
        self._turning = turning_lengths(model)
        self._hidden: dict[BatchKey, bool] = {}  # by kind of batch, once a graph has shown it
        self._returned: dict[BatchKey, tuple[Returned, int]] = {}  # by kind, and at what length
        self._ignored: dict[tuple[Any, ...], bool] = {}  # by the user's function, by kind of batch and length
        self._told = False
        self._costs = PaddingCosts()  # by the key that was wanted

    def padded(
        self, micro: list[Batch], decided: Decisions, *, first: bool, ranks: OfRanks | None = None
    ) -> list[Batch]:
        """Pad the micro-batches of one step to one kind if padding can, and to a known kind if one is near;
        the ``first`` are left as they are if they are alike. Several ranks, which pass what they have in
        common, all pad to one length.
        """
        alike = len({batch.key for batch in micro}) == 1 and (ranks is None or ranks.alike)
        if alike and (first or decided.knows(micro[0])):
            return micro
        found = self._to_one_length(micro, decided, alike, ranks)
        if found is None and not alike and ranks is None:
            return [one for batch in micro for one in self.padded([batch], decided, first=False)]
        return found or micro

    def lengths(self, micro: list[Batch]) -> list[int]:
        """Return the lengths of micro-batches that may be padded; none, where some may not."""
        reads = self._frontend.reads_values
        paddable = all(
            not (reads(batch) or isinstance(batch.outputs, LossCut))
            and may_be_padded(batch, self._model, self._function_of(batch))
            for batch in micro
        )
        return [length_of(batch) for batch in micro] if paddable else []

    def _to_one_length(
        self, micro: list[Batch], decided: Decisions, alike: bool, ranks: OfRanks | None
    ) -> list[Batch] | None:
        """The micro-batches at one length that has a program, or is worth one; None: no padding is hidden.

        A longer one's program serves until padding has cost as much as compiling another (ski rental).
        """
        lengths = self.lengths(micro) if ranks is None else ranks.lengths
        if not lengths:
            return None
        least, right = max(lengths), ranks is None or ranks.right
        if ranks is None and not worth_one_length(lengths):
            return None
        length = (
            least if len(set(lengths)) == 1 and not alike else bucket_length(least, longest=self._longest)
        )
        wanted = self._at(micro, length, right)
        if len({batch.key for batch in wanted}) > 1:
            return None
        exact = alike and length == least
        if exact or not decided.knows(wanted[0]):
            known = lengths_of_kind(decided.keys, wanted[0])
            near = next((n for n in known if n >= least), None)
            longer = [] if near is None else self._at(micro, near, right)
            if (
                near is not None
                and decided.knows(longer[0])
                and self._hides(micro, decided, near, min(lengths))
            ):
                key = (micro if exact else wanted)[0].key
                step_seconds, compile_seconds = decided.seconds(longer[0])
                if self._costs.pay(key, step_seconds * (1 - least / near), compile_seconds):
                    return longer
        return wanted if not exact and self._hides(micro, decided, length, min(lengths)) else None

    def _at(self, micro: Sequence[Batch], length: int, right: bool) -> list[Batch]:
        """The micro-batches at one length, with masks; ``right`` unless others have padding elsewhere."""
        found = of_one_kind([self.padded_to(batch, length) for batch in micro])
        return found if right else padded_anywhere(found)

    def padded_to(self, batch: Batch, length: int) -> Batch:
        """The batch at one length, with a mask."""
        own = own_entries(self._model, batch.kwargs, self._function_of(batch))
        padded = read_batch(
            pad_batch(batch.kwargs, length, own=own),
            self._model,
            evaluate=batch.evaluates,
            keep_mask=True,
            settings=batch.settings,
            outputs=batch.outputs,
        )
        return padded if batch.outputs is None else replace(padded, added=length - length_of(batch))

    def _function_of(self, batch: Batch) -> Function | None:
        """The function that makes the results of a batch's program, where it is not the model itself."""
        if batch.outputs is None:
            return self._loss_fn
        return batch.outputs if batch.outputs is not all_outputs else None

    def _hides(self, micro: Sequence[Batch], decided: Decisions, length: int, shortest: int) -> bool:
        """Return whether the model hides the padding of all these, and of the ``shortest``, to a length.

        A graph's verdict holds for all lengths, a failure of capture for its own. Beyond a turning length the
        model computes otherwise.
        """
        longer = self.padded_to(micro[0], length)
        if any(shortest <= turn < length for turn in self._turning):
            return False
        function = self._function_of(longer)
        if shortest == length and (function is None or longer.outputs is not None):
            return True
        if not all(self._ignored.get((kind_of(batch),), True) for batch in micro):
            return False
        kind = kind_of(longer)
        if kind not in self._hidden or (self._hidden[kind] and not decided.knows(longer)):
            try:
                self._hidden[kind] = self._judged(longer, kind in self._hidden)
            except CaptureError:
                return False
        if function is None or not self._hidden[kind]:
            return self._hidden[kind]
        return all(self._ignores(function, batch, kind, length) for batch in micro)

    def _ignores(self, function: Function, batch: Batch, kind: BatchKey, length: int) -> bool:
        """Return whether a function ignores the padding of a batch to a length, ``kind`` when padded; that a
        ``loss_fn`` does not is told once."""
        own, at = kind_of(batch), length_of(batch)
        called = LossAtLengths if batch.outputs is None else OutputsAtLengths
        function = getattr(function, "whole", function)  # more parts of a longer sequence are other calls
        found = called(function, self._model, *self._returned[kind], batch.kwargs)
        checks: dict[tuple[Any, ...], Callable[[], bool]] = {
            (own,): found.ignores_padding,
            (own, at): lambda: found.computes_alike(at, padded=False),
            (own, length, "padded"): lambda: found.computes_alike(length, padded=True),
        }
        for key, check in checks.items():
            if key not in self._ignored:
                self._ignored[key] = check()
            if not self._ignored[key]:
                if batch.outputs is None:
                    self._tell()
                return False
        return True

    def _tell(self) -> None:
        if not self._told:
            warn_user(_COUNTS)
        self._told = True

    def _judged(self, longer: Batch, known: bool) -> bool:
        """The verdict on a padded batch's graph; where another dimension is as long, on one of a near length,
        unless padding is ``known`` to be hidden.
        """
        frontend, length = self._frontend, length_of(longer)
        if not computes_as_libraries_do(self._model):
            return False
        others, is_loss = frontend.graphs_of_others(length), longer.outputs is None
        graph = frontend.captured(longer)
        if graph.prologue is not None:  # which may look at padding
            return False
        if not (is_loss or gives_positions(graph, longer, once=False)):
            return False
        telling = telling_length(length, others or [graph])
        if telling != length and known:
            return True
        if telling != length:
            longer = self.padded_to(longer, telling)
            graph = frontend.captured(longer)
        if self._function_of(longer) is not None:
            if graph.returned is None:
                return False
            self._returned[kind_of(longer)] = graph.returned, telling
        return (is_loss or gives_positions(graph, longer)) and hides_padding(self._model, graph, longer)

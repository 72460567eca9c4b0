"""The attempts at a capture: in which ways one forward is traced, one after the other, until a way succeeds.

In: what is captured. Out: its graph and the way that gave it, or the error to raise. :data:`ATTEMPTS` lists
them all in order, each with the reason after which it is made and with its cost; :class:`Attempts` goes
through them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from megacompile.capture.loss_cut import LossCut
from megacompile.capture.trace import (
    ChangesAttributes,
    How,
    LayersDiffer,
    NeedsValues,
    ReadsPadding,
    Reason,
    Refused,
    Request,
    Untraceable,
    trace,
)
from megacompile.errors import CaptureError, MegacompileError, UntraceableError
from megacompile.graph.captured import Captured

_LOG = logging.getLogger("megacompile.compiler")  # trainers show what it tells
H = TypeVar("H")
T = TypeVar("T")


class NotTried(Reason):
    """Nothing was tried so far."""


@dataclass(frozen=True)
class LossUntraceable(Refused):
    """No graph holds the model's own loss; ``cuts`` are the ways to cut it off that are left."""

    cuts: tuple[LossCut, ...]


@dataclass(frozen=True)
class OwnLoss:
    """The way in which a model's own loss is computed: by its programs, or ``cut`` off, and ``why``; ``left``
    are other ways to cut it."""

    cut: LossCut | None = None
    why: CaptureError | None = None
    left: tuple[LossCut, ...] = ()

    def failed(self, error: MegacompileError, cuts: Callable[[], Sequence[LossCut]]) -> LossUntraceable:
        """Return the reason for another attempt: the error with which the loss was captured in this way."""
        if self.why is None:
            assert isinstance(error, UntraceableError)
            return LossUntraceable(error, tuple(cuts()))
        if isinstance(error, CaptureError) and not isinstance(error, UntraceableError):
            return LossUntraceable(error, self.left)  # it could be cut off in this way, but for this
        return LossUntraceable(self.why, self.left)  # the forward needs the labels, or cannot be cut


@dataclass(frozen=True)
class Attempt:
    """A way to capture: its name, the class of reasons after which it is tried, and what it costs.

    ``way`` gives it from the way that was tried before and the reason why that did not do; None: nothing is
    left to try.
    """

    name: str
    after: type[Reason]
    way: Callable[[Any, Any], Any]
    cost: str


def _as_given(how: H, _reason: NotTried) -> H:
    return how


def _each_layer(how: How, _reason: LayersDiffer) -> How:
    return replace(how, repeats=False, first=None)


def _without_proof(how: How, _reason: ReadsPadding) -> How:
    return replace(how, proves_padding=False)


def _again(how: How, reason: ChangesAttributes) -> How:
    return replace(how, first=reason)


def with_values(how: How, _reason: NeedsValues | None = None) -> How:
    """Return the way in which values of the batch are computed on the host, which follows every call."""
    return How(repeats=False, proves_padding=False, reads_values=True, parts=how.parts)


def _without_part(how: How, reason: Untraceable) -> How | None:
    part = reason.part
    if part is None or part in how.parts:
        return None
    why = str(reason.error).partition(" be captured")[2].lstrip(" :").rstrip(".")
    _LOG.warning("%s is frozen and cannot be traced: it runs in eager PyTorch", part)
    return How(parts={**how.parts, part: why})


def _without_loss(_loss: OwnLoss, reason: LossUntraceable) -> OwnLoss | None:
    return OwnLoss(reason.cuts[0], reason.error, reason.cuts[1:]) if reason.cuts else None


ATTEMPTS = (
    Attempt("equal layers once", NotTried, _as_given, "one layer of each kind"),
    Attempt("each layer", LayersDiffer, _each_layer, "all layers"),
    Attempt("without the proof of padding", ReadsPadding, _without_proof, "once more"),
    Attempt("a second forward", ChangesAttributes, _again, "once more; refused if the two differ"),
    Attempt("values of the batch on the host", NeedsValues, with_values, "all layers, with real leaves"),
    Attempt("a frozen part in eager PyTorch", Untraceable, _without_part, "all above, for each such part"),
    Attempt("the loss cut off", LossUntraceable, _without_loss, "all above, for each way to cut"),
)
"""All attempts in their order, each tried only after its reason: most forwards need the first alone."""


class Attempts(Generic[H, T]):
    """Yields one way after the other, ``how`` first, until ``outcome`` is set to something else than a
    reason; ``how`` is the last one then."""

    def __init__(self, how: H) -> None:
        self.how = how
        self.outcome: T | Reason = NotTried()

    def __iter__(self) -> Iterator[H]:
        while isinstance(self.outcome, Reason):
            attempt = next(each for each in ATTEMPTS if isinstance(self.outcome, each.after))
            further = attempt.way(self.how, self.outcome)
            if further is None:
                return
            self.how = further
            yield further

    def get(self) -> T:
        """Return what the last one gave; raises the error for the user if no way was left."""
        if isinstance(self.outcome, Reason):
            assert isinstance(self.outcome, Refused)
            raise self.outcome.error from None
        return self.outcome


def capture(request: Request, how: How) -> Attempts[How, Captured]:
    """Capture a forward, first in this way."""
    attempts: Attempts[How, Captured] = Attempts(how)
    for way in attempts:
        attempts.outcome = trace(request, way)
    return attempts

"""What of long sequences stays whole, where a step does not fit: one sentence for the error that says so.

In: a batch's tensors, and its templates as they were differentiated for chunks of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, fx

from megacompile.blocks.costs import ATTENTION
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.partition import Template

NO_PRODUCT = "no product acts on positions alone"
"""Why a block of little work has no loops."""


_BIAS, _DROPOUT = 3, 10  # places among attention's arguments


def why_whole(
    batch: Iterable[Tensor],
    templates: Sequence[Template],
    made: Sequence[DifferentiatedTemplate],
    length: int,
) -> str | None:
    """Say why sequences of more positions than ``length`` are not all in chunks, and what helps; None where
    they are, or are no longer than that."""
    counted = [x.shape for x in batch if x.dim() > 1 and not x.is_floating_point()]  # tokens, labels
    if any(shape[0] > 1 and shape[1] > length for shape in counted):
        return "Blocks stay whole: a batch of several sequences; give micro-batches of one."
    calls = [n for t in templates for n in t.graph.nodes if n.target is ATTENTION]
    if any(_has_mask(call, length) for call in calls):
        return (
            "Attention's mask of tokens × tokens stays whole: give sequences without padding at their left, "
            "or documents by position_ids."
        )
    if any(_drops(call, length) for call in calls):
        return "Attention stays whole, with its tokens × tokens: dropout acts in it; set that to 0."
    reasons = ((t.name, t.not_looped) for t in made if t.not_looped not in (None, NO_PRODUCT))
    return next((f"The block {name} stays whole: {reason}." for name, reason in reasons), None)


def _has_mask(call: fx.Node, length: int) -> bool:
    """Return whether attention is given something for each of more than ``length`` queries and each key."""
    bias = call.args[_BIAS]
    return isinstance(bias, fx.Node) and bias.meta["val"].shape[-2:-1] > (length,)


def _drops(call: fx.Node, length: int) -> bool:
    """Return whether attention of more than ``length`` queries has a dropout."""
    queries, probability = call.args[0], call.args[_DROPOUT]
    assert isinstance(queries, fx.Node) and isinstance(probability, float)
    return probability > 0 and queries.meta["val"].shape[2] > length

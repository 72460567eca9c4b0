"""Choose to which length token batches are padded, so that few programs serve all lengths.

In: lengths in tokens. Out: the length of a program. All that pads asks here: steps and predictions
(:mod:`megacompile.api.padder`), samples without a cache, TRL's trainers, buckets of images. Whether a model
hides the padding is another question, which :mod:`megacompile.capture.padding` answers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn

MULTIPLE = 8  # of tokens, which matrix products like
_QUARTERS = 4  # the lengths of all batches, where the longest is known
_SHORT = 256  # a length whose computing takes less time than the weights take to come
_APART = 4  # how many times its tokens a step may have, for its micro-batches to be one program
_SCALED = 1 << 20  # times that no rotary embedding is stretched


def reach(model: nn.Module) -> int | None:
    """Return the number of positions that the model has embeddings for, or names in its config; scaled rotary
    embeddings count with their scaling."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("max_position_embeddings", "max_seq_len")  # GPT-2's n_positions is the first of these, too
    given = [value for name in names if isinstance(value := getattr(text, name, None), int) and value > 0]
    if not given:
        return None
    rotary = getattr(text, "rope_parameters", None) or {}
    kinds = rotary.values() if all(isinstance(kind, dict) for kind in rotary.values()) else [rotary]
    scaled = [
        int(factor * kind.get("original_max_position_embeddings", given[0]))
        for kind in kinds
        if isinstance(factor := kind.get("factor"), (int, float)) and 1 < factor < _SCALED
    ]
    return max([given[0], *scaled])


def bucket_length(length: int, *, longest: int | None = None) -> int:
    """Return the padded length where nothing is known of the batches to come: four to each doubling.

    At most a quarter longer (at least 8), at most ``longest``, and never shorter.
    """
    step = max(MULTIPLE, 1 << max(0, length.bit_length() - 3))
    padded = _rounded(length, step)
    return padded if longest is None else max(length, min(padded, longest))


def quarter_length(length: int, longest: int) -> int:
    """Return the padded length where no batch is longer than ``longest``: four lengths in all, as each may
    come in a data set that is shuffled."""
    quarter = _rounded(math.ceil(longest / _QUARTERS), MULTIPLE)
    return min(_rounded(length, quarter), longest)


def growing_length(length: int, last: int, longest: int | None) -> int:
    """Return the padded length of a sequence that grows token by token until ``last``.

    That is the last length, or twice this one if the last is far: few programs, none of them much longer than
    its batches. Beyond ``longest`` a limit would make each token a program, so there is none.
    """
    ahead = min(last, max(2 * length, _SHORT))
    if longest is None or length > longest:
        return max(length, bucket_length(ahead))
    return max(length, bucket_length(min(ahead, longest), longest=longest))


def worth_one_length(lengths: Sequence[int]) -> bool:
    """Return whether micro-batches may be padded to the longest of them, as it is not much longer."""
    return max(lengths) * len(lengths) <= _APART * sum(lengths)


class PaddingCosts:
    """The seconds that padding has cost each kind of batch that runs on a longer one's program."""

    def __init__(self) -> None:
        self._lost_seconds: dict[Hashable, float] = {}

    def pay(self, kind: Hashable, seconds: float, compile_seconds: float) -> bool:
        """Return whether a step may lose these seconds to padding; a kind that has lost as many as compiling
        takes is worth a program of its own (ski rental), so padding never costs more than that."""
        lost_seconds = self._lost_seconds.get(kind, 0.0) + seconds
        if lost_seconds > compile_seconds:
            return False
        self._lost_seconds[kind] = lost_seconds
        return True


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple

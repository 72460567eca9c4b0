"""Lengths of batches on several ranks, where these are to run one program and the program does not pad."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megacompile.capture.padding import pad_batch
from megacompile.program import Program


def longest_of(program: Program, length: int) -> int:
    """The longest that any rank has, where all ask; of a process alone its own."""
    with program.world.together():
        lengths: list[int] = [rank["length"] for rank in program.world.hear(lambda: {"length": length})]
    return max(lengths)


def as_long_as_others(program: Program, batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of tokens, padded on the right to the longest of several ranks'."""
    ids = batch.get("input_ids")
    if program.world.size == 1 or not isinstance(ids, Tensor) or ids.dim() != 2:
        return batch
    longest = longest_of(program, ids.shape[1])
    return batch if longest == ids.shape[1] and "attention_mask" in batch else pad_batch(batch, longest)

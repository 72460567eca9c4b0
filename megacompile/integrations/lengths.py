"""Lengths of rows, and of batches on several ranks, to run one program where the program does not pad."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megacompile.api.program import Program
from megacompile.capture.padding import pad_batch

_ROW_COLUMNS = (
    ("input_ids",),
    ("prompt_ids", "chosen_ids"),
    ("prompt_ids", "rejected_ids"),
)  # whose tokens a row has
_ROWS_AT_A_TIME = 10_000  # rows at a time


def longest_of(program: Program, length: int) -> int:
    """The longest that any rank has, where all ask; of a process alone its own."""
    with program.world.together():
        lengths: list[int] = [rank["length"] for rank in program.world.hear(lambda: {"length": length})]
    return max(lengths)


def as_long_as_others(program: Program, batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of tokens, padded on the right to the longest of several ranks', as upstream pads what it
    gathers of them; a program alone would pad to buckets, and only where the model hides that."""
    ids = batch.get("input_ids")
    if program.world.size == 1 or not isinstance(ids, Tensor) or ids.dim() != 2:
        return batch
    longest = longest_of(program, ids.shape[1])
    return batch if longest == ids.shape[1] and "attention_mask" in batch else pad_batch(batch, longest)


def with_rows(batch: dict[str, Any], count: int) -> dict[str, Any]:
    """Return a batch of ``count`` rows: those of another one, repeated or cut."""
    rows = len(next(value for value in batch.values() if isinstance(value, Tensor) and value.dim()))
    chosen = torch.arange(count) % rows
    return {
        name: value[chosen] if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value
        for name, value in batch.items()
    }


def longest_rows(data: Any, count: int) -> Any:
    """Return the row of most tokens ``count`` times, where lengths are at hand; else the first rows.

    Not the longest rows: a collator that pads nothing takes rows of one length alone.
    """
    lengths, count = row_lengths(data), min(count, len(data))
    numbers = [lengths.index(max(lengths))] * count if lengths else range(count)
    return data.select(numbers) if hasattr(data, "select") else [data[i] for i in numbers]


def longest_row(data: Any) -> int | None:
    """The most tokens of a row, where lengths are at hand; None of a stream, and of other data."""
    return max(row_lengths(data), default=None)


def row_lengths(data: Any) -> list[int]:
    """The tokens of each row: of a list of rows, or of a table of datasets, with tokens; else none."""
    if isinstance(data, list) and all(isinstance(row, Mapping) and "input_ids" in row for row in data):
        return [len(row["input_ids"]) for row in data]
    columns = set(getattr(data, "column_names", None) or ()) if hasattr(data, "select_columns") else set()
    kinds = [names for names in _ROW_COLUMNS if columns.issuperset(names)]
    if not kinds or not isinstance(data, Sized):
        return []
    lengths, wanted = [], sorted({name for names in kinds for name in names})
    for table in data.select_columns(wanted).with_format("arrow").iter(_ROWS_AT_A_TIME):  # type: ignore[attr-defined]
        count = {name: table[name].combine_chunks().value_lengths().to_numpy(False) for name in wanted}
        of_kinds = [sum(count[name] for name in names) for names in kinds]
        lengths += np.maximum.reduce(of_kinds).tolist()
    return lengths

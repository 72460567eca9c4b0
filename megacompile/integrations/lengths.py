"""Lengths: of batches on several ranks, to run one program where the program does not pad; of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from torch import Tensor

from megacompile.capture.padding import pad_batch
from megacompile.program import Program

_ROWS = (
    ("input_ids",),
    ("prompt_ids", "chosen_ids"),
    ("prompt_ids", "rejected_ids"),
)  # whose tokens a row has
_READ = 10_000  # rows at a time


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


def longest_rows(data: Any, count: int) -> Any:
    """Return the row of most tokens ``count`` times, where lengths are at hand; else the first rows.

    Not the longest rows: a collator that pads nothing takes rows of one length alone.
    """
    count, names = min(count, len(data)), getattr(data, "column_names", None) or ()
    if hasattr(data, "select") and "input_ids" not in names:
        return data.select(range(count))
    if hasattr(data, "select"):
        parts = data.select_columns(["input_ids"]).with_format("arrow").iter(_READ)
        columns = [part["input_ids"].combine_chunks().value_lengths().to_pylist() for part in parts]
        lengths = [length for column in columns for length in column]
        return data.select([lengths.index(max(lengths))] * count)
    if isinstance(data, list) and all(isinstance(row, Mapping) and "input_ids" in row for row in data):
        return [max(data, key=lambda row: len(row["input_ids"]))] * count
    return [data[i] for i in range(count)]


def longest_row(data: Any) -> int | None:
    """The most tokens of a row of data that TRL prepared; None of a stream, and of other data."""
    columns = set(getattr(data, "column_names", None) or ()) if hasattr(data, "select_columns") else set()
    kinds = [names for names in _ROWS if columns.issuperset(names)]
    if not kinds or not isinstance(data, Sized):
        return None
    longest, wanted = 0, sorted({name for names in kinds for name in names})
    for table in data.select_columns(wanted).with_format("arrow").iter(_READ):  # type: ignore[attr-defined]
        count = {name: table[name].combine_chunks().value_lengths().to_numpy(False) for name in wanted}
        longest = max(longest, *(int(sum(count[name] for name in names).max()) for names in kinds))
    return longest

"""Rows whose image tokens a trainer's ``max_length`` cuts off: named before training.

In: the collator that a trainer of TRL has for images, and its data. The images that were cut off would still
be in the batch, and the model refuse it, wherever in an epoch it comes. Each row is collated alone, as long
as it is, with blank images of the same sizes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from megacompile.errors import MegacompileError
from megacompile.integrations.image_buckets import Collator, images_by_size

_PLACES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")  # in configs


class _Row(NamedTuple):
    """The tokens of a row, those up to the last that stands for a part of an image, and the images' files."""

    tokens: int
    up_to_images: int
    files: str


def refuse_cut_images(
    collator: Any, data: Mapping[str, Any], config: Any, *, workers: int = 0, shows: bool = False
) -> None:
    """Raise MegacompileError where the collator's ``max_length`` cuts off image tokens of a row.

    ``data`` are data sets by their names; streams are not looked at, nor collators of other kinds.
    ``config`` is the model's. Each of ``workers`` processes collates rows; a progress bar ``shows`` how far
    they are, as this takes about as long as reading all images once.
    """
    length = getattr(collator, "max_length", None)
    if length is None or not dataclasses.is_dataclass(collator) or not hasattr(collator, "processor"):
        return
    whole: Any = dataclasses.replace(collator, max_length=None)  # type: ignore[type-var]
    marks = torch.tensor([getattr(config, name) for name in _PLACES if hasattr(config, name)])
    for name, rows in data.items():
        if not hasattr(rows, "__len__"):
            continue
        with images_by_size(whole):
            look = functools.partial(_looked_at, whole, marks)
            loader = DataLoader(rows, batch_size=1, num_workers=workers, collate_fn=look)
            found = enumerate(tqdm(loader, f"Image tokens of {name}", unit="rows", disable=not shows))
            cut = [(number, row) for number, row in found if row.up_to_images > length]
        if cut:
            (number, row), more = cut[0], f" and {len(cut) - 1} more" if len(cut) > 1 else ""
            least = max(row.up_to_images for _, row in cut)
            raise MegacompileError(
                f"max_length={length} cuts off image tokens of {name}[{number}]{row.files}{more}: it has "
                f"{row.tokens} tokens, the last of an image at {row.up_to_images}; set max_length to {least} "
                "or more, or to None, leave such rows out, or make the images smaller."
            )


def _looked_at(collator: Collator, marks: torch.Tensor, rows: list[Any]) -> _Row:
    images = pytree.tree_leaves([(row.get("images"), row.get("image")) for row in rows])
    files = ", ".join(name for name in (getattr(image, "filename", "") for image in images) if name)
    batch = collator([dict(row) for row in rows])
    mask = batch["attention_mask"].bool()
    places = (torch.isin(batch["input_ids"], marks) & mask).nonzero()[:, 1]
    last = int(places.max()) + 1 if len(places) else 0
    return _Row(int(mask.sum(1).max()), last, f" ({files})" if files else "")

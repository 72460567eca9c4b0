"""Few programs for many image sizes: batches of a vision-language model are filled up to one of few shapes.

In: what a data collator returns, with images as rows of patches (``pixel_values`` and ``image_grid_thw``, as
for the models of Qwen and GLM). Out: the same batch, with the rows, tokens, patches and images of one of few
buckets, which are chosen before training from the sizes of all examples.

What follows the last token of a row changes nothing before it in a causal model, a label of -100 does not
count, and each image attends to itself alone. So what a batch lacks comes at the ends of its rows: images of
zeros, and tokens without a label. Loss, gradients and updates are those of the batch itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader
from transformers import BatchFeature
from transformers.image_utils import make_flat_list_of_images

from megacompile.capture.padded_length import MULTIPLE
from megacompile.capture.padding import IGNORED
from megacompile.errors import MegacompileError

Collator = Callable[[list[Any]], Mapping[str, Any]]
Grid = tuple[int, int, int]  # frames, and rows and columns of patches
Shapes = tuple[tuple[int, int], ...]  # rows and columns of image tokens, of a row's images of zeros
_BATCHES = 256  # random ones, for which buckets are chosen
_LARGEST_WINDOW = 4  # image tokens a side, up to which each number of windows between the bounds is reached
_WINDOWS_OVER = 3.25  # of a row's three images, at least, beyond its image tokens / tokens of a window


class Sizes(NamedTuple):
    """The sizes of an example: its tokens, those of images among them, and the grid of each image."""

    tokens: int
    grids: tuple[Grid, ...] = ()


class Bucket(NamedTuple):
    """The sizes of batches that share a program; ``windows`` are of attention, in models that have them."""

    rows: int
    tokens: int
    patches: int = 0
    images: int = 0
    windows: int = 0

    def __str__(self) -> str:
        images = f", {self.images} images of {self.patches} patches" if self.images else ", no image"
        windows = f" in {self.windows} windows" if self.windows else ""
        return f"{self.rows} x {self.tokens} tokens{images}{windows}"


def measure(collator: Collator, dataset: Any, *, workers: int = 0) -> list[Sizes]:
    """Return the sizes of each example, which is collated alone for that, by as many ``workers``.

    The images' part of a collator's ``processor``, as TRL's has one, sees sizes alone: files that are opened
    lazily are not decoded.
    """
    with images_by_size(collator):
        measured = functools.partial(_measured_sizes, collator)
        return list(DataLoader(dataset, batch_size=1, num_workers=workers, collate_fn=measured))


@contextlib.contextmanager
def images_by_size(collator: Any) -> Iterator[None]:
    """Within, the part for images of a collator's ``processor``, if it has one, sees their sizes alone."""
    processor: Any = getattr(collator, "processor", None)
    theirs = getattr(processor, "image_processor", None)
    if theirs is not None:
        processor.image_processor = _BySize(theirs)
    try:
        yield
    finally:
        if theirs is not None:
            processor.image_processor = theirs


def _measured_sizes(collator: Collator, examples: list[Any]) -> Sizes:
    batch = collator(examples)
    return Sizes(int(_mask(batch).sum()), tuple(_grids(batch)))


class _BySize:
    """An image processor that gives the grids of images, as another one gives them for a blank image of the
    same size; of one without grids all that it gives, with one zero for all pixels."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self._grids: dict[Any, Tensor] = {}
        self._blank: dict[Any, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while it is unpickled in a worker
            raise AttributeError(name)
        return getattr(self._theirs, name)

    def __call__(self, images: Any, **options: Any) -> BatchFeature:
        if "image_grid_thw" not in self._theirs.model_input_names:
            return BatchFeature(self._without_grids(images, options))
        grids = [self._grid(image, options) for image in make_flat_list_of_images(images)]
        return BatchFeature({"image_grid_thw": torch.stack(grids), "pixel_values": torch.empty(0)})

    def _without_grids(self, images: Any, options: dict[str, Any]) -> dict[str, Any]:
        leaves, tree = pytree.tree_flatten(images)
        if not all(isinstance(image, Image) for image in leaves):
            return dict(self._theirs(images, **options))
        key = str(tree), *(image.size for image in leaves), repr(options)
        if key not in self._blank:
            blank = [np.zeros((*image.size[::-1], 3), np.uint8) for image in leaves]
            given = dict(self._theirs(pytree.tree_unflatten(blank, tree), **options))
            self._blank[key] = pytree.tree_map_only(Tensor, _in_one_element, given)
        return dict(self._blank[key])

    def _grid(self, image: Any, options: dict[str, Any]) -> Tensor:
        if not isinstance(image, Image):
            return torch.as_tensor(self._theirs(image, **options)["image_grid_thw"][0])
        key = image.size, repr(options)
        if key not in self._grids:
            self._grids[key] = self._grid(np.zeros((*image.size[::-1], 3), np.uint8), options)
        return self._grids[key]


def _in_one_element(x: Tensor) -> Tensor:
    return x.new_zeros(()).expand(x.shape) if x.is_floating_point() else x


class BucketCollator:
    """A data collator whose batches have one of few shapes, so that they need few programs.

    It calls ``collator``, and fills what that returns up to the cheapest bucket with room for it. At most
    ``programs`` buckets are chosen so that random batches of ``batch_size`` need the least filler; any batch
    of these ``sizes`` (see :func:`measure`) has room in the largest. They begin with those of the data that
    is trained on. ``config`` is the model's. ``str()``
    says how many programs an epoch needs, and how much of it is filler.
    """

    def __init__(
        self,
        collator: Collator,
        config: Any,
        sizes: Sequence[Sizes],
        *,
        batch_size: int,
        programs: int = 8,
    ) -> None:
        if not sizes:
            raise MegacompileError("There is no example to choose buckets for: give the sizes of all.")
        self._collator, self._fill = collator, _Fill.of(config, batch_size)
        self._sizes = list(sizes)
        self._batches = list(itertools.islice(_random_batches(sizes, batch_size), _BATCHES))
        self.buckets = _chosen(self._fill, self._batches, sizes, programs)

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """Collate examples, and fill the batch up to a bucket."""
        batch = self._collator(examples)
        rows = _sizes_of_rows(batch, self._fill)
        return _filled(batch, rows, *self.place(rows), self._fill)

    def largest(self, dataset: Any) -> dict[str, Any]:
        """Return a batch of the largest bucket, made of one of the examples that were measured."""
        bucket = self.buckets[-1]
        number = next(i for i, size in enumerate(self._sizes) if bool(size.grids) == bool(bucket.images))
        batch = self._collator([dataset[number]])
        rows = _sizes_of_rows(batch, self._fill)
        filler = self._fill.images_of_zeros(rows, bucket)
        assert filler is not None, "an example has room in the largest bucket"
        return _filled(batch, rows, bucket, filler, self._fill)

    def place(self, rows: Sequence[Sizes]) -> tuple[Bucket, list[list[Grid]]]:
        """Return the bucket of a batch, and the images of zeros that come at the end of each row."""
        for bucket in self.buckets:
            if (filler := self._fill.images_of_zeros(rows, bucket)) is not None:
                return bucket, filler
        raise MegacompileError(
            f"A batch of {len(rows)} rows, of up to {max(row.tokens for row in rows)} tokens, with "
            f"{sum(len(row.grids) for row in rows)} images has no room in the largest bucket "
            f"({self.buckets[-1]}): measure all examples, and give the batch_size of the loader."
        )

    def __str__(self) -> str:
        places = [self.place(batch)[0] for batch in self._batches]
        counts = {bucket: places.count(bucket) for bucket in self.buckets}
        real = sum(row.tokens for batch in self._batches for row in batch)
        patches = sum(math.prod(grid) for batch in self._batches for row in batch for grid in row.grids)
        padded = sum(len(batch) * max(row.tokens for row in batch) for batch in self._batches)
        used = sum(map(bool, counts.values()))
        text = (
            f"{used} program{'s' * (used != 1)}, at most {len(self.buckets)}; "
            f"{_rest(patches, sum(b.patches for b in places))} of patches and "
            f"{_rest(real, sum(b.rows * b.tokens for b in places))} of tokens are filler "
            f"({_rest(real, padded)} where rows are padded to the longest of their batch)."
        )
        lines = (f"\n{n / len(places):5.0%} of batches: {bucket}" for bucket, n in counts.items())
        return "".join((text, *lines)).replace("%", " %")


def _rest(part: int, whole: int) -> str:
    return f"{1 - part / whole if whole else 0:.1%}"


def _mask(batch: Mapping[str, Any]) -> Tensor:
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def _grids(batch: Mapping[str, Any]) -> list[Grid]:
    grids = batch.get("image_grid_thw")
    return [] if grids is None else [(t, h, w) for t, h, w in grids.tolist()]


def _sizes_of_rows(batch: Mapping[str, Any], fill: _Fill) -> list[Sizes]:
    """Return the sizes of each row of a batch."""
    grids, rows = iter(_grids(batch)), []
    for ids, mask in zip(batch["input_ids"], _mask(batch), strict=True):
        missing, images = int((ids[mask] == fill.image_token).sum()) * fill.unit, []
        while missing > 0:
            images.append(next(grids, (1, 1, missing + 1)))  # none is missing, or too much
            missing -= math.prod(images[-1])
        if missing or (mask.diff() != 0).sum() > 1 + int(not mask[0]):
            raise MegacompileError(
                "The image tokens of a row are not those of its images."
                if missing
                else "The attention_mask of a row hides tokens between others."
            )
        rows.append(Sizes(int(mask.sum()), tuple(images)))
    return rows


def _filled(
    batch: Mapping[str, Any], rows: Sequence[Sizes], bucket: Bucket, filler: list[list[Grid]], fill: _Fill
) -> dict[str, Any]:
    """Return a batch with the sizes of its bucket: its rows without padding, then images of zeros, then text
    that has no label. Its mask hides nothing, so that programs need none."""
    if "labels" not in batch:
        raise MegacompileError("The batch has no labels, so filler would count: let the collator add them.")
    shape, mask = (bucket.rows, bucket.tokens), _mask(batch)
    values: dict[str, Any] = {}
    for name, value in batch.items():
        if name in ("attention_mask", "pixel_values", "image_grid_thw"):
            continue
        if not isinstance(value, Tensor) or not value.dim():
            values[name] = value
        elif value.shape == mask.shape:
            empty = IGNORED if name.endswith("labels") else fill.text_token if name == "input_ids" else 0
            values[name] = value.new_full(shape, empty)
            for row, old, kept in zip(values[name], value, mask, strict=False):
                row[: int(kept.sum())] = old[kept]
        else:
            raise MegacompileError(
                f"The batch's {name} of shape {tuple(value.shape)} is not one number for each token, so it "
                "is not known how to fill it up: leave it out, or collate without buckets."
            )
    values["attention_mask"] = torch.ones(shape, dtype=torch.long)
    if not bucket.images:
        return values
    grids: list[Grid] = []
    pixels: list[Tensor] = []
    patches = batch["pixel_values"]
    pieces = iter(patches.split([math.prod(grid) for grid in _grids(batch)]))
    every = [*rows, *[Sizes(0)] * (bucket.rows - len(rows))]
    for number, (row, added) in enumerate(zip(every, filler, strict=True)):
        grids += (*row.grids, *added)
        pixels += itertools.islice(pieces, len(row.grids))
        pixels += (patches.new_zeros(math.prod(grid), patches.shape[1]) for grid in added)
        end = row.tokens
        for grid in added:
            begin, end = end + 1, end + 1 + math.prod(grid) // fill.unit
            values["input_ids"][number, begin:end] = fill.image_token
            if "mm_token_type_ids" in values:
                values["mm_token_type_ids"][number, begin:end] = 1
    return values | {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}


@dataclass(frozen=True)
class _Fill:
    """Fills batches of so many rows for a model, and tells for which batches a bucket has room.

    ``merge`` patches a side are an image token, ``window`` image tokens the side of a window of attention, 0
    where there are none. Each row gets images of zeros, with a token of text before each.
    """

    rows: int
    image_token: int
    text_token: int
    merge: int
    window: int

    @classmethod
    def of(cls, config: Any, rows: int) -> _Fill:
        vision: Any = getattr(config, "vision_config", None)
        merge = getattr(vision, "spatial_merge_size", None)
        image = getattr(config, "image_token_id", None)
        text = getattr(config, "vision_start_token_id", getattr(config, "image_start_token_id", 0))
        if merge is None or image is None:
            raise MegacompileError(
                f"{type(config).__name__} names no spatial_merge_size and image_token_id, as models do that "
                "take images as patches with grids (Qwen, GLM): resize images to few sizes instead."
            )
        if getattr(config.get_text_config(), "output_router_logits", False):
            raise MegacompileError(
                "The model's loss of its routers counts all tokens, so filler would change it: set "
                "output_router_logits to False, or collate without buckets."
            )
        side = getattr(vision, "window_size", 0) // merge // vision.patch_size
        if side > _LARGEST_WINDOW:
            raise MegacompileError(
                f"Windows of {side} x {side} image tokens are larger than buckets are made for "
                f"({_LARGEST_WINDOW} x {_LARGEST_WINDOW}): collate without buckets."
            )
        return cls(rows, image, text, merge, side if side > 1 else 0)

    @property
    def unit(self) -> int:
        """Return the patches of an image token."""
        return self.merge**2

    @property
    def images(self) -> int:
        """Return the images of zeros that each row has at least."""
        return 3 if self.window else 1

    def _of(self, row: Sizes) -> tuple[int, int, int]:
        """Return the images of a row, their tokens, and their windows."""
        tokens = sum(map(math.prod, row.grids)) // self.unit
        windows = 0
        if self.window:
            side = self.window * self.merge
            windows = sum(t * -(-h // side) * -(-w // side) for t, h, w in row.grids)
        return len(row.grids), tokens, windows

    def images_of_zeros(self, rows: Sequence[Sizes], bucket: Bucket) -> list[list[Grid]] | None:
        """Return the images to end each row of a batch with, so that it has its bucket's sizes; None if it
        has no room."""
        images, tokens, windows = map(sum, zip(*map(self._of, rows), strict=True))
        free = [bucket.tokens - row.tokens for row in rows] + [bucket.tokens] * (bucket.rows - len(rows))
        if len(free) > bucket.rows or min(free) < 0 or bool(images) != bool(bucket.images):
            return None
        if not images:
            return [[] for _ in free]
        images, tokens = bucket.images - images, bucket.patches // self.unit - tokens
        windows = bucket.windows - windows
        # Each row has its images of a token each; the others too, where there is room; then these are grown.
        others, grown = images - self.images * len(free), tokens - images
        if others < 0 or grown < 0 or min(free) < 2 * self.images:
            return None
        small, large = [], []
        for room in free:
            small.append(min(others, (room - 2 * self.images) // 2))
            others -= small[-1]
            large.append(min(grown, room - 2 * self.images - 2 * small[-1]))
            grown -= large[-1]
        if others or grown:
            return None
        shapes = self._shapes([self.images + n for n in large], windows - sum(small))
        if shapes is None:
            return None
        return [
            [(1, h * self.merge, w * self.merge) for h, w in [*shape, *[(1, 1)] * n]]
            for shape, n in zip(shapes, small, strict=True)
        ]

    def _shapes(self, tokens: Sequence[int], windows: int) -> list[Shapes] | None:
        """Return shapes, in image tokens, of images with so many in each row, and so many windows in all."""
        if not self.window:
            return [((1, n),) for n in tokens]
        options = [_by_windows(n, self.window) for n in tokens]
        least = sum(map(min, options))
        shapes: list[Shapes] = []
        for option in options:
            least -= min(option)
            number = max(min(option), min(max(option), windows - least))
            windows -= number
            shapes.append(option[number])
        return shapes if not windows else None

    # A batch has room in a bucket if some sums over its rows are at most what the bucket's sizes were made
    # of. So a bucket for several batches is one for the largest of each sum.

    def demand(self, row: Sizes) -> tuple[float, ...]:
        """Return the numbers of a row whose largest, of the first, and sums, of the others, tell which bucket
        has room for a batch."""
        images, tokens, windows = self._of(row)
        numbers = (row.tokens, images, tokens - images, row.tokens - tokens - images, row.tokens - 2 * images)
        if not self.window:
            return numbers
        side, area = self.window, self.window**2
        dense = windows - tokens / area - images * (1 - 1 / area)
        return *numbers, dense, tokens - side * windows + images * (side - 1)

    def sizes(self, demand: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens of a row, image tokens, images and windows that are room for these demands."""
        longest, images, tokens, text, rest, *of_windows = demand.unbind(-1)
        has_images, rows = images > 0, self.rows
        others, images = images, images + self.images * rows
        tokens, windows = tokens + images, torch.zeros_like(images)  # each image of zeros has a token
        if of_windows:
            side, area = self.window, self.window**2
            # Filler of whole windows has the fewest for its tokens: not fewer than are missing.
            least = of_windows[0] + others * (1 - 1 / area) + _WINDOWS_OVER * rows
            # Filler of single rows has the most: as many as are missing.
            most = of_windows[1] - (side - 1) * others - (2 * side - 2) * rows
            tokens = torch.maximum(tokens, (side * (least + 1) + most) * side / (side - 1))
            windows = (_multiple(tokens) / area + least).ceil()
        tokens = _multiple(tokens)
        # Room for the longest row with its images, for all filler, and for images of a token in pairs.
        room = (longest + 2 * self.images, (text + tokens + images) / rows, (rest + 2 * images) / rows + 1)
        length = _multiple(torch.where(has_images, torch.stack(room).amax(0), longest))
        return length, tokens * has_images, images * has_images, windows * has_images

    def cost(self, demand: Tensor) -> Tensor:
        """Return the cost of a batch with these sizes, in tokens: an image's costs as much in the tower."""
        length, tokens, _, _ = self.sizes(demand)
        return self.rows * length + tokens


def _multiple(x: Tensor) -> Tensor:
    return (x / MULTIPLE).ceil() * MULTIPLE


@functools.lru_cache(maxsize=4096)
def _by_windows(tokens: int, side: int) -> dict[int, Shapes]:
    """Return the shapes of three images with so many tokens in sum, by the number of their windows: one is of
    whole windows, one of two rows, one of a single row."""
    options: dict[int, Shapes] = {}
    for whole, pairs in itertools.product(range((tokens - 2) // side**2 + 1), range(2 * side + 1)):
        blocks = (side, side * whole) if whole else (1, 1)
        double = (2, pairs) if pairs else (1, 1)
        single = tokens - math.prod(blocks) - math.prod(double)
        if single > 0:
            shapes = (blocks, double, (1, single))
            options.setdefault(sum(-(-h // side) * -(-w // side) for h, w in shapes), shapes)
    return options


def _random_batches(sizes: Sequence[Sizes], batch_size: int) -> Iterator[list[Sizes]]:
    """Yield the batches of shuffled epochs, as many as there may be different ones of one row."""
    shuffled, draw = list(sizes), random.Random(0)
    for _ in range(batch_size):
        draw.shuffle(shuffled)
        for start in range(0, len(shuffled), batch_size):
            yield shuffled[start : start + batch_size]


def _chosen(
    fill: _Fill, batches: Sequence[Sequence[Sizes]], sizes: Sequence[Sizes], programs: int
) -> list[Bucket]:
    """Return at most ``programs`` buckets with room for any batch, cheap ones first.

    The two groups of batches are joined that are cheapest to fill up alike, until there are as few. Batches
    of text alone stay apart: in them a tower has no gradient, so it is not updated, and with images of zeros
    its gradient would be zero, with which weights decay.
    """
    rows = {row: torch.tensor(fill.demand(row), dtype=torch.float64) for row in {*sizes}}
    demands = [_demand([rows[row] for row in batch]) for batch in batches]
    every = torch.stack([rows[row] for row in sizes])
    for part in (every[every[:, 1] > 0], every[every[:, 1] == 0]):
        if len(part):
            beside = part if not part[0, 1] else every
            demands.append(_demand(beside.clamp(min=0).sort(0, descending=True).values[: fill.rows]))
    demand = torch.stack(demands)
    weight = torch.ones(len(demand), dtype=torch.float64)
    weight[len(batches) :] = 0  # the largest that may come
    while True:
        demand_of = torch.maximum(demand[:, None], demand[None])
        cost = fill.cost(demand) * weight
        more = fill.cost(demand_of) * (weight[:, None] + weight[None]) - cost[:, None] - cost[None]
        apart = (demand[:, None, 1] > 0) != (demand[None, :, 1] > 0)
        more = more.masked_fill(apart | torch.eye(len(demand), dtype=torch.bool), math.inf)
        at = int(more.argmin())
        if len(demand) <= programs and more.view(-1)[at] > 0:
            break
        i, j = sorted(divmod(at, len(demand)))
        if math.isinf(more[i, j]):
            raise MegacompileError("Batches of text alone need a program beside one with images: allow 2.")
        demand[i] = demand_of[i, j]
        weight[i] += weight[j]
        kept = torch.arange(len(demand)) != j
        demand, weight = demand[kept], weight[kept]
    order = fill.cost(demand).argsort()
    parts = torch.stack(fill.sizes(demand[order]), -1).long().tolist()
    return [Bucket(fill.rows, n, tokens * fill.unit, images, windows) for n, tokens, images, windows in parts]


def _demand(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the demand of a batch of these rows."""
    stacked = torch.stack(list(rows))
    return torch.cat([stacked[:, :1].amax(0), stacked[:, 1:].sum(0)])

"""Buckets of images: each batch has room in one, and is filled up to its sizes exactly."""

from __future__ import annotations

import functools
import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm4v import image_processing_pil_glm4v as glm4v
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2_vl
from transformers.vision_utils import get_vision_window_index

from megacompile.errors import MegacompileError
from megacompile.integrations.image_buckets import Bucket, BucketCollator, Sizes, measure
from tests.support.vision_language import Example, collate, natural_images

SIDE = st.integers(1, 20).map(lambda n: 2 * n)
EXAMPLES = st.lists(
    st.tuples(st.integers(1, 60), st.lists(st.tuples(st.just(1), SIDE, SIDE), max_size=3)),
    min_size=1,
    max_size=12,
)


def config(window: int = 0, patch: int = 14, **text: Any) -> Any:
    """What a collator reads of a model's config; windows have so many image tokens a side."""
    vision = SimpleNamespace(spatial_merge_size=2, patch_size=patch, window_size=window * 2 * patch)
    return SimpleNamespace(
        vision_config=vision,
        image_token_id=190,
        vision_start_token_id=189,
        get_text_config=lambda: SimpleNamespace(**text),
    )


def windows_of(grids: list[Any], side: int) -> int:
    if not side or not grids:
        return 0
    _, bounds = get_vision_window_index(torch.tensor(grids), 2, side * 28, 14)
    return len(bounds) - 1


@settings(max_examples=40, deadline=None)
@given(EXAMPLES, st.integers(1, 4), st.integers(2, 8), st.sampled_from((0, 2, 3, 4)), st.randoms())
def test_each_batch_is_filled_up_to_one_of_few_buckets(
    examples: list[Any], batch_size: int, programs: int, window: int, draw: random.Random
) -> None:
    sizes = [Sizes(text + sum(map(math.prod, grids)) // 4, tuple(grids)) for text, grids in examples]
    buckets = BucketCollator(collate, config(window), sizes, batch_size=batch_size, programs=programs)
    assert len(buckets.buckets) <= programs
    draw.shuffle(sizes)
    for at in range(0, len(sizes), batch_size):
        rows = sizes[at : at + batch_size]
        bucket, filler = buckets.place(rows)
        every = [grid for row in rows for grid in row.grids]
        assert bool(every) == bool(bucket.images)  # a tower without images gets no gradient
        every += [grid for row in filler for grid in row]
        patches = sum(map(math.prod, every))
        assert bucket[2:] == (patches, len(every), windows_of(every, window))
        for row, added in itertools.zip_longest(rows, filler, fillvalue=Sizes(0)):
            filled = row.tokens + len(added) + sum(map(math.prod, added)) // 4
            assert filled <= bucket.tokens
        assert len(filler) == bucket.rows == batch_size


MODELS = {  # pixels of a patch's side, image tokens of a window's side, and how images are resized
    "Qwen2-VL": (14, 0, qwen2_vl.smart_resize),
    "Qwen2.5-VL": (14, 4, qwen2_vl.smart_resize),
    "Qwen3-VL": (16, 0, qwen2_vl.smart_resize),
    "GLM-4V": (14, 0, functools.partial(glm4v.smart_resize, 2)),
}


def natural_sizes(model: str, count: int) -> list[Sizes]:
    """The sizes of rows of natural images as a model's processor makes them, at most 1280 tokens an image."""
    patch, _, resize = MODELS[model]
    draw, rows = random.Random(0), []
    for images in natural_images(count):
        frames = 2 if model == "GLM-4V" else 1
        limits = {"min_pixels": 4 * (2 * patch) ** 2, "max_pixels": 1280 * frames * (2 * patch) ** 2}
        resized = [resize(height, width, factor=2 * patch, **limits) for height, width in images]
        grids = tuple((1, height // patch, width // patch) for height, width in resized)
        text = int(min(600, max(20, draw.lognormvariate(4.6, 0.6)))) + 2 * len(grids)
        rows.append(Sizes(text + sum(map(math.prod, grids)) // 4, grids))
    return rows


@pytest.mark.slow_cases(r"(?!Qwen2\.5-VL-2)")
@pytest.mark.parametrize(("batch_size", "before"), [(1, 170), (2, 95), (4, 50)])
@pytest.mark.parametrize("model", MODELS)
def test_natural_images_need_few_programs(model: str, batch_size: int, before: int) -> None:
    """An epoch of 200 rows in any order; a third of what the tower computes, at most, is filler."""
    patch, window, _ = MODELS[model]
    sizes = natural_sizes(model, 200)
    buckets = BucketCollator(collate, config(window, patch), sizes, batch_size=batch_size)
    random.Random(1).shuffle(sizes)
    batches = [sizes[at : at + batch_size] for at in range(0, 200, batch_size)]
    places = [buckets.place(rows)[0] for rows in batches]
    real = [[grid for row in rows for grid in row.grids] for rows in batches]
    kinds = {
        (max(row.tokens for row in rows), sum(map(math.prod, grids)), len(grids), windows_of(grids, window))
        for rows, grids in zip(batches, real, strict=True)
    }
    assert len({*places}) <= len(buckets.buckets) <= 8 < before <= len(kinds)
    patches = sum(math.prod(grid) for grids in real for grid in grids)
    assert sum(bucket.patches for bucket in places) < 1.5 * patches


def test_says_how_many_programs_and_how_much_filler() -> None:
    rows = [Sizes(20), *[Sizes(24, ((1, 4, 8),))] * 6]
    buckets = BucketCollator(collate, config(), rows, batch_size=1)
    assert buckets.buckets == [Bucket(1, 24), Bucket(1, 40, 64, 2)]
    assert str(buckets).splitlines() == [
        "2 programs, at most 2; 50.0 % of patches and 37.9 % of tokens are filler "
        "(0.0 % where rows are padded to the longest of their batch).",
        "  14 % of batches: 1 x 24 tokens, no image",
        "  86 % of batches: 1 x 40 tokens, 2 images of 64 patches",
    ]


def test_pixels_are_not_decoded_to_measure_images(tmp_path: Any) -> None:
    """Files that end behind their header."""
    for number, size in enumerate(((640, 480), (300, 500), (640, 480))):
        PIL.Image.new("RGB", size).save(tmp_path / f"{number}.png")
        header = (tmp_path / f"{number}.png").read_bytes()[:64]
        (tmp_path / f"{number}.png").write_bytes(header)
    theirs = qwen2_vl.Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 256 * 28 * 28})
    processor = SimpleNamespace(image_processor=theirs)

    def collated(paths: Any) -> Any:
        images = [[PIL.Image.open(path)] for path in paths]
        return {"input_ids": torch.ones(1, 5)} | processor.image_processor(images, return_tensors="pt")

    collated.processor = processor  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="truncated"):
        collated([tmp_path / "0.png"])
    sizes = measure(collated, sorted(tmp_path.iterdir()))
    real = [theirs(PIL.Image.new("RGB", size))["image_grid_thw"] for size in ((640, 480), (300, 500))]
    first, second = (Sizes(5, tuple(tuple(map(int, grid)) for grid in grids)) for grids in real)
    assert sizes == [first, second, first]
    assert processor.image_processor is theirs


def test_rows_keep_what_they_hold() -> None:
    """Padded on the left too; their images stay in order, before the filler of the row."""
    rows = [Example(2, 6), Example(0, 9, [(4, 4)]), Example(1, 20, [(2, 4), (4, 2)])]
    sizes = measure(collate, rows)
    buckets = BucketCollator(collate, config(), sizes, batch_size=4)
    plain, batch = collate(rows), buckets(rows)
    at = 0
    for number, row in enumerate(sizes):
        ids, labels = batch["input_ids"][number], batch["labels"][number]
        assert torch.equal(ids[: row.tokens], plain["input_ids"][number, : row.tokens])
        assert torch.equal(labels[: row.tokens], plain["labels"][number, : row.tokens])
        assert bool((labels[row.tokens :] == -100).all())
        grids = batch["image_grid_thw"].tolist()
        assert grids[at : at + len(row.grids)] == [list(grid) for grid in row.grids]
        at += len(row.grids) + 1
    assert bool((batch["labels"][3] == -100).all()) and bool(batch["attention_mask"].all())
    assert torch.equal(batch["pixel_values"][batch["pixel_values"].any(1)], plain["pixel_values"])
    assert torch.equal(batch["mm_token_type_ids"], (batch["input_ids"] == 190).long())

    def on_the_left(examples: Any) -> Any:
        shift = [int(m) for m in (plain["attention_mask"] == 0).sum(1)]
        return plain | {
            name: torch.stack([row.roll(n) for row, n in zip(plain[name], shift, strict=True)])
            for name in ("input_ids", "labels", "attention_mask", "mm_token_type_ids")
        }

    moved = BucketCollator(on_the_left, config(), sizes, batch_size=4)(rows)
    assert all(torch.equal(moved[name], batch[name]) for name in batch)


def altered(**entries: Any) -> Any:
    """A collator whose batches have these entries; those that are None are left out."""

    def collated(examples: Any) -> Any:
        batch = collate(examples) | entries
        return {name: value for name, value in batch.items() if value is not None}

    return collated


@pytest.mark.parametrize(
    ("collator", "words"),
    [
        (altered(labels=None), "has no labels"),
        (altered(position_ids=torch.zeros(3, 1, 13)), r"position_ids of shape \(3, 1, 13\)"),
        (altered(image_grid_thw=torch.tensor([[1, 2, 2]])), "image tokens of a row"),
        (altered(image_grid_thw=torch.tensor([[1, 8, 8]])), "image tokens of a row"),
        (altered(attention_mask=torch.tensor([[1] * 6 + [0] + [1] * 6])), "hides tokens between others"),
        (lambda examples: collate([*examples] * 2), "A batch of 2 rows, of up to 13 tokens, with 2 images"),
    ],
)
def test_what_cannot_be_filled_is_refused(collator: Any, words: str) -> None:
    rows = [Example(0, 8, [(4, 4)])]
    buckets = BucketCollator(collator, config(), measure(collate, rows), batch_size=1)
    with pytest.raises(MegacompileError, match=words):
        buckets(rows)


def test_models_whose_batches_filler_would_change_are_refused() -> None:
    rows = measure(collate, [Example(0, 8, [(4, 4)]), Example(1, 8)])
    for of, words in (
        (config(output_router_logits=True), "loss of its routers"),
        (config(window=8), "Windows of 8 x 8"),
        (SimpleNamespace(image_token_id=3), "names no spatial_merge_size"),
    ):
        with pytest.raises(MegacompileError, match=words):
            BucketCollator(collate, of, rows, batch_size=1)
    with pytest.raises(MegacompileError, match="allow 2"):
        BucketCollator(collate, config(), rows, batch_size=1, programs=1)

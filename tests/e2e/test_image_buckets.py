"""Images of many sizes on few programs: what is trained is what plain transformers trains on the same batches
without filler."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from megacompile.integrations.image_buckets import BucketCollator, measure
from tests.e2e.test_vision_language import steps, trained
from tests.support.vision_language import Example, cases, collate

WITH_GRIDS = ["Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "GLM-4V"]
SIZES = ((4, 4), (4, 8), (2, 8), (6, 4), (10, 2), (8, 8), (2, 2))


def batches_of_two(count: int) -> list[list[Example]]:
    """Rows of text with none to two images, of sizes as they come; one batch is of text alone, the last is
    short."""
    draw = random.Random(0)
    rows = [
        Example(seed, draw.randint(5, 40), draw.choices(SIZES, k=draw.choice((0, 1, 1, 2))))
        for seed in range(2 * count - 1)
    ]
    rows[4:6] = [row._replace(sizes=()) for row in rows[4:6]]
    return [rows[at : at + 2] for at in range(0, len(rows), 2)]


def buckets_of(model: torch.nn.Module, batches: list[list[Example]], programs: int) -> BucketCollator:
    sizes = measure(collate, [row for batch in batches for row in batch])
    return BucketCollator(collate, model.config, sizes, batch_size=2, programs=programs)


@pytest.mark.parametrize("name", WITH_GRIDS)
def test_filler_changes_no_step(name: str) -> None:
    torch.manual_seed(0)
    model, batches = cases()[name].build(), batches_of_two(6)
    filled = copy.deepcopy(model)
    wanted = steps(model, [collate(batch) for batch in batches])
    buckets = buckets_of(model, batches, 3)
    for numbers, theirs in zip(steps(filled, [buckets(batch) for batch in batches]), wanted, strict=True):
        assert numbers == pytest.approx(theirs, rel=1e-5)
    for name, value in filled.named_parameters():
        torch.testing.assert_close(value, model.get_parameter(name), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", WITH_GRIDS)
def test_an_epoch_needs_as_many_programs_as_were_said(name: str) -> None:
    torch.manual_seed(0)
    model, batches = cases()[name].build(), batches_of_two(6)
    buckets = buckets_of(model, batches, 3)
    filled = [buckets(batch) for batch in batches]
    kinds = {(batch["input_ids"].shape, len(batch.get("image_grid_thw", ()))) for batch in filled}
    assert trained(model, filled, "200MB", beside=map(collate, batches)) == len(kinds) <= 3

"""Images of many sizes on few programs: what is trained is what plain transformers trains on the same batches
without filler."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

import megacompile
from megacompile.integrations.image_buckets import BucketCollator, measure
from tests.e2e.test_vision_language import steps, trained
from tests.support.vision_language import Example, cases, collate, natural_images

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


@pytest.mark.slow_cases(r"(Qwen2-VL|GLM)")
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


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_GRIDS)
def test_an_epoch_needs_as_many_programs_as_were_said(name: str) -> None:
    torch.manual_seed(0)
    model, batches = cases()[name].build(), batches_of_two(6)
    buckets = buckets_of(model, batches, 3)
    filled = [buckets(batch) for batch in batches]
    kinds = {(batch["input_ids"].shape, len(batch.get("image_grid_thw", ()))) for batch in filled}
    assert trained(model, filled, "200MB", beside=map(collate, batches)) == len(kinds) <= 3


@pytest.mark.filterwarnings("ignore:Compiling another program")
@pytest.mark.nightly
def test_an_epoch_of_natural_images_needs_few_programs() -> None:
    """200 rows, whose images are resized to at most 16 image tokens, in windows of four."""
    torch.manual_seed(0)
    model, draw, rows = cases()["Qwen2.5-VL"].build(), random.Random(0), []
    for seed, images in enumerate(natural_images(200)):
        resized = [smart_resize(*size, max_pixels=16 * 28 * 28, min_pixels=28 * 28) for size in images]
        rows.append(Example(seed, draw.randint(5, 40), [(h // 14, w // 14) for h, w in resized]))
    batches = [rows[at : at + 2] for at in range(0, 200, 2)]
    buckets = buckets_of(model, batches, 8)
    wanted, _ = steps(copy.deepcopy(model), [collate(batch) for batch in batches])
    program = megacompile.compile(
        model,
        "200MB",
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        max_grad_norm=0.5,
        compute_dtype=torch.float32,
        device="cpu",
        planner="full-recompute",
    )
    losses = [float(program.train_step(buckets(batch)).loss) for batch in batches]
    programs = len(program._session.decided.programs)
    program.close()
    assert losses == pytest.approx(wanted, rel=1e-4)
    placed = {buckets.place(measure(collate, batch))[0] for batch in batches}
    assert programs == len(placed) <= len(buckets.buckets) <= 8

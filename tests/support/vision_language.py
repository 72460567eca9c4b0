"""Small vision-language models of transformers, whose images have sizes of their own, and batches for them.

``sizes`` of a batch are, by row, what its images measure in patches, (rows, columns), or in pixels where the
model cuts and pads its images itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.models.llava_next import modeling_llava_next

Sizes = Sequence[Sequence[tuple[int, int]]]
IMAGE, _PATCH = 190, 14
TEXT: dict[str, Any] = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 8,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "patch_size": _PATCH,
}  # fmt: skip
GRIDS: dict[str, Any] = {
    "depth": 3, "hidden_size": 32, "embed_dim": 32, "intermediate_size": 48, "mlp_ratio": 2, "num_heads": 4,
    "out_hidden_size": 32, "patch_size": _PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "image_size": 112, "window_size": 56, "fullatt_block_indexes": [1], "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
_WINDOWS = ("window_size", "fullatt_block_indexes")
_STARTS = ("vision_start_token_id", "image_start_token_id")
_PINPOINTS = [[28, 56], [56, 28], [56, 56]]


class Case(NamedTuple):
    """How a model is made, and a batch of images of these sizes, from a seed, with padding on the left."""

    build: Callable[[], nn.Module]
    batch: Callable[[Sizes, int, int], dict[str, Tensor]]
    sizes: Sequence[Sizes]


def rows(counts: Sequence[Sequence[int]], seed: int, padding: int, length: int) -> dict[str, Tensor]:
    """Rows of tokens with so many for each image, whose place depends on the seed."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 180, (len(counts), length), generator=draw)
    for row, numbers in zip(ids, counts, strict=True):
        at = padding + 1 + seed % 3
        for n in numbers:
            row[at : at + n] = IMAGE
            at += n + 2
        assert at <= length
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((ids == IMAGE) | (mask == 0), -100),
    }


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_grids(sizes: Sizes, seed: int, padding: int) -> dict[str, Tensor]:
    """Patches of all images in a row, with their grids."""
    batch = rows([[h * w // 4 for h, w in row] for row in sizes], seed, padding, 40)
    grids = torch.tensor([[1, h, w] for row in sizes for h, w in row])
    if grids.numel():
        batch["image_grid_thw"] = grids
        batch["pixel_values"] = normal(seed, int(grids.prod(-1).sum()), 3 * 2 * _PATCH * _PATCH)
        batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return batch


def _by_sizes(merge: int) -> Callable[[Sizes, int, int], dict[str, Tensor]]:
    """Images in a frame as large as the largest, with their sizes."""

    def make(sizes: Sizes, seed: int, padding: int) -> dict[str, Tensor]:
        batch = rows([[h * w // merge**2 for h, w in row] for row in sizes], seed, padding, 64)
        pixels = torch.tensor([[h * _PATCH, w * _PATCH] for row in sizes for h, w in row])
        if pixels.numel():
            height, width = pixels.amax(0).tolist()
            batch["image_sizes"], batch["pixel_values"] = pixels, normal(seed, len(pixels), 3, height, width)
        return batch

    return make


def _by_tiles(sizes: Sizes, seed: int, padding: int) -> dict[str, Tensor]:
    """Tiles of each image, as many as its shape asks for, and zeros."""

    def tokens(size: tuple[int, int]) -> int:
        rows, columns = modeling_llava_next.get_anyres_image_grid_shape(size, _PINPOINTS, 28)
        seen = modeling_llava_next.unpad_image(torch.zeros(1, 2 * rows, 2 * columns), size)
        return 4 + seen.shape[1] * (seen.shape[2] + 1)

    batch = rows([[tokens(size) for size in row] for row in sizes], seed, padding, 64)
    flat = [size for row in sizes for size in row]
    if flat:
        tiles = [modeling_llava_next.image_size_to_num_patches(size, _PINPOINTS, 28) for size in flat]
        pixels = normal(seed, len(flat), max(tiles), 3, 28, 28)
        for image, n in zip(pixels, tiles, strict=True):
            image[n:] = 0
        batch |= {"pixel_values": pixels, "image_sizes": torch.tensor(flat)}
    return batch


def _by_masks(sizes: Sizes, seed: int, padding: int) -> dict[str, Tensor]:
    """As many images for each row, those it has not all zeros, and masks of their pixels."""
    batch = rows([[4] * len(row) for row in sizes], seed, padding, 32)
    most = max(map(len, sizes))
    if most:
        pixels = torch.zeros(len(sizes), most, 3, 56, 56)
        mask = torch.zeros(len(sizes), most, 56, 56, dtype=torch.bool)
        for i, row in enumerate(sizes):
            for j, (h, w) in enumerate(row):
                pixels[i, j, :, : h * _PATCH, : w * _PATCH] = normal(seed + j, 3, h * _PATCH, w * _PATCH)
                mask[i, j, : h * _PATCH, : w * _PATCH] = True
        batch |= {"pixel_values": pixels, "pixel_attention_mask": mask}
    return batch


def _with_grids(config: Any, model: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        others = () if config is transformers.Qwen2_5_VLConfig else _WINDOWS
        vision = {name: value for name, value in GRIDS.items() if name not in others}
        sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        options = {"text_config": TEXT | {"rope_parameters": sections}, "vision_config": vision}
        ids = {"image_token_id": IMAGE, "video_token_id": 191} | dict.fromkeys(_STARTS, 189)
        built: nn.Module = model(config(**options, **ids))
        return built

    return make


def _of_llava(config: Any, model: Any, text: str, tower: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        vision = TOWER | {"model_type": tower, "image_size": 112 if tower == "pixtral" else 28}
        vision |= {"head_dim": 8} if tower == "pixtral" else {}
        made = config(
            text_config=TEXT | {"model_type": text},
            vision_config=vision,
            image_token_id=IMAGE,
            image_token_index=IMAGE,
            **options,
        )
        built: nn.Module = model(made)
        return built

    return make


def _of_idefics(config: Any, model: Any, text: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = config(
            text_config=TEXT | {"model_type": text, "pad_token_id": 0},
            vision_config=TOWER | {"image_size": 56},
            image_token_id=IMAGE,
            **options,
        )
        built: nn.Module = model(made)
        return built

    return make


GRID_SIZES = ([[(4, 4)], [(4, 8), (4, 4)]], [[(4, 8)], [(8, 4), (2, 8)]])
_PIXEL_SIZES = ([[(56, 56)], [(28, 60)]], [[(40, 56)], [(60, 28)]])
_MASK_SIZES = ([[(4, 4)], [(4, 3), (2, 4)]], [[(3, 4)], [(4, 2), (4, 4)]])
_PERCEIVER = {
    "hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4,
    "resampler_head_dim": 8, "num_key_value_heads": 2,
}  # fmt: skip


def cases() -> dict[str, Case]:
    """The models by name."""
    t, fully = transformers, {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    default = fully | {"vision_feature_select_strategy": "default"}
    tiles = {"image_grid_pinpoints": _PINPOINTS}
    made = {
        "Qwen2-VL": _with_grids(t.Qwen2VLConfig, t.Qwen2VLForConditionalGeneration),
        "Qwen2.5-VL": _with_grids(t.Qwen2_5_VLConfig, t.Qwen2_5_VLForConditionalGeneration),
        "Qwen3-VL": _with_grids(t.Qwen3VLConfig, t.Qwen3VLForConditionalGeneration),
        "GLM-4V": _with_grids(t.Glm4vConfig, t.Glm4vForConditionalGeneration),
    }
    found = {name: Case(build, by_grids, GRID_SIZES) for name, build in made.items()}
    mistral3 = _of_llava(
        t.Mistral3Config, t.Mistral3ForConditionalGeneration, "mistral", "pixtral", spatial_merge_size=2
    )
    pixtral = _of_llava(t.LlavaConfig, t.LlavaForConditionalGeneration, "mistral", "pixtral", **fully)
    found["Mistral 3"] = Case(mistral3, _by_sizes(2), GRID_SIZES)
    found["LLaVA with Pixtral"] = Case(pixtral, _by_sizes(1), _MASK_SIZES)
    found["LLaVA-NeXT"] = Case(
        _of_llava(
            t.LlavaNextConfig, t.LlavaNextForConditionalGeneration, "llama", "clip_vision_model",
            **default, **tiles,
        ),
        _by_tiles,
        _PIXEL_SIZES,
    )  # fmt: skip
    found["LLaVA-OneVision"] = Case(
        _of_llava(
            t.LlavaOnevisionConfig, t.LlavaOnevisionForConditionalGeneration, "qwen2",
            "siglip_vision_model", video_token_id=191, video_token_index=191, **fully, **tiles,
        ),
        _by_tiles,
        _PIXEL_SIZES,
    )  # fmt: skip
    idefics = {
        "Idefics 2": _of_idefics(
            t.Idefics2Config, t.Idefics2ForConditionalGeneration, "mistral", perceiver_config=_PERCEIVER
        ),
        "Idefics 3": _of_idefics(
            t.Idefics3Config, t.Idefics3ForConditionalGeneration, "llama", scale_factor=2, pad_token_id=0
        ),
        "SmolVLM": _of_idefics(
            t.SmolVLMConfig, t.SmolVLMForConditionalGeneration, "llama", scale_factor=2, pad_token_id=0
        ),
    }
    return found | {name: Case(build, _by_masks, _MASK_SIZES) for name, build in idefics.items()}


class Example(NamedTuple):
    """A row of so much text, and images of these sizes in patches."""

    seed: int
    text: int
    sizes: Sequence[tuple[int, int]] = ()


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """Collate rows as processors of images in patches do: padded on the right to the longest."""
    rows, grids, pixels = [], [], []
    for seed, text, sizes in examples:
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 180, (text,), generator=draw).tolist()
        for place, (h, w) in enumerate(sizes):
            ids[1 + 2 * place : 1 + 2 * place] = [IMAGE] * (h * w // 4) + [7]
            grids.append([1, h, w])
            pixels.append(torch.randn(h * w, 3 * 2 * _PATCH * _PATCH, generator=draw))
        rows.append(torch.tensor(ids))
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((ids == IMAGE) | (mask == 0), -100),
    }
    if grids:
        batch["mm_token_type_ids"] = (ids == IMAGE).long()
        batch |= {"image_grid_thw": torch.tensor(grids), "pixel_values": torch.cat(pixels)}
    return batch


def natural_images(count: int) -> list[list[tuple[int, int]]]:
    """The images of so many rows, none to two in each, (height, width) in pixels: landscape and portrait as
    in COCO, most of them 640 pixels along the longer side."""
    draw = random.Random(0)

    def image() -> tuple[int, int]:
        kind = draw.random()
        if kind < 0.6:
            return (480, 640) if kind < 0.45 else (640, 480)
        if kind < 0.9:
            other = draw.randint(400, 560)
            return (other, 640) if kind < 0.75 else (640, other)
        return draw.randint(150, 640), draw.randint(150, 640)

    return [[image() for _ in range(draw.choices((0, 1, 2), (1, 8, 1))[0])] for _ in range(count)]

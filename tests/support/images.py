"""Small vision-language models with their processors, files of images, and chats about them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLProcessor

from tests.support.text import sentences, tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}"
    "{% generation %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}</s>{% endgeneration %}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SIZES = ((60, 40), (40, 60))  # of the files, in pixels: one number of patches
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 48, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14}


class ImagesAlone(Qwen3VLProcessor):
    """Qwen3-VL's without videos, which need torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **given: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template)


def qwen3_vl() -> tuple[nn.Module, Any]:
    """Images of 6 tokens, which lie as the image does; ``AutoProcessor`` finds the processor in a folder."""
    transformers.AutoProcessor.register(Qwen3VLConfig, ImagesAlone, exist_ok=True)
    characters = tokenizer()
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    marks = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    characters.add_special_tokens({"additional_special_tokens": list(marks)})
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    limits = {"shortest_edge": 56 * 56, "longest_edge": 56 * 112}
    shown = transformers.Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, size=limits)
    config = Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": sections},
        vision_config=TOWER
        | {"depth": 1, "num_heads": 4, "out_hidden_size": 32, "num_position_embeddings": 16}
        | {"deepstack_visual_indexes": [0]},
        **{name: characters.convert_tokens_to_ids(mark) for name, mark in zip(names, marks, strict=True)},
    )
    template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    transformers.set_seed(0)
    model: nn.Module = transformers.Qwen3VLForConditionalGeneration(config)
    return model, ImagesAlone(shown, characters, template)


def gemma3() -> tuple[nn.Module, Any]:
    """Images of 4 tokens, whatever their sizes."""
    characters = tokenizer(marks={"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"})
    shown = transformers.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    token = characters.convert_tokens_to_ids
    config = transformers.Gemma3Config(
        text_config=TEXT | {"layer_types": ["full_attention"]},
        vision_config=TOWER | {"num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 56},
        mm_tokens_per_image=4,
        image_token_index=token("<image>"),
        boi_token_index=token("<boi>"),
        eoi_token_index=token("<eoi>"),
    )
    transformers.set_seed(0)
    model: nn.Module = transformers.Gemma3ForConditionalGeneration(config)
    template = TEMPLATE.replace("IMAGE", "<boi>")
    return model, transformers.Gemma3Processor(shown, characters, template, image_seq_length=4)


def files(folder: Path, count: int, sizes: Sequence[tuple[int, int]] = SIZES) -> list[Path]:
    """PNG and JPEG files in turn, of these sizes in turn."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i in range(count):
        width, height = sizes[i % len(sizes)]
        image = Image.frombytes("RGB", (width, height), random.Random(i).randbytes(3 * width * height))
        paths.append(folder / f"{i}.{('png', 'jpg')[i % 2]}")
        image.save(paths[-1])
    return paths


def chats(count: int) -> list[list[dict[str, str]]]:
    """A question and an answer each."""
    return [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        for asked, said in zip(sentences(count, 1), sentences(count, 2), strict=True)
    ]

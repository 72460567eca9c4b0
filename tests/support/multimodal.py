"""Small models of images, video, sound and actions, each with batches of one kind, whose values depend on a
seed: beside those of :mod:`tests.support.vision_language`, whose images come in several sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as t
from torch import Tensor, nn

from tests.support.vision_language import (
    GRID_SIZES,
    GRIDS,
    IMAGE,
    TEXT,
    TOWER,
    Case,
    Sizes,
    by_grids,
    cases,
    normal,
    rows,
)

_VIDEO, _SOUND, _START, _END = range(191, 195)
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_WIDE: dict[str, Any] = {"head_dim": 16, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}
_LINEAR: dict[str, Any] = _WIDE | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 16,
}  # fmt: skip
_SIZES = [[(4, 4)], [(2, 6), (4, 2)]]


class Fixed(NamedTuple):
    """How a model is made, and a batch from a seed."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]


def _text(**options: Any) -> dict[str, Any]:
    return {**TEXT, "pad_token_id": 0, **options}


def _named(name: str, **options: Any) -> nn.Module:
    """A model of transformers, and its configuration, by their common name."""
    config = getattr(t, f"{name}Config")(**options)
    model: nn.Module = getattr(t, f"{name}ForConditionalGeneration")(config)
    return model


def _with_tokens(batch: dict[str, Tensor], token: int) -> dict[str, Tensor]:
    """The batch with this token in the place of images'."""
    ids = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, token)
    return batch | {"input_ids": ids, "labels": ids.masked_fill(ids >= IMAGE, -100)}


def _upto(lengths: list[int], most: int) -> Tensor:
    return torch.arange(most)[None] < torch.tensor(lengths)[:, None]


def _grids(name: str, **text: Any) -> Callable[[], nn.Module]:
    vision = GRIDS | {"num_hidden_layers": 2, "num_attention_heads": 4}
    return lambda: _named(
        name, text_config=_text(rope_parameters=_ROPE) | text, vision_config=vision,
        image_token_id=IMAGE, video_token_id=_VIDEO,
    )  # fmt: skip


def _of_grids(seed: int) -> dict[str, Tensor]:
    return by_grids([[(4, 4)], [(4, 8), (4, 4)]], seed, 0)


def _frames(counts: list[list[int]]) -> Callable[[int], dict[str, Tensor]]:
    """A video of two frames, with so many tokens in a row, in each row."""

    def make(seed: int) -> dict[str, Tensor]:
        batch = _with_tokens(rows(counts, seed, 0, 32), _VIDEO)
        return batch | {
            "video_grid_thw": torch.tensor([[2, 4, 4]]),
            "pixel_values_videos": normal(seed, 32, 3 * 2 * 14 * 14),
            "mm_token_type_ids": (batch["input_ids"] == _VIDEO).long() * 2,
        }

    return make


def _videollama() -> nn.Module:
    model = _named(
        "VideoLlama3", text_config=_text(model_type="qwen2"), vision_config=TOWER, image_token_id=IMAGE,
        video_token_id=_VIDEO,
    )  # fmt: skip
    for parameter in model.parameters():  # the projector is torch's own
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


def _merged(sizes: Sizes, seed: int, padding: int) -> dict[str, Tensor]:
    batch = by_grids(sizes, seed, padding)
    if "image_grid_thw" not in batch:
        return batch
    del batch["mm_token_type_ids"]
    merges = torch.full((len(batch["image_grid_thw"]),), 2)
    pixels = normal(seed, len(batch["pixel_values"]), 3 * 14 * 14)
    return batch | {"image_merge_sizes": merges, "pixel_values": pixels}


def _compressed(seed: int) -> dict[str, Tensor]:
    """A video of two frames, of whose eight tokens six are kept."""
    batch = _frames([[6], []])(seed)
    del batch["mm_token_type_ids"]
    draw = torch.Generator().manual_seed(seed)
    return batch | {
        "pixel_values_videos": normal(seed, 32, 3 * 14 * 14),
        "video_merge_sizes": torch.tensor([2]),
        "video_compression_mask": torch.randperm(8, generator=draw) < 6,
    }


def _minicpm() -> nn.Module:
    config = t.MiniCPMV4_6Config(
        text_config=_text(model_type="qwen3_5_text", **_LINEAR), image_size=112, insert_layer_id=1,
        vision_config=TOWER | {"image_size": 112, "num_hidden_layers": 3}, image_token_id=IMAGE,
        video_token_id=_VIDEO,
    )  # fmt: skip
    return t.MiniCPMV4_6ForConditionalGeneration(config)


def _merged_twice(sizes: Sizes, seed: int, padding: int) -> dict[str, Tensor]:
    """Images twice as high and wide, in one row of pixels."""
    batch = rows([[h * w // 4 for h, w in row] for row in sizes], seed, padding, 40)
    flat = [(2 * h, 2 * w) for row in sizes for h, w in row]
    if flat:
        patches = sum(h * w for h, w in flat)
        batch |= {"target_sizes": torch.tensor(flat), "pixel_values": normal(seed, 1, 3, 14, 14 * patches)}
    return batch


def _gemma4() -> nn.Module:
    text = _text(
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=200, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"], use_bidirectional_attention="vision",
    )  # fmt: skip
    vision = TOWER | {"head_dim": 8, "num_key_value_heads": 4, "patch_size": 4}
    vision |= {"pooling_kernel_size": 2, "position_embedding_size": 16}
    return _named(
        "Gemma4", text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=_VIDEO,
        audio_token_id=_SOUND, boa_token_id=_START, eoa_token_index=_END, boi_token_id=195, eoi_token_id=196,
    )  # fmt: skip


def _in_places(sizes: Sizes, seed: int, padding: int) -> dict[str, Tensor]:
    """Patches of each image with their places, filled up to 32."""
    batch = rows([[h * w // 4 for h, w in row] for row in sizes], seed, padding, 40)
    flat = [size for row in sizes for size in row]
    if flat:
        places = torch.full((len(flat), 32, 2), -1)
        for own, (h, w) in zip(places, flat, strict=True):
            own[: h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1)
        batch |= {"image_position_ids": places, "pixel_values": normal(seed, len(flat), 32, 3 * 4 * 4)}
    return batch | {"mm_token_type_ids": (batch["input_ids"] == IMAGE).long()}


def sized() -> dict[str, Case]:
    """Models of images in several sizes by name."""
    experts = _WIDE | _EXPERTS | {"first_k_dense_replace": 1}
    return {
        "Qwen3-VL-MoE": Case(_grids("Qwen3VLMoe", **_EXPERTS), by_grids, GRID_SIZES),
        "GLM-4.5V": Case(_grids("Glm4vMoe", **experts), by_grids, GRID_SIZES),
        "VideoLLaMA 3": Case(_videollama, _merged, GRID_SIZES),
        "MiniCPM-V 4.6": Case(_minicpm, _merged_twice, GRID_SIZES),
    }


def _kimi() -> nn.Module:
    text = _text(model_type="deepseek_v3", num_key_value_heads=4, kv_lora_rank=8, q_lora_rank=8)
    text |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 1, "topk_group": 1}
    del text["head_dim"]
    vision = TOWER | {"pos_emb_height": 8, "pos_emb_width": 8}
    return _named(
        "Kimi_K25", text_config=text | _EXPERTS | {"first_k_dense_replace": 1}, vision_config=vision,
        projection_hidden_size=32, image_token_id=IMAGE, video_token_id=_VIDEO,
    )  # fmt: skip


def _patches(seed: int) -> dict[str, Tensor]:
    batch = _of_grids(seed)
    del batch["mm_token_type_ids"]
    return batch | {"pixel_values": normal(seed, len(batch["pixel_values"]), 3, 14, 14)}


def _patches_and_kinds(seed: int) -> dict[str, Tensor]:
    return _of_grids(seed) | _patches(seed)


def _naflex(seed: int) -> dict[str, Tensor]:
    flat = [size for row in _SIZES for size in row]
    mask = _upto([h * w for h, w in flat], 16).int()
    pixels = normal(seed, len(flat), 16, 3 * 4 * 4) * mask[..., None]
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(flat)}


def _lfm2(seed: int) -> dict[str, Tensor]:
    return rows([[h * w // 4 for h, w in row] for row in _SIZES], seed, 0, 40) | _naflex(seed)


def _ovis() -> nn.Module:
    vision = TOWER | {"image_size": 56, "vocab_size": 64, "hidden_stride": 2}
    return _named(
        "Ovis2", text_config=_text(model_type="qwen2"), vision_config=vision, image_token_id=IMAGE,
        visual_indicator_token_ids=[191, 192, 193, 194, 195], vocab_size=200, hidden_size=32,
    )  # fmt: skip


def _with_indicators(seed: int) -> dict[str, Tensor]:
    batch = rows([[4], [4]], seed, 0, 24)
    for row in batch["input_ids"]:
        at = int((row == IMAGE).nonzero()[0])
        row[at - 1], row[at + 4] = 191, 193
    return _with_tokens(batch, IMAGE) | {"pixel_values": normal(seed, 2, 3, 56, 56)}


def _kosmos() -> nn.Module:
    text = {"vocab_size": 200, "max_position_embeddings": 64, "embed_dim": 32, "layers": 2, "ffn_dim": 64}
    text |= {"attention_heads": 4, "dropout": 0.0, "attention_dropout": 0.0}
    vision = TOWER | {"image_size": 28}
    return _named("Kosmos2", text_config=text, vision_config=vision, latent_query_num=4)


def _with_mask_of_images(seed: int) -> dict[str, Tensor]:
    batch = rows([[4], [4]], seed, 0, 24)
    mask = (batch["input_ids"] == IMAGE).long()
    return batch | {"image_embeds_position_mask": mask, "pixel_values": normal(seed, 2, 3, 28, 28)}


def _videomae() -> nn.Module:
    return t.VideoMAEForPreTraining(
        t.VideoMAEConfig(
            image_size=28, patch_size=14, num_frames=4, hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, intermediate_size=64, decoder_num_attention_heads=4,
            decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_intermediate_size=64,
        )
    )  # fmt: skip


def _hidden_patches(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.stack([torch.randperm(8, generator=draw) < 6 for _ in range(2)])
    return {"pixel_values": normal(seed, 2, 4, 3, 28, 28), "bool_masked_pos": mask}


def _pi0() -> nn.Module:
    vision = TOWER | {"model_type": "siglip_vision_model", "image_size": 28, "projection_dim": 32}
    seeing = {
        "model_type": "paligemma", "text_config": _text(model_type="gemma"), "vision_config": vision,
        "image_token_id": IMAGE, "projection_dim": 32, "hidden_size": 32,
    }  # fmt: skip
    return _named(
        "PI0", vlm_config=seeing, dit_config=_text(model_type="gemma"), chunk_size=4, max_state_dim=6,
        max_action_dim=5,
    )  # fmt: skip


def _actions(seed: int) -> dict[str, Tensor]:
    """Two cameras with four tokens each; the mask, of ones, is what positions are counted from."""
    ids = torch.randint(3, 180, (2, 14), generator=torch.Generator().manual_seed(seed))
    ids[:, :8] = IMAGE
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": normal(seed, 2, 2, 3, 28, 28),
        "pixel_attention_mask": torch.ones(2, 2, dtype=torch.bool),
        "state": normal(seed, 2, 6),
        "noise": normal(seed + 1, 2, 4, 5),
        "actions": normal(seed + 2, 2, 4, 5),
        "timestep": normal(seed, 2).sigmoid(),
    }


_EARS: dict[str, Any] = {
    "num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "d_model": 32, "max_source_positions": 16,
}  # fmt: skip


def _qwen2_audio() -> nn.Module:
    text = _text(model_type="qwen2")
    return _named("Qwen2Audio", text_config=text, audio_config=_EARS, audio_token_index=_SOUND)


def _sound(seed: int) -> dict[str, Tensor]:
    """Sound of 32 and 20 frames, of which 8 and 5 tokens are made."""
    batch = _with_tokens(rows([[8], [5]], seed, 0, 24), _SOUND)
    mask = _upto([32, 20], 32).long()
    return batch | {"input_features": normal(seed, 2, 8, 32), "feature_attention_mask": mask}


def _omni() -> nn.Module:
    config = t.Qwen2_5OmniThinkerConfig(
        text_config=_text(rope_parameters=_ROPE), vision_config=GRIDS, audio_token_index=_SOUND,
        audio_config=_EARS | {"n_window": 8, "output_dim": 32, "max_source_positions": 64},
        image_token_index=IMAGE, video_token_index=_VIDEO, audio_start_token_id=_START,
        audio_end_token_id=_END, vision_start_token_id=195, vision_end_token_id=196, user_token_id=197,
    )  # fmt: skip
    return t.Qwen2_5OmniThinkerForConditionalGeneration(config)


def _sound_and_images(seed: int) -> dict[str, Tensor]:
    batch, grids = rows([[8, 4], [5, 8]], seed, 0, 48), torch.tensor([[1, 4, 4], [1, 4, 8]])
    for row, tokens in zip(batch["input_ids"], (8, 5), strict=True):
        of_images = (row == IMAGE).nonzero().flatten()
        row[of_images[:tokens]] = _SOUND
        row[of_images[0] - 1], row[of_images[tokens - 1] + 1] = _START, _END
        row[of_images[tokens] - 1], row[of_images[-1] + 1] = 195, 196
    sound = {key: _sound(seed)[key] for key in ("input_features", "feature_attention_mask")}
    pixels = normal(seed, 48, 3 * 2 * 14 * 14)
    return _with_tokens(batch, IMAGE) | sound | {"pixel_values": pixels, "image_grid_thw": grids}


def _granite() -> nn.Module:
    encoder = {"input_dim": 8, "num_layers": 2, "hidden_dim": 32, "num_heads": 4, "dim_head": 8}
    encoder |= {"output_dim": 12, "context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 3, "dropout": 0}
    projector = {"model_type": "blip_2_qformer", "hidden_size": 32, "encoder_hidden_size": 32}
    projector |= {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    projector |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = _named(
        "GraniteSpeech", text_config=_text(model_type="granite"), encoder_config=encoder,
        projector_config=projector, audio_token_index=_SOUND, has_lora_adapter=False,
        downsample_rate=2, window_size=4,
    )  # fmt: skip
    for parameter in model.parameters():  # a few are left as they were in memory
        nn.init.normal_(parameter, std=0.02)
    return model


def _sound_of_granite(seed: int) -> dict[str, Tensor]:
    batch = _with_tokens(rows([[8], [6]], seed, 0, 24), _SOUND)
    return batch | {"input_features": normal(seed, 2, 16, 8), "input_features_mask": _upto([8, 6], 8)}


def _clap() -> nn.Module:
    text = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"intermediate_size": 64, "max_position_embeddings": 64, "projection_dim": 16}
    ears = {"window_size": 4, "num_mel_bins": 8, "spec_size": 32, "hidden_size": 32, "projection_dim": 16}
    ears |= {"depths": [1, 1], "num_attention_heads": [2, 4], "num_hidden_layers": 2, "num_classes": 4}
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return t.ClapModel(
        t.ClapConfig(
            text_config=text | dropped,
            audio_config=ears | dropped | {"patch_embeds_hidden_size": 16},
            projection_dim=16,
            logit_scale_init_value=1.0,
        )
    )


def _sound_and_text(seed: int) -> dict[str, Any]:
    ids = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(seed))
    mask = _upto([12, 8 + seed], 12).long()
    sound = {"input_features": normal(seed, 2, 1, 100, 8), "is_longer": torch.zeros(2, 1, dtype=torch.bool)}
    return sound | {"input_ids": ids.where(mask > 0, 1), "attention_mask": mask, "return_loss": True}


def _upernet() -> nn.Module:
    stages = {"out_features": [f"stage{i}" for i in range(1, 5)]}
    backbone = t.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1] * 4, drop_path_rate=0.0, **stages)
    config = t.UperNetConfig(
        backbone_config=backbone, hidden_size=16, auxiliary_in_channels=24, auxiliary_channels=8,
        num_labels=3, pool_scales=[1, 2],
    )  # fmt: skip
    return t.UperNetForSemanticSegmentation(config)


def _classes(seed: int) -> dict[str, Tensor]:
    labels = torch.randint(0, 3, (2, 64, 64), generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": normal(seed, 2, 3, 64, 64), "labels": labels}


def fixed() -> dict[str, Fixed]:
    """The models by name."""
    qwen3 = cases()["Qwen3-VL"].build
    lfm2 = {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 4}
    in_lfm2 = _text(model_type="lfm2", layer_types=["conv", "full_attention"], block_ff_dim=64)
    return {
        "VideoMAE, pre-training": Fixed(_videomae, _hidden_patches),
        "Kosmos 2": Fixed(_kosmos, _with_mask_of_images),
        "PI0": Fixed(_pi0, _actions),
        "Qwen3.5": Fixed(_grids("Qwen3_5", **_LINEAR), _of_grids),
        "Qwen3.5-MoE": Fixed(_grids("Qwen3_5Moe", **_LINEAR | _EXPERTS), _of_grids),
        "PaddleOCR-VL": Fixed(_grids("PaddleOCRVL"), _patches_and_kinds),
        "Kimi K2.5": Fixed(_kimi, _patches),
        "LFM2-VL": Fixed(
            lambda: _named(
                "Lfm2Vl", text_config=in_lfm2, vision_config=TOWER | lfm2 | {"vision_use_head": False},
                image_token_id=IMAGE, projector_hidden_size=32,
            ),
            _lfm2,
        ),
        "Ovis 2": Fixed(_ovis, _with_indicators),
        "Qwen3-VL, video": Fixed(qwen3, _frames([[4, 4], []])),
        "Qwen2-Audio": Fixed(_qwen2_audio, _sound),
        "Qwen2.5-Omni": Fixed(_omni, _sound_and_images),
        "Granite Speech": Fixed(_granite, _sound_of_granite),
        "VideoLLaMA 3, compressed video": Fixed(_videollama, _compressed),
        "Gemma 4": Fixed(_gemma4, lambda seed: _in_places(GRID_SIZES[0], seed, 0)),
        "CLAP": Fixed(_clap, _sound_and_text),
        "UperNet": Fixed(_upernet, _classes),
    }  # fmt: skip

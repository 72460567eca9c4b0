"""Built-in geometries of published models, and what else the name of a model may be.

A preset is what the published config.json says about shapes, as fields of transformers configs; what has no
bearing on bytes or FLOPs (token ids, rotary base, dropout of zero) is left at the class's default. Nothing
here needs torch or transformers, so that a wrong name is told at once.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacompile.errors import MegacompileError
from megacompile.json_codec import parse_json
from megacompile.text_files import path_of, read_text


@dataclass(frozen=True)
class Preset:
    """A geometry: ``billions`` is the published parameter count, ``active`` the count of the parameters that
    compute a text token. Tests hold the geometry to both."""

    model_type: str
    fields: dict[str, Any]
    billions: float
    active: float
    source: str


def _dense_models(
    model_type: str,
    source: str,
    vocab: int,
    rows: dict[str, tuple[float, int, int, int, int, int, bool]],
    **more: Any,
) -> dict[str, Preset]:
    """Presets of one family from (billions, layers, hidden, intermediate, heads, kv heads, tied)."""
    return {
        name: Preset(
            model_type,
            {"vocab_size": vocab, "num_hidden_layers": layers, "hidden_size": hidden,
             "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv,
             "tie_word_embeddings": tied, **more},
            billions, billions, source,
        )
        for name, (billions, layers, hidden, inner, heads, kv, tied) in rows.items()
    }  # fmt: skip


_LLAMA = _dense_models("llama", "The Llama 3 Herd of Models, table 3; model cards", 128256, {
    "llama-3.1-8b": (8.03, 32, 4096, 14336, 32, 8, False),
    "llama-3.1-70b": (70.6, 80, 8192, 28672, 64, 8, False),
    "llama-3.1-405b": (405.9, 126, 16384, 53248, 128, 8, False),
}, max_position_embeddings=131072) | _dense_models("llama", "Llama 3.2 model cards and config.json", 128256, {
    "llama-3.2-1b": (1.236, 16, 2048, 8192, 32, 8, True),
    "llama-3.2-3b": (3.213, 28, 3072, 8192, 24, 8, True),
}, max_position_embeddings=131072)  # fmt: skip
_QWEN25_SOURCE = "Qwen2.5 technical report, table 1; model cards"
_QWEN25 = _dense_models("qwen2", _QWEN25_SOURCE, 151936, {
    "qwen2.5-0.5b": (0.494, 24, 896, 4864, 14, 2, True),
    "qwen2.5-1.5b": (1.54, 28, 1536, 8960, 12, 2, True),
    "qwen2.5-3b": (3.09, 36, 2048, 11008, 16, 2, True),
}, max_position_embeddings=131072) | _dense_models("qwen2", _QWEN25_SOURCE, 152064, {
    "qwen2.5-7b": (7.62, 28, 3584, 18944, 28, 4, False),
    "qwen2.5-14b": (14.8, 48, 5120, 13824, 40, 8, False),
    "qwen2.5-32b": (32.8, 64, 5120, 27648, 40, 8, False),
    "qwen2.5-72b": (72.7, 80, 8192, 29568, 64, 8, False),
}, max_position_embeddings=131072)  # fmt: skip
_QWEN3 = _dense_models("qwen3", "Qwen3 technical report, table 1; model cards", 151936, {
    "qwen3-0.6b": (0.596, 28, 1024, 3072, 16, 8, True),
    "qwen3-1.7b": (1.72, 28, 2048, 6144, 16, 8, True),
    "qwen3-4b": (4.02, 36, 2560, 9728, 32, 8, True),
    "qwen3-8b": (8.19, 36, 4096, 12288, 32, 8, False),
    "qwen3-14b": (14.8, 40, 5120, 17408, 40, 8, False),
    "qwen3-32b": (32.8, 64, 5120, 25600, 64, 8, False),
}, head_dim=128, max_position_embeddings=40960)  # fmt: skip
_GEMMA3_SOURCE = "Gemma 3 technical report, table 1 (embedding + non-embedding, no vision encoder)"
_GEMMA3 = (
    _dense_models("gemma3_text", _GEMMA3_SOURCE, 262144,
                  {"gemma3-1b": (1.0, 26, 1152, 6912, 4, 1, True)},
                  head_dim=256, sliding_window=512, max_position_embeddings=32768)
    | _dense_models("gemma3_text", _GEMMA3_SOURCE, 262208, {
        "gemma3-4b": (3.884, 34, 2560, 10240, 8, 4, True),
        "gemma3-12b": (11.77, 48, 3840, 15360, 16, 8, True),
    }, head_dim=256, sliding_window=1024)
    | _dense_models("gemma3_text", _GEMMA3_SOURCE, 262208,
                    {"gemma3-27b": (27.02, 62, 5376, 21504, 32, 16, True)},
                    head_dim=128, sliding_window=1024, query_pre_attn_scalar=168)
)  # fmt: skip

_OTHERS = (
    _dense_models("smollm3", "SmolLM3-3B, config.json", 128256,
                  {"smollm3-3b": (3.075, 36, 2048, 11008, 16, 4, True)}, max_position_embeddings=65536)
    | _dense_models("mistral", "Mistral-Small-24B-Base-2501, config.json", 131072,
                    {"mistral-small-3-24b": (23.57, 40, 5120, 32768, 32, 8, False)},
                    head_dim=128, sliding_window=None, max_position_embeddings=32768)
    | _dense_models("phi3", "phi-4, config.json", 100352,
                    {"phi-4": (14.66, 40, 5120, 17920, 40, 10, False)},
                    max_position_embeddings=16384, original_max_position_embeddings=16384)
    | _dense_models("olmo3", "Olmo-3-1025-7B and Olmo-3-1125-32B, config.json", 100278, {
        "olmo3-7b": (7.298, 32, 4096, 11008, 32, 32, False),
        "olmo3-32b": (32.23, 64, 5120, 27648, 40, 8, False),
    }, sliding_window=4096, max_position_embeddings=65536)
    | _dense_models("olmo_hybrid", "Olmo-Hybrid-7B, config.json", 100352,
                    {"olmo-hybrid-7b": (7.431, 32, 3840, 11008, 30, 30, False)},
                    max_position_embeddings=65536)
)  # fmt: skip


def _experts(model_type: str, source: str, billions: float, active: float, **fields: Any) -> Preset:
    return Preset(model_type, {"tie_word_embeddings": False, **fields}, billions, active, source)


_MIXTRAL_SOURCE = "Mixtral of Experts, table 1; model card"
_EXPERTS = {
    "qwen3-235b-a22b": _experts(
        "qwen3_moe", "Qwen3 technical report, table 2; model card", 235.1, 22.2,
        vocab_size=151936, num_hidden_layers=94, hidden_size=4096, intermediate_size=12288,
        moe_intermediate_size=1536, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=40960),
    "qwen3-30b-a3b": _experts(
        "qwen3_moe", "Qwen3 technical report, table 2; model card", 30.53, 3.3,
        vocab_size=151936, num_hidden_layers=48, hidden_size=2048, intermediate_size=6144,
        moe_intermediate_size=768, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=40960),
    "glm-4.5-air": _experts(
        "glm4_moe", "GLM-4.5-Air, config.json (without the prediction module)", 106.85, 12.2,  # published: 12
        vocab_size=151552, num_hidden_layers=46, hidden_size=4096, intermediate_size=10944,
        moe_intermediate_size=1408, num_attention_heads=96, num_key_value_heads=8, head_dim=128,
        attention_bias=True, n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8,
        first_k_dense_replace=1, max_position_embeddings=131072),
    "mixtral-8x7b": _experts(
        "mixtral", _MIXTRAL_SOURCE, 46.7, 12.9, vocab_size=32000, num_hidden_layers=32,
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32768),
    "mixtral-8x22b": _experts(
        "mixtral", "Mistral AI, model card of 8x22B", 140.6, 39.1, vocab_size=32768,
        num_hidden_layers=56, hidden_size=6144, intermediate_size=16384, num_attention_heads=48,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=65536),
    "deepseek-v3": _experts(
        "deepseek_v3", "DeepSeek-V3 technical report, section 4.2 (without the prediction module)",
        671.0, 37.0, vocab_size=129280, num_hidden_layers=61, hidden_size=7168,
        intermediate_size=18432, moe_intermediate_size=2048, num_attention_heads=128,
        num_key_value_heads=128, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
        n_group=8, topk_group=4, first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, routed_scaling_factor=2.5),
} | {
    name: _experts(
        "gpt_oss", "gpt-oss model card, table 1", billions, active, vocab_size=201088,
        num_hidden_layers=layers, hidden_size=2880, intermediate_size=2880, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, sliding_window=128, num_local_experts=experts,
        num_experts_per_tok=4, max_position_embeddings=131072)
    for name, layers, experts, billions, active in (
        ("gpt-oss-20b", 24, 32, 20.91, 3.61), ("gpt-oss-120b", 36, 128, 116.83, 5.13))
}  # fmt: skip


def _with_towers(
    model_type: str,
    source: str,
    billions: float,
    active: float,
    text: dict[str, Any],
    tied: bool,
    **towers: Any,
) -> Preset:
    """A model that reads more than text; ``towers`` are the configs of what reads the rest."""
    fields = {"text_config": {"tie_word_embeddings": tied, **text}, "tie_word_embeddings": tied, **towers}
    return Preset(model_type, fields, billions, active, source)


# vision towers that several sizes of Qwen's models share
_SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
_LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
_QWEN3_VL = {
    name: _with_towers(
        kind, "Qwen3-VL-2B, 4B, 8B, 32B and 30B-A3B, config.json; model cards", billions, active,
        {"vocab_size": 151936, "num_hidden_layers": layers, "hidden_size": hidden,
         "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv,
         "head_dim": 128, "max_position_embeddings": 262144, **experts},
        tied, vision_config={**tower, "out_hidden_size": hidden, "deepstack_visual_indexes": deep},
    )
    for tower, deep, kind, experts, rows in (
        (_SMALL_TOWER, [5, 11, 17], "qwen3_vl", {}, {
            "qwen3-vl-2b": (2.128, 1.721, 28, 2048, 6144, 16, 8, True),
            "qwen3-vl-4b": (4.438, 4.022, 36, 2560, 9728, 32, 8, True),
        }),
        (_LARGE_TOWER, [8, 16, 24], "qwen3_vl", {}, {
            "qwen3-vl-8b": (8.767, 8.191, 36, 4096, 12288, 32, 8, False),
            "qwen3-vl-32b": (33.36, 32.76, 64, 5120, 25600, 64, 8, False),
        }),
        (_LARGE_TOWER, [8, 16, 24], "qwen3_vl_moe",
         {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
         {"qwen3-vl-30b-a3b": (31.07, 3.3, 48, 2048, 6144, 32, 4, False)}),
    )
    for name, (billions, active, layers, hidden, inner, heads, kv, tied) in rows.items()
}  # fmt: skip
_QWEN35_SOURCE = "Qwen3.5, config.json of each size; model cards (without the prediction module)"
_QWEN35_TEXT = {"vocab_size": 248320, "head_dim": 256, "max_position_embeddings": 262144}
_QWEN35 = {
    name: _with_towers(
        "qwen3_5", _QWEN35_SOURCE, billions, active,
        {**_QWEN35_TEXT, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
         "num_attention_heads": heads, "num_key_value_heads": kv, "linear_num_value_heads": values},
        tied, vision_config={**tower, "out_hidden_size": hidden},
    )
    for name, tower, billions, active, layers, hidden, inner, heads, kv, values, tied in (
        ("qwen3.5-0.8b", {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12},
         0.853, 0.752, 24, 1024, 3584, 8, 2, 16, True),
        ("qwen3.5-2b", _SMALL_TOWER, 2.213, 1.882, 24, 2048, 6144, 8, 2, 16, True),
        ("qwen3.5-4b", _SMALL_TOWER, 4.539, 4.206, 32, 2560, 9216, 16, 4, 32, True),
        ("qwen3.5-9b", _LARGE_TOWER, 9.410, 8.954, 32, 4096, 12288, 16, 4, 32, False),
        ("qwen3.5-27b", _LARGE_TOWER, 27.36, 26.90, 64, 5120, 17408, 24, 4, 48, False),
    )
} | {
    "qwen3.5-35b-a3b": _with_towers(
        "qwen3_5_moe", _QWEN35_SOURCE, 35.11, 3.0,
        {**_QWEN35_TEXT, "num_hidden_layers": 40, "hidden_size": 2048, "num_attention_heads": 16,
         "num_key_value_heads": 2, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
         "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8},
        False, vision_config={**_LARGE_TOWER, "out_hidden_size": 2048}),
}  # fmt: skip
_GEMMA4_SOURCE = "Gemma 4, config.json of each size; model cards"
_GEMMA4_TOWER = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                 "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72,
                 "standardize": True}  # fmt: skip
_GEMMA4 = {
    name: _with_towers(
        "gemma4", _GEMMA4_SOURCE, billions, active,
        {"vocab_size": 262144, "hidden_size": hidden, "intermediate_size": inner,
         "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
         "head_dim": 256, "final_logit_softcapping": 30.0, **more},
        True, **towers,
    )
    for name, billions, active, layers, hidden, inner, heads, kv, more, towers in (
        ("gemma4-e2b", 5.104, 4.629, 35, 1536, 6144, 8, 1,
         {"num_kv_shared_layers": 20, "use_double_wide_mlp": True, "sliding_window": 512,
          "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7},
         {"vision_config": {"use_clipped_linears": True}, "audio_config": {}}),
        ("gemma4-e4b", 7.941, 7.463, 42, 2560, 10240, 8, 2,
         {"num_kv_shared_layers": 18, "sliding_window": 512},
         {"vision_config": {"use_clipped_linears": True}, "audio_config": {}}),
        ("gemma4-26b-a4b", 25.81, 3.823, 30, 2816, 2112, 16, 8,
         {"num_global_key_value_heads": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
          "sliding_window": 1024, "max_position_embeddings": 262144, "enable_moe_block": True,
          "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
         {"vision_config": _GEMMA4_TOWER}),
        ("gemma4-31b", 31.27, 30.70, 60, 5376, 21504, 32, 16,
         {"num_global_key_value_heads": 4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
          "sliding_window": 1024, "max_position_embeddings": 262144},
         {"vision_config": _GEMMA4_TOWER}),
    )
}  # fmt: skip
_MISTRAL_SMALL = {
    "mistral-small-3.2-24b": _with_towers(
        "mistral3", "Mistral-Small-3.2-24B-Instruct-2506, config.json", 24.01, 23.57,
        {**_OTHERS["mistral-small-3-24b"].fields, "model_type": "mistral", "max_position_embeddings": 131072},
        False,
        vision_config={"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096,
                       "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14,
                       "image_size": 1540}),
}  # fmt: skip
PRESETS: dict[str, Preset] = (
    _LLAMA | _QWEN25 | _QWEN3 | _QWEN3_VL | _QWEN35 | _GEMMA3 | _GEMMA4 | _OTHERS | _MISTRAL_SMALL | _EXPERTS
)


def find_model(name: str) -> Preset | Path | str:
    """What a model's name stands for: a preset, the config.json of a model, or, as it is, a hub id or a
    config's class."""
    preset = PRESETS.get(name.lower())
    if preset is not None:
        return preset
    path = path_of(name, "--model")
    if path.is_dir() and name and not (path / "config.json").is_file():
        raise MegacompileError(f"--model {name}: there is no config.json in this folder.")
    if name and (path.exists() or path.suffix == ".json"):
        path = path / "config.json" if path.is_dir() else path
        model_type(path)
        return path
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return name
    if name.isidentifier() and name.endswith("Config"):
        return name
    near = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "`megacompile models` lists what is built in."
    raise MegacompileError(
        f"No model is called {name!r}: {hint} A config.json or its folder, a hub id (owner/name) "
        "and a config's class in transformers, such as LlamaConfig, work too."
    )


def model_type(path: Path) -> str:
    """Which kind of model a config.json is of, as transformers names it."""
    fields = parse_json(read_text(path), str(path), finite=False)  # Mamba-2's limits of time steps
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise MegacompileError(f"{path} is no config of a model: it has no model_type.")
    return kind

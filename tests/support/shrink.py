"""Small configurations of any transformers architecture: same code paths, thousands of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

VOCABULARY = 128
HIDDEN, HEADS, HEAD_DIM, KV_HEADS, LAYERS, INNER = 32, 4, 8, 2, 2, 64

ROLES: dict[str, tuple[str, ...]] = {
    "vocabulary": ("vocab_size", "decoder_vocab_size", "text_vocab_size"),
    "hidden": (
        "hidden_size", "n_embd", "d_model", "dim", "n_embed", "word_embed_proj_dim", "attention_hidden_size",
        "embedding_size", "emb_dim", "lru_width",
    ),
    "heads": (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
        "encoder_attention_heads",
    ),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "layers": (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "decoder_layers",
        "encoder_layers", "num_decoder_layers",
    ),
    "inner": (
        "intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "d_inner", "d_ff", "encoder_ffn_dim",
        "ffn_hidden_size", "dff", "mlp_hidden_size",
    ),
    "expert_inner": (
        "moe_intermediate_size", "expert_dim", "shared_intermediate_size", "shared_expert_intermediate_size",
        "expert_ffn_hidden_size",
    ),
    "head_dim": (
        "head_dim", "kv_channels", "attention_head_dim", "d_kv", "swa_head_dim", "v_head_dim",
        "qk_nope_head_dim", "qk_head_dim", "swa_v_head_dim",
    ),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "chosen_experts": ("num_experts_per_tok", "moe_topk", "moe_k", "top_k"),
    "window": ("sliding_window", "attention_window_size", "attention_chunk_size"),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"),
}  # fmt: skip
"""What configurations call one and the same size."""

_COMMON: dict[str, int] = {
    "vocabulary": VOCABULARY, "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS, "layers": LAYERS,
    "inner": INNER, "expert_inner": 16, "head_dim": HEAD_DIM, "experts": 4, "chosen_experts": 2, "window": 8,
    "positions": 64,
}  # fmt: skip

_SIZES: dict[str, Any] = {
    **{name: size for role, size in _COMMON.items() for name in ROLES[role]},
    **dict.fromkeys(("qk_rope_head_dim",), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_ssm", "d_state"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), HEADS),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("index_n_heads", "index_head_dim"), 4),
    **dict.fromkeys(("index_topk",), 8),
    **dict.fromkeys(("pad_token_id", "padding_idx"), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    **dict.fromkeys(("num_token_types", "type_vocab_size"), 2),
}

_LATENT = {"head_dim": 4, "qk_head_dim": 12, "num_key_value_heads": HEADS}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16}
_MIXED = ["linear_attention", "full_attention"]
_OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
         "minicpm3", "youtu"),
        _LATENT,
    ),
    "longcat_flash": {**_LATENT, "zero_expert_num": 2},
    "bailing_hybrid": {**_LATENT, "layer_group_size": 2, "linear_head_dim": 8, "num_experts_per_token": 2,
                       "num_expert_group": 1},
    "kimi_linear": {**_LATENT, "layer_types": _MIXED, "linear_head_dim": 8, "num_experts_per_token": 2},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["mamba", "attention"]},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "cpmant": {"dim_head": 8, "dim_ff": 64, "prompt_types": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "nemotron_h": {"moe_shared_expert_intermediate_size": 16},
    "reformer": {"axial_pos_shape": [4, 6], "axial_pos_embds_dim": [16, 16], "attention_head_size": 8,
                 "feed_forward_size": 64, "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8,
                 "attn_layers": ["local", "lsh"], "is_decoder": True, "num_buckets": 4},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 32},
    "roc_bert": {"pronunciation_embed_dim": 16, "pronunciation_vocab_size": 128, "shape_embed_dim": 16,
                 "shape_vocab_size": 128},
    "xlstm": {"qk_dim_factor": 1.0, "embedding_dim": 32},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2,
              "attention_hidden_size": 64,
              "attention_head_dim": 16, "n_mamba_heads": 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2,
               "attention_hidden_size": 64, "n_mamba_heads": 8,
               "attention_head_dim": 16, "mamba_headdim": 8, "num_query_groups": 4, "kv_channels": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "qwen3_next": {"layer_types": _MIXED},
    "qwen3_5_text": {"layer_types": _MIXED},
    "qwen3_5_moe_text": {"layer_types": _MIXED},
    "gemma3n_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
                     "num_kv_shared_layers": 1, "laurel_rank": 4, "num_hidden_layers": 3,
                     "layer_types": ["full_attention"] * 3, "activation_sparsity_pattern": [0.0] * 3},
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
                    "per_layer_config": {}},
    "qwen4_exp_text": {"layer_types": _MIXED, "indexer_n_heads": 4, "indexer_kv_heads": 1,
                       "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2,
                       "ngram_vocab_size_base": 64, "ple_embed_dim": 32, "hc_lowrank": 8,
                       "split_ngram_parts": 1},
    "cohere_compass_text": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0}
        for kind in ("full_attention", "sliding_attention")
    }},
    "dots3_note_text": {"num_key_value_heads": HEADS, "head_dim": 12, "per_layer_config": {},
                        "layer_types": ["indexed_attention", "sliding_attention"]},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}},
    "phi4_multimodal": {"num_hidden_layers": 2},
}  # fmt: skip
"""What an architecture needs beyond the common sizes, by model type."""


def shrink(config_class: Any, roles: Mapping[str, int] = MappingProxyType({}), **changes: Any) -> Any:
    """A small configuration of ``config_class``; nested configurations are shrunken too.

    ``roles`` are sizes other than the common ones, which an architecture's own overrule.
    """
    default = config_class()
    given = dict(default.to_dict())
    sizes = _SIZES | {name: size for role, size in roles.items() for name in ROLES[role]}
    values = {name: size for name, size in sizes.items() if name in given and _replaceable(given[name])}
    for name in getattr(config_class, "sub_configs", None) or {}:
        nested = type(getattr(default, name, None))  # where the class only says that it is some configuration
        if hasattr(nested, "model_type"):
            values[name] = shrink(nested, roles).to_dict()
    for extra in (_OVERRIDES.get(config_class.model_type, {}), changes):
        values.update(extra)
    return config_class(**values)


def _replaceable(value: Any) -> bool:
    return value is None or isinstance(value, int)

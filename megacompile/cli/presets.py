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
    """A geometry: ``billions`` and ``active`` are the published parameter counts that tests hold it to."""

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


def _experts(model_type: str, source: str, billions: float, active: float, **fields: Any) -> Preset:
    return Preset(model_type, {"tie_word_embeddings": False, **fields}, billions, active, source)


_MIXTRAL_SOURCE = "Mixtral of Experts, table 1; model card"
_EXPERTS = {
    "qwen3-235b-a22b": _experts(
        "qwen3_moe", "Qwen3 technical report, table 2; model card", 235.1, 22.2,
        vocab_size=151936, num_hidden_layers=94, hidden_size=4096, intermediate_size=12288,
        moe_intermediate_size=1536, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=40960),
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
PRESETS: dict[str, Preset] = _LLAMA | _QWEN25 | _QWEN3 | _GEMMA3 | _EXPERTS


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
        f"No model is called {name!r}: {hint} A path to a config.json also works, "
        "or a class of transformers, such as LlamaConfig."
    )


def model_type(path: Path) -> str:
    """Which kind of model a config.json is of, as transformers names it."""
    fields = parse_json(read_text(path), str(path), finite=False)  # Mamba-2's limits of time steps
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise MegacompileError(f"{path} is no config of a model: it has no model_type.")
    return kind

"""Random training set-ups of transformers' models: configuration, batch, habits, budget.

:func:`draw` makes a :class:`Trial` of a seed, :func:`case` what the judge takes. Many draws are no model
that transformers can build or train; the judge says so, and they cost little.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.reference import Habits
from tests.support.shrink import shrink
from tests.support.zoo import Batch, Case, causal_types, config_class_of, generator, model_class_of

ENCODERS = (
    "AlbertForMaskedLM", "BertForMaskedLM", "BigBirdForMaskedLM", "CamembertForMaskedLM",
    "ConvBertForMaskedLM", "DebertaForMaskedLM", "DebertaV2ForMaskedLM", "DistilBertForMaskedLM",
    "ElectraForMaskedLM", "ErnieForMaskedLM", "EsmForMaskedLM", "EuroBertForMaskedLM", "FNetForMaskedLM",
    "FunnelForMaskedLM", "GteForMaskedLM", "LayoutLMForMaskedLM", "LongformerForMaskedLM",
    "MegatronBertForMaskedLM", "MobileBertForMaskedLM", "ModernBertForMaskedLM", "MPNetForMaskedLM",
    "NomicBertForMaskedLM", "NystromformerForMaskedLM", "RemBertForMaskedLM", "RobertaForMaskedLM",
    "RobertaPreLayerNormForMaskedLM", "RoFormerForMaskedLM", "SqueezeBertForMaskedLM",
    "XLMRobertaForMaskedLM", "XLMRobertaXLForMaskedLM", "XmodForMaskedLM",
)  # fmt: skip
SEQ2SEQ = (
    "BartForConditionalGeneration", "BigBirdPegasusForConditionalGeneration",
    "BlenderbotForConditionalGeneration", "BlenderbotSmallForConditionalGeneration",
    "FSMTForConditionalGeneration", "LEDForConditionalGeneration", "LongT5ForConditionalGeneration",
    "M2M100ForConditionalGeneration", "MarianMTModel", "MBartForConditionalGeneration",
    "MT5ForConditionalGeneration", "MvpForConditionalGeneration", "NllbMoeForConditionalGeneration",
    "PegasusForConditionalGeneration", "PLBartForConditionalGeneration",
    "ProphetNetForConditionalGeneration", "SwitchTransformersForConditionalGeneration",
    "T5ForConditionalGeneration", "UMT5ForConditionalGeneration",
)  # fmt: skip
SWITCHES = (
    "attention_bias", "mlp_bias", "use_bias", "bias", "norm_topk_prob", "scale_embedding",
    "use_sliding_window", "use_qk_norm", "qk_layernorm", "use_parallel_residual", "parallel_attn", "alibi",
    "multi_query",
    "new_decoder_architecture", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "lm_head_bias",
    "reorder_and_upcast_attn", "do_layer_norm_before", "conv_bias", "mamba_proj_bias", "use_conv_bias",
    "residual_in_fp32", "output_router_logits", "rope_interleave", "use_post_norm", "qkv_bias", "norm_bias",
    "apply_residual_connection_post_layernorm", "enable_bias", "add_bias_linear", "is_gated_act",
    "normalize_embedding", "position_biased_input", "token_dropout", "mamba_conv_bias", "mlp_only",
)  # fmt: skip
DROPOUTS = (
    "attention_dropout", "hidden_dropout", "dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "activation_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "emb_pdrop", "embedding_dropout",
    "residual_dropout", "resid_dropout", "dropout_rate", "attention_dropout_prob", "mlp_dropout",
)  # fmt: skip
MULTIPLIERS = (
    "embedding_multiplier", "logits_scaling", "residual_multiplier", "logit_scale", "routed_scaling_factor",
)  # fmt: skip
ACTIVATIONS = ("gelu", "silu", "relu", "gelu_new", "gelu_pytorch_tanh", "relu2", "quick_gelu")
BATCHES = ("plain", "plain", "ones", "right", "left", "ragged", "packed", "ignored", "counted")


@dataclass(frozen=True)
class Trial:
    """One drawn set-up, as plain values; ``model`` is a model type of causal models, or a class's name.

    ``lora``: only adapters of PEFT are trained. ``piece_bytes``: how small pieces of weights may get, 0: as
    small as they ever do, which is larger than these models.
    """

    seed: int
    model: str
    dtype: str
    roles: dict[str, int]
    changes: dict[str, Any]
    batch: str
    rows: int
    lengths: tuple[int, ...]
    frozen: str
    share: float
    kernels: bool
    lora: bool = False
    evaluates: bool = False
    piece_bytes: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    habits: Habits = field(default_factory=Habits)


def draw(seed: int) -> Trial:
    """The trial of a seed, for the installed transformers."""
    rng = random.Random(seed)
    kind = rng.random()
    name = rng.choice(causal_types() if kind < 0.7 else ENCODERS if kind < 0.85 else SEQ2SEQ)
    roles = _sizes(rng)
    micro = rng.choice((1, 1, 1, 2, 3))
    length = rng.randint(2, 40)
    lengths = tuple(length if rng.random() < 0.8 else rng.randint(2, 40) for _ in range(micro))
    rates = ((1e-3, 0.01), (3e-3, 1.0), (1e-2, 0.0))[: rng.choice((1, 1, 2, 3))]
    given = _defaults(name)
    varied = len(set(lengths)) > 1
    return Trial(
        seed=seed,
        model=name,
        dtype=rng.choice(("float32", "bfloat16")),
        roles=roles,
        changes=_changes(rng, given) | (_without_dropout(given) if varied else {}),
        batch=_batch_kind(rng.choice(BATCHES), causal=kind < 0.7),
        rows=rng.randint(1, 3),
        lengths=lengths,
        frozen=rng.choice(("nothing", "nothing", "nothing", "embeddings", "half", "first layer")),
        share=round(rng.uniform(0.1, 1.0), 2),
        kernels=rng.random() < 0.5,
        habits=Habits(rng.choice((1.0, 1.0, None, 0.01)), rates),
        lora=rng.random() < 0.1,
        evaluates=rng.random() < 0.3,
        piece_bytes=rng.choice((0, 0, 1 << 9, 1 << 11, 1 << 13)),
        options=_options(rng) | ({"max_seq_len": max(lengths)} if varied else {}),
    )


def _batch_kind(drawn: str, *, causal: bool) -> str:
    """Losses of causal models alone are divided by a given number of items."""
    return "plain" if drawn == "counted" and not causal else drawn


def _options(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.3:
        found["optimizer_state"] = rng.choice(("int8", "int4"))
    if rng.random() < 0.3:
        found["on_nonfinite"] = rng.choice(("skip", "raise"))
    return found


def _sizes(rng: random.Random) -> dict[str, int]:
    """Sizes that most architectures can take together; a few times only."""
    if rng.random() < 0.3:
        return {}
    heads, head_dim = rng.choice((1, 2, 4, 6)), rng.choice((4, 8, 16))
    experts = rng.choice((2, 4, 7))
    return {
        "heads": heads,
        "kv_heads": rng.choice([k for k in (1, 2, 3, heads) if heads % k == 0]),
        "head_dim": head_dim,
        "hidden": heads * head_dim,
        "layers": rng.randint(1, 4),
        "inner": rng.choice((24, 64, 100)),
        "expert_inner": rng.choice((8, 20)),
        "vocabulary": rng.choice((67, 128, 515)),
        "experts": experts,
        "chosen_experts": rng.randint(1, min(3, experts)),
        "window": rng.randint(1, 32),
    }


def _defaults(name: str) -> dict[str, Any]:
    try:
        return dict(config_class_of(name)().to_dict())
    except Exception:  # transformers cannot make it without more; the judge will say why
        return {}


def _changes(rng: random.Random, given: dict[str, Any]) -> dict[str, Any]:
    """Values for what this configuration knows of the things that are drawn."""
    found: dict[str, Any] = {}
    for name in SWITCHES:
        if isinstance(given.get(name), bool) and rng.random() < 0.3:
            found[name] = not given[name]
    if "tie_word_embeddings" in given:
        found["tie_word_embeddings"] = rng.random() < 0.5
    drop = rng.choice((0.0, 0.0, 0.1, 0.3))
    found.update({n: drop for n in DROPOUTS if isinstance(given.get(n), (int, float)) and rng.random() < 0.7})
    for name in MULTIPLIERS:
        if isinstance(given.get(name), float) and rng.random() < 0.3:
            found[name] = rng.choice((0.5, 3.0))
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if name in given:
            found[name] = rng.choice((None, 2.0, 30.0))
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        if isinstance(given.get(name), str) and rng.random() < 0.4:
            found[name] = rng.choice(ACTIVATIONS)
    for name in ("initializer_range", "init_std"):
        if isinstance(given.get(name), float):
            found[name] = rng.choice((0.02, 0.1, 0.3))
    rope = given.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_type") == "default" and rng.random() < 0.5:
        found["rope_parameters"] = {**rope, **_rope(rng)}
    return found


def _without_dropout(given: dict[str, Any]) -> dict[str, Any]:
    """Batches that are padded draw other elements than eager does, which pads nothing."""
    return {n: 0.0 for n in DROPOUTS if isinstance(given.get(n), (int, float))}


def _rope(rng: random.Random) -> dict[str, Any]:
    before = {"original_max_position_embeddings": 16}
    return rng.choice(
        (
            {"rope_theta": 500.0},
            {"rope_type": "linear", "factor": 2.0},
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_type": "yarn", "factor": 4.0, **before},
            {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **before},
            {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0], "long_factor": [2.0], **before},
            {"partial_rotary_factor": 0.5},
        )
    )


def case(trial: Trial) -> Case:
    """What the judge takes."""

    def make() -> nn.Module:
        model_class, config_class = model_class_of(trial.model), config_class_of(trial.model)
        config = shrink(config_class, trial.roles, **trial.changes)
        if hasattr(config, "is_decoder") and not config.is_encoder_decoder and trial.model in causal_types():
            config.is_decoder = True
        model: nn.Module = model_class(config)
        _freeze(model, trial)
        return _adapted(model, 0.1 if len(set(trial.lengths)) == 1 else 0.0) if trial.lora else model

    return Case(
        f"seed {trial.seed}: {trial.model}", trial.batch, make, lambda seed: _batch(trial, seed),
        micro=len(trial.lengths), habits=trial.habits, share=trial.share, kernels=trial.kernels,
        options=trial.options, evaluates=trial.evaluates,
    )  # fmt: skip


def _freeze(model: nn.Module, trial: Trial) -> None:
    rng = random.Random(trial.seed)
    for name, parameter in model.named_parameters():
        table = any(part in name for part in ("embed", "wte", "wpe", "shared"))
        first = ".0." in name
        frozen = {"nothing": False, "embeddings": table, "first layer": first, "half": rng.random() < 0.5}
        parameter.requires_grad_(not frozen[trial.frozen])


def _adapted(model: nn.Module, dropout: float) -> nn.Module:
    """The model with adapters at its linear layers, which alone are trained; some are not zero at first."""
    import peft

    given = peft.LoraConfig(r=3, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    adapted: nn.Module = peft.get_peft_model(model, given)
    return adapted


def _batch(trial: Trial, seed: int) -> Batch:
    length = trial.lengths[seed % len(trial.lengths)]
    rows = 1 if trial.batch == "packed" else trial.rows
    vocabulary = trial.roles.get("vocabulary", 128)
    source = generator(seed)
    ids = torch.randint(3, vocabulary, (rows, length), generator=source)
    batch: Batch = {"input_ids": ids, "labels": ids.clone()}
    if trial.batch in ("ones", "right", "left", "ragged"):
        batch["attention_mask"] = mask = _mask(trial.batch, ids, source)
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    elif trial.batch == "packed":
        first = max(1, length // 3)
        batch["position_ids"] = torch.cat([torch.arange(first), torch.arange(length - first)])[None]
    elif trial.batch == "ignored":
        batch["labels"][:, : length // 2] = -100
    elif trial.batch == "counted":
        batch["num_items_in_batch"] = 5 * length
    return batch


def _mask(kind: str, ids: Tensor, source: torch.Generator) -> Tensor:
    """1 where a token is; "right" and "left" pad the last row by a third, "ragged" each row as it comes."""
    mask = torch.ones_like(ids)
    length = ids.shape[1]
    if kind in ("right", "left"):
        mask[-1, slice(length - length // 3, length) if kind == "right" else slice(0, length // 3)] = 0
    elif kind == "ragged":
        for row in mask:
            row[int(torch.randint(2, length + 1, (), generator=source)) :] = 0  # a label at least
    return mask

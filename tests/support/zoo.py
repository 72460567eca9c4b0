"""Architectures to try: small models of every kind that people train, with batches for them.

A :class:`Case` builds a model and its batches; :func:`cases` lists those of transformers' causal
language models (enumerated, so that new ones are tried as they appear) and a few of every other kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.reference import Habits
from tests.support.shrink import VOCABULARY, shrink

Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One model to try: how it is made, its batch number ``seed``, and how it is trained.

    ``share``: of the bytes at which everything fits, what a budget between that and the least gives.
    ``options`` are given to ``compile`` too. ``evaluates``: the loss is taken in eval mode between steps.
    """

    name: str
    kind: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    micro: int = 1
    habits: Habits = field(default_factory=Habits)
    share: float = 0.4
    kernels: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    evaluates: bool = False

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().train()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def tokens(seed: int, size: int = 2, length: int = 24) -> Tensor:
    return torch.randint(3, VOCABULARY, (size, length), generator=generator(seed))


def token_batch(seed: int) -> Batch:
    ids = tokens(seed)
    return {"input_ids": ids, "labels": ids.clone()}


def padded_batch(seed: int, *, left: bool = False) -> Batch:
    """Rows of 24 and 17 tokens, the second padded; the loss ignores the padding."""
    ids = tokens(seed)
    mask = torch.ones_like(ids)
    mask[1, slice(0, 7) if left else slice(17, 24)] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed_batch(seed: int) -> Batch:
    """One row that holds sequences of 10, 8 and 6 tokens, told apart by their positions."""
    ids = tokens(seed, size=1)
    positions = torch.cat([torch.arange(n) for n in (10, 8, 6)])[None]
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}


def model_class_of(name: str) -> Any:
    """The class that ``AutoModelForCausalLM`` makes for a model type, or the class of that name."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name, name)
    return getattr(transformers, found if isinstance(found, str) else found[0])


def config_class_of(name: str) -> Any:
    """The class of configurations of :func:`model_class_of`."""
    from transformers import CONFIG_MAPPING

    return model_class_of(name).config_class or CONFIG_MAPPING[name]


def causal(model_type: str, **changes: Any) -> nn.Module:
    """A small causal language model of a type."""
    config = shrink(config_class_of(model_type), **changes)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    model: nn.Module = model_class_of(model_type)(config)
    return model


def causal_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _causal_case(model_type: str) -> Case:
    return Case(model_type, "causal LM", lambda: causal(model_type), token_batch)


def _of(class_name: str, **changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        model_class = getattr(transformers, class_name)
        model: nn.Module = model_class(shrink(model_class.config_class, **changes))
        return model

    return make


def _few_experts(model_type: str) -> Callable[[], nn.Module]:
    """More experts than a batch has tokens: some get none, and their gradient is zero."""
    return lambda: causal(model_type, num_local_experts=64, num_experts=64)


def _image_batch(seed: int) -> Batch:
    pixels = torch.randn(2, 3, 32, 32, generator=generator(seed))
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (2,), generator=generator(seed + 1))}


def _map_batch(seed: int) -> Batch:
    labels = torch.randint(0, 2, (2, 8, 8), generator=generator(seed + 1))
    return {**_image_batch(seed), "labels": labels}


def _short_batch(seed: int) -> Batch:
    ids = tokens(seed, size=1, length=8)
    return {"input_ids": ids, "labels": ids.clone()}


def _classify_batch(seed: int) -> Batch:
    batch = padded_batch(seed)
    return {**batch, "labels": torch.randint(0, 2, (2,), generator=generator(seed + 1))}


_TRANSFORMERS: dict[str, tuple[str, Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "llama, right-padded": ("padding", lambda: causal("llama"), padded_batch),
    "llama, left-padded": ("padding", lambda: causal("llama"), lambda s: padded_batch(s, left=True)),
    "llama, packed": ("packing", lambda: causal("llama"), packed_batch),
    "gemma2, right-padded": ("padding", lambda: causal("gemma2"), padded_batch),
    "gpt_oss, left-padded": ("padding", lambda: causal("gpt_oss"), lambda s: padded_batch(s, left=True)),
    "mistral, packed": ("packing", lambda: causal("mistral"), packed_batch),
    "mistral, sliding": ("sliding window", lambda: causal("mistral", sliding_window=5), token_batch),
    "qwen2, sliding": (
        "sliding window",
        lambda: causal("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1),
        token_batch,
    ),
    "mixtral, experts without tokens": ("experts", _few_experts("mixtral"), _short_batch),
    "qwen3_moe, experts without tokens": ("experts", _few_experts("qwen3_moe"), _short_batch),
    "T5": ("encoder-decoder", _of("T5ForConditionalGeneration", decoder_start_token_id=0), token_batch),
    "T5, padded": (
        "encoder-decoder", _of("T5ForConditionalGeneration", decoder_start_token_id=0), padded_batch,
    ),
    "BART": ("encoder-decoder", _of("BartForConditionalGeneration"), padded_batch),
    "Pegasus": ("encoder-decoder", _of("PegasusForConditionalGeneration"), token_batch),
    "BERT, padded": ("encoder", _of("BertForMaskedLM"), padded_batch),
    "BERT classifier": ("encoder", _of("BertForSequenceClassification"), _classify_batch),
    "RoBERTa, padded": ("encoder", _of("RobertaForMaskedLM"), padded_batch),
    "ALBERT, padded": ("encoder", _of("AlbertForMaskedLM"), padded_batch),
    "ELECTRA, padded": ("encoder", _of("ElectraForMaskedLM"), padded_batch),
    "DistilBERT, padded": ("encoder", _of("DistilBertForMaskedLM"), padded_batch),
    "DeBERTa-v2": ("encoder", _of("DebertaV2ForMaskedLM"), padded_batch),
    "ModernBERT, padded": ("encoder", _of("ModernBertForMaskedLM"), padded_batch),
    "XLM-R, padded": ("encoder", _of("XLMRobertaForMaskedLM"), padded_batch),
    "ViT": ("vision", _of("ViTForImageClassification", image_size=32, patch_size=8), _image_batch),
    "DeiT": ("vision", _of("DeiTForImageClassification", image_size=32, patch_size=8), _image_batch),
    "DINOv2": ("vision", _of("Dinov2ForImageClassification", image_size=32, patch_size=8), _image_batch),
    "Swin": (
        "vision",
        _of("SwinForImageClassification", image_size=32, patch_size=4, embed_dim=16, depths=[1, 1],
            num_heads=[2, 2], window_size=4),
        _image_batch,
    ),
    "ConvNeXt": (
        "vision",
        _of("ConvNextForImageClassification", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
        _image_batch,
    ),
    "ResNet": (
        "batch norm",
        _of("ResNetForImageClassification", embedding_size=8, hidden_sizes=[16, 32], depths=[2, 1]),
        _image_batch,
    ),
    "RegNet": (
        "batch norm",
        _of("RegNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2],
            groups_width=4),
        _image_batch,
    ),
    "SegFormer": (
        "batch norm",
        _of("SegformerForSemanticSegmentation", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
            hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2],
            mlp_ratios=[2, 2], decoder_hidden_size=16, drop_path_rate=0.0),
        _map_batch,
    ),
}  # fmt: skip


class UNet(nn.Module):
    """Two levels down and up, the skips concatenated."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(_conv(width * 2**i, width * 2 ** (i + 1)) for i in range(2))
        self.middle = _conv(width * 4, width * 4)
        self.up = nn.ModuleList(_conv(width * (4 + 4) // 2**i, width * 2 // 2**i) for i in range(2))
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, skips = self.enter(x), []
        for block in self.down:
            h = block(h)
            skips.append(h)
            h = nn.functional.avg_pool2d(h, 2)
        h = self.middle(h)
        for block in self.up:
            h = nn.functional.interpolate(h, scale_factor=2.0)
            h = block(torch.cat([h, skips.pop()], 1))
        return nn.functional.mse_loss(self.leave(h), y)


def _conv(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(4, outer), nn.SiLU())


class MlpMixer(nn.Module):
    def __init__(self, width: int = 32, patches: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 8, stride=8)
        self.blocks = nn.ModuleList(MixerBlock(width, patches) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(self.norm(h).mean(1)), y)


class MixerBlock(nn.Module):
    def __init__(self, width: int, patches: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(
            nn.Linear(patches, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, patches)
        )
        self.channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.tokens(self.norm1(h).transpose(1, 2)).transpose(1, 2)
        return h + self.channels(self.norm2(h))


class Lstm(nn.Module):
    def __init__(self, cell: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.rnn = cell(32, 32, batch_first=True, **options)
        self.head = nn.Linear(64 if options.get("bidirectional") else 32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        h, _ = self.rnn(self.embed(input_ids))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


class Universal(nn.Module):
    """One block called several times, as in a universal transformer."""

    def __init__(self, width: int = 32, times: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True)
        self.head, self.times = nn.Linear(width, VOCABULARY), times

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(input_ids)
        for _ in range(self.times):
            h = self.block(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


class Torch(nn.Module):
    """torch's own encoder-decoder transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.body = nn.Transformer(32, 4, 2, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1])
        h = self.body(h, h, tgt_mask=mask, tgt_is_causal=True)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def _pixels(seed: int) -> Batch:
    x = torch.randn(2, 3, 32, 32, generator=generator(seed))
    return {"x": x, "y": torch.randn(2, 3, 32, 32, generator=generator(seed + 1))}


def _classes(seed: int) -> Batch:
    x = torch.randn(2, 3, 32, 32, generator=generator(seed))
    return {"x": x, "y": torch.randint(0, 10, (2,), generator=generator(seed + 1))}


_PLAIN: dict[str, tuple[str, Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "U-Net": ("skips", UNet, _pixels),
    "MLP-Mixer": ("plain", MlpMixer, _classes),
    "LSTM": ("recurrent", lambda: Lstm(nn.LSTM, num_layers=2), token_batch),
    "LSTM, bidirectional, dropout": (
        "recurrent",
        lambda: Lstm(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.1),
        token_batch,
    ),
    "GRU": ("recurrent", lambda: Lstm(nn.GRU), token_batch),
    "one block called 4 times": ("shared block", Universal, token_batch),
    "nn.Transformer": ("encoder-decoder", Torch, token_batch),
}


def cases() -> dict[str, Case]:
    """Every architecture to try, by name: the named set-ups first."""
    named = {**_TRANSFORMERS, **_PLAIN}
    found = [Case(name, *parts) for name, parts in named.items()]
    return {c.name: c for c in found + [_causal_case(t) for t in causal_types()]}

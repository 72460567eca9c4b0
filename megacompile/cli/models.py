"""Models by name: a preset, a config.json (file or folder), a hub id of which only config.json is read, or a
config's class in transformers with its defaults.

Out: a causal language model on the meta device, and the counts that model FLOPs are made of. No remote code
runs, and no weight is needed.
"""

from __future__ import annotations

import difflib
import importlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from megacompile.api.pretrained import auto_class
from megacompile.capture.quantized_weights import plan_as
from megacompile.capture.weight_codings import BlockCoding, RowCoding, WeightCoding
from megacompile.cli.presets import Preset, find_model, model_type
from megacompile.errors import MegacompileError
from megacompile.state.several_optimizers import Several

_MOST_LAYERS, _MOST = 4096, 1 << 24  # beyond any model
# how names of fields end that say how large it is
_SIZE_SUFFIXES = ("size", "dim", "heads", "layers", "experts")
_NEEDED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
_NOT_ATTENDING = {"linear_attention", "conv", "mlp", "moe"}  # kinds of layers, as transformers names them


FROZEN: dict[str, Callable[[tuple[int, ...]], WeightCoding] | None] = {
    "bf16": None,
    "8bit": RowCoding,
    "4bit": lambda shape: BlockCoding(shape, 64),  # bitsandbytes' default
}


@dataclass(frozen=True)
class Lora:
    """PEFT's LoRA of a rank, on the modules of these names; none: on all linear layers but the head.

    ``frozen`` says how the base's linear layers but the head are kept, a key of :data:`FROZEN`.
    """

    rank: int
    targets: tuple[str, ...] = ()
    frozen: str = "bf16"


@dataclass(frozen=True)
class Model:
    """A causal language model on the meta device under the name that the user gave.

    ``lora`` are the adapters that alone are trained; None: all of it is.
    """

    name: str
    config: Any
    module: nn.Module
    lora: Lora | None = None

    @property
    def text_config(self) -> Any:
        """The config of what reads text, which is the whole model's where it reads nothing else."""
        return self.config.get_text_config()

    @property
    def tower_parameters(self) -> int:
        """Those that text alone does not pass through, as a vision tower's."""
        if self.text_config is self.config:
            return 0
        text: Any = self.module.get_base_model() if self.lora else self.module  # type: ignore[operator]
        parts = (text.get_decoder(), text.get_output_embeddings())
        read = {id(p) for part in parts if part is not None for p in part.parameters()}
        return sum(p.numel() for p in self.module.parameters() if id(p) not in read)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    @property
    def trained_parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through: of routed experts only those it is sent to."""
        held = sum(p.numel() for n, p in self.module.named_parameters() if ".experts." in n)
        passed = self.parameters - self.tower_parameters
        if not held:
            return passed
        chosen = _first(self.text_config, "num_experts_per_tok", "num_experts_per_token", "top_k_experts")
        experts = _first(self.text_config, "n_routed_experts", "num_local_experts", "num_experts")
        return passed - held + held * chosen // experts

    @property
    def matmul_parameters(self) -> int:
        """Active parameters that are multiplied: an embedding is looked up, unless it is the head too."""
        tables = {
            id(m.weight): m.weight.numel() for m in self.module.modules() if isinstance(m, nn.Embedding)
        }
        heads = {id(m.weight) for m in self.module.modules() if isinstance(m, nn.Linear)}
        return self.active_parameters - sum(n for key, n in tables.items() if key not in heads)

    def attention_flops(self, seq: int) -> float:
        """Forward FLOPs of causal attention for one sequence, each score counted once."""
        c = self.text_config
        layers = getattr(c, "per_layer_config", None) or [c] * c.num_hidden_layers  # Gemma 4's heads differ
        kinds = getattr(c, "layer_types", None) or ["full_attention"] * c.num_hidden_layers
        return sum(_layer_flops(layer, kind, seq) for layer, kind in zip(layers, kinds, strict=False))

    def forward_flops(self, batch: int, seq: int) -> float:
        """Model FLOPs of a forward on ``batch`` sequences: 2·P·T, and attention."""
        return 2.0 * self.matmul_parameters * batch * seq + batch * self.attention_flops(seq)

    def step_flops(self, batch: int, seq: int) -> float:
        """Model FLOPs of a training step on ``batch`` sequences: three times its forward's, less those of
        frozen weights' gradients."""
        frozen = self.matmul_parameters - self.trained_parameters if self.lora else 0
        return 3.0 * self.forward_flops(batch, seq) - 2.0 * frozen * batch * seq


def _layer_flops(c: Any, kind: str, seq: int) -> float:
    """Forward FLOPs of one layer's attention, by the layer's own config."""
    heads: int = getattr(c, "num_attention_heads", None) or 0  # Mamba has none
    if not heads or kind in _NOT_ATTENDING:
        return 0.0
    width: int = getattr(c, "head_dim", None) or c.hidden_size // heads
    query: int = c.qk_nope_head_dim + c.qk_rope_head_dim if hasattr(c, "qk_nope_head_dim") else width
    window = getattr(c, "sliding_window", None) or seq
    value: int = getattr(c, "v_head_dim", width)
    return 2.0 * _pairs(seq, window if "sliding" in kind else seq) * heads * (query + value)


def _pairs(seq: int, window: int) -> float:
    """(query, key) pairs under a causal mask that sees ``window`` positions, itself included."""
    window = min(window, seq)
    return window * (window + 1) / 2 + (seq - window) * window


def _first(config: Any, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise MegacompileError(
        f"The config of this {config.model_type} model has experts but none of {', '.join(names)}."
    )


def load_model(name: str, lora: Lora | None = None) -> Model:
    """The model of a preset, a config.json, a hub id or a config's class, built on the meta device, with the
    adapters ``lora`` where that is given.

    :class:`MegacompileError` names the near presets or classes for an unknown name, and says what is wrong
    with a config that cannot be read or is no causal language model.
    """
    _need_transformers()
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = _config(name)
    _need_decoder(name, config)
    return build(name, config, lora)


def build(name: str, config: Any, lora: Lora | None = None) -> Model:
    """The model of a transformers config on the meta device, with the adapters ``lora``."""
    try:
        with torch.device("meta"):
            module = auto_class(config).from_config(config).train()
    except Exception as error:  # transformers raises many kinds for a config that does not hang together
        kind = getattr(config, "model_type", "?")
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise MegacompileError(
            f"{name}: no causal language model comes of its config ({kind}): {reason}"
        ) from error
    if lora is None:
        return Model(name, config, module)
    coding = FROZEN[lora.frozen]
    if coding is not None:
        _code(module, coding)
    return Model(name, config, _adapted(module, lora), lora)


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """Create the optimizer of that name over a model's trainable parameters: a class of ``torch.optim`` in
    lower case, or another one by its module and name. Muon has the matrices between its embedding and its
    head; AdamW has these two and the rest."""
    trained = [p for p in module.parameters() if p.requires_grad]
    if "." in name:
        where, _, kind = name.rpartition(".")
        try:
            made: torch.optim.Optimizer = getattr(importlib.import_module(where), kind)(trained)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise MegacompileError(
                f"--optimizer {name} cannot be made of parameters alone: {error}."
            ) from error
        return made
    if name != "muon":
        classes = {n.lower(): kind for n, kind in vars(torch.optim).items() if isinstance(kind, type)}
        return torch.optim.SGD(trained, momentum=0.9) if name == "sgd" else classes[name](trained)
    matrices = inner_matrices(module)
    chosen = set(map(id, matrices))
    rest = [p for p in trained if id(p) not in chosen]
    return Several([torch.optim.Muon(matrices), *([torch.optim.AdamW(rest)] if rest else [])])


def inner_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return what Muon is for: the trained matrices between a model's embeddings and its head."""
    others = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    others |= {id(p) for n, p in module.named_parameters() if n.endswith("lm_head.weight")}
    return [p for p in module.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in others]


def _code(module: Any, coding: Callable[[tuple[int, ...]], WeightCoding]) -> None:
    """Mark the weights of linear layers as coded, for all layers that bitsandbytes codes by default."""
    head = module.get_output_embeddings()
    for layer in module.modules():
        if type(layer) is nn.Linear and layer is not head:
            plan_as(layer.weight, coding(tuple(layer.weight.shape)))


def _adapted(module: nn.Module, lora: Lora) -> nn.Module:
    """Return the model with PEFT's adapters, and the rest frozen."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MegacompileError("--lora needs PEFT: pip install peft.") from error
    targets = list(lora.targets) or "all-linear"
    config = LoraConfig(task_type="CAUSAL_LM", r=lora.rank, target_modules=targets)
    try:
        with torch.device("meta"):
            adapted: nn.Module = get_peft_model(module, config)
    except (ValueError, TypeError) as error:  # of PEFT, about layers that it cannot adapt
        reason = str(error).strip().splitlines()[0]
        raise MegacompileError(
            f"--lora {lora.rank}: PEFT makes no adapters for this model: {reason}"
        ) from error
    return adapted


def _need_decoder(name: str, config: Any) -> None:
    """An encoder has a language model head in transformers too, yet its tokens see what follows them."""
    from transformers.models.auto import modeling_auto as auto

    kind = config.model_type
    encoder = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    sequence = kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    if encoder and not sequence and not getattr(config, "is_decoder", False):
        raise MegacompileError(
            f"{name}: a {kind} is an encoder, no causal language model, unless its config says "
            '"is_decoder": true.'
        )
    _check_sizes(name, config)


def _check_sizes(name: str, config: Any) -> None:
    """Refuse sizes that no model has, because they overflow or fill this machine."""
    for field, value in vars(config).items():
        if hasattr(value, "model_type"):
            _check_sizes(name, value)
        if not isinstance(value, int) or not field.endswith(_SIZE_SUFFIXES):
            continue
        least, most = 1 if field in _NEEDED else -1, _MOST_LAYERS if field.endswith("layers") else _MOST
        if not least <= value <= most:
            raise MegacompileError(f"{name}: {field} {value} cannot be meant: give {least} to {most:,}.")


def _config(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    found = find_model(name)
    if isinstance(found, Preset):
        return CONFIG_MAPPING[found.model_type](**found.fields)
    if isinstance(found, Path):
        return _config_file(found)
    return _hub_config(found) if "/" in found else _default_config(found)


def _default_config(name: str) -> Any:
    """The config that a class of transformers makes of its defaults."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kinds = {class_name: kind for kind, class_name in CONFIG_MAPPING_NAMES.items()}
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "give the path of a config.json."
        raise MegacompileError(f"--model {name}: transformers has no such config: {hint}")
    return CONFIG_MAPPING[kinds[name]]()


def _hub_config(name: str) -> Any:
    """The config of a hub id, from the cache or the hub; nothing but its config.json is fetched."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError):
        _need_connection(name)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:160]
        raise MegacompileError(f"{name}: its config.json could not be fetched: {reason}") from error


def _need_connection(name: str) -> None:
    """Say at once that the hub cannot be reached; its client would try again for half a minute."""
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname or ""
    if getproxies().get("https"):
        return  # whether a proxy reaches it, only the client can tell
    try:
        socket.create_connection((host, 443), timeout=10).close()
    except OSError as error:
        raise MegacompileError(
            f"{name}: its config.json could not be fetched, {host} cannot be reached from here: save the "
            "file by other means and give its path as --model."
        ) from error


def _config_file(path: Path) -> Any:
    from transformers import CONFIG_MAPPING

    kind = model_type(path)
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING.keys()), n=3)
        hint = f": did you mean {' or '.join(near)}?" if near else "."
        raise MegacompileError(f"{path}: transformers knows no model_type {kind!r}{hint}")
    try:
        return CONFIG_MAPPING[kind].from_pretrained(path)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise MegacompileError(f"{path} is no valid {kind} config: {reason}") from error


def _need_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise MegacompileError(
            "Models by name need transformers: pip install 'megacompile[transformers]'."
        ) from error

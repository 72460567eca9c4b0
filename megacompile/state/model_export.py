"""Export trained values as a folder that plain transformers, or any safetensors reader, loads."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.capture.module_wrappers import plain_names, unwrapped
from megacompile.capture.quantized_weights import is_coded
from megacompile.errors import DiskError, MegacompileError
from megacompile.state.atomic_folder import adding_to, replacing
from megacompile.state.model_values import persistent_buffers
from megacompile.state.safetensors_io import save_shard
from megacompile.user_warning import warn_user

SHARD_BYTES = 2 << 30
_INDEX = "model.safetensors.index.json"
_PROCESSOR_FILES = (  # of tokenizers too
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
    "*.tiktoken", "chat_template*", "*processor_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class Description:
    """The description of a model beside its values: shapes and dtypes by name, tied tensors once, the names
    to write, its config and generation config, or None, the folder that it was loaded from, or None, and
    further names of tensors that a user tied."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    names: dict[str, str]
    config: Any
    generation: Any
    source: Path | None = None
    further: Mapping[str, list[str]] = field(default_factory=dict)


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model, tied ones once."""
    kept = persistent_buffers(model)
    return dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n in kept}


def describe(model: nn.Module) -> Description:
    """A model's description, which stays as it is when the model changes."""
    with torch._C.DisableTorchFunctionSubclass():  # many microseconds for each owned parameter
        named = saved_tensors(model)
        coded = next((name for name, tensor in named.items() if is_coded(tensor)), None)
        if coded is not None:
            raise MegacompileError(
                f"{coded} is kept in codes, and the base of adapters is not written again: save "
                "the adapters alone by the trainer's save_model, or, after program.sync_to(model), by "
                "its save_pretrained."
            )
        shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
        dtypes = {name: tensor.dtype for name, tensor in named.items()}
    config, generation = (
        copy.deepcopy(c) if hasattr(c, "save_pretrained") else None
        for c in (getattr(model, name, None) for name in ("config", "generation_config"))
    )
    loaded_from = getattr(config, "name_or_path", None)
    source = Path(loaded_from) if loaded_from and Path(loaded_from).is_dir() else None
    names, kind = plain_names(model), type(model).__name__
    further = _tied_by_hand(model, names)
    return Description(kind, shapes, dtypes, names, config, generation, source, further)


def _tied_by_hand(model: nn.Module, names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the further names, by the first, of parameters that transformers does not tie when it loads the
    model: it would fill them at random."""
    declared = getattr(unwrapped(model), "all_tied_weights_keys", None)
    if declared is None:
        return {}
    known, owners = {*declared.keys(), *declared.values()}, dict[int, list[str]]()
    for prefix, module in model.named_modules():  # once each: a module at two places is loaded at both
        for name, parameter in module._parameters.items():
            own = f"{prefix}.{name}" if prefix else name
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(own)
    return {
        first: [names[other] for other in others if not known.issuperset((names[first], names[other]))]
        for first, *others in owners.values()
    }


def export_model(
    folder: Path,
    model: Description,
    values: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype | None,
    *,
    beside: bool = False,
) -> None:
    """Write ``values`` (a name once for tied weights) in ``dtype``, and the model's config where it has one.
    The files of a tokenizer and a processor follow from the folder that the model was loaded from.

    ``dtype`` None: each in the dtype that the model has it in. The folder is written whole or not at all; it
    must not exist, or be empty, unless ``beside`` says to put the files beside others that are there. Buffers
    that are no floating point keep their dtype. Beside the state, one shard is in memory at a time.
    """
    folder = folder.resolve()
    if dtype is not None and not dtype.is_floating_point:
        raise MegacompileError(f"dtype={dtype} cannot hold weights: give torch.bfloat16 or torch.float32.")
    if not beside and folder.is_dir() and any(folder.iterdir()):
        raise MegacompileError(f"{folder} is not empty: export to a new folder.")
    try:
        with adding_to(folder) if beside else replacing(folder) as fresh:
            _write_shards(fresh, _cast(values, model, dtype))
            _write_configs(fresh, model, dtype)
            copy_processor(model.source, fresh, known=folder)
            if beside:  # files of an earlier export, in other shards, that a reader would take for these
                _remove_weights(folder)
    except OSError as error:
        raise DiskError(f"The model was not exported to {folder}: {error}.") from error


def _cast(
    values: Iterator[tuple[str, Tensor]], model: Description, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    for name, value in values:
        floating = value.is_floating_point()
        written = value.to(dtype or model.dtypes[name]) if floating else value
        for one in (model.names[name], *model.further.get(name, ())):
            yield one, written


def _remove_weights(folder: Path) -> None:
    for old in (folder / _INDEX, *folder.glob("model*.safetensors")):
        old.unlink(missing_ok=True)


def _write_shards(folder: Path, values: Iterator[tuple[str, Tensor]]) -> None:
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = size = 0
    for name, tensor in values:
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
        del tensor
        if size >= SHARD_BYTES:
            shards.append(_write_shard(folder, len(shards) + 1, shard))
            total, size, shard = total + size, 0, {}
    if shard:
        shards.append(_write_shard(folder, len(shards) + 1, shard))
    _name_shards(folder, shards, total + size)


def _write_shard(folder: Path, number: int, shard: dict[str, Tensor]) -> list[str]:
    save_shard(folder / f"{number}", shard, {"format": "pt"})
    return list(shard)


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    """The names that transformers expects, and its index where there are several files."""
    if len(shards) == 1:
        (folder / "1").rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}").rename(folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / _INDEX).write_text(json.dumps(index, indent=1))


def _write_configs(folder: Path, model: Description, dtype: torch.dtype | None) -> None:
    if model.config is not None:
        config = copy.copy(model.config)
        config.dtype = dtype or next(d for d in model.dtypes.values() if d.is_floating_point)
        config.architectures = [model.name]
        config.save_pretrained(folder)
    if model.generation is not None:
        model.generation.save_pretrained(folder)


def copy_processor(source: Path | None, folder: Path, *, known: Path) -> None:
    """Copy the files of a tokenizer and a processor to ``folder``, but for those that ``known`` has. They are
    not loaded, which may need torchvision.

    A link is followed where it leads to a file within ``source``, or within the ``blobs`` of the model's own
    folder in the hub's cache, where ``source`` is of a snapshot. Any other may lead to a private file, which
    would be published with the model: a warning names what is left out.
    """
    if source is None:
        return
    source = source.resolve()
    snapshots = [folder for folder in source.parents if folder.name == "snapshots"]
    own = [folder.parent / "blobs" for folder in snapshots if folder.parent.name.startswith("models--")]
    for file in dict.fromkeys(f for name in _PROCESSOR_FILES for f in source.glob(name)):
        if not file.is_file() or os.path.lexists(known / file.name):
            continue
        target = file.resolve()
        if any(target.is_relative_to(place) for place in (source, *own)):
            with target.open("rb") as given, (folder / file.name).open("xb") as copied:
                shutil.copyfileobj(given, copied)
        else:
            warn_user(
                f"{file} was not copied to {known}: it is a link to {target}, outside of the model's folder. "
                "Copy that file into the exported folder if it belongs to the model."
            )

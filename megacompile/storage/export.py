"""Export: the trained values as a folder that plain transformers, or any safetensors reader, loads."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import MegacompileError, ProgramError
from megacompile.storage.durable import adding_to, replacing, save_shard

SHARD_BYTES = 2 << 30
_INDEX = "model.safetensors.index.json"


def export_model(
    folder: Path,
    model: nn.Module,
    values: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype | None,
    *,
    beside: bool = False,
) -> None:
    """Write ``values`` (a name once for tied weights) in ``dtype``, and the model's config where it has one.

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
            if beside:  # files of an earlier export, in other shards, that a reader would take for these
                _remove_weights(folder)
    except OSError as error:
        raise ProgramError(f"The model was not exported to {folder}: {error}.") from error


def _cast(
    values: Iterator[tuple[str, Tensor]], model: nn.Module, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    own = {n: t.dtype for n, t in itertools.chain(model.named_parameters(), model.named_buffers())}
    return ((n, v.to(dtype or own[n]) if v.is_floating_point() else v) for n, v in values)


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
            shards.append(_write(folder, len(shards) + 1, shard))
            total, size, shard = total + size, 0, {}
    if shard:
        shards.append(_write(folder, len(shards) + 1, shard))
    _name_shards(folder, shards, total + size)


def _write(folder: Path, number: int, shard: dict[str, Tensor]) -> list[str]:
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


def _write_configs(folder: Path, model: nn.Module, dtype: torch.dtype | None) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.dtype = dtype or next(p.dtype for p in model.parameters() if p.is_floating_point())
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)

"""The model's values out of a checkpoint, without a program: one tensor at a time, from its files.

In:  a checkpoint's folder and the description of a model of the same names.
Out: what :func:`~megacompile.storage.export.export_model` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megacompile.errors import MegacompileError
from megacompile.host import adam as host_adam
from megacompile.storage.export import Description
from megacompile.storage.layout import Facts, Pieces, by_whole
from megacompile.storage.manifest import Places, read_manifest
from megacompile.storage.shards import checksum, open_shard


def saved_values(folder: Path, model: Description) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's FP32 master, and each persistent buffer, by the model's names, tied ones once.

    Raises :class:`MegacompileError` for a checkpoint of another model, or one that is damaged, by name.
    """
    folder = folder.resolve()
    manifest, places = read_manifest(folder)
    wholes, shapes = by_whole(manifest.layout.parameters), model.shapes
    loose = {name.removesuffix("/value") for name in places if name.endswith("/value")}
    different = sorted(shapes.keys() ^ (wholes.keys() | loose))
    if different:
        where = "model" if different[0] in shapes else "checkpoint"
        raise MegacompileError(f"{folder} is of another model: only the {where} has {different[0]}.")
    for name, shape in shapes.items():
        yield name, _value(folder, places, name, wholes.get(name), shape)


def _value(folder: Path, places: Places, name: str, pieces: Pieces | None, shape: tuple[int, ...]) -> Tensor:
    if pieces is None:
        flat = _read(folder, places, f"{name}/value")
        value = flat if flat.numel() != prod(shape) else flat.view(shape)
    else:
        parts = [_master(folder, places, piece, facts) for piece, facts in pieces.items()]
        value = parts[0] if len(parts) == 1 else torch.cat(parts)
    if tuple(value.shape) != shape:
        raise MegacompileError(
            f"{folder} has {name} in the shape {tuple(value.shape)}; the model has {shape}."
        )
    return value


def _master(folder: Path, places: Places, name: str, facts: Facts) -> Tensor:
    """A parameter or a piece of one, its halves joined where it has two, or widened where one is all."""
    flat = _read(folder, places, f"{name}/weights")
    if f"{name}/low" in places:
        flat = host_adam.join(flat, _read(folder, places, f"{name}/low"), torch.empty(flat.numel()))
    elif flat.dtype == torch.bfloat16:
        flat = flat.float()
    reach = sum((n - 1) * s for n, s in zip(facts.shape, facts.stride, strict=False)) + 1
    if (
        not flat.numel() == prod(facts.shape) == (reach if flat.numel() else 0)
        or min(facts.stride, default=1) < 0
    ):
        raise MegacompileError(f"{folder} is damaged: {name} does not lie in it as it says.")
    return flat.as_strided(facts.shape, facts.stride)


def _read(folder: Path, places: Places, name: str) -> Tensor:
    """A flat tensor of a checkpoint, mapped from its file, or put together, and compared with checksums."""
    if name not in places:
        raise MegacompileError(f"{folder} is damaged: it does not name {name}.")
    parts = [_read_part(folder, name, *place) for place in places[name]]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read_part(folder: Path, name: str, file: str, known: int) -> Tensor:
    with open_shard(folder / file) as handle:
        if name not in handle.keys():  # noqa: SIM118
            raise MegacompileError(f"{folder / file} is damaged: it does not hold {name}.")
        tensor: Tensor = handle.get_tensor(name)
    if checksum(tensor.reshape(-1)) != known:
        raise MegacompileError(f"{folder / file} is damaged: the checksum of {name} is wrong.")
    return tensor

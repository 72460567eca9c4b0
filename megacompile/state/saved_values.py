"""Read a model's values out of a checkpoint, without a program: one tensor at a time, from its files.

In:  a checkpoint's folder and the description of a model of the same names. Out: what
:func:`~megacompile.state.model_export.export_model` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megacompile.errors import MegacompileError
from megacompile.state import adam
from megacompile.state.checkpoint_layout import Facts, Pieces, by_whole
from megacompile.state.checkpoint_manifest import Place, Places, read_manifest, say_unchecked
from megacompile.state.model_export import Description
from megacompile.state.safetensors_io import checksum, open_shard


def saved_values(folder: Path, model: Description) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's FP32 master, and each persistent buffer, by the model's names, tied ones once.

    Raises :class:`MegacompileError` for a checkpoint of another model, or one that is damaged, by name.
    """
    folder = folder.resolve()
    manifest, places = read_manifest(folder)
    say_unchecked(folder, manifest)
    wholes, shapes = by_whole(manifest.layout.parameters), model.shapes
    loose = {name.removesuffix("/value") for name in places if name.endswith("/value")}
    different = sorted(shapes.keys() ^ (wholes.keys() | loose))
    if different:
        where = "model" if different[0] in shapes else "checkpoint"
        raise MegacompileError(f"{folder} is of another model: only the {where} has {different[0]}.")
    for name, shape in shapes.items():
        yield name, _saved_value(folder, places, name, wholes.get(name), shape)


def saved_masters(folder: Path) -> Callable[[str, tuple[int, ...]], Tensor | None]:
    """Return what reads a parameter's FP32 master by its name and shape; None where there is none."""
    folder = folder.resolve()
    manifest, places = read_manifest(folder)
    wholes = by_whole(manifest.layout.parameters)
    return lambda name, shape: (
        _saved_value(folder, places, name, wholes[name], shape) if name in wholes else None
    )


def _saved_value(
    folder: Path, places: Places, name: str, pieces: Pieces | None, shape: tuple[int, ...]
) -> Tensor:
    if pieces is None:
        flat = _read_saved(folder, places, f"{name}/value")
        value = flat if flat.numel() != prod(shape) else flat.view(shape)
    else:
        parts = [_saved_master(folder, places, piece, facts) for piece, facts in pieces.items()]
        value = parts[0] if len(parts) == 1 else torch.cat(parts)
    if tuple(value.shape) != shape:
        raise MegacompileError(
            f"{folder} has {name} in the shape {tuple(value.shape)}; the model has {shape}."
        )
    return value


def _saved_master(folder: Path, places: Places, name: str, facts: Facts) -> Tensor:
    """A parameter or a piece of one, its halves joined where it has two, or widened where one is all."""
    flat = _read_saved(folder, places, f"{name}/weights")
    if f"{name}/low" in places:
        flat = adam.join(flat, _read_saved(folder, places, f"{name}/low"), torch.empty(flat.numel()))
    elif flat.dtype == torch.bfloat16:
        flat = flat.float()
    reach = sum((n - 1) * s for n, s in zip(facts.shape, facts.stride, strict=False)) + 1
    if (
        not flat.numel() == prod(facts.shape) == (reach if flat.numel() else 0)
        or min(facts.stride, default=1) < 0
    ):
        raise MegacompileError(f"{folder} is damaged: {name} does not lie in it as it says.")
    return flat.as_strided(facts.shape, facts.stride)


def _read_saved(folder: Path, places: Places, name: str) -> Tensor:
    """A flat tensor of a checkpoint, mapped from its file, or put together, and compared with checksums."""
    if name not in places:
        raise MegacompileError(f"{folder} is damaged: it does not name {name}.")
    parts = [_read_part(folder, name, place) for place in places[name]]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read_part(folder: Path, name: str, place: Place) -> Tensor:
    path = folder / place.file
    with open_shard(path, place.header) as handle:
        if name not in handle.keys():  # noqa: SIM118
            raise MegacompileError(f"{path} is damaged: it does not hold {name}.")
        tensor: Tensor = handle.get_tensor(name)
    if checksum(tensor.reshape(-1)) != place.checksum:
        raise MegacompileError(f"{path} is damaged: the checksum of {name} is wrong.")
    return tensor

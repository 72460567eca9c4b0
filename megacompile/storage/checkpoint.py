"""Checkpoints: everything that a run needs to go on bit for bit, as safetensors files and one JSON.

In:  the host state, loose tensors (buffers, parameters that no block uses), and :class:`Progress`.
Out: a folder with ``checkpoint.json`` and ``state-00001.safetensors`` ..., written whole or not at all.

A parameter's flat arrays are stored as they lie in host memory, masters in their two halves and
moments in their format, so neither side makes a copy of the state: writing maps views, reading goes
through the file a piece at a time. Each tensor has a CRC-32; nothing is trusted before it is checked,
and no pickle is involved.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacompile.assemble.codec import from_plain, parse_json, to_plain
from megacompile.errors import MegacompileError, ProgramError
from megacompile.host.snapshot import Snapshot
from megacompile.host.state import HostState
from megacompile.storage.durable import recover, replacing
from megacompile.storage.layout import SavedLayout, copied_range, layout_of, read_layout
from megacompile.storage.shards import DTYPES, checksum, open_shard, save_shard

MANIFEST = "checkpoint.json"
VERSION = 1
SHARD_BYTES = 1 << 26  # updates may wait for one to be written
PIECE_BYTES = 1 << 28  # of a file that is mapped while it is read, at most
_FILE = re.compile(r"state-\d{5}\.safetensors")


@dataclass(frozen=True)
class Progress:
    """How far a run is besides its tensors: the seed, the micro-steps that drew from it, settings."""

    model: str
    seed: int
    calls: int
    param_groups: list[dict[str, Any]]


@dataclass(frozen=True)
class Shard:
    """One file: its size, and the CRC-32 of each tensor in it."""

    bytes: int
    checksums: dict[str, int]


@dataclass(frozen=True)
class Manifest:
    """What ``checkpoint.json`` holds.

    ``files`` names every file of the folder beside it.
    """

    version: int
    progress: Progress
    layout: SavedLayout
    files: dict[str, Shard]


def save_checkpoint(
    folder: Path, state: HostState | Snapshot, loose: Mapping[str, Tensor], progress: Progress
) -> None:
    """Write a checkpoint to ``folder``; an earlier one there stays until this one is complete.

    Raises :class:`ProgramError` where the disk does not take it, with the earlier one untouched.
    """
    folder = checked_folder(folder)
    try:
        with replacing(folder) as fresh:
            batches = _batches(state.parts(), loose)
            files = dict(_write_shards(fresh, batches, state.passing, state.written))
            manifest = to_plain(Manifest(VERSION, progress, layout_of(state), files))
            (fresh / MANIFEST).write_text(json.dumps(manifest, indent=1, allow_nan=False))
    except OSError as error:
        raise ProgramError(f"The checkpoint was not written to {folder}: {error}.") from error


def checked_folder(folder: Path) -> Path:
    """Where a checkpoint may be written: nothing else is there."""
    folder = folder.resolve()
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise MegacompileError(f"{folder} is not empty and holds no checkpoint: give another folder.")
    return folder


def _batches(
    parts: Iterator[dict[str, dict[str, Tensor]]], loose: Mapping[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Tensors by their names in the files, as many at a time as are there together: a group's, the rest."""
    for group in parts:
        yield {
            f"{name}/{array}": tensor for name, arrays in group.items() for array, tensor in arrays.items()
        }
    yield {f"{name}/value": value.reshape(-1) for name, value in loose.items()}


def _write_shards(
    folder: Path, batches: Iterator[dict[str, Tensor]], passing: bool, written: Callable[[int], None]
) -> Iterator[tuple[str, Shard]]:
    """Fill files up to ``SHARD_BYTES``; gives each file's name, size and checksums.

    ``passing`` says that a batch's tensors are gone with the next one, so that no file holds two. ``written``
    is told how many batches are in files.
    """
    shard: dict[str, Tensor] = {}
    names = (f"state-{number:05d}.safetensors" for number in itertools.count(1))
    for count, batch in enumerate(batches):
        for left, (name, tensor) in zip(reversed(range(len(batch))), batch.items(), strict=True):
            shard[name] = tensor.detach().cpu()
            if sum(t.nbytes for t in shard.values()) >= SHARD_BYTES or (passing and not left):
                yield _write(folder / next(names), shard)
                shard = {}
                written(count if left else count + 1)
    if shard:
        yield _write(folder / next(names), shard)


def _write(path: Path, shard: dict[str, Tensor]) -> tuple[str, Shard]:
    sums = save_shard(path, shard)
    return path.name, Shard(path.stat().st_size, sums)


class Checkpoint:
    """A checkpoint on disk that was found whole, and to fit the state it will be read into."""

    def __init__(self, folder: Path, state: HostState, loose: Mapping[str, Tensor]) -> None:
        """Check names, shapes, formats and files; :class:`MegacompileError` names what does not fit."""
        self._folder = folder.resolve()
        self._state, self._loose = state, loose
        manifest, self._places = read_manifest(self._folder)
        self.progress = manifest.progress
        self._layout = read_layout(manifest.layout, state, self._folder)
        values = {f"{name}/value": value for name, value in loose.items()}
        self._expected = self._layout.tensors | values
        _compare_tensors(self._folder, self._places, self._expected)

    def read(self) -> None:
        """Overwrite the state and the loose tensors; a damaged file is named and leaves them in part."""
        checked: set[str] = set()
        for group in self._state.parts(change=True):
            for name, arrays in group.items():
                for array, target in arrays.items():
                    self._fill(name, array, target, checked)
        for name, value in self._loose.items():
            flat = torch.empty(value.numel(), dtype=value.dtype)
            self._copy(f"{name}/value", flat)
            value.copy_(flat.view(value.shape))
        groups = self._state.groups
        self._state.steps[:] = [self._layout.steps[g.slots[0].parameter.name] for g in groups]

    def _fill(self, name: str, array: str, target: Tensor, checked: set[str]) -> None:
        """One flat array of a parameter, of the saved ones that hold its elements; each is checked once."""
        for part in self._layout.parts[name]:
            saved = f"{part.saved}/{array}"
            length = self._expected[saved].numel()
            there, here = copied_range(array, part, length, target.numel(), self._state.form)
            if there == slice(0, length):
                self._copy(saved, target[here])
                continue
            if saved not in checked:
                self._copy(saved, None)
                checked.add(saved)
            self._copy(saved, target[here], there)

    def _copy(self, name: str, target: Tensor | None, part: slice | None = None) -> None:
        """Copy a flat tensor, or a part of it, from its file, which is mapped anew for every piece.

        A tensor that is read in whole is compared with its checksum, with or without a target.
        """
        file, known = self._places[name]
        path, whole, crc = self._folder / file, self._expected[name], 0
        part, step = part or slice(0, whole.numel()), max(1, PIECE_BYTES // whole.itemsize)
        for start in range(part.start, part.stop, step):
            stop = min(part.stop, start + step)
            with open_shard(path) as handle:
                piece = handle.get_slice(name)[start:stop]
                crc = checksum(piece, crc)
                if target is not None:
                    target[start - part.start : stop - part.start].copy_(piece)
                del piece
        if part == slice(0, whole.numel()) and crc != known:
            raise MegacompileError(f"{path} is damaged: the checksum of {name} is wrong.")


def read_manifest(folder: Path) -> tuple[Manifest, dict[str, tuple[str, int]]]:
    """What a checkpoint holds, and by tensor its file, which is there and of its size, and its checksum."""
    recover(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise MegacompileError(f"{folder} holds no checkpoint: there is no {MANIFEST} in it.")
    given = parse_json(path.read_text(), str(path))
    found = given.get("version") if isinstance(given, dict) else None
    if found != VERSION:
        raise MegacompileError(f"{path} has version {found!r}; this megacompile reads version {VERSION}.")
    manifest: Manifest = from_plain(Manifest, given, str(path), partial=True)
    return manifest, _places(folder, manifest.files)


def _places(folder: Path, files: dict[str, Shard]) -> dict[str, tuple[str, int]]:
    places: dict[str, tuple[str, int]] = {}
    for name, entry in files.items():
        if not _FILE.fullmatch(name):
            raise MegacompileError(f"{folder / MANIFEST} names {name!r}, which is no file of a checkpoint.")
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != entry.bytes:
            what = "missing" if size is None else f"{size} bytes long instead of {entry.bytes}"
            raise MegacompileError(f"{folder / name} is {what}: the checkpoint is not whole.")
        places |= {tensor: (name, known) for tensor, known in entry.checksums.items()}
    return places


def _compare_tensors(
    folder: Path, places: dict[str, tuple[str, int]], expected: Mapping[str, Tensor]
) -> None:
    """Each expected tensor is in its file, with its dtype and length; and no others are."""
    if set(places) != set(expected):
        name = min(set(places) ^ set(expected))
        where = "misses" if name in expected else "has in excess"
        raise MegacompileError(f"{folder} {where} {name}: it is of another model.")
    for file in {f for f, _ in places.values()}:
        with open_shard(folder / file) as handle:
            held = set(handle.keys())
            for name in (n for n, (f, _) in places.items() if f == file):
                if name not in held:
                    raise MegacompileError(f"{folder / file} is damaged: it does not hold {name}.")
                part = handle.get_slice(name)
                found = (part.get_dtype(), list(part.get_shape()))
                wanted = (DTYPES[expected[name].dtype], [expected[name].numel()])
                if found != wanted:
                    raise MegacompileError(f"{folder / file} holds {name} as {found}, not {wanted}.")

"""Read the manifest of a checkpoint: which files it has, and where in them each tensor is.

In:  a folder. Out: :class:`Manifest`, and the spans of tensors in files, all of which were looked at.

A digest seals the manifest, which has checksums of all bytes of the files beside it. One of version 1 has
no digest, and no checksums of headers: its numbers are as likely as they look.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megacompile.errors import MegacompileError
from megacompile.json_codec import from_plain, parse_json, unsealed
from megacompile.state.atomic_folder import recover
from megacompile.state.checkpoint_layout import SavedLayout, by_whole, join_pieces
from megacompile.state.safetensors_io import DTYPES, open_shard
from megacompile.text_files import read_text
from megacompile.user_warning import warn_user

MANIFEST = "checkpoint.json"
VERSION = 2
UNSEALED = 1
_COUNT = 1 << 53  # more steps, rows or elements than there are
_FILE = re.compile(r"state(-\d{5}){1,2}\.safetensors")


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run besides its tensors: the seed, the micro-steps that drew from it, settings."""

    model: str
    seed: int
    calls: int
    param_groups: list[dict[str, Any]]


@dataclass(frozen=True)
class ShardFile:
    """One file: its size, and the CRC-32 of each tensor in it, and of its header, if that was noted."""

    bytes: int
    checksums: dict[str, int]
    header: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor, or a part of it, is: a file, the checksum of its header, and that of what it holds."""

    file: str
    header: int | None
    checksum: int


Places = dict[str, list[Place]]
"""By tensor the file that holds it, or those of its parts one after another."""


@dataclass(frozen=True)
class Manifest:
    """The contents of ``checkpoint.json``.

    ``files`` names every file of the folder beside it. ``mesh``: so many replicas of so many ranks wrote it,
    (0, 0) where that was not noted.
    """

    version: int
    progress: RunProgress
    layout: SavedLayout
    files: dict[str, ShardFile]
    mesh: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class ArraySpan:
    """Entries of a saved array, from ``start`` to ``stop``, that are in one file, with their checksum."""

    file: str
    start: int
    stop: int
    checksum: int


def read_manifest(folder: Path) -> tuple[Manifest, Places]:
    """Read what a checkpoint holds, and by tensor its files, which are there and of their sizes, and its
    checksums in them."""
    recover(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise MegacompileError(f"{folder} holds no checkpoint: there is no {MANIFEST} in it.")
    given = parse_json(read_text(path), str(path))
    found = given.get("version") if isinstance(given, dict) else None
    if found not in (UNSEALED, VERSION):
        raise MegacompileError(f"{path} has version {found!r}; this megacompile reads version {VERSION}.")
    fields = given if found == UNSEALED else unsealed(given, str(path))
    manifest: Manifest = from_plain(Manifest, fields, str(path), partial=True)
    _check_counts(manifest, path)
    return manifest, places_of(folder, manifest.files)


def _check_counts(manifest: Manifest, path: Path) -> None:
    """Refuse counts that cannot be, and pieces that are not all rows of their parameter, each once."""
    counts = {"progress.calls": manifest.progress.calls}
    counts |= {f"mesh[{i}]": n for i, n in enumerate(manifest.mesh)}
    for name, facts in manifest.layout.parameters.items():
        where = f"layout.parameters.{name}"
        counts |= {f"{where}.step": facts.step, f"{where}.first_row": facts.first_row}
        counts |= {f"{where}.shape[{i}]": n for i, n in enumerate(facts.shape)}
        counts |= {f"{where}.stride[{i}]": n for i, n in enumerate(facts.stride)}
    for where, count in counts.items():
        if not 0 <= count < _COUNT:
            raise MegacompileError(f"{path}: {where} is {count}, which cannot be.")
    for whole, pieces in by_whole(manifest.layout.parameters).items():
        if join_pieces(pieces) is None:
            raise MegacompileError(f"{path} does not have all rows of {whole} once, in order and alike.")


def say_unchecked(folder: Path, manifest: Manifest) -> None:
    """Warn of a checkpoint of an older version."""
    if manifest.version == UNSEALED:
        text = (
            f"{folder / MANIFEST} is of an older version, without a digest: its numbers are unchecked, the "
            "weights are not. The next checkpoint has one."
        )
        warn_user(text)


def places_of(folder: Path, files: dict[str, ShardFile]) -> Places:
    """By tensor its files and checksums; each file is there and of its size, or it is named."""
    places: Places = {}
    for name, entry in sorted(files.items()):
        if not _FILE.fullmatch(name):
            raise MegacompileError(f"{folder / MANIFEST} names {name!r}, which is no file of a checkpoint.")
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != entry.bytes:
            what = "missing" if size is None else f"{size} bytes long instead of {entry.bytes}"
            raise MegacompileError(f"{folder / name} is {what}: the checkpoint is not whole.")
        for tensor, known in entry.checksums.items():
            places.setdefault(tensor, []).append(Place(name, entry.header, known))
    return places


def find_spans(
    folder: Path, places: Places, expected: Mapping[str, Tensor]
) -> dict[str, tuple[ArraySpan, ...]]:
    """Return where each expected tensor is in its files, with its dtype and length; and check that no others
    are there."""
    if set(places) != set(expected):
        name = min(set(places) ^ set(expected))
        where = "misses" if name in expected else "has in excess"
        raise MegacompileError(f"{folder} {where} {name}: it is of another model.")
    spans: dict[str, list[ArraySpan]] = {name: [] for name in expected}
    of_files: dict[tuple[str, int | None], list[tuple[str, int]]] = defaultdict(list)
    for name, parts in places.items():
        for place in parts:
            of_files[place.file, place.header].append((name, place.checksum))
    for (file, header), named in sorted(of_files.items(), key=lambda item: item[0][0]):
        with open_shard(folder / file, header) as handle:
            held = set(handle.keys())
            for name, crc in named:
                if name not in held:
                    raise MegacompileError(f"{folder / file} is damaged: it does not hold {name}.")
                part, before = handle.get_slice(name), spans[name]
                found = (part.get_dtype(), list(part.get_shape()))
                whole, start = expected[name], before[-1].stop if before else 0
                ends = file == places[name][-1].file
                stop = whole.numel() if ends or len(found[1]) != 1 else start + found[1][0]
                wanted = (DTYPES[whole.dtype], [stop - start])
                if found != wanted or stop > whole.numel():
                    raise MegacompileError(f"{folder / file} holds {name} as {found}, not {wanted}.")
                before.append(ArraySpan(file, start, stop, crc))
    return {name: tuple(found) for name, found in spans.items()}

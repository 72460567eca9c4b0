"""The manifest of a checkpoint: which files it has, and where in them each tensor is.

In:  a folder. Out: :class:`Manifest`, and the spans of tensors in files, all of which were looked at.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megacompile.assemble.codec import from_plain, parse_json
from megacompile.errors import MegacompileError
from megacompile.storage.durable import recover
from megacompile.storage.layout import SavedLayout
from megacompile.storage.shards import DTYPES, open_shard

MANIFEST = "checkpoint.json"
VERSION = 1
Places = dict[str, list[tuple[str, int]]]
"""By tensor the files that hold it, or its parts one after another, and the checksum of what each holds."""
_FILE = re.compile(r"state(-\d{5}){1,2}\.safetensors")


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

    ``files`` names every file of the folder beside it. ``mesh``: so many replicas of so many ranks wrote it,
    (0, 0) where that was not noted.
    """

    version: int
    progress: Progress
    layout: SavedLayout
    files: dict[str, Shard]
    mesh: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Span:
    """Entries of a saved array, from ``start`` to ``stop``, that are in one file, with their checksum."""

    file: str
    start: int
    stop: int
    checksum: int


def read_manifest(folder: Path) -> tuple[Manifest, Places]:
    """What a checkpoint holds, and by tensor its files, which are there and of their sizes, and its checksums
    in them."""
    recover(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise MegacompileError(f"{folder} holds no checkpoint: there is no {MANIFEST} in it.")
    given = parse_json(path.read_text(), str(path))
    found = given.get("version") if isinstance(given, dict) else None
    if found != VERSION:
        raise MegacompileError(f"{path} has version {found!r}; this megacompile reads version {VERSION}.")
    manifest: Manifest = from_plain(Manifest, given, str(path), partial=True)
    return manifest, places_of(folder, manifest.files)


def places_of(folder: Path, files: dict[str, Shard]) -> Places:
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
            places.setdefault(tensor, []).append((name, known))
    return places


def find_spans(folder: Path, places: Places, expected: Mapping[str, Tensor]) -> dict[str, tuple[Span, ...]]:
    """Where each expected tensor is in its files, with its dtype and length; and no others are there."""
    if set(places) != set(expected):
        name = min(set(places) ^ set(expected))
        where = "misses" if name in expected else "has in excess"
        raise MegacompileError(f"{folder} {where} {name}: it is of another model.")
    spans: dict[str, list[Span]] = {name: [] for name in expected}
    of_files: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, parts in places.items():
        for file, crc in parts:
            of_files[file].append((name, crc))
    for file, named in sorted(of_files.items()):
        with open_shard(folder / file) as handle:
            held = set(handle.keys())
            for name, crc in named:
                if name not in held:
                    raise MegacompileError(f"{folder / file} is damaged: it does not hold {name}.")
                part, before = handle.get_slice(name), spans[name]
                found = (part.get_dtype(), list(part.get_shape()))
                whole, start = expected[name], before[-1].stop if before else 0
                ends = file == places[name][-1][0]
                stop = whole.numel() if ends or len(found[1]) != 1 else start + found[1][0]
                wanted = (DTYPES[whole.dtype], [stop - start])
                if found != wanted or stop > whole.numel():
                    raise MegacompileError(f"{folder / file} holds {name} as {found}, not {wanted}.")
                before.append(Span(file, start, stop, crc))
    return {name: tuple(found) for name, found in spans.items()}

"""Rows of chats with images: where in the text each image belongs, and that all files are there.

In: a table of rows as people have them. Out: one as TRL takes it, with ``messages`` (or ``prompt`` and
``completion``) of parts and a column ``images``, which are read when a batch is made. An image belongs
where a part of the type image stands or the text says ``<image>``; where nothing says so, before what the
user says first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacompile.errors import MegacompileError

_Turn = Mapping[str, Any]
_CHATS = ("messages", "conversations", "prompt")
_PLACE = re.compile(r"\n?<image>\n?")  # a line of its own goes with it
_NAMED = ("image", "path", "url")  # keys of a part that names its image


def has_images(data: Any) -> bool:
    """Return whether rows name images, in a column of their own or in what is said."""
    from datasets import Dataset

    names = set(data.column_names or ())
    if names & {"image", "images"}:
        return True
    chats = [name for name in _CHATS if name in names]
    if not chats or not isinstance(data, Dataset) or not _has_parts(data[0][chats[0]]):
        return False
    return any(_is_no_text(part) for row in data for turn in row[chats[0]] for part in _said(turn) or ())


def _has_parts(turns: Any) -> bool:
    return isinstance(turns, list) and any(isinstance(_said(turn), list) for turn in turns)


def _said(turn: Any) -> Any:
    return turn.get("content") if isinstance(turn, Mapping) else None


def _is_no_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") != "text"


def named_images(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of a row's own column."""
    value = row.get("images", row.get("image"))
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def placed_images(
    turns: Sequence[_Turn], images: Sequence[Any], row: int
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return turns of parts, and all images in their order; ``images`` are those that no part names."""
    split = [{**turn, "content": _parts_of_text(turn["content"])} for turn in turns]
    for part in (part for turn in split for part in turn["content"]):
        if part.get("type") not in ("text", "image"):
            raise MegacompileError(
                f"data: row {row} has a part of the type {part.get('type')!r}: give text, and image, which "
                "names its file as path."
            )
    places = [part for turn in split for part in turn["content"] if part["type"] == "image"]
    user = next((turn for turn in split if turn["role"] == "user"), None)
    if images and not places and user is not None:
        places = [{"type": "image", "text": None} for _ in images]
        user["content"] = [*places, *user["content"]]
    own = [next((part[key] for key in _NAMED if part.get(key) is not None), None) for part in places]
    if own.count(None) != len(images):
        raise MegacompileError(
            f"data: row {row} has {len(images)} images, and {own.count(None)} places for them: write <image> "
            "once for each where it belongs, or nowhere, which puts all before what the user says first."
        )
    rest = iter(images)
    ordered = [next(rest) if image is None else image for image in own]
    for turn in split:
        turn["content"] = [{"type": p["type"], "text": p.get("text")} for p in turn["content"]]
    return split, ordered


def _parts_of_text(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return [dict(part) for part in content]
    parts: list[dict[str, Any]] = []
    for i, text in enumerate(_PLACE.split(content or "")):
        parts += [{"type": "image", "text": None}] if i else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def with_files(data: Any, folder: Path) -> Any:
    """The table whose column ``images`` names files, relative to ``folder``, with images that are read from
    these; raises MegacompileError for the first row of which one is none."""
    from datasets import Image, List

    for number, paths in enumerate(data["images"], 1):
        _check_files(paths, folder, number)
    found = data.map(_absolute, fn_kwargs={"folder": str(folder.absolute())})
    return found.cast_column("images", List(Image()))


def _absolute(row: Mapping[str, Any], folder: str) -> dict[str, Any]:
    return {"images": [str(Path(folder) / path) for path in row["images"]]}


def _check_files(paths: Iterable[str], folder: Path, row: int) -> None:
    from PIL import Image

    for path in paths:
        file = folder / path
        if not file.is_file():
            raise MegacompileError(
                f"data: row {row} names the image {path}, and {file} is no file: paths start from the folder "
                "of the data."
            )
        try:
            Image.open(file).close()
        except OSError as error:
            raise MegacompileError(
                f"data: row {row}: {file} is no image that can be read: {error}."
            ) from error


@dataclass(frozen=True)
class NamedRows:
    """A collator of rows with images that names the files of those that cannot be made a batch."""

    collate: Callable[[list[Any]], Any]

    @property
    def processor(self) -> Any:
        """The processor of the collator."""
        return getattr(self.collate, "processor", None)

    def __call__(self, rows: list[Any]) -> Any:
        names = [getattr(image, "filename", "") for row in rows for image in named_images(row)]
        try:
            return self.collate(rows)
        except ValueError as error:  # of the processor, for what it cannot take
            text = f"data: a batch with {', '.join(map(str, names)) or 'no image'} cannot be made: {error}"
            raise MegacompileError(text) from error

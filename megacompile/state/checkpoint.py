"""Checkpoints: everything that a run needs to go on bit for bit, written whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import GroupLayout, Parameter, Slot, padded_elements
from megacompile.distributed.world import World
from megacompile.errors import DiskError, MegacompileError
from megacompile.json_codec import from_plain, parse_json, sealed, to_plain, unsealed
from megacompile.state.atomic_folder import recover, replacing, sync
from megacompile.state.master_layout import own_part
from megacompile.state.masters import HostState, Snapshot, rounding_error, shapes_of
from megacompile.state.moment_formats import CODINGS, Form, array_range, is_coded
from megacompile.state.safetensors_io import DTYPES, checksum, open_shard, paced, save_shard
from megacompile.state.torch_optimizer import Foreign
from megacompile.text_files import read_text

# ------------------------------------------------------------------------------------------------------------
# Which parameters a checkpoint holds and where a program's parameters lie in them.
#
# In:  the layout in a checkpoint's manifest, and the host state that is to be filled from it. Out:
# :class:`Layout`: the tensors that the checkpoint must hold, and of every parameter of the program the parts
# of saved ones that it consists of.
#
# A weight that is too large to be on the device whole is cut by rows, and another budget cuts it otherwise.
# Pieces are ranges of the model's parameters, so a program reads the ranges that it needs, bit for bit; codes
# of moments allow that where a cut lies between two of their blocks.


@dataclass(frozen=True)
class Facts:
    """The facts of a saved parameter: how it lies, the step that it is at, and of which rows it is a piece,
    if it is one."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    computes_in: str
    step: int
    whole: str = ""
    first_row: int = 0


@dataclass(frozen=True)
class SavedLayout:
    """The layout in the manifest: the format, and the facts of each parameter."""

    optimizer_state: str
    parameters: dict[str, Facts]


@dataclass(frozen=True, slots=True)
class Part:
    """``count`` elements from ``start`` on of a saved parameter, which begin at ``to`` in one of ours.

    ``ends`` says that both end there, whatever padding follows.
    """

    saved: str
    start: int
    to: int
    count: int
    ends: bool


@dataclass(frozen=True)
class Layout:
    """The tensors of a checkpoint by name, on the meta device; the parts and the step of every parameter."""

    tensors: dict[str, Tensor]
    parts: dict[str, tuple[Part, ...]]
    steps: dict[str, int]


def layout_of(state: HostState | Snapshot) -> SavedLayout:
    """The layout of a state, as it is saved."""
    slots = [
        (slot.parameter, step)
        for g in state.groups
        for slot, step in zip(g.slots, state.steps[g.index], strict=True)
    ]
    return SavedLayout(str(state.form), {p.name: _facts(p, step) for p, step in slots})


def _facts(p: Parameter, step: int) -> Facts:
    return Facts(p.shape, p.stride, str(p.dtype).removeprefix("torch."), step, p.whole, p.first_row)


def read_layout(saved: SavedLayout, held: Container[str], state: HostState, folder: Path) -> Layout:
    """Match a manifest's layout with a state, or :class:`MegacompileError` that names what does not fit.

    ``held`` are the names of all saved tensors: of frozen parameters there may be low halves or none.
    """
    if saved.optimizer_state != str(state.form):
        if isinstance(state.form, Foreign) or "." in saved.optimizer_state:
            raise MegacompileError(
                f"{folder} was saved with the state of {saved.optimizer_state} and this program has that of "
                f"{state.form}: compile with the optimizer that was saved."
            )
        raise MegacompileError(
            f"{folder} was saved with optimizer_state={saved.optimizer_state!r} and this program has "
            f"{state.form!r}: compile with the one that was saved."
        )
    theirs = by_whole(saved.parameters)
    owners = {slot.parameter.name: (g, slot.parameter) for g in state.groups for slot in g.slots}
    mine = by_whole(layout_of(state).parameters)
    for whole in [*mine, *theirs]:
        if whole not in theirs or whole not in mine:
            where = "the model" if whole in mine else "the checkpoint"
            raise MegacompileError(
                f"{folder} is of another model: only {where} has the parameter {whole}."
                + " Older versions saved no state of what no batch had used." * (whole in mine)
            )
        _compare(whole, theirs[whole], mine[whole], folder)
    groups = [
        _saved_group(owners[next(iter(mine[w]))], name, f, f"{name}/low" in held)
        for w in theirs
        for name, f in theirs[w].items()
    ]
    tensors = {f"{n}/{a}": t for group in shapes_of(groups, state.form) for n, arrays in group.items()
               for a, t in arrays.items()}  # fmt: skip
    parts: dict[str, tuple[Part, ...]] = {}
    for whole, pieces in mine.items():
        for name, facts in pieces.items():
            parts[name] = _parts(facts, theirs[whole])
            _check_blocks(owners[name], parts[name], theirs[whole], state.form, folder)
    steps = {name: next(iter(theirs[w].values())).step for w, pieces in mine.items() for name in pieces}
    return Layout(tensors, parts, steps)


Pieces = dict[str, Facts]


def by_whole(parameters: Mapping[str, Facts]) -> dict[str, Pieces]:
    """By the model's parameters, their pieces (or themselves) in the order of rows."""
    found: dict[str, Pieces] = defaultdict(dict)
    for name, facts in sorted(parameters.items(), key=lambda item: item[1].first_row):
        found[facts.whole or name][name] = facts
    return {name: found[name] for name in dict.fromkeys(f.whole or n for n, f in parameters.items())}


def _compare(whole: str, theirs: Pieces, mine: Pieces, folder: Path) -> None:
    together, ours = _together(theirs), _together(mine)
    assert together is not None and ours is not None  # of a manifest that was read, and of a model
    for fact in ("shape", "stride", "computes_in"):
        found, expected = getattr(together, fact), getattr(ours, fact)
        if found != expected:
            raise MegacompileError(
                f"{folder} does not fit at {whole}: {fact} is {found} in the checkpoint "
                f"and {expected} in the model."
            )


def _together(pieces: Pieces) -> Facts | None:
    """The facts of the parameter that pieces make up; None where they leave rows out, overlap or differ."""
    first, *rest = pieces.values()
    if not first.whole:
        return None if rest or first.first_row else first
    rows = 0
    for facts in (first, *rest):
        alike = (facts.stride, facts.computes_in, facts.step, facts.shape[1:])
        if (
            not facts.shape
            or facts.first_row != rows
            or alike != (first.stride, first.computes_in, first.step, first.shape[1:])
        ):
            return None
        rows += facts.shape[0]
    return replace(first, shape=(rows, *first.shape[1:]))


def _saved_group(owner: tuple[GroupLayout, Parameter], name: str, facts: Facts, has_low: bool) -> GroupLayout:
    """A group of one saved parameter, alike one of ours in all but name, rows and, if frozen, low halves."""
    group, parameter = owner
    slot = Slot(replace(parameter, name=name, shape=facts.shape), 0)
    elements, exact = padded_elements(slot.parameter.numel), not group.trainable and not has_low
    return replace(group, slots=(slot,), elements=elements, ranks=1, exact=exact)


def _parts(facts: Facts, saved: Pieces) -> tuple[Part, ...]:
    begin, end = _elements(facts)
    parts = []
    for name, theirs in saved.items():
        first, last = _elements(theirs)
        start, stop = max(begin, first), min(end, last)
        if start < stop or begin == end == first == last:
            parts.append(Part(name, start - first, start - begin, stop - start, stop == end == last))
    return tuple(parts)


def _elements(facts: Facts) -> tuple[int, int]:
    """A piece's range of its whole parameter's elements."""
    start = facts.first_row * prod(facts.shape[1:])
    return start, start + prod(facts.shape)


def _check_blocks(
    owner: tuple[GroupLayout, Parameter],
    parts: tuple[Part, ...],
    saved: Pieces,
    form: Form,
    folder: Path,
) -> None:
    """Codes can be taken apart between blocks only."""
    (group, parameter) = owner
    if isinstance(form, Foreign) or form not in CODINGS or not group.trainable:
        return
    coding = CODINGS[form]
    coded = is_coded(parameter.numel, form)
    for part in parts:
        between = part.ends or part.count % coding.block == 0  # then the next part begins with a block too
        if is_coded(prod(saved[part.saved].shape), form) != coded or (coded and not between):
            raise MegacompileError(
                f"{folder} holds {part.saved} where this program has {parameter.name}, and {form} moments "
                "cannot be taken apart there: compile with the hbm_budget of the program that saved them."
            )


def copied_range(array: str, part: Part, saved: int, ours: int, form: Form) -> tuple[slice, slice]:
    """Return which entries of a saved flat array, of that length, go where in one of ours."""
    if isinstance(form, Foreign) and form.shared_by_pieces(array):
        return slice(0, saved), slice(0, ours)
    coding = None if isinstance(form, Foreign) else CODINGS.get(form)
    start, stop = array_range(array, coding, part.start, part.start + part.count)
    to, _ = array_range(array, coding, part.to, part.to)
    length = min(saved - start, ours - to) if part.ends else stop - start
    return slice(start, start + length), slice(to, to + length)


# ------------------------------------------------------------------------------------------------------------
# The manifest of a checkpoint: which files it has, and where in them each tensor is.
#
# In:  a folder. Out: :class:`Manifest`, and the spans of tensors in files, all of which were looked at.
#
# A digest seals the manifest, which has checksums of all bytes of the files beside it. One of version 1 has
# no digest, and no checksums of headers: its numbers are as likely as they look.


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
        if _together(pieces) is None:
            raise MegacompileError(f"{path} does not have all rows of {whole} once, in order and alike.")


def say_unchecked(folder: Path, manifest: Manifest) -> None:
    """Warn of a checkpoint of an older version."""
    if manifest.version == UNSEALED:
        text = (
            f"{folder / MANIFEST} is of an older version, without a digest: its numbers are unchecked, the "
            "weights are not. The next checkpoint has one."
        )
        warnings.warn(text, stacklevel=2)


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


# ------------------------------------------------------------------------------------------------------------
# Checkpoints: everything that a run needs to go on bit for bit, as safetensors files and one JSON.
#
# In:  the host state, buffers, and :class:`RunProgress`. Out: a folder with ``checkpoint.json`` and
# ``state-00001.safetensors`` ..., written whole or not at all. Of several ranks each writes and reads what is
# its own; ``state-00000-00001.safetensors`` is the first one's. A parameter's arrays are then in files of
# several ranks, and whoever reads takes what it needs of each.
#
# A parameter's flat arrays are stored as they lie in host memory, masters in their two halves and moments in
# their format, so neither side makes a copy of the state: writing maps views, reading goes through the file a
# piece at a time. Each tensor has a CRC-32; nothing is trusted before it is checked, and no pickle is
# involved.


SHARD_BYTES = 1 << 26  # updates may wait for one to be written
PIECE_BYTES = 1 << 28  # of a file that is mapped while it is read, at most


def save_checkpoint(
    folder: Path,
    state: HostState | Snapshot,
    buffers: Mapping[str, Tensor],
    progress: RunProgress,
    world: World | None = None,
) -> None:
    """Write a checkpoint to ``folder``; an earlier one there stays until this one is complete.

    Raises :class:`~megacompile.errors.DiskError` where the disk does not take it, with the earlier one
    untouched. Several ranks call it together, in the thread that saves. Each writes its part of the state.
    Once all have, the first one writes the manifest and gives the folder its name; if one fails, all raise.
    """
    folder, world = checked_folder(folder), world or World()
    with contextlib.ExitStack() as stack:

        def begin() -> bytes:
            with _on_disk(folder):
                return os.fsencode(stack.enter_context(replacing(folder))) if world.rank == 0 else b""

        def write() -> bytes:
            with _on_disk(folder):
                found = _write_own(fresh, state, buffers if world.rank == 0 else {}, world)
            return json.dumps({name: to_plain(shard) for name, shard in found.items()}).encode()

        def finish() -> None:
            if world.rank > 0:
                return
            files = {n: from_plain(ShardFile, s, n) for text in written for n, s in json.loads(text).items()}
            with _on_disk(folder):
                places_of(fresh, files)  # whichever disk ranks have written to
                mesh = world.ranks.replicas, world.ranks.shards
                manifest = sealed(to_plain(Manifest(VERSION, progress, layout_of(state), files, mesh)))
                (fresh / MANIFEST).write_text(json.dumps(manifest, indent=1, allow_nan=False))
                stack.close()

        fresh = Path(os.fsdecode(world.exchange(begin, saving=True)[0]))
        written = world.exchange(write, saving=True)
        world.agree(finish, saving=True)


@contextlib.contextmanager
def _on_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskError(f"The checkpoint was not written to {folder}: {error}.") from error


def _write_own(
    fresh: Path, state: HostState | Snapshot, buffers: Mapping[str, Tensor], world: World
) -> dict[str, ShardFile]:
    """The files of one rank; of a later replica none, as the first one's are the same."""
    if not fresh.is_dir():
        raise MegacompileError(f"{fresh.parent} is not the folder of rank 0: give one that all ranks share.")
    if world.ranks.replica:
        state.written(len(state.groups))
        return {}
    prefix = "state" if world.size == 1 else f"state-{world.rank:05d}"
    files = dict(_write_shards(fresh / prefix, _batches(state, buffers, world.rank), state))
    if world.size > 1:
        for name in files:
            sync(fresh / name)  # the first rank's machine may be another
    return files


def checked_folder(folder: Path) -> Path:
    """Return the folder that a checkpoint may be written to: nothing else is there."""
    folder = folder.resolve()
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise MegacompileError(f"{folder} is not empty and holds no checkpoint: give another folder.")
    return folder


def _batches(
    state: HostState | Snapshot, buffers: Mapping[str, Tensor], rank: int
) -> Iterator[dict[str, Tensor]]:
    """Tensors by their names in the files, as many at a time as are there together: a group's, the rest.

    Arrays of which a rank has nothing are the first one's to write; so is, of a parameter of which several
    have a part, what each keeps alike, to the one that has its beginning.
    """
    slots = ((group, slot) for group in state.groups for slot in group.slots if rank)
    later = {slot.parameter.name for group, slot in slots if own_part(group, slot, rank)[0].start}
    shared = state.form.shared_by_pieces if isinstance(state.form, Foreign) else lambda array: False
    for group in state.parts():
        named = {
            f"{name}/{array}": tensor
            for name, arrays in group.items()
            for array, tensor in arrays.items()
            if not (name in later and shared(array))
        }
        yield {name: tensor for name, tensor in named.items() if rank == 0 or tensor.numel()}
    yield {f"{name}/value": value.reshape(-1) for name, value in buffers.items()}


def _write_shards(
    prefix: Path, batches: Iterator[dict[str, Tensor]], state: HostState | Snapshot
) -> Iterator[tuple[str, ShardFile]]:
    """Fill files up to ``SHARD_BYTES``; gives each file's name, size and checksums.

    Where the state is ``passing``, a batch's tensors are gone with the next one, so that no file holds two.
    The state is told how many batches are in files.
    """
    shard: dict[str, Tensor] = {}
    paths = (prefix.with_name(f"{prefix.name}-{n:05d}.safetensors") for n in itertools.count(1))
    count = 0
    for count, batch in enumerate(batches, 1):
        for left, (name, tensor) in zip(reversed(range(len(batch))), batch.items(), strict=True):
            shard[name] = tensor.detach().cpu()
            if sum(t.nbytes for t in shard.values()) >= SHARD_BYTES or (state.passing and not left):
                yield _write(next(paths), shard)
                shard = {}
                state.written(count - 1 if left else count)
    if shard:
        yield _write(next(paths), shard)
    state.written(count)


def _write(path: Path, shard: dict[str, Tensor]) -> tuple[str, ShardFile]:
    header, sums = save_shard(path, shard)
    return path.name, ShardFile(path.stat().st_size, sums, header)


def _check_mesh(saved: tuple[int, int], world: World, folder: Path) -> None:
    """Refuse to go on otherwise than bit for bit where nobody asked for it."""
    ranks = world.ranks
    if world.chosen and saved[0] * saved[1] == ranks.size and saved[1] != ranks.shards:
        raise MegacompileError(
            f"{folder} was saved on a mesh of {saved[0]} × {saved[1]} ranks, and compile has chosen one of "
            f"{ranks.replicas} × {ranks.shards}: to go on bit for bit, call program.prepare(batch, "
            f"checkpoint=folder) in place of example_batch, or give mesh=init_device_mesh(device, {saved})."
        )


class Checkpoint:
    """A checkpoint on disk that was found whole, and to fit the state it will be read into."""

    def __init__(self, folder: Path, state: HostState, buffers: Mapping[str, Tensor]) -> None:
        """Check names, shapes, formats and files; :class:`MegacompileError` names what does not fit."""
        self._folder = folder.resolve()
        self._state, self._buffers = state, buffers
        manifest, places = read_manifest(self._folder)
        self.progress = manifest.progress
        _check_mesh(manifest.mesh, state.world, self._folder)
        self._layout = read_layout(manifest.layout, places, state, self._folder)
        values = {f"{name}/value": value for name, value in buffers.items()}
        self._expected = self._layout.tensors | values
        self._spans = find_spans(self._folder, places, self._expected)
        self._checked: set[tuple[str, ArraySpan]] = set()
        if state.world.rank == 0:
            say_unchecked(self._folder, manifest)
            self._refuse_rounding()

    def _refuse_rounding(self) -> None:
        """Refuse low halves that a frozen parameter of the state has no place for, unless all are zero."""
        slots = (slot.parameter for group in self._state.groups if group.exact for slot in group.slots)
        for parameter in slots:
            for name in (f"{part.saved}/low" for part in self._layout.parts[parameter.name]):
                for span in self._spans.get(name, ()):
                    lost = False
                    for _, piece in self._pieces(name, span, slice(0, span.stop - span.start)):
                        lost |= bool(piece.any())
                        del piece
                    if lost:
                        raise rounding_error(parameter.whole or parameter.name, f"what {self._folder} has")

    def read(self) -> None:
        """Overwrite the state, or a rank's part of it, and the buffers; a damaged file is named and
        leaves them in part."""
        groups, rank = self._state.groups, self._state.world.ranks.shard
        own = {s.parameter.name: own_part(group, s, rank)[0] for group in groups for s in group.slots}
        for group in self._state.parts(change=True):
            for name, arrays in group.items():
                for array, target in arrays.items():
                    self._fill(name, array, target, own[name])
        for name, value in self._buffers.items():
            flat = torch.empty(value.numel(), dtype=value.dtype)
            self._copy(f"{name}/value", flat, slice(0, flat.numel()))
            value.copy_(flat.view(value.shape))
        self._state.steps[:] = [[self._layout.steps[s.parameter.name] for s in g.slots] for g in groups]

    def _fill(self, name: str, array: str, target: Tensor, own: slice) -> None:
        """One flat array of a parameter's own elements, of the saved ones that hold them."""
        for part in self._layout.parts[name]:
            first, last = max(part.to, own.start), min(part.to + part.count, own.stop)
            if first >= last:
                continue
            ends = part.ends and last == part.to + part.count
            part = Part(part.saved, part.start + first - part.to, first - own.start, last - first, ends)
            saved = f"{part.saved}/{array}"
            if array == "low" and saved not in self._expected:
                target[part.to : part.to + part.count] = 0
                continue
            length = self._expected[saved].numel()
            there, here = copied_range(array, part, length, target.numel(), self._state.form)
            self._copy(saved, target[here], there)

    def _copy(self, name: str, target: Tensor, part: slice) -> None:
        """Copy a part of a flat tensor from its files; what is read of one is compared with its checksum."""
        for span in self._spans[name]:
            start, stop = max(part.start, span.start), min(part.stop, span.stop)
            if start >= stop:
                continue
            whole = (start, stop) == (span.start, span.stop)
            if not whole and (name, span) not in self._checked:
                self._read(name, span, slice(0, span.stop - span.start), None)
                self._checked.add((name, span))
            within = slice(start - span.start, stop - span.start)
            self._read(name, span, within, target[start - part.start : stop - part.start])

    def _read(self, name: str, span: ArraySpan, part: slice, target: Tensor | None) -> None:
        """Copy a part of a span from its file, with a target."""
        for start, piece in self._pieces(name, span, part):
            if target is not None:
                target[start - part.start :][: piece.numel()].copy_(piece)
            del piece  # before the next is mapped

    def _pieces(self, name: str, span: ArraySpan, part: slice) -> Iterator[tuple[int, Tensor]]:
        """A part of a span piece by piece, with where each begins; the file is mapped anew for every one.

        A span that is read in whole is compared with its checksum at the end.
        """
        path, crc, step = self._folder / span.file, 0, max(1, PIECE_BYTES // self._expected[name].itemsize)
        for start in range(part.start, part.stop, step):
            stop = min(part.stop, start + step)
            with open_shard(path) as handle:
                piece = handle.get_slice(name)[start:stop]
                crc = checksum(piece, crc)
                yield start, piece
                del piece
        if part == slice(0, span.stop - span.start) and crc != span.checksum:
            raise MegacompileError(f"{path} is damaged: the checksum of {name} is wrong.")


# ------------------------------------------------------------------------------------------------------------
# Checkpoints that are written while training goes on, each by a thread of its own.
#
# In:  what :func:`~megacompile.state.checkpoint.save_checkpoint` takes, the state as a snapshot. Out: the
# same folder, bit for bit, as it would have written at that moment.
#
# The thread waits for nothing that trains, but of several ranks for the others' threads, and ends with the
# process at the latest when its folder is whole. It takes a small share of the machine until somebody waits.


Then = Callable[[BaseException | None], None]


class BackgroundSave:
    """One checkpoint; :meth:`start` it before anything changes.

    ``then`` is called in the thread at its end, with what kept the checkpoint from being written, if anything
    did; that is raised here where there is no ``then``.
    """

    def __init__(
        self,
        folder: Path,
        snapshot: Snapshot,
        buffers: Mapping[str, Tensor],
        progress: RunProgress,
        world: World,
        then: Then | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._failures: list[BaseException] = []
        work = (checked_folder(folder), {n: v.clone() for n, v in buffers.items()}, progress, world)
        arguments = (snapshot, *work, then or _raise, self._failures)
        self._thread = threading.Thread(target=_write_snapshot, args=arguments, name="megacompile-save")
        weakref.finalize(self, _tell, self._failures)

    def start(self, state: HostState) -> None:
        """Let the thread begin; from now on the state, of which the snapshot is, may change."""
        state.guard(self._snapshot)
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C may come at any line
            self._snapshot.cancel()
            raise

    def finish(self) -> None:
        """Return when the checkpoint is on disk, or raise why it is not."""
        if self._thread.ident is not None:  # else it was interrupted before it began
            self._snapshot.hurry()
            self._thread.join()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise, once, what kept the checkpoint from being written, if that is known."""
        if self._failures:
            raise self._failures.pop()


def _write_snapshot(
    snapshot: Snapshot,
    folder: Path,
    buffers: Mapping[str, Tensor],
    progress: RunProgress,
    world: World,
    then: Then,
    failures: list[BaseException],
) -> None:
    if not snapshot.begin():
        return
    with paced(snapshot.hurried):
        found: BaseException | None = None
        try:
            with world.together():
                save_checkpoint(folder, snapshot, buffers, progress, world)
        except BaseException as error:
            found = error
        finally:
            snapshot.end()
        try:
            then(found)
        except BaseException as error:  # for whoever calls the program next
            failures.append(error)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _tell(failures: list[BaseException]) -> None:
    """Nobody called the program again."""
    for error in failures:
        print(f"megacompile: {error}", file=sys.stderr)

"""Checkpoints: everything that a run needs to go on bit for bit, as safetensors files and one JSON.

In:  the host state, buffers, and :class:`~megacompile.state.checkpoint_manifest.RunProgress`. Out: a folder
with ``checkpoint.json`` and ``state-00001.safetensors`` ..., written whole or not at all. Each of several
ranks writes and reads its own part; ``state-00000-00001.safetensors`` is the first one's. A parameter's
arrays are then in files of several ranks, and whoever reads takes what it needs of each.

A parameter's flat arrays are stored as they lie in host memory, masters in their two halves and moments in
their format, so neither side makes a copy of the state: writing maps views, reading goes through the file a
piece at a time. Each tensor has a CRC-32; nothing is trusted before it is checked, and no pickle is
involved.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megacompile.distributed.world import World
from megacompile.errors import DiskError, MegacompileError
from megacompile.json_codec import from_plain, sealed, to_plain
from megacompile.state.atomic_folder import replacing, sync
from megacompile.state.checkpoint_layout import Part, copied_range, layout_of, read_layout
from megacompile.state.checkpoint_manifest import (
    MANIFEST,
    VERSION,
    ArraySpan,
    Manifest,
    RunProgress,
    ShardFile,
    find_spans,
    places_of,
    read_manifest,
    say_unchecked,
)
from megacompile.state.master_layout import own_part
from megacompile.state.masters import HostState, rounding_error
from megacompile.state.optimizer_state import shared_by_pieces
from megacompile.state.safetensors_io import checksum, open_shard, save_shard
from megacompile.state.snapshot import Snapshot

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

    The first rank writes arrays that no rank owns. If several ranks have a part of a parameter, the rank with
    its beginning writes what all of them keep alike.
    """
    slots = ((group, slot) for group in state.groups for slot in group.slots if rank)
    later = {slot.parameter.name for group, slot in slots if own_part(group, slot, rank)[0].start}
    for group in state.parts():
        named = {
            f"{name}/{array}": tensor
            for name, arrays in group.items()
            for array, tensor in arrays.items()
            if not (name in later and shared_by_pieces(state.form, array))
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
                yield _write_file(next(paths), shard)
                shard = {}
                state.written(count - 1 if left else count)
    if shard:
        yield _write_file(next(paths), shard)
    state.written(count)


def _write_file(path: Path, shard: dict[str, Tensor]) -> tuple[str, ShardFile]:
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

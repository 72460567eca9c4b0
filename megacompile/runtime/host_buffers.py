"""Host buffers: what steps keep on the host beside the state. Gradients on their way or waiting, and
offloaded activations.

They come out of the state's arena while it has room, which is sized for the first program; see
:func:`~megacompile.state.host_budget.step_bytes`. Gradients and the ring grow at rest when a program
wants more. Offloaded activations are of one program at a time: those of another one are laid over the same
bytes, in memory and on storage, for which they leave by a few buffers.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megacompile.errors import ProgramError
from megacompile.runtime.bound_step import BoundStep
from megacompile.runtime.host_memory import HostMemory
from megacompile.schedule.op_table import Offloaded, Ring, Spill, Token
from megacompile.schedule.step import Step, offload_buffers, offloads
from megacompile.state.host_arena import HostArena, Room, padded
from megacompile.state.nvme import Storage


class HostBuffers:
    """Buffers by use."""

    def __init__(self, arena: HostArena, host: HostMemory, storage: Storage | None) -> None:
        self.gradients: dict[int, Tensor] = {}  # bytes, by weight group
        self._host = host
        self._storage = storage
        self._arena = Room(arena.take((arena.free_bytes,), torch.uint8))
        self._extra = torch.empty(
            0, dtype=torch.uint8
        )  # for offloaded activations that find no room in the arena
        self._more = Room(self._extra)  # the whole pages of it
        self._ring: list[Tensor] = []
        self._step: Step | None = None  # whose offloaded activations have places
        self._homes: dict[
            Token, Tensor
        ] = {}  # bytes, by offloaded activations, or by buffer on the way to storage
        self._likes: dict[Token, list[Tensor]] = {}  # what is offloaded, without its data
        self._offloaded: dict[tuple[Token, Token], list[Tensor]] = {}

    def nbytes(self) -> dict[str, int]:
        """Host bytes by kind."""
        offloaded = [h.nbytes for h in self._homes.values() if not self._more.holds(h)]
        return {
            "gradients": sum(g.nbytes for g in self.gradients.values()),
            "ring": sum(r.nbytes for r in self._ring),
            "offloaded": sum(offloaded) + self._extra.nbytes,
        } | self._host.nbytes()

    @property
    def beside_bytes(self) -> int:
        """Host bytes that the arena had no room for."""
        pieces = [*self.gradients.values(), *self._ring, *self._homes.values()]
        outside = [p for p in pieces if not self._arena.holds(p) and not self._more.holds(p)]
        return sum(p.nbytes for p in [*outside, self._extra]) + sum(self._host.nbytes().values())

    def prepare(self, step: Step, synchronize: Callable[[], None]) -> None:
        """Allocate the ring as large as a step wants it, and its offloaded activations, with nothing under
        way in a buffer that is replaced."""
        for i, nbytes in enumerate(step.ring):
            if i == len(self._ring) or self._ring[i].nbytes < nbytes:
                synchronize()
                self._ring[i : i + 1] = [self._grown(self._ring[i : i + 1], nbytes)]
        if step is not self._step:
            synchronize()
            self._step = None
            self._allocate_offloaded(step)
            self._step = step

    def gradient(self, bound: BoundStep, group: int, home: Token) -> Tensor:
        """Return where a group's gradient lands, flat: in its dtype while it is passed on, or as it is kept;
        a shard of one in FP32. If the rows that a step names are updated apart, there is room for these."""
        layout = bound.assembly.groups[group]
        passing = isinstance(home, Ring) and layout.ranks == 1
        dtype = layout.dtype if passing or bound.kept.get(group) else torch.float32
        rows = bound.rows.get(group)
        elements = layout.share if rows is None else min(layout.share, rows // layout.dtype.itemsize)
        nbytes = dtype.itemsize * elements
        if isinstance(home, Ring):
            return self._ring[home.slot][:nbytes].view(dtype)
        known = self.gradients.get(group)
        if known is None or known.nbytes < nbytes:
            known = self.gradients[group] = self._grown([] if known is None else [known], nbytes)
        return known[:nbytes].view(dtype)

    def offload(self, home: Offloaded, tensors: Sequence[Tensor], slot: int | None = None) -> list[Tensor]:
        """Host memory for what a block offloads: tensors of the same shapes, dtypes and, if dense, strides.

        With ``slot`` in that buffer, from which it goes on to storage.
        """
        if home not in self._likes:
            self._likes[home] = [torch.empty_like(t, device="meta") for t in tensors]
        return self.offloaded(home, slot)

    def offloaded(self, home: Offloaded, slot: int | None = None) -> list[Tensor]:
        """Return what was offloaded, where it lies or in a buffer to which it came back."""
        place = home if slot is None else Spill(slot)
        if (home, place) not in self._offloaded:
            likes = self._likes[home]
            sizes = [like.untyped_storage().nbytes() for like in likes]
            if self._homes[place].nbytes < sum(sizes):  # views that share memory, each as a tensor
                if slot is not None:
                    raise ProgramError(
                        f"What block {home.block} keeps for its backward shares memory, and taken apart has "
                        "no room in a buffer for NVMe: raise host_budget, so that it waits in RAM."
                    )
                self._homes[home] = self._grown([self._homes[home]], sum(sizes))
            self._offloaded[home, place] = _views(self._homes[place], likes, sizes)
        return self._offloaded[home, place]

    def spilled(self, home: Offloaded, slot: int) -> tuple[str, Tensor]:
        """Return where on storage offloaded activations wait, and the bytes of a buffer that they pass
        through."""
        assert self._storage is not None
        region = _region(home)
        return region, self._homes[Spill(slot)][: self._storage.nbytes_of(region)]

    def _allocate_offloaded(self, step: Step) -> None:
        """Give each offload its bytes: in the arena, or in one buffer more that grows to what programs
        want."""
        self._give_back(self._homes.values())
        self._homes.clear()
        self._likes.clear()
        self._offloaded.clear()
        needs: dict[Token, int] = offload_buffers(step)
        if self._storage is not None:
            written = offloads(step, "nvme_write").items()
            self._storage.lay_over({_region(home): nbytes for home, nbytes in written})
        left = {home: n for home, n in needs.items() if not self._place(home, self._arena, n)}
        want = sum(padded(nbytes) for nbytes in left.values())
        if self._more.whole.nbytes < want:
            self._more_room(want)
        for home, nbytes in left.items():
            self._place(home, self._more, nbytes)

    def _more_room(self, nbytes: int) -> None:
        self._host.free(self._extra)
        self._extra = torch.empty(0, dtype=torch.uint8)
        self._more = Room(self._extra)
        self._extra = self._host.empty(nbytes + mmap.PAGESIZE)
        skipped = -self._extra.data_ptr() % mmap.PAGESIZE  # storage takes whole pages
        self._more = Room(self._extra[skipped : skipped + nbytes])

    def _place(self, home: Token, room: Room, nbytes: int) -> bool:
        piece = room.take(nbytes)
        if piece is not None:
            self._homes[home] = piece
        return piece is not None

    def _grown(self, instead_of: Sequence[Tensor], nbytes: int) -> Tensor:
        piece = self._arena.take(nbytes)
        if piece is None:
            piece = self._host.empty(nbytes)
        self._give_back(instead_of)
        return piece

    def _give_back(self, pieces: Iterable[Tensor]) -> None:
        for piece in pieces:
            room = next((r for r in (self._arena, self._more) if r.holds(piece)), None)
            if room is None:
                self._host.free(piece)
            else:
                room.give(piece)


def _views(flat: Tensor, likes: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Tensors like those given, side by side in flat bytes."""
    views, order = [flat] * len(likes), sorted(range(len(likes)), key=lambda i: -likes[i].dtype.itemsize)
    start = 0
    for i in order:  # the widest first: each begins at a multiple of its elements' size
        part = flat[start : start + sizes[i]].view(likes[i].dtype)
        views[i] = part.as_strided(likes[i].shape, likes[i].stride())
        start += sizes[i]
    return views


def _region(home: Offloaded) -> str:
    return f"the offloaded activations of block {home.block}, micro-batch {home.micro}"

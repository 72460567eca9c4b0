"""What torch's caching allocator holds for a sequence of requests, by its own rules.

In: sizes in the order in which one stream takes them and gives them back, the most that may be held. Out: the
bytes held, page by page. The rules are those of ``CUDACachingAllocator.cpp`` with expandable segments:
requests of up to 1 MiB in a segment of their own; the smallest free block of sufficient size, split; free
blocks side by side made one; if none is large enough, whole pages mapped behind a free block or in the first
gap; if these would go beyond the limit, first every wholly free page unmapped.
``tests/simulated/test_pages.py`` compares it with the allocator itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

Request = tuple[int, int]
"""A number that stands for an allocation, and its bytes; 0 gives it back."""

PAGE_BYTES = 12 << 20  # by which segments grow, as the runtime sets it; of 20 MiB unless told
_SMALL, _SMALL_PAGE, _LARGE, _ROUND = 1 << 20, 2 << 20, 10 << 20, 2 << 20
_UNIT = 512
_ADDRESSES = 1 << 50  # of a segment: more than any device has


class Pages:
    """Torch's allocator on one stream, that may hold ``limit`` bytes.

    ``held`` are the bytes of mapped pages, ``peak`` the most so far. ``lacking`` is by how much the limit was
    too small for any request so far; such a request is granted all the same.
    """

    def __init__(self, limit: int, page_bytes: int = PAGE_BYTES) -> None:
        self.limit = limit
        self.held = self.peak = self.lacking = 0
        self._page_bytes = page_bytes
        self._segments = _Segment(_SMALL_PAGE), _Segment(page_bytes)
        self._taken: dict[int, tuple[_Segment, _Block]] = {}

    def replay(self, requests: Iterable[Request]) -> None:
        """Take and give back, in order."""
        for number, nbytes in requests:
            if nbytes:
                self.take(number, nbytes)
            else:
                self.give(number)

    def take(self, number: int, nbytes: int) -> None:
        """Allocate."""
        size = -(-nbytes // _UNIT) * _UNIT
        segment = self._segments[size > _SMALL]
        found = segment.fitting(size)
        if found is None:
            if size <= _SMALL:
                asked = _SMALL_PAGE
            else:
                asked = self._page_bytes if size < _LARGE else -(-size // _ROUND) * _ROUND
            if self.held + asked > self.limit:
                self.trim()
                self.lacking = max(self.lacking, self.held + asked - self.limit)
            found, mapped = segment.grown(size)
            self.held += mapped
            self.peak = max(self.peak, self.held)
        segment.take(found, size)
        self._taken[number] = segment, found

    def give(self, number: int) -> None:
        """Give an allocation back."""
        segment, block = self._taken.pop(number)
        segment.give(block)

    def trim(self) -> None:
        """Unmap every page that is free as a whole."""
        self.held -= sum(segment.trim() for segment in self._segments)

    def address(self, number: int) -> int:
        """The offset of an allocation in its segment."""
        return self._taken[number][1].start


class _Block:
    """A part of a segment: mapped or not, taken or free."""

    __slots__ = ("free", "mapped", "next", "previous", "size", "start")

    def __init__(self, start: int, size: int, mapped: bool) -> None:
        self.start, self.size, self.mapped, self.free = start, size, mapped, True
        self.previous: _Block | None = None
        self.next: _Block | None = None

    def cut(self, size: int) -> _Block:
        """Leave ``size`` bytes to this block; the rest."""
        rest = _Block(self.start + size, self.size - size, self.mapped)
        rest.previous, rest.next, self.size = self, self.next, size
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        return rest


class _Segment:
    """Addresses of one pool, of which whole pages are mapped."""

    def __init__(self, page_bytes: int) -> None:
        self._page = page_bytes
        self._free: list[tuple[int, int]] = []  # (size, address) of mapped blocks that are free
        self._gaps = [0]  # addresses of blocks that are not mapped
        self._at = {0: _Block(0, _ADDRESSES, mapped=False)}

    def fitting(self, size: int) -> _Block | None:
        """The free block to take: the smallest, its gap behind it counted in."""
        place = bisect_left(self._free, (size, 0))
        if place == len(self._free):
            return None
        best = self._at[self._free[place][1]]
        for _, address in self._free[place + 1 :]:
            other = self._at[address]
            if _room(other) >= _room(best):
                break
            best = other
        return best

    def take(self, block: _Block, size: int) -> None:
        """Take a free block, and leave what it has too much."""
        self._drop(block)
        if block.size > size:
            self._add(block.cut(size))
        block.free = False

    def give(self, block: _Block) -> None:
        """Free a block, and join it with free blocks beside it."""
        block.free = True
        self._add(self._merged(block))

    def grown(self, size: int) -> tuple[_Block, int]:
        """A free block of at least ``size`` bytes, and the bytes that were mapped for it."""
        mapped = 0
        block = self._with_room(size)
        while not block.mapped or block.size < size:
            gap = block if not block.mapped else block.next
            assert gap is not None and not gap.mapped
            missing = size - (block.size if block.mapped else 0)
            pages = min(gap.size, -(-missing // self._page) * self._page)
            self._drop(gap)
            if gap.size > pages:
                self._add(gap.cut(pages))
            gap.mapped = True
            mapped += pages
            block = self._merged(gap)
            self._add(block)
        return block, mapped

    def trim(self) -> int:
        """Unmap the whole pages of free blocks; the bytes."""
        unmapped = 0
        for _, address in list(self._free):
            block = self._at[address]
            first = -(-block.start // self._page) * self._page
            end = (block.start + block.size) // self._page * self._page
            if first >= end:
                continue
            self._drop(block)
            if first > block.start:
                inner = block.cut(first - block.start)
                self._add(block)
                block = inner
            if block.start + block.size > end:
                self._add(block.cut(end - first))
            block.mapped = False
            unmapped += end - first
            self._add(self._merged(block))
        return unmapped

    def _with_room(self, size: int) -> _Block:
        """The first gap, or the free block before it, from which on enough is free or not mapped."""
        for address in self._gaps:
            first: _Block = self._at[address]
            if first.previous is not None and first.previous.free:
                first = first.previous
            room, block = 0, first
            while room < size and block is not None and block.free:
                room, block = room + block.size, block.next  # type: ignore[assignment]
            if room >= size:
                return first
        raise AssertionError("a segment has no end")

    def _merged(self, block: _Block) -> _Block:
        """One block of this one and those beside it that are free, and mapped, as it is."""
        before, after = block.previous, block.next
        if after is not None and after.free and after.mapped == block.mapped:
            self._drop(after)
            block.size, block.next = block.size + after.size, after.next
            if after.next is not None:
                after.next.previous = block
        if before is not None and before.free and before.mapped == block.mapped:
            self._drop(before)
            before.size, before.next = before.size + block.size, block.next
            if block.next is not None:
                block.next.previous = before
            return before
        return block

    def _add(self, block: _Block) -> None:
        self._at[block.start] = block
        if block.mapped:
            insort(self._free, (block.size, block.start))
        else:
            insort(self._gaps, block.start)

    def _drop(self, block: _Block) -> None:
        del self._at[block.start]
        known: list[tuple[int, int]] | list[int] = self._free if block.mapped else self._gaps
        key = (block.size, block.start) if block.mapped else block.start
        del known[bisect_left(known, key)]


def _room(block: _Block) -> int:
    behind = block.next
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)

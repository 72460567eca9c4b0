"""What torch's allocator holds, by hand; ``tests/simulated/test_pages.py`` asks the allocator itself."""

from __future__ import annotations

from megacompile.hardware.caching_allocator import Pages

MIB = 1 << 20
PAGE = 12 * MIB


def test_blocks_that_are_free_side_by_side_are_one() -> None:
    pages = Pages(10 * PAGE, PAGE)
    pages.replay([(1, 3 * MIB), (2, 4 * MIB), (3, 5 * MIB)])
    assert pages.held == PAGE and [pages.address(n) for n in (1, 2, 3)] == [0, 3 * MIB, 7 * MIB]
    pages.replay([(1, 0), (3, 0), (2, 0), (4, PAGE)])  # with the block before it and the one behind
    assert pages.held == PAGE and pages.address(4) == 0


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    pages = Pages(10 * PAGE, PAGE)
    pages.replay([(1, 4 * MIB), (2, 2 * MIB), (3, 3 * MIB), (4, 3 * MIB), (1, 0), (3, 0)])
    pages.take(5, 3 * MIB - 511)
    assert pages.address(5) == 6 * MIB and pages.held == PAGE
    pages.take(6, MIB)  # of a segment of its own
    assert pages.address(6) == 0 and pages.held == PAGE + 2 * MIB


def test_pages_that_are_free_go_before_the_limit_is_passed() -> None:
    pages = Pages(3 * PAGE, PAGE)
    pages.replay([(1, PAGE), (2, 3 * MIB), (1, 0)])
    assert pages.held == 2 * PAGE
    pages.take(3, 18 * MIB)  # the page of the first, which is too small, is unmapped
    assert pages.lacking == 0 and pages.held == 2 * PAGE
    pages.replay([(4, 10 * MIB), (5, 10 * MIB)])  # for the last nothing is free as a whole
    assert pages.lacking == 10 * MIB and pages.held == 4 * PAGE
    pages.replay([(n, 0) for n in (2, 3, 4, 5)])
    pages.trim()
    assert pages.held == 0 and pages.peak == 4 * PAGE

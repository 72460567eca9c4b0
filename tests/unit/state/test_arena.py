"""The host arena: one mapping, exactly sized, at addresses that suit the CPU."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacompile import units
from megacompile.errors import BudgetError
from megacompile.state import host_arena
from megacompile.state.host_arena import ALIGNMENT, HostArena, padded, resident_bytes

pieces = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 9000), st.integers(260_000, 600_000)),
        st.sampled_from([torch.bfloat16, torch.float32, torch.int16]),
    ),
    max_size=8,
)


@settings(deadline=None, max_examples=30)
@given(pieces)
def test_pieces_are_disjoint_aligned_and_zero_and_fill_what_was_asked_for(wanted: list) -> None:
    whole = HostArena(sum(padded(n * t.itemsize) for n, t in wanted))
    taken = [whole.take((n,), t) for n, t in wanted]
    for i, piece in enumerate(taken):
        assert piece.data_ptr() % mmap.PAGESIZE == 0
        assert not piece.any()
        piece.fill_(i + 1)
    large = [p for p in taken if p.nbytes >= host_arena.LARGE]
    for one, other in pairwise(large):
        between = sum(padded(p.nbytes) for p in taken if one.data_ptr() < p.data_ptr() < other.data_ptr())
        assert (other.data_ptr() - one.data_ptr() - between) % ALIGNMENT == 0
    for i, piece in enumerate(taken):
        assert bool((piece == i + 1).all())
    assert whole.used_bytes == sum(padded(n * t.itemsize) for n, t in wanted) <= whole.nbytes
    assert whole.address == whole.tensor.data_ptr()


def taken(whole: HostArena) -> int:
    """Bytes of an arena in RAM: the process's own figure changes with what other tests left to be freed."""
    entries, table = np.empty(whole.nbytes // mmap.PAGESIZE, np.uint64), Path("/proc/self/pagemap")
    if not table.exists():
        pytest.skip("the system does not say which pages are there: run on Linux")
    with table.open("rb", buffering=0) as pages:
        pages.seek(whole.address // mmap.PAGESIZE * entries.itemsize)
        assert pages.readinto(entries.data.cast("B")) == entries.nbytes
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE


def test_the_arena_is_no_larger_than_asked_and_takes_ram_only_where_written() -> None:
    asked = (300 << 20) + 1
    whole = HostArena(asked)
    assert whole.nbytes == -(-asked // mmap.PAGESIZE) * mmap.PAGESIZE
    assert taken(whole) == 0
    whole.take((8 << 20,), torch.float32).fill_(1.0)
    assert 32 << 20 <= taken(whole) <= (32 << 20) + host_arena._HUGE_PAGE


def test_a_piece_keeps_the_mapping_alive_and_the_last_one_gives_it_back() -> None:
    whole = HostArena(128 << 20)
    piece = whole.take((32 << 20,), torch.float32).fill_(2.0)
    del whole
    gc.collect()
    assert float(piece[-1]) == 2.0
    before = resident_bytes()
    del piece
    gc.collect()
    assert resident_bytes() < before - (100 << 20)


def test_a_fork_that_drops_an_arena_unmaps_nothing_of_its_own() -> None:
    """The fork has other memory at the arena's addresses, which it was not given."""
    whole = HostArena(1 << 20)
    address, nbytes = whole.address, whole.nbytes
    child = os.fork()
    if child == 0:
        try:
            fixed = 0x100000 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # MAP_FIXED_NOREPLACE
            system = ctypes.CDLL(None)
            system.mmap.restype = ctypes.c_void_p
            system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
            assert system.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, fixed, -1, 0) == address
            del whole
            vars(host_arena).clear()  # as at the end of the interpreter
            gc.collect()
            ctypes.memset(address, 1, nbytes)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_more_than_the_arena_holds_is_our_own_mistake() -> None:
    whole = HostArena(ALIGNMENT)
    with pytest.raises(AssertionError, match="no 65540 bytes left"):
        whole.take((ALIGNMENT // 4 + 1,), torch.float32)


def test_a_mapping_that_the_system_refuses_is_said_in_a_sentence() -> None:
    with pytest.raises(BudgetError, match=r"refuses to map .* TB of host memory"):
        HostArena(1 << 60)


def test_several_numa_nodes_are_interleaved_and_one_is_left_alone(monkeypatch, tmp_path) -> None:
    calls: list[tuple[int, ...]] = []

    def call(number: int, address: int, nbytes: int, mode: int, mask: int, bits: int, flags: int) -> int:
        words = (ctypes.c_ulong * (bits // 64)).from_address(mask)
        calls.append((number, address, nbytes, mode, *words, flags))
        return 0

    nodes = tmp_path / "online"
    monkeypatch.setattr(host_arena, "_NODES", nodes)
    monkeypatch.setattr(host_arena, "_system_call", call)
    monkeypatch.setattr(host_arena.platform, "machine", lambda: "x86_64")
    for alone in ("0\n", "\n"):
        nodes.write_text(alone)
        HostArena(ALIGNMENT)
    assert not calls
    nodes.write_text("0-1,66\n")
    whole = HostArena(3 * ALIGNMENT)
    assert calls == [(237, whole.address, 3 * ALIGNMENT, 3, 0b11, 0b100, 0)]


def test_the_kernel_interleaves_what_it_was_told_to() -> None:
    maps, number = Path("/proc/self/numa_maps"), host_arena._MBIND.get(host_arena.platform.machine())
    if number is None or not maps.exists():
        pytest.skip("no NUMA here: run on a kernel with CONFIG_NUMA")
    whole, mask = HostArena(ALIGNMENT), ctypes.c_ulong(1)
    call = (number, whole.address, whole.nbytes, host_arena._MPOL_INTERLEAVE, ctypes.addressof(mask), 65, 0)
    if host_arena._system_call(*call):
        pytest.skip("mbind is not allowed here: run where seccomp allows it")
    (line,) = [x for x in maps.read_text().splitlines() if x.startswith(f"{whole.address:x} ")]
    assert line.split()[1].startswith("interleave")


@pytest.mark.parametrize(
    ("line", "place", "limit", "usage"),
    [
        ("0::/jobs/mine", "jobs", "memory.max", "memory.current"),
        ("0::/jobs/mine", "jobs/mine", "memory.max", "memory.current"),
        ("4:memory:/mine", "memory/mine", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("4:memory:/elsewhere", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_limit_of_a_control_group_around_the_process_counts(
    line: str, place: str, limit: str, usage: str, tmp_path, monkeypatch
) -> None:
    free = units.host_available()
    monkeypatch.setattr(units, "_GROUPS", tmp_path)
    monkeypatch.setattr(units, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(f"7:cpu:/x\n{line}\n")
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / place / usage).write_text("1000")
    (tmp_path / place / limit).write_text("max")
    assert units.host_available() > free // 2
    (tmp_path / place / limit).write_text("5000\n")
    assert units.host_available() == 4000


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/jobs/mine", {"jobs/cpu.max": "200000 100000", "jobs/mine/cpu.max": "max 100000"}),
        (
            "4:cpu,cpuacct:/mine",
            {"cpu,cpuacct/mine/cpu.cfs_quota_us": "250000", "cpu,cpuacct/mine/cpu.cfs_period_us": "100000"},
        ),
    ],
)
def test_cores_are_those_that_the_process_may_use(
    line: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "_GROUPS", tmp_path)
    monkeypatch.setattr(units, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    (tmp_path / "own").write_text(f"7:memory:/x\n{line}\n")
    assert units.usable_cores() == 6
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert units.usable_cores() == 2


def test_a_forked_child_gets_no_copy_of_an_arena() -> None:
    """Where pages are page-locked, a copy made at the next write would leave the device with the old ones."""
    whole = HostArena(1 << 20)
    regions = Path("/proc/self/smaps").read_text().split("VmFlags:")
    for region, flags in pairwise(regions):
        spans = [line.split()[0] for line in region.splitlines() if "-" in line.split(" ")[0]]
        first, last = (int(end, 16) for end in spans[-1].split("-"))
        if first <= whole.address < last:
            assert "dc" in flags.splitlines()[0].split()
            return
    raise AssertionError("the arena is not among the process's mappings")

"""Sums of gradients over ranks: what is packed is the bucket, and the shards together are its sum."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megacompile.blocks.weight_groups import GroupLayout, Parameter, Slot, padded_elements
from megacompile.distributed.ranks import Ranks
from megacompile.runtime.cpu import CpuDevice
from megacompile.runtime.gradient_reduction import Fabric
from megacompile.schedule.op_table import Shard
from megacompile.schedule.step import Step
from megacompile.state.master_layout import add_gradients, copy_elements, own_part


def stride_of(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in memory in that order, the first outermost."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


@st.composite
def layouts(draw: st.DrawFn) -> GroupLayout:
    """A bucket of parameters in any shape and order of memory, shared by two or three ranks."""
    ranks, slots, offset = draw(st.integers(2, 3)), [], 0
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
        order = draw(st.sampled_from(list(permutations(range(len(shape))))))
        parameter = Parameter(f"p{number}", shape, stride_of(shape, order), dtype, 0)
        slots.append(Slot(parameter, offset))
        offset += padded_elements(parameter.numel)
    unit = 8 * ranks
    return GroupLayout(0, "group", dtype, True, tuple(slots), -(-offset // unit) * unit, ranks)


def gradients(layout: GroupLayout, seed: int) -> list[tuple[int, Tensor]]:
    """Contiguous gradients of some parameters."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index, slot in enumerate(layout.slots):
        if (seed + index) % 4:
            found.append((index, torch.randn(slot.parameter.shape, generator=generator).to(layout.dtype)))
    return found


@given(layouts(), st.integers(0, 99), st.data())
def test_any_range_of_a_parameter_is_copied_as_it_lies_in_the_bucket(
    layout: GroupLayout, seed: int, data: st.DataObject
) -> None:
    for index, gradient in gradients(layout, seed):
        slot = layout.slots[index]
        whole = torch.zeros(layout.elements, dtype=layout.dtype)
        add_gradients(whole, layout.slots, [(index, gradient)], [index])
        start = data.draw(st.integers(0, slot.parameter.numel))
        stop = data.draw(st.integers(start, slot.parameter.numel))
        target = torch.full((stop - start,), 7.0, dtype=layout.dtype)
        copy_elements(target, gradient, slot, start)
        assert torch.equal(target, whole[slot.offset + start : slot.offset + stop])


class Together:
    """The ranks of one process, taking turns: what each sends is known when the last one asks."""

    def __init__(self, size: int, sent: list[list[Tensor]], rank: int) -> None:
        self.ranks, self._sent = Ranks(rank, size, size, size), sent

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Note what is sent; answer with what the others sent at this turn of theirs."""
        mine = self._sent[self.ranks.rank]
        mine.append(sent.clone())
        parts = [s[len(mine) - 1] for s in self._sent if len(s) >= len(mine)]
        if len(parts) == self.ranks.size:
            received.copy_(torch.cat([part.chunk(self.ranks.size)[self.ranks.rank] for part in parts]))


@given(layouts(), st.integers(0, 99), st.sampled_from([16, 64, 1 << 20]))
def test_shards_together_are_the_sum_in_the_order_of_ranks(
    layout: GroupLayout, seed: int, piece: int
) -> None:
    ranks = layout.ranks
    piece = min(piece, layout.share * layout.dtype.itemsize)
    step = Step((), {}, 1, shards=(4 * layout.share,), exchange_bytes=ranks * piece)
    parts = [gradients(layout, 4 * seed + rank) for rank in range(ranks)]
    expected = torch.zeros(layout.elements)
    for rank in range(ranks):
        bucket = torch.zeros(layout.elements, dtype=layout.dtype)
        add_gradients(bucket, layout.slots, parts[rank], range(len(layout.slots)))
        expected += bucket
    device, sent = CpuDevice(1 << 20), [[] for _ in range(ranks)]  # type: ignore[var-annotated]
    shards: list[Any] = [None] * ranks
    for _ in range(2):  # the second time all know what the others send
        turns = [s[:] for s in sent]
        for rank in range(ranks):
            known = [[] if r == rank else turns[r] for r in range(ranks)]
            fabric = Fabric(Together(ranks, known, rank), device)  # type: ignore[arg-type]
            fabric.prepare(step, lambda: None)
            fabric.reduce(layout, parts[rank], Shard(0))
            sent[rank], shards[rank] = known[rank], fabric.shard(layout, Shard(0))
    device.close()
    assert torch.equal(torch.cat(shards), expected)


class Replicas:
    """A world of replicas, each a thread of this process."""

    def __init__(self, replica: int, count: int, sent: list[Tensor], barrier: Barrier) -> None:
        self.ranks = Ranks(2 * replica, 2 * count, 2, 2)
        self._sent, self._barrier = sent, barrier

    def all_to_all(self, received: Tensor, sent: Tensor, *, across: bool) -> None:
        assert across and received.data_ptr() != sent.data_ptr()
        self._exchange(sent.clone())
        received.copy_(torch.cat([s.chunk(self.ranks.replicas)[self.ranks.replica] for s in self._sent]))

    def all_gather(self, whole: Tensor, *, across: bool) -> None:
        assert across
        self._exchange(whole.chunk(self.ranks.replicas)[self.ranks.replica].clone())
        whole.copy_(torch.cat(self._sent))

    def _exchange(self, sent: Tensor) -> None:
        self._barrier.wait(60)  # all have read what was sent before
        self._sent[self.ranks.replica] = sent
        self._barrier.wait(60)


@pytest.mark.parametrize(("count", "exchanged"), [(2, 64), (3, 60), (4, 1 << 20), (5, 20)])
def test_shards_are_added_up_in_the_order_of_replicas(count: int, exchanged: int) -> None:
    """In pieces of any size, on each replica the same; what is beyond the shard is nobody's."""
    layout = GroupLayout(0, "group", torch.float32, True, (), 2 * 256, 2)
    shards = torch.randn(count, 256, generator=torch.Generator().manual_seed(0))
    expected = shards[0].clone()
    for shard in shards[1:]:
        expected += shard
    step = Step((), {}, 1, shards=(4 * (256 + count),) * 2, exchange_bytes=exchanged)
    sent, barrier, device = [torch.empty(0)] * count, Barrier(count), CpuDevice(1 << 20)

    def add_up(replica: int) -> Tensor:
        fabric = Fabric(Replicas(replica, count, sent, barrier), device)  # type: ignore[arg-type]
        fabric.prepare(step, lambda: None)
        fabric.shard(layout, Shard(1)).copy_(shards[replica])
        fabric.all_reduce(layout, Shard(1))
        return fabric.shard(layout, Shard(1))

    with ThreadPoolExecutor(count) as pool:
        found = [*pool.map(add_up, range(count))]
    device.close()
    assert all(torch.equal(shard, expected) for shard in found)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_element_of_a_parameter_is_one_ranks(ranks: int) -> None:
    slots = (
        Slot(Parameter("a", (5, 9), (9, 1), torch.float32, 0), 0),
        Slot(Parameter("b", (), (), torch.float32, 0), 64),
        Slot(Parameter("c", (100,), (1,), torch.float32, 0), 96),
    )
    layout = GroupLayout(0, "group", torch.float32, True, slots, 240, ranks)
    for slot in slots:
        parts = [own_part(layout, slot, rank)[0] for rank in range(ranks)]
        covered = [i for part in parts for i in range(part.start, part.stop)]
        assert covered == list(range(slot.parameter.numel))

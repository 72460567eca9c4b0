"""The layout of weight groups over ranks where optimizers need whole parameters: borders lie between them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from megacompile.blocks.weight_groups import GroupLayout, Parameter, lay_out
from megacompile.state.master_layout import own_part, owned

QWEN = {"q": (3584, 3584), "k": (512, 3584), "v": (512, 3584), "o": (3584, 3584)}
QWEN |= {"gate": (18944, 3584), "up": (18944, 3584), "down": (3584, 18944)}


def parameter(name: str, *shape: int, undivided: bool = True) -> Parameter:
    return Parameter(name, shape, shape, torch.bfloat16, int(undivided), undivided=undivided)


def laid_out(members: list[Parameter], ranks: int, layers: int) -> tuple[list[GroupLayout], list[int]]:
    so_far = [0] * ranks
    return [lay_out(i, "layer", members, so_far) for i in range(layers)], so_far


def check(group: GroupLayout) -> None:
    """No undivided parameter is in two shards, none lies over another, each element has one owner."""
    ends = [slot.offset + slot.parameter.numel for slot in group.slots]
    begins = [slot.offset for slot in group.slots]
    assert (
        all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)) and ends[-1] <= group.elements
    )
    assert all(begin % 256 == 0 for begin in (*begins, group.share))
    for slot in group.slots:
        parts = [own_part(group, slot, rank)[0] for rank in range(group.ranks)]
        sizes = [part.stop - part.start for part in parts if part.start < part.stop]
        assert sum(sizes) == slot.parameter.numel
        assert len(sizes) <= 1 or not slot.parameter.undivided


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_no_border_lies_within_what_is_stepped_whole(ranks: int) -> None:
    draw = random.Random(ranks)
    for _ in range(40):
        members = [
            parameter(str(i), *(draw.randint(0, 90) for _ in range(2)), undivided=draw.random() < 0.6)
            for i in range(draw.randint(1, 9))
        ]
        for group in laid_out(members, ranks, 3)[0]:
            check(group)
            assert {slot.parameter for slot in group.slots} == set(members)


@pytest.mark.parametrize(("ranks", "padded"), [(2, 1.17), (4, 1.17), (8, 2.34)])
def test_owners_of_many_layers_have_about_as_much(ranks: int, padded: float) -> None:
    members = [parameter(name, *shape) for name, shape in QWEN.items()]
    members += [parameter(name, 3584, undivided=False) for name in ("norm", "norm2")]
    groups, so_far = laid_out(members, ranks, 28)
    held = [sum(count for g in groups for _, _, count in owned(g, rank)) for rank in range(ranks)]
    assert sum(held) == 28 * sum(p.numel for p in members)
    assert max(held) <= 1.1 * sum(held) / ranks
    assert so_far == [-(-count // 256) * 256 for count in held]
    assert groups[0].elements / sum(p.numel for p in members) == pytest.approx(padded, abs=0.01)


def test_banks_of_experts_that_are_divided_lie_over_all_shards() -> None:
    members = [parameter(name, 512, 512) for name in "qkvo"]
    members += [parameter(name, 64, 512, 256, undivided=False) for name in ("up", "down")]
    for group in laid_out(members, 8, 4)[0]:
        check(group)
        assert group.elements <= 1.02 * sum(p.numel for p in members)


def test_with_none_of_them_or_one_rank_the_bucket_is_as_it_was() -> None:
    members = [parameter(str(i), 40, 40 + i, undivided=i % 2 > 0) for i in range(5)]
    alone = lay_out(0, "layer", members, [0])
    sizes = [-(-p.numel // 32) * 32 for p in sorted(members, key=lambda p: p.param_group)]
    assert [slot.offset for slot in alone.slots] == [*itertools.accumulate(sizes, initial=0)][:-1]
    shared = lay_out(0, "layer", members[::2], [0, 0, 0])
    sizes = [-(-p.numel // 256) * 256 for p in members[::2]]
    assert [slot.offset for slot in shared.slots] == [*itertools.accumulate(sizes, initial=0)][:-1]
    assert shared.elements == -(-sum(sizes) // 768) * 768

"""A checkpoint loads into a program whose weights are cut otherwise: every bit is where it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megacompile
from megacompile.blocks.weight_groups import GroupLayout, Parameter, Slot, cut_parameters, padded_elements
from megacompile.state.checkpoint import Checkpoint, save_checkpoint
from megacompile.state.checkpoint_manifest import RunProgress
from megacompile.state.masters import HostState
from megacompile.state.moment_formats import StateFormat
from tests.support.damage import resealed
from tests.unit.graph.test_tile import start, tokens, vocabulary

ROWS = 600
NOTHING = RunProgress("m", 0, 7, [])


def state_of(cuts: tuple[int, ...], width: int, form: StateFormat, dtype: torch.dtype) -> HostState:
    """A weight of ROWS rows in pieces, each a group of its own, and a small one that is never cut."""
    whole = {
        "w": Parameter("w", (ROWS, width), (width, 1), dtype, 0),
        "bias": Parameter("bias", (5,), (1,), dtype, 0),
    }
    parameters = cut_parameters(whole, {"w": cuts} if len(cuts) > 2 else {})
    groups = [
        GroupLayout(i, p.name, dtype, True, (Slot(p, 0),), padded_elements(p.numel))
        for i, p in enumerate(parameters.values())
    ]
    return HostState(groups, form)


def fill(state: HostState) -> None:
    """Values that no two places share."""
    generator = torch.Generator().manual_seed(0)
    for group in state.parts(change=True):
        for name, arrays in group.items():
            for array, tensor in arrays.items():
                noise = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
                tensor.view(torch.uint8).copy_(noise)
                if array in ("exp_avg", "exp_avg_sq"):  # what no parameter owns stays zero
                    count = next(
                        s.parameter.numel for g in state.groups for s in g.slots if s.parameter.name == name
                    )
                    tensor[count:] = 0
    state.steps[:] = [[3] * len(group.slots) for group in state.groups]


def contents(state: HostState) -> dict[str, bytes]:
    """By the model's parameter and array, the bytes of all its elements in the order of rows."""
    found: dict[str, bytes] = {}
    for group, layout in zip(state.parts(), state.groups, strict=True):
        for name, arrays in group.items():
            parameter = layout.slots[0].parameter
            for array, tensor in arrays.items():
                coded = array.endswith(("codes", "scales"))
                owned = tensor if coded else tensor[: parameter.numel]
                key = f"{parameter.whole or name}/{array}"
                found[key] = found.get(key, b"") + owned.contiguous().view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "width"), [("fp32", 16), ("fp32", 7), ("int8", 64), ("int4", 64)], ids=lambda x: str(x)
)
@pytest.mark.parametrize(
    ("saved", "read"),
    [
        ((0, ROWS), (0, 200, 400, ROWS)),
        ((0, 200, 400, ROWS), (0, ROWS)),
        ((0, 256, 512, ROWS), (0, 128, 384, 500, ROWS)),
    ],
    ids=["whole to pieces", "pieces to whole", "pieces to pieces"],
)
def test_every_element_finds_its_place(
    saved: tuple[int, ...],
    read: tuple[int, ...],
    form: StateFormat,
    width: int,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    before = state_of(saved, width, form, dtype)
    fill(before)
    save_checkpoint(tmp_path / "a", before, {}, NOTHING)
    after = state_of(read, width, form, dtype)
    Checkpoint(tmp_path / "a", after, {}).read()
    assert contents(after) == contents(before)
    assert after.steps == [[3] * len(group.slots) for group in after.groups]


def test_codes_whose_blocks_span_a_cut_are_refused_by_name(tmp_path: Path) -> None:
    before = state_of((0, ROWS), 63, "int8", torch.float32)
    fill(before)
    save_checkpoint(tmp_path / "a", before, {}, NOTHING)
    after = state_of((0, 200, ROWS), 63, "int8", torch.float32)
    with pytest.raises(megacompile.MegacompileError, match=r"holds w where this program has w\[0:200\]"):
        Checkpoint(tmp_path / "a", after, {})
    same = state_of((0, ROWS), 63, "int8", torch.float32)
    Checkpoint(tmp_path / "a", same, {}).read()
    assert contents(same) == contents(before)


def test_damage_in_a_part_that_is_not_wanted_first_is_found(tmp_path: Path) -> None:
    before = state_of((0, ROWS), 16, "fp32", torch.float32)
    fill(before)
    save_checkpoint(tmp_path / "a", before, {}, NOTHING)
    shard = tmp_path / "a" / "state-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 4
    shard.write_bytes(content)
    with pytest.raises(megacompile.MegacompileError, match="damaged: the checksum of w/"):
        Checkpoint(tmp_path / "a", state_of((0, 200, ROWS), 16, "fp32", torch.float32), {}).read()


def test_rows_that_are_missing_are_refused(tmp_path: Path) -> None:
    before = state_of((0, 200, 400, ROWS), 16, "fp32", torch.float32)
    save_checkpoint(tmp_path / "a", before, {}, NOTHING)
    manifest = tmp_path / "a" / "checkpoint.json"

    def shift(fields: dict[str, Any]) -> None:
        fields["layout"]["parameters"]["w[400:600]"]["first_row"] = 300

    resealed(manifest, shift)
    with pytest.raises(megacompile.MegacompileError, match="does not have all rows of w once, in order"):
        Checkpoint(tmp_path / "a", state_of((0, ROWS), 16, "fp32", torch.float32), {})


def test_a_run_goes_on_at_another_budget_and_back_bit_for_bit(tmp_path: Path) -> None:
    """Cut at a tight budget, whole at a large one: what passes through the other program is unchanged."""
    batch: Any = tokens(32768)

    def program(budget: str) -> megacompile.Program:
        torch.manual_seed(0)
        return start(vocabulary(32768, 32, tied=True), budget, batch)

    tight = program("3MB")
    assert any(
        "[" in name for g in tight._session.runtime.state.groups for name in [g.slots[0].parameter.name]
    )
    for _ in range(2):
        tight.train_step(batch)
    tight.save(tmp_path / "tight")
    large = program("1GB")
    large.load(tmp_path / "tight")
    trained: dict[str, Tensor] = tight.state_dict()
    assert all(torch.equal(v, trained[n]) for n, v in large.state_dict().items())
    large.save(tmp_path / "large")
    expected = [float(tight.train_step(batch).loss) for _ in range(2)]
    again = program("3MB")
    again.load(tmp_path / "large")
    assert [float(again.train_step(batch).loss) for _ in range(2)] == expected
    final = tight.state_dict()
    assert all(torch.equal(v, final[n]) for n, v in again.state_dict().items())
    losses = [float(large.train_step(batch).loss) for _ in range(2)]
    assert losses == pytest.approx(expected, rel=1e-5)
    for each in (tight, large, again):
        each.close()

"""What is read out of a checkpoint without a program is what the program held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megacompile.errors import MegacompileError
from megacompile.state.checkpoint import save_checkpoint
from megacompile.state.model_export import Description
from megacompile.state.saved_values import saved_values
from tests.support.damage import resealed
from tests.unit.state.test_recut import NOTHING, ROWS, fill, state_of

SHAPES = {"w": (ROWS, 7), "bias": (5,), "scale": ()}
LOOSE = {"scale": torch.tensor(0.5)}


def described(shapes: dict[str, tuple[int, ...]] = SHAPES) -> Description:
    dtypes, names = dict.fromkeys(shapes, torch.float32), {name: name for name in shapes}
    return Description("M", shapes, dtypes, names, None, None)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = state_of((0, ROWS), 7, "fp32", torch.bfloat16)
    fill(state)
    save_checkpoint(tmp_path / "saved", state, LOOSE, NOTHING)
    return tmp_path / "saved"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(0, ROWS), (0, 200, 512, ROWS)])
def test_masters_come_back_bit_for_bit(cuts: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    """In one piece and in several; where they are kept in two halves, and where not."""
    state = state_of(cuts, 7, "fp32", dtype)
    fill(state)
    save_checkpoint(tmp_path, state, LOOSE, NOTHING)
    found = dict(saved_values(tmp_path, described()))
    assert {name: tuple(value.shape) for name, value in found.items()} == SHAPES
    expected = state.read_whole([(i, 0) for i in range(len(cuts) - 1)])
    assert torch.equal(found["w"].view(torch.int32), expected.view(torch.int32))
    assert torch.equal(found["scale"], LOOSE["scale"])


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"bias": (5,), "scale": ()}, "of another model: only the checkpoint has w"),
        (SHAPES | {"more": (2,)}, "of another model: only the model has more"),
        (SHAPES | {"w": (7, ROWS)}, "has w in the shape"),
        (SHAPES | {"scale": (2,)}, "has scale in the shape"),
    ],
)
def test_another_model_is_refused(shapes: dict[str, tuple[int, ...]], says: str, saved: Path) -> None:
    with pytest.raises(MegacompileError, match=says):
        list(saved_values(saved, described(shapes)))


def test_damage_is_named(saved: Path) -> None:
    (shard,) = saved.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-9] ^= 1
    shard.write_bytes(content)
    with pytest.raises(MegacompileError, match=r"is damaged: the checksum of \S+ is wrong"):
        list(saved_values(saved, described()))


def test_another_dtype_of_the_same_bytes_is_named(saved: Path) -> None:
    (shard,) = saved.glob("*.safetensors")
    content = shard.read_bytes()
    assert content.count(b'"F32"')
    shard.write_bytes(content.replace(b'"F32"', b'"I32"'))
    with pytest.raises(MegacompileError, match="is damaged: the checksum of its header is wrong"):
        list(saved_values(saved, described()))


def test_strides_beyond_the_file_are_refused(saved: Path) -> None:
    resealed(saved / "checkpoint.json", lambda m: m["layout"]["parameters"]["w"].update(stride=[10**6, 1]))
    with pytest.raises(MegacompileError, match="w does not lie in it as it says"):
        list(saved_values(saved, described()))

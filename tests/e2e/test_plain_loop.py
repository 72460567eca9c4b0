"""What a guide writes in the place of a plain loop has the losses, outputs and weights of that loop."""

from __future__ import annotations

import copy
import difflib
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import megacompile
from tests.support.examples import load_example
from tests.support.models import Plain, batch_for
from tests.support.ranks import run_ranks, whole

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "plain-loop.md").read_text()


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


SETUP, *SECTIONS = re.split(r"^## ", PAGE, flags=re.M)
PAIRS = {section.partition("\n")[0]: blocks(section) for section in SECTIONS if blocks(section)}


@pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported")
@pytest.mark.filterwarnings("ignore:Compiling another program")
@pytest.mark.parametrize("title", PAIRS)
def test_both_programs_of_a_pair_compute_the_same(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In FP32: in bfloat16 an autocast region rounds at other places than a program."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    seen = []
    for source in PAIRS[title]:
        exec("\n".join(blocks(SETUP)), names)
        exec(source.replace("torch.bfloat16", "torch.float32"), names)
        seen.append(dict(names))
    plain, ported = seen
    assert len(plain["losses"]) > 3 and ported["losses"] is not plain["losses"]
    assert ported["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    if "logits" in plain:
        torch.testing.assert_close(ported["logits"], plain["logits"], rtol=0, atol=1e-5)
    modules = {name for name, value in plain.items() if isinstance(value, nn.Module) and name != "judge"}
    assert modules
    for name in modules:
        assert ported[name] is not plain[name]
        state = ported[name].state_dict()
        for key, value in plain[name].state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=1e-5)


def test_the_guide_has_a_pair_of_each_kind() -> None:
    assert {len(pair) for pair in PAIRS.values()} == {2}
    assert len(PAIRS) == 5


def test_a_port_of_a_whole_loop_changes_twenty_lines_at_most() -> None:
    files = [(ROOT / "examples" / f"{name}_loop.py").read_text().splitlines() for name in ("plain", "ported")]
    changed = [line for line in difflib.ndiff(*files) if line[0] in "+-"]
    assert 0 < len(changed) <= 20
    gone, new = (sum(line[0] == mark for line in changed) for mark in "-+")
    assert f"shows {gone} lines that go and {new} that come" in PAGE


def test_a_ported_loop_trains_as_the_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in FP32: losses, the best weights and the average; a step in bfloat16 is near."""
    plain, ported = load_example("plain_loop"), load_example("ported_loop")
    monkeypatch.setattr(plain, "DEVICE", "cpu")
    for module in (plain, ported):
        monkeypatch.setattr(module, "EPOCHS", 1)
    in_bfloat16 = plain.main(tmp_path)[0]
    on_cpu = functools.partial(megacompile.compile, device="cpu", compute_dtype=torch.float32)
    monkeypatch.setattr(megacompile, "compile", on_cpu)
    monkeypatch.setattr(torch, "autocast", functools.partial(torch.autocast, enabled=False))
    losses, states = [], []
    for module in (plain, ported):
        losses.append(module.main(tmp_path))
        states.append([torch.load(tmp_path / f"{name}.pt") for name in ("best", "average")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1][0] == pytest.approx(in_bfloat16, rel=0.02)
    for ours, theirs in zip(states[1], states[0], strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-5)


def test_ranks_train_as_distributed_data_parallel_does() -> None:
    for error in whole(run_ranks(2, beside_ddp)):
        assert error < 1e-6


def beside_ddp(rank: int) -> float:
    """The largest difference of a weight after steps of DDP and of the program on the same batches."""
    model = Plain()
    plain, ported = DistributedDataParallel(model), DistributedDataParallel(copy.deepcopy(model))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, ported)]
    program = megacompile.compile(
        ported, "1GB", optimizer=optimizers[1], compute_dtype=torch.float32, device="cpu"
    )
    for step in range(3):
        batch = batch_for("plain", 2 * step + rank)
        optimizers[0].zero_grad()
        plain(**batch).backward()
        optimizers[0].step()
        program.train_step(batch)
    trained = Plain()
    program.sync_to(trained)
    program.close()
    pairs = zip(model.parameters(), trained.parameters(), strict=True)
    return max(float((a - b).abs().max().detach()) for a, b in pairs)

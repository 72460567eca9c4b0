"""What ``print(program.schedule)`` says can be added up, and is said of what it is true of."""

from __future__ import annotations

import ast
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import megacompile
from megacompile.cli.inspect import read_schedule
from megacompile.printable import is_printable
from megacompile.report.schedule import Schedule
from tests.support.models import batch_for, build


def trained(model: nn.Module, batch: Any, budget: str, **options: Any) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program = megacompile.compile(model, budget, optimizer=optimizer, device="cpu", **options)
    program.train_step(batch)
    return program


def added_up(printed: str) -> tuple[int, int, list[str]]:
    """The sum of the parts, the peak beside them, and the names of the parts."""
    table = printed.split("bytes of the device at the highest point")[1].split("\n\n")[0]
    rows = re.findall(r"^  (.+?)  +([\d,]+) .*$", table, re.MULTILINE)
    *parts, peak, budget = [(name, int(number.replace(",", ""))) for name, number in rows]
    assert (peak[0], budget[0]) == ("peak", "budget")
    return sum(nbytes for _, nbytes in parts), peak[1], [name for name, _ in parts]


@pytest.mark.parametrize("budget", ["200kB", "1GB"])
def test_parts_add_up_to_the_peak(budget: str) -> None:
    program = trained(build("llama"), batch_for("llama"), budget, compute_dtype=torch.float32)
    printed = str(program.schedule)
    total, peak, parts = added_up(printed)
    assert total == peak == program.schedule.peak_bytes == program.memory.predicted_peak_bytes
    stays = budget == "1GB"
    assert ("weights and state that stay" in parts, "weight slots" in parts) == (stays, not stays)
    assert ("stay on the device, state too" in printed, "streamed, prefetch" in printed) == (stays, not stays)
    program.close()


def test_blocks_of_a_sequential_are_called_by_what_has_their_weights() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    model[0].requires_grad_(False)
    batch = (torch.randn(8, 16), torch.randint(4, (8,)))
    program = trained(model, batch, "1MB", loss_fn=nn.CrossEntropyLoss(), max_grad_norm=1.0)
    schedule = program.schedule
    assert [block.name for block in schedule.work.blocks] == ["0", "2", "4"]
    printed = str(schedule)
    total, peak, _ = added_up(printed)
    assert total == peak
    rest, every = (sum(p.numel() for p in m.parameters()) for m in (model[2:], model))
    assert f"{rest:,} of {every:,} parameters are trained" in printed
    assert "trained   of 2, 4 (×2): 14.6 kB of weights, masters and moments" in printed  # 12 each, padded
    assert not re.search(r"(?<![\d.])0\.0+ (s|ms|MB)\b", printed.split('"""')[0])
    program.close()


def test_another_program_is_told_of_once_for_each_reason() -> None:
    batch = batch_for("plain", size=4)
    program = trained(build("plain", depth=1), batch, "1MB", compute_dtype=torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (3, 1):
            program.train_step({name: value[:rows] for name, value in batch.items()})
        program.model.eval()
        program.train_step({name: value[:1] for name, value in batch.items()})
    first, second = (str(w.message) for w in caught)
    assert "for a batch of (3, " in first and "pad batches to few lengths" in first
    assert "modes or attributes" in second
    assert {w.filename for w in caught} == {__file__}
    program.close()


def test_the_largest_schedule_is_not_that_of_a_last_short_batch() -> None:
    batch = batch_for("plain", size=4)
    program = trained(build("plain"), batch, "1MB", compute_dtype=torch.float32)
    with pytest.warns(UserWarning, match="Compiling another program"):
        program.train_step({name: value[:1] for name, value in batch.items()})
    largest, last = program.largest_schedule, program.schedule
    flops = [sum(op.flops for op in schedule.step.ops) for schedule in (largest, last)]
    assert flops[0] == 4 * flops[1] > 0
    assert largest.measured is not None and last.measured is not None  # both of the last two runs
    program.close()


names_of_modules = st.text(st.characters(exclude_characters="."), min_size=1, max_size=12)
ODD = [
    'a"""\nprint("run")\n"""',
    'a"',
    "a\\",
    "\\N{x}",
    "a\nb",
    "\x00",
    "\x1b[2J",
    "\u2028",
    "\ud800",
    "\ufb01",
    "²",
]


class Named(nn.Module):
    """Layers under any names, whose outputs are added up."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.outer = nn.Module()
        for name in names:
            self.outer.add_module(name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).sum() for layer in self.outer._modules.values()]).sum()


@settings(max_examples=2, phases=[Phase.explicit, Phase.generate])  # as each takes a second
@given(st.lists(names_of_modules, min_size=3, max_size=3, unique=True))
@example(ODD)
def test_a_module_may_have_any_name_that_torch_takes(names: list[str]) -> None:
    """What is emitted holds one function, which runs; the file of the schedule gives the schedule back."""
    model = Named([name for name in names if not hasattr(nn.Module(), name)])
    batch = (torch.ones(2, 8),)
    expected = model(*batch).item()
    with tempfile.TemporaryDirectory() as folder:
        optimizer = torch.optim.SGD(model.parameters())
        program = megacompile.compile(
            model, "1MB", optimizer=optimizer, device="cpu", compute_dtype=torch.float32, dump=folder
        )
        loss = program.train_step(batch).loss
        program.close()
        written = Path(folder, "train")
        schedule = read_schedule(written)
        text, *offsets, function = ast.parse((written / "09_step.py").read_bytes()).body
        ast.parse((written / "03_blocks.py").read_bytes())
    assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    assert [ast.unparse(line).partition(" = ")[0] for line in offsets] in ([], ["OFFSETS"])
    assert isinstance(function, ast.FunctionDef) and loss.item() == pytest.approx(expected)
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert all(
        is_printable(name) and schedule.explain(name) for name in (b.name for b in schedule.work.blocks)
    )

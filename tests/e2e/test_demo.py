"""The demo's helpers and the pictures, on a model of a few thousand parameters."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from megacompile.report.plots import _memory_layers, loss_curve, memory_timeline
from megacompile.schedule.op_table import Saved
from megacompile.schedule.step import Op, Step, memory_curve, peak_bytes
from tests.support.examples import load_example

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return load_example("demo")


def two_blocks() -> Step:
    """Forward of two blocks, then backward: 5 + 1 fixed bytes, 10 saved by each block."""
    ops = (
        Op("forward", "compute", block=0, writes=(Saved(0, 0),), peak_bytes=14),
        Op("forward", "compute", block=1, writes=(Saved(1, 0),), peak_bytes=12),
        Op("backward", "compute", block=1, donates=(Saved(1, 0),), peak_bytes=3),
        Op("free", "compute", frees=(Saved(0, 0),)),
    )
    tokens = {Saved(0, 0): 10, Saved(1, 0): 10}
    return Step(ops, tokens, 1, slab_bytes=5, constant_bytes=1)


def test_layers_of_the_timeline_stack_up_to_the_memory_curve() -> None:
    ops, layers = _memory_layers(two_blocks())
    fixed, kept, total = layers.values()
    assert [op.kind for op in ops] == ["forward", "forward", "backward"]
    assert fixed == [6, 6, 6]
    assert kept == [6, 16, 26]
    assert total == [nbytes for _, nbytes in memory_curve(two_blocks())[:3]]
    assert "weight slots and constants" in layers


def test_the_demo_trains_and_writes_what_it_says(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = demo.Settings(
        steps=3, out=tmp_path, budget="1MB", layers=1, width=128, feed_forward=64, batch=2, length=16,
        evaluate_every=2, held_out_batches=1,
    )  # fmt: skip
    demo.main(settings)
    printed = capsys.readouterr().out
    for row in ("plain PyTorch needs", "budget", "measured peak", "predicted peak", "tokens/s"):
        assert row in printed
    for picture in ("loss.png", "memory.png"):
        assert (tmp_path / picture).read_bytes().startswith(PNG)
        assert str(tmp_path / picture) in printed
    assert "def step(rt):" in (tmp_path / "schedule.txt").read_text()
    assert (tmp_path / "schedule" / "train" / "09_step.py").exists()


def test_training_history_has_a_loss_per_step_and_ends_with_an_evaluation(demo: ModuleType) -> None:
    settings = demo.Settings(steps=5, length=4, batch=2, evaluate_every=2)
    program = FakeProgram()
    history = demo.train(program, torch.arange(64, dtype=torch.uint8), [{}], settings)
    assert len(history.losses) == 5
    assert [step for step, _ in history.held_out] == [0, 2, 4, 5]


class FakeProgram:
    """Enough of a program for the loop: a constant loss, and an optimizer to schedule."""

    def __init__(self) -> None:
        self.optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
        self.memory = type("Memory", (), {"device_peak_bytes": 1})

    def train_step(self, batch: object) -> object:
        self.optimizer.step()
        return type("Out", (), {"loss": torch.tensor(2.0)})

    def evaluate(self, batch: object) -> torch.Tensor:
        return torch.tensor(2.5)

    def synchronize(self) -> None: ...


def test_text_is_split_by_file_in_a_fixed_order(demo: ModuleType, tmp_path: Path) -> None:
    for i in range(21):
        (tmp_path / f"{i:02}.py").write_text(f"{i:02}")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text("no")
    train, held_out = demo.standard_library(tmp_path)
    assert bytes(held_out.tolist()) == b"0020"
    assert bytes(train.tolist()) == b"".join(b"%02d" % i for i in range(1, 20))


def test_batches_are_windows_of_the_text(demo: ModuleType) -> None:
    settings = demo.Settings(batch=3, length=8)
    batch = demo.random_batch(torch.arange(9, dtype=torch.uint8), settings, torch.Generator())
    assert batch["input_ids"].shape == (3, 8)
    assert set((batch["input_ids"] - torch.arange(8))[:, 0].tolist()) <= {0, 1}
    assert batch["labels"] is batch["input_ids"]


def test_learning_rate_warms_up_and_falls_to_two_percent(demo: ModuleType) -> None:
    factor = demo.cosine(demo.Settings(steps=10, warmup=4))
    assert [factor(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1.0
    assert factor(10) == pytest.approx(0.02)


def test_plain_need_counts_weights_gradients_moments_and_activations(demo: ModuleType) -> None:
    settings = demo.Settings(layers=1, width=128, feed_forward=64, batch=2, length=16)
    model = demo.byte_model(settings)
    parameters = sum(p.numel() for p in model.parameters())
    ids = torch.zeros(2, 16, dtype=torch.long)
    short = demo.plain_need(model, {"input_ids": ids, "labels": ids})
    long = demo.plain_need(model, {"input_ids": ids.repeat(64, 1), "labels": ids.repeat(64, 1)})
    assert short >= 16 * parameters
    assert long - short > 62 * 2 * 16 * 256 * 4  # at least the logits grow
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("budget", [100, 3 * 10**9])
def test_pictures_of_edge_cases_are_drawn(tmp_path: Path, budget: int) -> None:
    assert peak_bytes(two_blocks()) <= budget
    timeline = memory_timeline(two_blocks(), tmp_path / "new" / "m.png", budget_bytes=budget)
    assert timeline.read_bytes().startswith(PNG)
    assert loss_curve([], [], tmp_path / "l.png").read_bytes().startswith(PNG)


def test_a_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'megacompile\[plots\]'"):
        loss_curve([(1, 1.0)], [], tmp_path / "l.png")


def test_arguments_become_settings(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    read = demo.read_arguments(["--steps", "7", "--budget", "1GB"])
    assert (read.steps, read.budget) == (7, "1GB")
    with pytest.raises(SystemExit):
        demo.read_arguments(["--steps", "0"])

"""What the Trainer shows while it trains: speed, memory, compilation; and what it does not add to logs."""

from __future__ import annotations

import contextlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_trainer import Trainer, rows, trainer

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
progress = pytest.importorskip("megacompile.integrations.progress")

SHOWN = r"[\d,]+ tokens/s, [\d.e+-]+ TFLOP/s, device [\d.]+ [kM]B, host [\d.]+ [kM]B"


@pytest.mark.parametrize("bar", [True, False])
def test_speed_memory_and_compilation_are_shown(
    bar: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the progress bar, or after each logged line; the update that compiles says nothing of its speed."""
    monkeypatch.setattr(progress, "_OFTEN", 0)
    monkeypatch.setattr(progress, "_is_terminal", lambda bar: True)
    one = trainer(
        Trainer,
        tmp_path,
        max_steps=3,
        eval_strategy="no",
        disable_tqdm=not bar,
        gradient_accumulation_steps=1,
    )
    one.train()
    captured = capfd.readouterr()
    shown = captured.err if bar else captured.out
    assert "compiling a program to train: a batch of (2, 12), (2, 12)" in shown
    assert re.search(r"compiled a program to train in [\d.]+ s", shown)
    assert re.search(SHOWN, shown)
    assert re.search(r"loss [\d.]+, device" if bar else r"^device", shown, re.MULTILINE)
    assert len(re.findall(r"[\d,]+ tokens/s", shown)) >= (1 if bar else 2)
    if not bar:  # what is logged stands in the entry, once
        losses = [f"{entry['loss']:.4g}" for entry in one.state.log_history if "loss" in entry]
        assert [shown.count(loss) for loss in losses] == [losses.count(loss) for loss in losses]
    assert not any("tokens" in name for entry in one.state.log_history for name in entry)


def test_a_bar_into_a_file_writes_few_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = trainer(
        Trainer,
        tmp_path,
        max_steps=8,
        eval_strategy="steps",
        eval_steps=4,
        logging_steps=1,
        disable_tqdm=False,
    )
    one.train()
    captured = capfd.readouterr()
    drawn = captured.err.count("/8 [")
    assert 1 <= drawn <= 3, "at the beginning, where a minute is over, and at the end"
    for entry in one.state.log_history:
        if "loss" in entry:
            assert captured.out.count(f"'loss': '{entry['loss']:.4g}'") >= 1
    assert "compiled a program to train" in captured.out and "compiled a program" not in captured.err


def test_figures_are_shown_no_more_often_than_they_are_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_OFTEN", 1e9)
    one = trainer(Trainer, tmp_path, max_steps=3, eval_strategy="no")
    one._steps.progress._shown = -1e10
    one.train()
    assert len(re.findall(r"device [\d.]+ [kM]B", capfd.readouterr().out)) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_lines_that_nobody_could_read_one_by_one_are_written_together(
    fails: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, in order, at the latest when training ends, by an error as well."""

    class Failing(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if fails and state.global_step == 4:
                raise ValueError("a callback's")

    monkeypatch.setattr(progress, "_OFTEN", 1e9)
    monkeypatch.setattr(progress, "_is_terminal", lambda bar: True)
    one = trainer(Trainer, tmp_path, max_steps=4, eval_strategy="no", disable_tqdm=False, logging_steps=1)
    one.add_callback(Failing())
    (bar,) = [c for c in one.callback_handler.callbacks if isinstance(c, transformers.ProgressCallback)]
    bar._written = -1e10
    writes, flush = [], bar.flush
    monkeypatch.setattr(bar, "flush", lambda: (writes.append(len(bar._lines)), flush()))
    with pytest.raises(ValueError, match="a callback's") if fails else contextlib.nullcontext():
        one.train()
    shown = [line for line in capfd.readouterr().out.splitlines() if line.startswith("{'loss'")]
    logged = [f"'loss': '{entry['loss']:.4g}'" for entry in one.state.log_history if "loss" in entry]
    assert len(logged) == (3 if fails else 4)
    assert len(shown) == len(logged) and all(map(str.__contains__, shown, logged))
    assert [n for n in writes if n] == [1, len(logged) - (1 if fails else 0)]


def test_compilation_is_told_to_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("megacompile.compiler")
    trainer(Trainer, tmp_path, max_steps=1, eval_strategy="no").train()
    assert not [record for record in caplog.records if record.name == log.name]
    assert (log.level, log.propagate, log.handlers) == (logging.NOTSET, True, [])


def test_padding_counts_for_no_tokens(tmp_path: Path) -> None:
    one = trainer(Trainer, tmp_path)
    ids = torch.stack([row["input_ids"] for row in rows(2, 1)])
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    one._steps.progress.count({"input_ids": ids, "attention_mask": mask})
    one._steps.progress.count({"input_ids": ids})
    assert one._steps.progress._tokens == 24 - 5 + 24

"""``megacompile doctor --gpu`` through torch.cuda."""

from __future__ import annotations

import pytest

from megacompile.cli import first_run
from megacompile.cli.main import main


def test_a_tiny_model_trains_as_by_plain_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_run, "OURS", {})  # their inputs are drawn on the device, which has no numbers
    assert main(["doctor", "--gpu"]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.count("OK: ") == 3

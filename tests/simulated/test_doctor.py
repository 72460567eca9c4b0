"""``megacompile doctor --gpu`` through torch.cuda."""

from __future__ import annotations

import pytest

from megacompile.cli.main import main


def test_a_tiny_model_trains_as_by_plain_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu"]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.count("OK: ") == 3

"""``megacompile doctor --gpu``; ``tests/simulated/test_doctor.py`` runs it through torch.cuda."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import megacompile
from megacompile.cli import gpu_doctor
from megacompile.cli.main import main
from megacompile.kernels.registry import EAGER_FORMS


def test_a_device_that_works_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_doctor, "_LENGTH", 32)
    monkeypatch.setattr(gpu_doctor, "_WIDTH", 64)
    monkeypatch.setattr(
        gpu_doctor,
        "_LARGEST_SIZES",
        {what: min(most, 256) for what, most in gpu_doctor._LARGEST_SIZES.items()},
    )
    found = list(gpu_doctor.findings("cpu", "50MB"))
    assert len(found) == 4 + len(EAGER_FORMS) and all(f.good for f in found), found
    assert "peak" in found[-1].text and "predicted" in found[-1].text


def test_what_fails_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    switched: list[dict[str, bool]] = []

    def train(
        device: str, budget: str, dtype: torch.dtype, planner: str, off: dict[str, bool]
    ) -> tuple[list[float], str]:
        switched.append(dict(off))
        if planner == "search":
            raise RuntimeError("no kernel image is available")
        return [1.0, float("nan")] if dtype == torch.float32 else [1.0, 2.1], ""

    def twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return 2 * megacompile.kernels.rms_norm(x, weight, 1e-6)

    def findings(device: str) -> Any:
        return [gpu_doctor._compared("float32", train(device, "", torch.float32, "", {})[0], [1.0, 2.0], 0.1)]

    monkeypatch.setattr(gpu_doctor, "_LENGTH", 8)
    monkeypatch.setattr(gpu_doctor, "_STEPS", 2)
    monkeypatch.setattr(gpu_doctor, "_train", train)
    wrong = {"rms_norm": twice, "attention": lambda q, k, v: 2 * q}
    forms = {name: replace(EAGER_FORMS[name], ours=ours) for name, ours in wrong.items()}
    monkeypatch.setattr(gpu_doctor, "EAGER_FORMS", forms)
    monkeypatch.setattr(gpu_doctor, "adamw_", lambda weight, *_: weight.zero_())
    found = list(gpu_doctor.findings("cpu"))
    assert not any(f.good for f in found)
    assert found[1].text.startswith("wrong: result 0 is off")
    assert "nothing switches it off" in found[0].text and 'kernels={"rms_norm": False}' in found[1].text
    assert "of the host's" in found[2].text
    assert switched == 3 * [{"rms_norm": False}] and found[3].what.endswith("without rms_norm")
    assert found[-1].text == "RuntimeError: no kernel image is available"
    monkeypatch.setattr(gpu_doctor, "findings", findings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("megacompile.cli.doctor.examine", lambda: "")
    assert main(["doctor", "--gpu"]) == 1
    said = capsys.readouterr().out
    assert "link            unknown: " in said and "FAILED: float32" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu"]) == 1
    assert "finds no CUDA device" in capsys.readouterr().out

"""Commands through torch.cuda: ``megacompile doctor --gpu`` and ``profile``."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megacompile.cli import gpu_doctor
from megacompile.cli.main import main
from megacompile.hardware import measure
from megacompile.hardware.catalog import PROFILES, read_profile
from megacompile.runtime.backends import open_backend
from megacompile.units import host_available, update_threads, usable_cores
from tests.simulated.numbers import runtime


def test_a_tiny_model_trains_as_by_plain_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_doctor, "OURS", {})  # their inputs are drawn on the device, which has no numbers
    monkeypatch.setattr(gpu_doctor, "_update", lambda device: gpu_doctor.Finding("AdamW", True, "no numbers"))
    assert main(["doctor", "--gpu"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert re.search(
        r"^link +to the device \S+ GB/s, from it \S+ GB/s, both at once \S+ GB/s each$", said, re.M
    )
    assert said.count("OK: ") - 1 == said.count("; 0 allocator retries") == 3


def test_what_profile_measures_is_planned_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runtime.set(lag_us=0)
    updates: list[tuple[int, int]] = []
    monkeypatch.setattr(measure, "adam_bandwidth", lambda *asked: (updates.append(asked), 7e9)[1])
    assert main(["profile", "--out", str(tmp_path / "machine.json")]) == 0
    measured = read_profile(tmp_path / "machine.json").rates("bf16")
    ((threads, parameters),) = updates
    assert threads == update_threads(usable_cores()) and measured.host_bandwidth == 7e9
    assert 16 * parameters == 1 << 30 or 16 * parameters < host_available()
    assert measured.name == torch.cuda.get_device_name() and measured.attention_forward > 0
    assert (
        measured.measured and (measured.chip // 10, measured.chip % 10) == torch.cuda.get_device_capability()
    )
    planned_by = open_backend("cuda", torch.bfloat16).machine
    links = planned_by.fabric_bandwidth  # to other cards, which it does not measure
    assert planned_by == replace(measured, fabric_bandwidth=links)
    assert links == PROFILES["h100-sxm"].rates("bf16").fabric_bandwidth

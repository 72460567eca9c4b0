"""What ``megacompile profile`` measured of a GPU is what ``compile`` plans by on that machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megacompile.hardware.catalog import PROFILES
from megacompile.hardware.kept_profile import keep_profile, kept_profile
from megacompile.runtime.backends import _machine_of
from tests.support.damage import resealed

NAME, DEVICE = "NVIDIA H100 80GB HBM3", torch.device("cuda", 0)
BUILT_IN = PROFILES["h100-sxm"]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAME)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    return card


def test_a_program_is_planned_by_what_was_measured(card: SimpleNamespace) -> None:
    """But for links to other cards, which are not measured."""
    measured = replace(BUILT_IN.machine, name=NAME, flops=5e14, processors=132)
    assert _machine_of(DEVICE, "bf16") == replace(BUILT_IN.rates("bf16"), processors=132)
    keep_profile(replace(BUILT_IN, machine=replace(measured, fabric_bandwidth=None)))
    assert _machine_of(DEVICE, "bf16") == measured
    assert _machine_of(DEVICE, "fp32").flops == BUILT_IN.fp32_flops


def test_a_part_of_a_card_is_another_machine(card: SimpleNamespace) -> None:
    keep_profile(replace(BUILT_IN, machine=replace(BUILT_IN.machine, name=NAME, processors=132)))
    card.multi_processor_count = 16
    assert _machine_of(DEVICE, "bf16") == replace(BUILT_IN.rates("bf16"), processors=16)


def test_a_profile_of_another_version_is_left_out_and_said(
    card: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    path = keep_profile(replace(BUILT_IN, machine=replace(BUILT_IN.machine, name=NAME)))
    resealed(path, lambda fields: fields.update(version=99))
    assert kept_profile(NAME, 132) is None
    assert "measure the machine again" in capsys.readouterr().err

"""Commands through torch.cuda: ``megacompile doctor --gpu`` and ``profile``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megacompile.cli import gpu_doctor
from megacompile.cli.main import main
from megacompile.distributed.world import World
from megacompile.hardware import measure, product_rates, update_rates
from megacompile.hardware.catalog import PROFILES, read_profile
from megacompile.hardware.update_rates import Together, UpdateRates
from megacompile.runtime.backends import open_backend
from megacompile.units import host_available, usable_cores
from tests.simulated.numbers import runtime


def test_a_tiny_model_trains_as_by_plain_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_doctor, "EAGER_FORMS", {})  # inputs would be drawn on the device, without numbers
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
    asked: list[tuple[Sequence[int], int]] = []
    ways = {(): 7e9, ("h2d",): 5e9, ("d2h",): 7e9, ("h2d", "d2h"): 5e9}
    updates = UpdateRates(1, {}, {way: Together(rate, 1e9 * len(way)) for way, rate in ways.items()})
    monkeypatch.setattr(measure, "measure_updates", lambda *given: (asked.append(given), updates)[1])
    monkeypatch.setattr(product_rates, "_LOAD", 0.0)
    assert main(["profile", "--out", str(tmp_path / "machine.json")]) == 0
    measured = read_profile(tmp_path / "machine.json").rates("bf16")
    ((threads, parameters),) = asked
    assert list(threads) == [n for n in range(usable_cores() - 6, usable_cores()) if n > 0]
    assert (measured.adam_bandwidth, measured.host_bandwidth, measured.adam_threads) == (7e9, 8e9, 1)
    assert 16 * parameters == 1 << 30 or 16 * parameters < host_available()
    assert measured.name == torch.cuda.get_device_name() and measured.attention_forward > 0
    backend = open_backend("cuda", torch.bfloat16)
    opened = backend.open(1 << 30, World())
    assert opened.adam_threads == 1
    opened.close()
    assert (
        measured.measured and (measured.chip // 10, measured.chip % 10) == torch.cuda.get_device_capability()
    )
    planned_by = backend.machine
    links = planned_by.fabric_bandwidth  # to other cards, which it does not measure
    assert planned_by == replace(measured, fabric_bandwidth=links)
    assert links == PROFILES["h100-sxm"].rates("bf16").fabric_bandwidth


def test_updates_are_timed_beside_copies_over_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.set(lag_us=0)
    monkeypatch.setattr(update_rates, "_COPY", 1 << 12)
    found = update_rates.measure_updates([1], 1 << 10)
    assert [bool(found.together[ways].copies) for ways in update_rates.WAYS] == [False, True, True, True]

"""What ``megacompile profile`` makes of what it times: on clocks and rates that are made up."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import nn

from megacompile.errors import MegacompileError
from megacompile.hardware import product_rates, update_rates
from megacompile.hardware.machine import Machine
from megacompile.hardware.product_rates import LLAMA_8B, layer_weights, measure_products
from megacompile.hardware.simulate import simulate
from megacompile.hardware.update_rates import ALONE, BOTH, WAYS, Together, UpdateRates, rates_of
from megacompile.schedule.op_table import SPECS, Kind
from megacompile.schedule.step import Op, Step

GPU = Machine("m", 1.0, 1.0, 50.0, 50.0, math.inf, shared_memory=True)
DOWN, UP = ("h2d",), ("d2h",)
# as an H100's host: copies down and updates take a quarter longer beside each other, copies up cost nothing
SEEN = {ALONE: Together(120.0, 0.0), DOWN: Together(96.0, 40.0), UP: Together(120.0, 50.0)}
SEEN[BOTH] = Together(96.0, 90.0)


def test_a_simulated_step_has_the_rates_that_were_measured() -> None:
    machine = UpdateRates(3, {}, SEEN).of(GPU)
    assert (machine.adam_bandwidth, machine.host_bandwidth, machine.adam_threads) == (120.0, 186.0, 3)
    kinds: list[Kind] = ["adam", "prefetch", "push_grad"]
    for ways in WAYS:
        together = [k for k in kinds if SPECS[k].stream in ("host", *ways)]
        # of each as many bytes as it moves in a second, so that all are over at the same moment
        moved = {"adam": 120, "prefetch": 50, "push_grad": 50}
        ops = tuple(Op(k, SPECS[k].stream, group=i, nbytes=moved[k]) for i, k in enumerate(together))
        line = simulate(Step(ops, {}, 1), machine)
        seconds = line.ends[0] - line.starts[0]
        assert moved["adam"] / seconds == pytest.approx(SEEN[ways].updates), ways


def test_of_threads_that_are_as_fast_the_fewest_update() -> None:
    asked: list[tuple[int, tuple[str, ...]]] = []

    def together(threads: int, ways: tuple[str, ...], seconds: float) -> Together:
        asked.append((threads, ways))
        return Together({10: 90.0, 11: 99.5, 12: 100.0, 13: 80.0}[threads] + 100 * (ways == ALONE), 1.0)

    found = rates_of([10, 11, 12, 13], together)
    assert found.threads == 11 and found.tried[10] == (190.0, 90.0)
    assert asked[-4:] == [(11, ways) for ways in WAYS]
    assert "11 threads" in str(found) and "alone 2e-07 GB/s" in str(found)


def test_updates_and_copies_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update takes a second of a clock; of each thread count and way one warms up, and one counts."""
    now, beside = [0.0], list[int]()
    copying: list[threading.Event] = []
    monkeypatch.setattr(update_rates.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(update_rates, "_CPU_COPY", 1 << 10)
    original = update_rates._Copier._on_cpu

    def watched(self: object, way: object, moved: object, done: threading.Event) -> None:
        copying.append(done)
        original(self, way, moved, done)  # type: ignore[arg-type]

    def update(threads: int) -> int:
        beside.append(sum(not done.is_set() for done in copying))
        now[0] += 1.0
        return 26

    monkeypatch.setattr(update_rates._Copier, "_on_cpu", watched)
    monkeypatch.setattr(update_rates, "adam_update", lambda elements, dtype: update)
    threads = torch.get_num_threads()
    found = update_rates.measure_updates([1, 2], 64)
    assert found.threads == 1 and found.together[BOTH].updates == 26.0 and found.together[ALONE].copies == 0
    assert beside == [0, 0, 2, 2] * 2 + [0, 0, 1, 1, 1, 1, 2, 2] and all(done.is_set() for done in copying)
    assert torch.get_num_threads() == threads


def test_a_copy_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(update_rates, "_CPU_COPY", 1 << 10)
    monkeypatch.setattr(update_rates._Copier, "_on_cpu", failing)
    with pytest.raises(RuntimeError, match="the device is gone"):
        update_rates.measure_updates([1], 64)


def test_products_count_after_a_second_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer takes 1/8 s of a clock at first, and 1/4 s once it has run for a second."""
    now, flops = [0.0], 6 * 4 * (8 * 16 + 16 * 8)

    def mm(left: torch.Tensor, right: torch.Tensor) -> None:
        assert left.shape[1] == right.shape[0]
        now[0] += (0.125 if now[0] < 1 else 0.25) / 6

    monkeypatch.setattr(product_rates.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(product_rates.torch, "mm", mm)
    found = measure_products([(8, 16), (16, 8)], "cpu", tokens=4)
    assert found.cold == pytest.approx(flops / 0.125) and found.hot == pytest.approx(flops / 0.25)


def test_the_products_of_a_model_are_those_of_one_layer() -> None:
    layer = [nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4), nn.Embedding(3, 8)]
    model = nn.Sequential(*(nn.Sequential(*layer) for _ in range(3)))
    assert sorted(layer_weights(model)) == [(4, 8), (4, 8), (8, 8)]
    with pytest.raises(MegacompileError, match=r"no nn\.Linear"):
        layer_weights(nn.Embedding(3, 8))


def test_the_layer_that_is_timed_by_default_is_llamas() -> None:
    from megacompile.cli.models import load_model

    assert sorted(layer_weights(load_model("llama-3.1-8b").module)) == sorted(LLAMA_8B)

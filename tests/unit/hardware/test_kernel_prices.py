"""How fast machines run our kernels, by what an H100 reached."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacompile.bench.ceilings import CHIPS
from megacompile.blocks.kernel_calls import KernelCall, eager_use
from megacompile.hardware.catalog import PROFILES
from megacompile.hardware.kernel_prices import kernel_seconds
from megacompile.hardware.simulate import duration
from megacompile.kernels.registry import CALLED
from megacompile.schedule.step import Op
from megacompile.schedule.workload import KernelWork

H100, A100 = PROFILES["h100-sxm"].machine, PROFILES["a100-80gb-sxm"].machine


def test_every_machine_is_of_a_chip_of_the_gate() -> None:
    assert {p.machine.chip for p in PROFILES.values()} == set(CHIPS)
    for profile in PROFILES.values():
        chip = CHIPS[profile.machine.chip or 0]
        if chip.name in profile.title:
            assert profile.machine.processors == chip.processors


def test_every_kernel_of_products_has_a_price_below_that_of_products() -> None:
    """The others move bytes, at the memory's bandwidth."""
    for name, call in CALLED.items():
        reached = call.part.teraflops
        reached = reached({"softcap": 0.0}) if callable(reached) else reached
        assert bool(reached) == (call.spec.runs_kernels is not None), name
        assert reached < H100.flops / 1e12


def test_a_function_is_priced_by_its_kernels_of_products() -> None:
    scan = KernelWork("mamba2_chunk_scan", 10**12, 47)
    assert kernel_seconds(scan, H100) == pytest.approx(1 / 47)
    assert kernel_seconds(scan, A100) == pytest.approx(H100.flops / A100.flops / 47)
    op = Op("forward", "compute", flops=3 * 10**12, moved_bytes=2 * 10**9, kernels=(scan,))
    others = 2e12 / H100.flops + 2e9 / H100.memory_bandwidth
    assert duration(op, H100) == pytest.approx(others + 1 / 47)
    assert duration(op, replace(H100, measured=True, chip=None)) == pytest.approx(others + 1 / 47)


@pytest.mark.parametrize("pass_", ["", "_backward"])
def test_attention_keeps_the_rate_that_was_measured_on_the_machine_itself(pass_: str) -> None:
    flops = (0, 10**12) if pass_ else (10**12, 0)
    ours = KernelWork(f"attention{pass_}", 10**12, 400)
    op, library = (
        Op("forward", "compute", flops=10**12, attention_flops=flops, kernels=kernels)
        for kernels in ((ours,), ())
    )
    assert duration(op, H100) == pytest.approx(1 / 400)
    theirs = 10**12 / ((H100.attention_backward if pass_ else H100.attention_forward) or 0)
    assert theirs > 1 / 400
    for machine in (replace(H100, measured=True), replace(H100, chip=None)):
        assert duration(op, machine) == pytest.approx(theirs)
        assert duration(library, machine) == pytest.approx(theirs)


def test_attention_with_a_softcap_is_no_use_that_has_an_eager_form() -> None:
    plain, capped = (
        KernelCall(
            "attention",
            "bfloat16",
            ((2, 16, 1024, 128),) * 3,
            (*["None"] * 3, "0.09", "True", "0", softcap, "0.0"),
            10**12,
            455,
        )
        for softcap in ("0.0", "50.0")
    )
    assert eager_use(plain) is not None
    assert eager_use(capped) is None, "whatever its dropout of 0.0"

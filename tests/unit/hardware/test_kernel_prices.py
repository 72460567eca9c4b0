"""How fast machines run our kernels, by what an H100 reached; what they are worth in a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacompile.bench.ceilings import CHIPS
from megacompile.blocks.kernel_calls import KernelCall, eager_use
from megacompile.cli.kernel_worth import worth
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


def test_what_a_kernel_is_worth_by_hand() -> None:
    """A gated activation in plain torch: one pass over the gate, one over its result and the other half."""
    machine, one = replace(H100, memory_bandwidth=1e12), 4096 * 512 * 2
    call = KernelCall("glu", "bfloat16", ((4096, 512), (4096, 512)), ("'silu'",), 3 * one)
    unknown = KernelCall("dropout", "bfloat16", ((8,), (2,)), (), 99)
    found = worth(((call, 7), (unknown, 1)), machine)
    assert list(found) == ["glu"]
    assert found["glu"].calls == 7
    assert found["glu"].seconds == pytest.approx(7 * 3 * one / 1e12)
    assert found["glu"].without == pytest.approx(7 * 5 * one / 1e12)


def test_plain_torch_has_attention_of_its_own_but_for_a_softcap() -> None:
    """At the machine's rate of it; scores that are capped are whole there."""
    shapes, work = ((2, 16, 1024, 128),) * 3, 10**12
    plain, capped = (
        KernelCall(
            "attention",
            "bfloat16",
            shapes,
            (*["None"] * 3, "0.09", "True", "0", softcap, "0.0"),
            work,
            455,
        )
        for softcap in ("0.0", "50.0")
    )
    assert eager_use(plain) is not None
    assert eager_use(capped) is None  # no benchmark is of it, whatever its dropout of 0.0
    found = [worth(((call, 2),), H100)["attention"].without for call in (plain, capped)]
    assert H100.attention_forward is not None
    assert found[0] == pytest.approx(2 * work / H100.attention_forward)
    scores = 2 * 16 * 1024 * 1024 * 2  # bytes, read and written by several operators
    assert found[1] > 2 * 6 * scores / H100.memory_bandwidth


def test_a_recurrence_in_plain_torch_costs_as_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    x, B = (1, 1536, 4, 64), (1, 1536, 1, 128)
    call = KernelCall("mamba2_chunk_scan", "bfloat16", (x, x[:3], (4,), B, B, (4,)), (), 1, 47)
    few = worth(((call, 1),), H100)["mamba2_chunk_scan"].without
    monkeypatch.setattr("megacompile.cli.kernel_worth._TRACED", 1536)
    assert few == pytest.approx(worth(((call, 1),), H100)["mamba2_chunk_scan"].without, rel=0.02)

"""How fast machines run our kernels, by the rows of the ahead-of-time gate; what they are worth in a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacompile.bench.program_targets import operation_of
from megacompile.blocks.kernel_calls import KernelCall
from megacompile.cli.kernel_worth import worth
from megacompile.graph.fusion_rewriter import PATTERNS
from megacompile.hardware.catalog import PROFILES
from megacompile.hardware.kernel_ceilings import kernel_seconds, nearest, rate
from megacompile.hardware.simulate import duration
from megacompile.kernels.chips import CHIPS
from megacompile.kernels.gate_tables import CEILINGS, read_ceilings
from megacompile.schedule.step import Op
from megacompile.schedule.workload import KernelWork

FUSED = [
    name for name in (*PATTERNS, "clamped_glu") if name != "routing_weights"
]  # which are torch's operators
MOVE = [name + suffix for name in FUSED for suffix in ("", "_backward")]
MOVE += ["dropout", "uniform"]  # and what a forward draws
ATTEND = ["attention", "attention_backward"]
DELTA = ["gated_delta_rule", "gated_delta_rule_backward"]
SCAN = ["mamba2_chunk_scan", "mamba2_chunk_scan_backward"]
VARIANTS = ["", "64", "5120", "silu", "gelu_erf", "interleaved", "8x64", "32x128 partial", "128256 all terms",
            "80 window", "128 window softcap", "192/128", "256 packed"]  # fmt: skip
H100, H200 = PROFILES["h100-sxm"].machine, PROFILES["h200"].machine


def test_every_machine_is_of_a_chip_of_the_gate() -> None:
    assert {p.machine.chip for p in PROFILES.values()} == set(CHIPS)
    for profile in PROFILES.values():
        chip = CHIPS[profile.machine.chip or 0]
        if chip.name in profile.title:
            assert profile.machine.processors == chip.processors


@pytest.mark.parametrize("operator", [*MOVE, *ATTEND, *DELTA, *SCAN])
def test_every_operator_that_is_placed_has_a_row_on_every_chip(operator: str) -> None:
    for profile in PROFILES.values():
        assert rate(operator, "bfloat16", "128", profile.machine)


@given(
    st.sampled_from(MOVE),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.sampled_from(VARIANTS) | st.integers(1, 100_000).map(str),
    st.sampled_from([p.machine for p in PROFILES.values()]),
)
def test_no_kernel_is_faster_than_memory_and_none_slower_on_a_faster_one(operator, dtype, variant, machine):  # type: ignore[no-untyped-def]
    found = rate(operator, dtype, variant, machine)
    faster = replace(machine, memory_bandwidth=2 * machine.memory_bandwidth)
    assert 0 < found <= machine.memory_bandwidth
    assert found <= rate(operator, dtype, variant, faster) <= 2 * found


@given(st.sampled_from(ATTEND), st.sampled_from(VARIANTS[1:3] + VARIANTS[-4:]), st.sampled_from([*PROFILES]))
def test_attention_is_slower_than_the_chips_products(operator: str, variant: str, name: str) -> None:
    profile = PROFILES[name]
    assert 0 < (rate(operator, "bfloat16", variant, profile.machine) or 0) < profile.machine.flops


@pytest.mark.parametrize(
    ("kernel", "dtype", "variant", "case"),
    [
        ("rms_norm_forward_kernel", "bfloat16", "4096", "4096 bf16"),
        ("rms_norm_forward_kernel", "float32", "4096", "4096 fp32"),
        ("rms_norm_forward_kernel", "bfloat16", "5120", "8192 bf16"),  # whose tile it has
        ("rms_norm_forward_kernel", "bfloat16", "40000", "32768 bf16"),
        ("glu_backward_kernel", "float16", "gelu_erf", "gelu_erf bf16"),
        ("rope_kernel", "bfloat16", "8x128 interleaved", "32x128 interleaved bf16"),
        ("accumulate_kernel", "bfloat16", "50000 all terms", "128256 bf16 all terms"),
        ("attention_forward_kernel", "bfloat16", "80", "128 causal bf16"),
        ("attention_forward_kernel", "bfloat16", "128 window softcap", "128 all bf16"),
        ("attention_forward_kernel", "bfloat16", "64 window", "64 window sinks bf16"),
        ("attention_forward_kernel", "bfloat16", "192/128", "192/128 causal bf16"),
        ("attention_forward_kernel", "bfloat16", "192", "256 causal bf16"),
    ],
)
def test_the_nearest_row(kernel: str, dtype: str, variant: str, case: str) -> None:
    rows = [r for r in read_ceilings() if r.kernel == kernel and r.arch == 90]
    rows = [r for r in rows if r.operator != "add_rms_norm"]
    assert {row.case for row in nearest(rows, dtype, variant)} == {case}


def test_the_rate_by_hand() -> None:
    (row,) = (
        r for r in read_ceilings() if r.key == ("rms_norm", "64 bf16", "rms_norm_forward_kernel", 0, 90)
    )
    assert row.binds == "latency"
    assert rate("rms_norm", "bfloat16", "64", H200) == pytest.approx(row.in_flight * 132 / 800e-9)
    assert rate("rms_norm", "bfloat16", "4096", H200) == H200.memory_bandwidth
    half = replace(H200, processors=66)
    assert rate("rms_norm", "bfloat16", "64", half) == pytest.approx(row.in_flight * 66 / 800e-9)


def test_a_function_is_priced_by_its_kernels_unless_the_machine_was_measured() -> None:
    kernel = KernelWork("rms_norm", "bfloat16", "64", 10**9)
    op = Op("forward", "compute", moved_bytes=2 * 10**9, kernels=(kernel,))
    others = 10**9 / H100.memory_bandwidth
    assert duration(op, H100) == pytest.approx(others + kernel_seconds(kernel, H100))
    assert duration(op, H100) > duration(op, replace(H100, measured=True)) == pytest.approx(2 * others)
    attention = KernelWork("attention", "bfloat16", "128 window", 10**12)
    op = Op("forward", "compute", flops=10**12, attention_flops=(10**12, 0), kernels=(attention,))
    assert duration(op, H100) == pytest.approx(kernel_seconds(attention, H100))
    measured = replace(H100, measured=True)
    assert duration(op, measured) == pytest.approx(10**12 / (H100.attention_forward or 0))


@pytest.mark.parametrize("operator", DELTA)
def test_the_gated_delta_rule_is_priced_by_each_of_its_kernels(operator: str) -> None:
    """Of a chunk of 64 tokens: what each kernel forms, at what is reached of its ceiling."""
    suffix, parts = operator.removeprefix("gated_delta_rule").removeprefix("_"), {"chunk": 2 * 64 * 128}
    if suffix:
        parts |= {"states": 2 * 128 * 128 + 64 * 128, "backward_state": 3 * 128 * 128 + 2 * 64 * 128}
        parts |= {"backward_pairs": 2 * 2 * 64 * 128, "backward_q": 128 * 128 + 64 * 128}
        parts["backward_k"] = 2 * (128 * 128 + 64 * 128)
    else:
        parts["forward"] = 3 * 128 * 128 + 2 * 64 * 128
    key = "gated_delta_rule", "128/128 bf16"
    rows = {r.kernel: r for r in read_ceilings() if r.key[:2] == key and r.arch == 90}
    assert len(rows) == 7
    seconds = sum(128 * n / (rows[f"gated_delta_{k}_kernel"].rate * 1e12) for k, n in parts.items()) / 0.27
    flops = 128 * (4 * 64 * 128 + 3 * 128 * 128 + 64 * 32)
    if suffix:
        flops = 128 * (10 * 64 * 128 + 8 * 128 * 128 + 64 * 32)
    kernel = KernelWork(operator, "bfloat16", "128/128", flops)
    assert kernel_seconds(kernel, H100) == pytest.approx(seconds)
    assert kernel_seconds(kernel, replace(H100, processors=66)) == pytest.approx(2 * seconds)
    op = Op("forward", "compute", flops=3 * flops, kernels=(kernel,))
    assert duration(op, H100) == pytest.approx(2 * flops / H100.flops + seconds)
    measured = 2 * flops / H100.flops + flops / (H100.attention_backward or 0)
    assert duration(op, replace(H100, chip=None)) == pytest.approx(measured)


@pytest.mark.parametrize("operator", SCAN)
def test_a_scan_is_priced_by_each_of_its_kernels(operator: str) -> None:
    """Of a chunk of 64 tokens of 16 heads that share B and C, which see 2.5 chunks on average."""
    backward, rows = operator.endswith("_backward"), read_ceilings()
    rows = [r for r in rows if r.key[:2] == ("mamba2_chunk_scan", "128/64 bf16") and r.arch == 90]
    pairs, state, group = 64 * 64, 128 * 64, 64 * 128
    parts = {"scores": 2.5 * group, "states": 16 * state, "scan": 16 * (2.5 * pairs + state)}
    flops = 128 * (group + 16 * (pairs + 2 * state))
    if backward:
        parts |= {"backward_x": parts.pop("scan"), "backward_groups": 2 * (2.5 * group + 16 * state)}
        parts["backward_pairs"] = 16 * pairs * (1 + 1.5 * 0.375)  # of two chunks no sums across tokens
        flops = 128 * (3 * group + 16 * (2 * pairs + 6 * state))
    seconds = 0.0
    for name, products in parts.items():
        found = [r.rate * 1e12 for r in rows if r.kernel == f"mamba2_{name}_kernel"]
        seconds += sum(128 * products / (0.27 * rate) for rate in found) / len(found)
    seconds += (3 if backward else 2) * 4 * 16 * state / 4 / H100.memory_bandwidth  # every fourth chunk's
    kernel = KernelWork(operator, "bfloat16", "128/64", flops)
    assert kernel_seconds(kernel, H100) == pytest.approx(seconds)


def test_what_a_kernel_is_worth_by_hand() -> None:
    """A gated activation in plain torch: one pass over the gate, one over its result and the other half."""
    machine, one = replace(H100, memory_bandwidth=1e12), 4096 * 512 * 2
    call = KernelCall("glu", "bfloat16", ((4096, 512), (4096, 512)), ("'silu'",), "silu", 3 * one)
    unknown = KernelCall("dropout", "bfloat16", ((8,), (2,)), (), "", 99)
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
            variant,
            work,
        )
        for softcap, variant in (("0.0", "128"), ("50.0", "128 softcap"))
    )
    assert operation_of(plain) is not None
    assert operation_of(capped) is None  # no benchmark is of it, whatever its dropout of 0.0
    found = [worth(((call, 2),), H100)["attention"].without for call in (plain, capped)]
    assert H100.attention_forward is not None
    assert found[0] == pytest.approx(2 * work / H100.attention_forward)
    scores = 2 * 16 * 1024 * 1024 * 2  # bytes, read and written by several operators
    assert found[1] > 2 * 6 * scores / H100.memory_bandwidth


def test_a_recurrence_in_plain_torch_costs_as_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    x, B = (1, 1536, 4, 64), (1, 1536, 1, 128)
    call = KernelCall("mamba2_chunk_scan", "bfloat16", (x, x[:3], (4,), B, B, (4,)), (), "64/128", 1)
    few = worth(((call, 1),), H100)["mamba2_chunk_scan"].without
    monkeypatch.setattr("megacompile.cli.kernel_worth._TRACED", 1536)
    assert few == pytest.approx(worth(((call, 1),), H100)["mamba2_chunk_scan"].without, rel=0.02)


def test_the_table_travels_with_the_package() -> None:
    patterns = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'"megacompile.kernels" = ["*{CEILINGS.suffix}"]' in patterns


def test_updates_keep_every_chips_memory_busy() -> None:
    """So they are priced by its bandwidth, whatever their kernel."""
    rows = [row for row in read_ceilings() if row.operator == "adamw_"]
    assert {row.arch for row in rows} == set(CHIPS) and {row.binds for row in rows} == {"memory"}

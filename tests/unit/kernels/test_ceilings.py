"""What is counted in machine code, and what follows for a chip: see ``benchmarks/machine_code.py``
and ``benchmarks/kernel_ceilings.py``."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import kernel_ceilings, machine_code
from benchmarks.gate_rules import changes, slow, worse, write_table
from megacompile.bench.ceilings import CEILINGS, CHIPS, Ceiling, read_ceilings
from megacompile.bench.results import ceilings as printed
from megacompile.kernels._triton import Launch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is missing: pip install triton"
)

LOOP = """
kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   UMOV UR15, 0x8100490 ;
.L_x_0:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64] ;
        /*0040*/              @!P0 BRA `(.L_x_3) ;
.L_x_1:
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], R24 ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, R116, gdesc[UR12].tnspB, R24, gsb0 ;
        /*0070*/               @P1 BRA `(.L_x_2) ;
        /*0080*/                   FSEL R24, R24, -INF , P2 ;
        /*0090*/                   FSEL R25, R25, -INF , P2 ;
.L_x_2:
        /*00a0*/                   MUFU.EX2 R24, R24 ;
        /*00b0*/                   FFMA R24, R24, R25, R26 ;
        /*00c0*/               @P3 BRA `(.L_x_0) ;
        /*00d0*/                   STG.E.64 desc[UR4][R2.64], R24 ;
        /*00e0*/                   EXIT ;
.L_x_3:
        /*00f0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR6], R0 ;
        /*0100*/              @!P0 BRA `(.L_x_3) ;
        /*0110*/                   BRA `(.L_x_1) ;
.L_x_4:
        /*0120*/                   BRA `(.L_x_4);
"""


def launch(warps: int = 8, stages: int = 2, **constants: int) -> Launch:
    def attention_forward_kernel() -> None: ...

    constants = {"DIM": 128, "V_DIM": 64, **constants} if constants else {}
    return Launch(attention_forward_kernel, (1000, 32), (), constants, warps, stages)


def names(code: list[machine_code.Instruction]) -> list[str]:
    return [x.opcode for x in code]


def test_the_hot_path_skips_masks_and_waits_that_lie_elsewhere() -> None:
    wanted = ["LDGSTS", "BRA", "HGMMA", "HGMMA", "BRA", "MUFU", "FFMA", "BRA"]
    assert names(machine_code.Flow(LOOP).hottest()) == wanted
    assert "FSEL" in names(machine_code.Flow(LOOP.replace("@P1 BRA", "@P1 NOP")).hottest())


def test_a_kernel_without_a_loop_is_counted_whole() -> None:
    straight = LOOP.replace("@P3 BRA `(.L_x_0)", "NOP").replace("@!P0 BRA `(.L_x_3)", "NOP")
    assert {"LDG", "HGMMA", "STG", "EXIT"} <= set(names(machine_code.Flow(straight).hottest()))


def test_products_tell_their_shapes() -> None:
    code = machine_code.Flow(LOOP).hottest()
    shapes = [(p.kind, p.m, p.n, p.k, p.shared) for x in code if (p := x.product)]
    assert shapes == [("HGMMA", 64, 128, 16, True), ("HGMMA", 64, 64, 16, False)]
    text = "/*0*/ UMOV UR15, 0x8100490 ;\n/*1*/ UTCHMMA gdesc[UR2], gdesc[UR4], tmem[UR7], idesc[UR15] ;"
    assert machine_code.parse(text)[0][1].product == machine_code.Product("UTCHMMA", 128, 64, 16)
    assert machine_code.Instruction("HMMA.16816.F32.BF16", "R4, R8, R12, R4").product == machine_code.Product(
        "HMMA", 16, 8, 16
    )


def test_bytes_of_instructions() -> None:
    sizes = {"LDG.E.128": 16, "LDG.E": 4, "LDG.E.U16": 2, "STG.E.64": 8, "LDSM.16.M88.4": 16, "LDS.U.128": 16}
    assert {name: machine_code.Instruction(name, "R4").lane_bytes for name in sizes} == sizes
    assert machine_code.Instruction("LDS.128", "R4").global_bytes == 0


def test_a_load_flies_until_its_value_is_named() -> None:
    loads = [machine_code.Instruction("LDG.E.128", f"R{r}, desc[UR4][R2.64]") for r in (4, 8)]
    use = machine_code.Instruction("FADD", "R20, R7, R7")
    assert machine_code.in_flight([*loads, use], stages=3) == 2 * 512
    assert machine_code.in_flight([loads[0], use, loads[1]], stages=3) == 2 * 512, (
        "the next iteration's beside it"
    )
    both = machine_code.Instruction("FADD", "R20, R7, R9")
    assert machine_code.in_flight([loads[0], use, loads[1], both], stages=3) == 512
    copy = machine_code.Instruction("LDGSTS.E.BYPASS.128", "[R9], desc[UR4][R2.64]")
    assert [machine_code.in_flight([copy], stages) for stages in (1, 2, 4)] == [512, 512, 1536]


def measured(monkeypatch: pytest.MonkeyPatch, given: Launch, arch: int = 90) -> Ceiling:
    monkeypatch.setattr(kernel_ceilings, "disassemble", lambda _: LOOP)
    return kernel_ceilings.ceiling(given, b"", arch, (128, 64 << 10), ("m", "c", "k", 0))


def test_a_ceiling_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch, launch(BLOCK_M=128, BLOCK_N=16))
    # Two warpgroups: (64 and, half the width, 32) cycles each; 8 instructions x 8 warps over 4 schedulers.
    assert (row.tensor, row.issue, row.special, row.alu) == (192, 16, 16, 0)
    assert (row.ctas, row.bytes, row.mma) == (2, 8 * 512, "HGMMA")
    assert row.executed == round(2 * 2 * 64 * (128 + 64) * 16 / (2 * 128 * 16 * (128 + 64)), 2) == 1.0
    chip = CHIPS[90]
    needed = 2 * 128 * 16 * (128 + 64)
    assert row.rate == round(needed * chip.processors * chip.clock / 192 / 1e12) and row.binds == "tensor"
    assert not slow([row])


def test_duplicated_products_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two warpgroups that compute the same rows."""
    row = measured(monkeypatch, launch(BLOCK_M=64, BLOCK_N=16))
    assert row.executed == 2.0 and "executes 2.0" in slow([row])[0]
    assert "products by HMMA" in slow([replace(row, executed=1.0, mma="HMMA")])[0]
    assert "executes 0.5" in slow([replace(row, executed=0.5)])[0], "a loop unrolled, so counted wrong"
    assert "executes 2.0" in worse([replace(row, executed=1.0)], [row])[0]


GROUPS_LOOP = LOOP.replace(
    """        /*0070*/               @P1 BRA `(.L_x_2) ;
""",
    """        /*0061*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR6], R0 ;
        /*0062*/                   BAR.SYNC.DEFER_BLOCKING 0x2, 0x80 ;
        /*0063*/              @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR11+0x28130], RZ ;
        /*0070*/               @P1 BRA `(.L_x_2) ;
""",
)


def specialised(monkeypatch: pytest.MonkeyPatch, text: str) -> Ceiling:
    def hopper_attention_forward_kernel() -> None: ...

    monkeypatch.setattr(kernel_ceilings, "disassemble", lambda _: text)
    given = replace(launch(warps=4, BLOCK_M=128, BLOCK_N=16), kernel=hopper_attention_forward_kernel)
    return kernel_ceilings.ceiling(given, b"", 90, (168, 64 << 10), ("m", "128 c", "k", 0))


def test_groups_of_warps_take_turns_unless_their_chain_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of four warps; a third one fetches, and its registers count."""
    row = specialised(monkeypatch, GROUPS_LOOP)
    assert (row.tensor, row.issue, row.executed, row.ctas) == (192, 22, 1.0, 1)
    assert row.binds == "chain", "96 + 11 + 150 cycles of one group beside 192"
    assert "longer than the tensor cores" in slow([row])[0]
    monkeypatch.setattr(kernel_ceilings, "WAITS", 50)
    assert specialised(monkeypatch, GROUPS_LOOP).binds == "tensor"
    all_meet = GROUPS_LOOP.replace("0x2, 0x80", "0x1")
    assert specialised(monkeypatch, all_meet).binds == "chain"


def test_one_warp_must_not_arrive_before_the_others_have_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = GROUPS_LOOP.replace("BAR.SYNC.DEFER_BLOCKING 0x2, 0x80", "NOP")
    with pytest.raises(AssertionError, match="arrives before those beside it"):
        specialised(monkeypatch, alone)


def test_a_spill_in_the_hot_loop_is_a_fault_and_one_before_it_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exponential = "MUFU.EX2 R24, R24 ;"
    for spilled, count in (
        (LOOP.replace(exponential, "LDL.64 R24, [R1] ;"), 1),
        (LOOP.replace("LDG.E.128", "STL"), 0),
    ):
        monkeypatch.setattr(kernel_ceilings, "disassemble", lambda _, text=spilled: text)
        row = kernel_ceilings.ceiling(
            launch(BLOCK_M=128, BLOCK_N=16), b"", 90, (128, 64 << 10), ("m", "c", "k", 0)
        )
        assert row.spills == count
        assert ["spills in its hot loop" in fault for fault in slow([row])] == [True] * count


def test_a_lower_ceiling_is_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch, launch(BLOCK_M=128, BLOCK_N=16))
    assert not worse([row], [row]) and not worse([], [row])
    assert "before" in worse([row], [replace(row, rate=row.rate - 1)])[0]
    assert len(changes([row], [replace(row, in_flight=0)])) == 1


def test_too_few_bytes_in_flight_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch, launch())
    few = measured(monkeypatch, replace(launch(), grid=(CHIPS[90].processors,)))
    assert row.in_flight == 2 * few.in_flight == 2 * 8 * 512
    assert few.binds == "latency" and few.rate == round(8 * 512 * 132 / 800e-9 / 1e9)


def test_what_a_multiprocessor_holds() -> None:
    chip = CHIPS[90]
    assert kernel_ceilings.resident(chip, 255, 0, 8) == 1 and kernel_ceilings.resident(chip, 128, 0, 8) == 2
    assert (
        kernel_ceilings.resident(chip, 32, 100 << 10, 4) == 2
        and kernel_ceilings.resident(chip, 32, 0, 4) == 16
    )


def test_the_table_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch, launch(BLOCK_M=128, BLOCK_N=16))
    write_table([row], tmp_path / "table.csv", "0123")
    assert read_ceilings(tmp_path / "table.csv") == [row]


def test_the_checked_in_ceilings() -> None:
    rows = read_ceilings()
    assert not slow(rows)
    assert {row.arch for row in rows} == set(CHIPS)
    for row in rows:
        chip = CHIPS[row.arch]
        assert (row.executed > 0) == (row.mma != "-") == (row.tensor > 0)
        most = chip.bandwidth / 1e9
        if row.executed:
            most = max(chip.products.values()) * chip.processors * chip.clock / 1e12 + 1
        assert 0 < row.rate <= most
    assert CEILINGS.read_text().splitlines()[0].startswith("# sources")


def test_updates_keep_every_chips_memory_busy() -> None:
    """So they are priced by its bandwidth, whatever their kernel."""
    rows = [row for row in read_ceilings() if row.operator == "adamw_"]
    assert {row.arch for row in rows} == set(CHIPS) and {row.binds for row in rows} == {"memory"}


def test_the_tables_travel_with_the_package() -> None:
    patterns = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'"megacompile.bench" = ["*{CEILINGS.suffix}"]' in patterns


def test_bench_prints_them() -> None:
    text = printed()
    assert "H100 SXM (sm_90)" in text and "TFLOP/s" in text and "GB/s (memory)" in text
    assert len(text.splitlines()) == 2 + len(
        {(r.operator, r.case, r.kernel, r.variant) for r in read_ceilings()}
    )


def test_datasheets_give_the_rates() -> None:
    for chip in CHIPS.values():
        best = max(chip.products.values()) * chip.processors * chip.clock
        assert best == pytest.approx(float(chip.peak.split()[0]) * 1e12, rel=0.01)


@pytest.mark.parametrize(
    ("kernel", "more", "widths"),
    [
        ("attention_forward_kernel", {}, 192 + 128),
        ("attention_backward_q_kernel", {}, 2 * 192 + 128),
        ("attention_backward_kv_kernel", {"KEYS": True, "VALUES": True}, 2 * 192 + 2 * 128),
        ("attention_backward_kv_kernel", {"KEYS": True, "VALUES": False}, 2 * 192 + 128),
        ("attention_backward_kv_kernel", {"KEYS": False, "VALUES": True}, 128),
    ],
)
def test_products_that_the_formula_needs(kernel: str, more: dict[str, int], widths: int) -> None:
    """Scores are needed once, however often they are computed; dk and dv apart need as much as together."""
    given = launch(DIM=192, V_DIM=128, BLOCK_M=32, BLOCK_N=64, **more)
    given.kernel.__name__ = kernel
    assert kernel_ceilings.needed_flops(given) == 2 * 32 * 64 * widths


@pytest.mark.parametrize(
    ("kernel", "flops"),
    [
        ("gated_delta_chunk_kernel", 2 * 2 * 64 * 64 * 32),  # q and k with k, 32 columns an iteration
        ("gated_delta_forward_kernel", 2 * 64 * 16 * (3 * 96 + 2 * 64)),  # a chunk and 16 columns of a state
        ("gated_delta_states_kernel", 2 * 64 * 16 * (2 * 96 + 64)),  # neither reads of q nor scores
        ("gated_delta_backward_state_kernel", 2 * 64 * 16 * (3 * 96 + 2 * 64)),
        ("gated_delta_backward_pairs_kernel", 2 * 2 * 64 * 64 * 16),  # grad and dv with what is written
        ("gated_delta_backward_q_kernel", 2 * 64 * 16 * 96),
        ("gated_delta_backward_k_kernel", 2 * 64 * 16 * 96),
        ("mamba2_states_kernel", 2 * 64 * 96 * 16),
        ("mamba2_scores_kernel", 2 * 64 * 64 * 96),
        ("mamba2_scan_kernel", 2 * 64 * 64 * 16),
        ("mamba2_pass_kernel", 0),
        ("mamba2_backward_x_kernel", 2 * 64 * 64 * 16),
        ("mamba2_backward_pairs_kernel", 2 * 64 * 64 * 64),  # all columns of a head
        ("mamba2_backward_groups_kernel", 2 * 64 * 128 * 64),
        ("mamba2_backward_decays_kernel", 0),
    ],
)
def test_products_that_a_chunk_needs(kernel: str, flops: int) -> None:
    given = launch(DIM=96, CHUNK=64, BLOCK_D=32 if "chunk" in kernel else 128, BLOCK_V=16)
    given.kernel.__name__ = kernel
    assert kernel_ceilings.needed_flops(given) == flops

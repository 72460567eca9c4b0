"""The ahead-of-time gate, in a process of its own: see ``benchmarks/kernel_gate.py``."""

import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import hopper_attention
from benchmarks import kernel_gate as gate
from benchmarks.gate_cases import CASES
from benchmarks.gate_rules import SHARED_LIMIT, changes, faults, made_of, write_table
from megacompile import kernels
from megacompile.bench.ceilings import CEILINGS, TABLE, Resources, read_table
from megacompile.kernels._triton import MAX_ROW, Launch, launch, recording, row_tile, triton

adamw, attention, layer_norm, rms_norm, rope = (
    importlib.import_module(f"megacompile.kernels.{name}")
    for name in ("adamw", "attention", "layer_norm", "rms_norm", "rope")
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is missing: pip install triton"
)


def test_the_table_is_of_these_sources() -> None:
    """So every row holds: equal sources under one triton compile to equal kernels."""
    for table in (TABLE, CEILINGS):
        assert made_of(table)[0] == gate.sources(), "python -m benchmarks.kernel_gate --update compiles anew"
    assert not faults(read_table())


def test_a_table_says_what_it_was_made_of(tmp_path: Path) -> None:
    write_table([row()], tmp_path / "table.csv", "0123")
    assert made_of(tmp_path / "table.csv") == ("0123", triton.__version__)
    assert read_table(tmp_path / "table.csv") == [row()]


@pytest.mark.nightly
def test_every_kernel_compiles_and_holds_its_resources() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.kernel_gate"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "0 faults" in done.stdout


def recorded(arch: int) -> list[Launch]:
    with recording(arch) as launches:
        for cases in CASES.values():
            for _, call in cases:
                call()
    return launches


def test_every_kernel_stands_in_the_table_for_every_chip() -> None:
    """A kernel that no case launches would be compiled on the user's machine for the first time."""
    names = {
        name
        for module in pkgutil.iter_modules(kernels.__path__)
        for name, found in vars(importlib.import_module(f"megacompile.kernels.{module.name}")).items()
        if name.endswith("_kernel") and hasattr(found, "arg_names")
    }
    assert len(names) > 15
    hopper = {name for name in vars(hopper_attention) if name.endswith("_kernel")}
    assert len({r.key for r in read_table()}) == len(read_table()), "a row that hides another one"
    for arch in SHARED_LIMIT:
        assert {r.kernel for r in read_table() if r.arch == arch} == names | (hopper if arch == 90 else set())


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_every_tile_is_compiled(arch: int) -> None:
    """All that the launchers' tables and functions of shape and chip can choose."""
    launched = {
        (x.kernel.__name__, x.constants.get("BLOCK_M"), x.constants.get("BLOCK_N"), x.num_warps, x.num_stages)
        for x in recorded(arch)
    }
    tiles = {90: attention.HOPPER, 100: attention.BLACKWELL, 120: attention.GEFORCE}.get(
        arch, attention.TILES
    )
    name = {"forward": "forward", "q": "backward_q"}
    wanted = {
        (f"attention_{name.get(k, 'backward_kv')}_kernel", t.block_m, t.block_n, t.num_warps, t.num_stages)
        for k, row in tiles.items()
        for t in row
        if t is not None
    }
    for columns in range(33, MAX_ROW + 1, 31):
        for kernel, most, per_thread in (
            ("rms_norm_forward_kernel", MAX_ROW, 16),
            ("rms_norm_backward_kernel", rms_norm.MAX_RMS_NORM_BACKWARD, 16),
            ("layer_norm_forward_kernel", MAX_ROW, 16),
            ("layer_norm_backward_kernel", layer_norm.MAX_LAYER_NORM_BACKWARD, 8),
        ):
            tile = row_tile(columns, per_thread)
            if columns <= most:
                wanted.add((kernel, tile.block_m, tile.block_n, tile.num_warps, 3))
    assert not wanted - launched


def test_grids_of_many_heads_and_tokens_fit() -> None:
    """CUDA's grids end at 65535 in their second and third dimension."""
    q = torch.empty((4096, 32, 16, 64), dtype=torch.bfloat16, device="meta")
    table = torch.empty((4096, 32, 1, 64), dtype=torch.bfloat16, device="meta")
    rule = attention.Rule(0.1)
    with recording(90) as launches:
        out, lse = attention.forward_triton(q, q, q, rule)
        attention.backward_triton(out, q, q, q, out, lse, rule)
        rope.rope_triton(q, table, table, False, False, q)
    assert len(launches) == 5
    for each in launches:
        assert each.grid[0] < 1 << 31 and max(each.grid[1:], default=1) < 1 << 16


@pytest.mark.parametrize(("batch", "heads"), [(1 << 16, 1), (1, 1 << 16), (65535, 65535)])
def test_attention_leaves_longer_grids_to_its_reference(batch: int, heads: int) -> None:
    one = torch.empty((1, 1, 16, 64), dtype=torch.bfloat16, device="meta")
    many = one.expand(batch, heads, 16, 64)
    assert attention.supports(one, one, one) and not attention.supports(many, many, many)


def row(**changed: object) -> Resources:
    values = {
        "operator": "m",
        "case": "c",
        "kernel": "k",
        "variant": 0,
        "arch": 90,
        "registers": 64,
        "local": 0,
        "shared": 1024,
        "load": 16,
        "narrow_loads": 0,
        "store": 16,
    }
    return Resources(**{**values, **changed})


def test_widths_of_loads() -> None:
    """Those of copies are hexadecimal, as triton prints them."""
    ptx = """
        ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        @%p1 ld.global.b16 { %rs1 }, [ %rd2 + 0 ];
        cp.async.cg.shared.global [ %r5 + 0 ], [ %rd3 + 0 ], 0x10, %r6;
        cp.async.ca.shared.global [ %r5 + 0 ], [ %rd3 + 0 ], 0x4, %r6;
    """
    assert sorted(gate._widths(ptx, "ld")) == [2, 4, 16, 16]
    tile = (
        "cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd3, {%r2}], [%r4];"
    )
    assert gate._widths(tile, "ld") == [16]


def test_what_runs_is_compiled_as_in_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same options, whatever the environment says."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    monkeypatch.setattr(gate, "_specialise", lambda _: ({}, {}, {}))
    ran: list[dict[str, object]] = []
    compiled: list[dict[str, object]] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda x, **options: ran.append(options)

    def compile_only(source: object, target: object, options: dict[str, object]) -> None:
        compiled.append(options)
        raise StopIteration

    monkeypatch.setattr("triton.compiler.ASTSource", lambda *_: None)
    monkeypatch.setattr(triton, "compile", compile_only)
    given = Kernel(), (1,), torch.zeros(1)
    launch(*given, num_warps=8)
    with recording(90) as launches:
        launch(*given, num_warps=8)
    with pytest.raises(StopIteration):
        gate.compile_launch(launches[0], 90, ("m", "c", "k", 0))
    assert ran == compiled and ran[0]["enable_fp_fusion"] is True


def test_adamw_has_the_hosts_operations() -> None:
    """No product and sum are fused but the two that the host fuses; all is rounded to nearest."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with recording(90) as launches:
        for _, case in CASES["adamw_"]:
            case()
    source = ASTSource(launches[0].kernel, *gate._specialise(launches[0]))
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launches[0].options)
    found = Counter(re.findall(r"\b(?:fma|mul|add|sub|div|sqrt)\.\S*f32\b", built.asm["ptx"]))
    assert all(name.endswith(".rn.f32") for name in found), found
    assert found["fma.rn.f32"] == 2 * found["sqrt.rn.f32"] == found["div.rn.f32"]


def test_faults_are_found() -> None:
    assert not faults([row()])
    assert "spills" in faults([row(local=8)])[0]
    assert "shared" in faults([row(shared=SHARED_LIMIT[90] + 1)])[0]
    assert "widest load" in faults([row(load=2)])[0]


def test_changes_are_found() -> None:
    assert not changes([row()], [row()])
    assert len(changes([row()], [row(registers=80)])) == 1
    assert len(changes([row()], [row(arch=80)])) == 2

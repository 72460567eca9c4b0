"""Block functions compiled by Inductor: as good as eager, exact in memory, the same bits every time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.api.program import Program
from megacompile.blocks import inductor
from megacompile.blocks.block_functions import BlockFunction
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.memory_meter import StorageMeter
from megacompile.blocks.partition import Template
from megacompile.blocks.policies import differentiate
from tests.e2e.test_bf16 import check_gradients
from tests.support.models import batch_for

CPU = torch.device("cpu")


class Small(nn.Module):
    """Two equal layers over dense features, a regression loss in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def small(budget: str = "1GB", **options: Any) -> Program:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"compute_dtype": torch.float32, "inductor": True, "example_batch": rows(0)} | options
    return megacompile.compile(model, budget, optimizer=optimizer, **options)


def rows(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))}


def templates(program: Program) -> list[tuple[Template, DifferentiatedTemplate]]:
    compiled = program._session.scheduled().compiled
    return list(zip(compiled.part.templates, compiled.templates, strict=True))


def peaks_agree(program: Program) -> bool:
    return program.memory.device_peak_bytes == program.memory.predicted_peak_bytes


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    made = small(dump=tmp_path_factory.mktemp("dump"))
    yield made
    made.close()


@pytest.mark.slow
def test_losses_are_those_of_eager_blocks_and_recomputes_are_exact(program: Program) -> None:
    """On a small model; the next test asks it of a language model."""
    assert losses(program) == pytest.approx(trained(inductor=False)[1], rel=1e-5)
    layer = max(templates(program), key=lambda pair: len(pair[0].examples))
    assert all(f.fused for f in layer[1].functions())
    check_recomputes(layer)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-4), (torch.bfloat16, 1e-2)])
def test_a_model_trains_as_well_as_in_eager(dtype: torch.dtype, tolerance: float) -> None:
    """Contract 2's rule for fused kernels; and what is recomputed is what was computed, bit for bit."""
    program = check_gradients("llama", dtype, tolerance, inductor=True, planner="full-recompute")
    assert torch.isfinite(program.train_step(batch_for("llama", 1)).loss)
    assert peaks_agree(program)
    layer = next(pair for pair in templates(program) if "layers" in pair[1].name)
    assert all(f.fused for f in layer[1].functions())
    check_recomputes(layer)
    program.close()


def check_recomputes(layer: tuple[Template, DifferentiatedTemplate]) -> None:
    """What is recomputed is what was computed."""
    for policy, source in (("none", "all"), ("least", "some")):
        computed, again = recomputed(layer, policy, source)
        assert computed and all(torch.equal(a, b) for a, b in zip(computed, again, strict=True))


def recomputed(
    layer: tuple[Template, DifferentiatedTemplate], policy: Any, source: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """The saved tensors of a layer, from its forward and from its recompute."""
    template, found = layer
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(e.shape, generator=generator).to(e.dtype) for e in template.examples]
    forward, again = found.policies[source].forward, found.policies[policy].recompute
    assert again is not None
    results = dict(zip(forward.outputs, run(forward, values), strict=True))
    computed = [results[ref] for ref in again.outputs]
    return computed, run(again, values)


def run(function: BlockFunction, values: list[Tensor]) -> list[Tensor]:
    assert all(kind == "in" for kind, _ in function.inputs)
    with torch.no_grad():
        return function.load(CPU)([values[i] for _, i in function.inputs])


@pytest.mark.slow
def test_memory_of_every_function_is_what_was_predicted(program: Program) -> None:
    tried = 0
    for template, found in templates(program):
        for function in (f for f in found.functions() if "backward" not in f.name):
            tried += function.fused
            values = [torch.ones(e.shape, dtype=e.dtype) for e in template.examples]
            meter = StorageMeter()
            with meter:
                results = run(function, values)
            assert meter.peak == function.peak_bytes, function.name
            assert meter.live == function.end_bytes == sum(function.result_bytes)
            del results
    assert tried > 2


def trained(budget: str = "1GB", **options: Any) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after three steps, and their losses."""
    program = small(budget, **options)
    told, state = losses(program), program.state_dict()
    program.close()
    return state, told


def losses(program: Program) -> list[float]:
    """Those of three steps."""
    told = [float(program.train_step(rows(i)).loss) for i in range(3)]
    assert peaks_agree(program)
    return told


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "options"), [("1GB", {}), ("20kB", {"max_grad_norm": 1.0})])
def test_the_same_run_gives_the_same_bits(budget: str, options: dict[str, Any]) -> None:
    (state, told), (again, others) = trained(budget, **options), trained(budget, **options)
    assert told == others and told[-1] < told[0]
    assert all(torch.equal(again[name], value) for name, value in state.items())


@pytest.mark.slow
def test_the_dump_shows_what_runs(program: Program) -> None:
    folder = program._session.compiler._dump
    assert folder is not None
    source = (folder / "train" / "03_blocks.py").read_text()
    assert "_forward, by Inductor: call(args)" in source and "empty_strided_cpu(" in source
    assert "by Inductor" in (folder / "train" / "02_policies.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["chance", "layout"])
def test_what_would_differ_stays_plain(
    program: Program, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the order of sums would depend on threads, or results would lie in memory in another way."""
    if reason == "chance":
        monkeypatch.setattr(inductor, "_CHANCE", re.compile("empty_strided_cpu"))
    else:
        source = inductor.wrapper_source
        monkeypatch.setattr(inductor, "wrapper_source", lambda *args: shifted(source(*args)))
    template, found = templates(program)[0]
    compiled = program._session.scheduled().compiled
    again = differentiate(template, compiled.fused.fake_mode, CPU)
    assert all(f.fused for f in found.functions())
    assert list(again.functions()) == list(differentiate(template, compiled.fused.fake_mode).functions())


def test_what_recomputes_is_fused_as_what_computes_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    program = small(inductor=False)  # whose templates are those of any
    source = inductor.wrapper_source
    monkeypatch.setattr(
        inductor, "wrapper_source", lambda name, *args: None if "recompute" in name else source(name, *args)
    )
    template, _ = templates(program)[0]
    compiled = program._session.scheduled().compiled
    found = differentiate(template, compiled.fused.fake_mode, CPU)
    assert {f.name: f.fused for f in found.functions()} == {
        f.name: "backward" in f.name for f in found.functions()
    }
    program.close()


def shifted(source: str | None) -> str:
    """A wrapper whose results have room for one element more."""
    assert source is not None
    larger = "[torch.cat([r.flatten(), r.flatten()[:1]])[1:] for r in runner.call(args)]"
    grown = source.replace("call = runner.call", f"call = lambda args: {larger}")
    assert grown != source
    return grown


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def none() -> str:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(megacompile.MegacompileError, match=r"needs a C\+\+ compiler.*install g\+\+"):
        small()


def test_what_inductor_fails_on_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    def broken(*args: Any) -> None:
        raise RuntimeError("planted fault\nand a trace")

    monkeypatch.setattr(compile_fx, "compile_fx_inner", broken)
    with pytest.raises(
        megacompile.CaptureError, match=r"forward_save_all: planted fault\. Compile without inductor"
    ):
        small()


def test_the_settings_arrive_and_nothing_is_tried_out_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tests/simulated/test_inductor.py`` runs such kernels on CUDA."""
    from torch._inductor import config, utils

    seen: list[bool] = []
    given = utils.get_code

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(config.triton.autotune_pointwise)
        return given(*args, **options)

    monkeypatch.setattr(utils, "get_code", spy)
    small()
    assert seen and not any(seen)


@pytest.mark.parametrize(
    ("source", "ordered"),
    [
        ("inductor_meta={'atomic_add_found': False}", True),  # in the source of every Triton kernel
        ("inductor_meta={'atomic_add_found': True}", False),
        ("tl.atomic_add(out_ptr0 + x0, tmp0)", False),
        ("atomic_add(&out_ptr0[x0], tmp0);", False),
    ],
)
def test_sums_in_an_order_left_to_chance_are_found(source: str, ordered: bool) -> None:
    assert (inductor._CHANCE.search(source) is None) == ordered

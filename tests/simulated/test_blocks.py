"""What a block function asks of the device is what plans count: kernels, and memory, theirs included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import megacompile
from megacompile.api.frontend import Frontend
from megacompile.blocks import policies
from megacompile.blocks.block_functions import BlockFunction
from megacompile.kernels import _triton
from tests.simulated.numbers import runtime
from tests.simulated.test_budgets import batch, llama
from tests.support.captures import nothing_kept
from tests.support.models import batch_for, build

CUDA = torch.device("cuda")
ROUNDING = 512  # bytes, of each tensor


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Tensor]]]:
    """What the functions that are made from now on take, by their names."""
    found: dict[str, list[Tensor]] = {}
    block_function = policies.block_function

    def noted(name: str, graph: fx.Graph, *rest: Any) -> BlockFunction:
        found[name] = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
        return block_function(name, graph, *rest)

    monkeypatch.setattr(policies, "block_function", noted)
    monkeypatch.setattr(
        "megacompile.api.compile.Frontend", Frontend
    )  # no function of an earlier test is taken
    monkeypatch.setattr(_triton, "HAS_TRITON", True)  # as where it is installed
    monkeypatch.setattr(_triton, "_gave_up", False)
    runtime.set(poison=0, lag_us=0)
    with nothing_kept():
        yield found


def functions(model: nn.Module, example: dict[str, Tensor], inductor: bool = False) -> list[BlockFunction]:
    """All of a program's."""
    options = {"compute_dtype": torch.bfloat16, "inductor": inductor, "example_batch": example}
    made = megacompile.compile(model.train(), "2GB", device="cuda", **options)  # type: ignore[arg-type]
    compiled = made._session.scheduled().compiled
    made.close()
    return [f for template in compiled.templates for f in template.functions()]


def called(function: BlockFunction, like: list[Tensor]) -> tuple[int, int]:
    """Kernels, and copies on the device, that a call asks for; bytes that it takes beside its arguments."""
    run = function.load(CUDA)
    given = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA) for x in like]
    matrix = torch.ones(64, 64, dtype=torch.bfloat16, device=CUDA)
    torch.mm(matrix, matrix)  # cuBLAS keeps a workspace from here on
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    asked, held = runtime.count("launches") + runtime.count("copies"), torch.cuda.memory_allocated()
    with torch.no_grad():
        run(given)
    asked = runtime.count("launches") + runtime.count("copies") - asked
    return asked, torch.cuda.max_memory_allocated() - held


@pytest.mark.parametrize(("name", "inductor"), [("llama", False), ("gemma3", False), ("llama", True)])
def test_block_functions_launch_what_is_counted(
    name: str, inductor: bool, arguments: dict[str, list[Tensor]]
) -> None:
    made = functions(build(name), batch_for(name, size=4, length=64), inductor)
    assert any(f.fused for f in made) == inductor
    for function in made:
        count, _ = called(function, arguments[function.name])
        assert function.launches == pytest.approx(count, abs=max(2, count / 10)), function.name


@pytest.mark.parametrize("length", [1024, 4096])
def test_block_functions_take_what_is_planned(length: int, arguments: dict[str, list[Tensor]]) -> None:
    """Sums of columns, attention's backward and sorted indices hold memory that no tensor shows."""
    for function in functions(llama(width=512), batch(0, length)):
        _, taken = called(function, arguments[function.name])
        assert taken <= function.peak_bytes + ROUNDING * function.launches, function.name

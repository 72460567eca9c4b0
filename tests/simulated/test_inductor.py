"""Inductor's blocks on CUDA: really compiled and launched by Triton, which computes nothing here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from megacompile.kernels import _triton
from tests.simulated.numbers import runtime
from tests.support.cuda_programs import program
from tests.support.models import batch_for, build


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_step_runs_kernels_of_inductor_and_tries_none_of_them_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def benchmark(self: CachingAutotuner, *_: Any, **__: Any) -> Any:
        tried.append(self.fn.__name__)
        raise AssertionError("tilings are tried out within a step")

    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", benchmark)
    monkeypatch.setattr(_triton, "HAS_TRITON", True)  # for gemma's windows
    monkeypatch.setattr(_triton, "_gave_up", False)
    batch = batch_for(name, size=4, length=64)
    options = {"compute_dtype": torch.bfloat16, "max_grad_norm": 1.0, "on_nonfinite": "skip"}
    trained = program(build(name), "cuda", "1GB", inductor=True, example_batch=batch, **options)
    compiled = trained._session.scheduled().compiled
    made = [f for template in compiled.templates for f in template.functions()]
    assert sum(f.fused for f in made) > len(made) / 2
    before = runtime.count("launches")
    trained.train_step(batch)  # of numbers that nobody computed
    trained.close()
    assert runtime.count("launches") > before
    assert not tried

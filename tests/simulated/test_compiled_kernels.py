"""Triton's kernels are compiled before the first step: those that it launches, and no step compiles any."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

import megacompile
from megacompile.api import bound_programs
from megacompile.kernels import _triton
from megacompile.kernels._triton import Launch
from megacompile.runtime import precompile_kernels
from tests.simulated.numbers import runtime
from tests.simulated.test_architectures import SLOW
from tests.support.cuda_programs import program
from tests.support.models import batch_for, build
from tests.support.zoo import cases

CUDA = torch.device("cuda", 0)
compile_kernels = precompile_kernels.compile_kernels


@pytest.fixture(autouse=True)
def with_triton(device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton launches, and has compiled nothing yet."""

    def anew(launches: Sequence[Launch], device: torch.device) -> None:
        for launch in launches:
            launch.kernel.device_caches.clear()
        compile_kernels(launches, device)

    monkeypatch.setattr(_triton, "HAS_TRITON", True)
    monkeypatch.setattr(_triton, "_gave_up", False)
    monkeypatch.setattr(bound_programs, "compile_kernels", anew)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    runtime.set(poison=0, lag_us=0)


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("gemma3", torch.bfloat16)])
def test_steps_compile_nothing(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    batch = batch_for(name, size=2, length=16)
    trained = program(build(name), "cuda", "1GB", compute_dtype=dtype, example_batch=batch, max_grad_norm=0.5)
    compiled = set(tmp_path.rglob("*"))
    kernels = {path.stem for path in compiled if path.suffix == ".cubin"}
    assert {"rms_norm_forward_kernel", "rms_norm_backward_kernel", "adamw_kernel"} <= kernels
    assert ("attention_backward_kv_kernel" in kernels) == (name == "gemma3")  # its windows
    for _ in range(2):
        trained.train_step(batch)
    trained.close()
    assert set(tmp_path.rglob("*")) == compiled


Kind = tuple[Any, ...]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("name", "dtype"), [("gpt2", "float32"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
)
def test_what_steps_launch_is_known(
    name: str, dtype: str, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By addresses of real tensors. Nothing is compiled, and so nothing launched."""
    known: set[Kind] = set()
    launched: set[Kind] = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        pointers = [x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in args]
        seen = [
            precompile_kernels._Pointer(x.dtype, at % 16) if isinstance(x, torch.Tensor) else x
            for x, at in zip(args, pointers, strict=True)
        ]
        kind = (kernel, *map(precompile_kernels._argument_kind, seen), str(sorted(options.items())))
        (known if warmup else launched).add(kind)

    def warmed_up(launches: Sequence[Launch], device: torch.device) -> None:
        for x in precompile_kernels.distinct(launches):
            x.kernel.warmup(*x.args, grid=x.grid, **x.options, **x.constants)

    monkeypatch.setattr(bound_programs, "compile_kernels", warmed_up)
    monkeypatch.setattr(JITFunction, "run", run)
    if streamed:
        monkeypatch.setattr("megacompile.api.pipeline.Compiler._may_reside", lambda *_: ())
    case, options = cases()[name], {"compute_dtype": getattr(torch, dtype), "max_grad_norm": 0.5}
    trained = program(case.build(), "cuda", "1GB", **options)
    launched.clear()  # the preflight's
    trained.train_step([case.batch(0), case.batch(0)])
    trained.evaluate(case.batch(0))
    trained.close()
    assert launched <= known
    assert {kernel.__name__ for kernel, *_ in known - launched} <= {"adamw_kernel"}  # it clips, or does not


@triton.jit
def broken_kernel(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + tl.arange(0, BLOCK), 1.0)


def broken(block: int) -> Launch:
    return Launch(broken_kernel, (1,), (torch.ones(1, device="cuda"),), {"BLOCK": block}, 4, 3)


def none_left() -> bool:
    return not any(thread.name.startswith("megacompile-triton") for thread in threading.enumerate())


def test_a_kernel_that_does_not_compile_is_named_before_the_model_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = build("plain"), batch_for("plain", size=2)
    with monkeypatch.context() as patch:
        patch.setattr(bound_programs, "launches_of", lambda *_: [broken(4), broken(3), broken(8)])
        with pytest.raises(megacompile.MegacompileError, match=r"broken_kernel.*power of 2.*kernels=False"):
            program(model, "cuda", "1GB", example_batch=batch)
    assert none_left()
    assert next(model.parameters()).sum().isfinite()  # has its values
    program(model, "cuda", "1GB", example_batch=batch).close()


def test_after_an_interrupt_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Launch] = []
    go = threading.Event()

    def compile_slowly(launch: Launch) -> None:
        begun.append(launch)
        go.wait()

    def interrupted(*_: Any, **__: Any) -> None:
        go.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(precompile_kernels, "_compile", compile_slowly)
    monkeypatch.setattr(precompile_kernels, "usable_cores", lambda: 1)
    monkeypatch.setattr(precompile_kernels, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_kernels([broken(block) for block in (1, 2, 4, 8)], CUDA)
    assert none_left()
    assert len(begun) < 4


def test_what_takes_long_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    told, go = list[str](), threading.Event()

    class Bar(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            go.set()

    bar, log = Bar(), logging.getLogger("megacompile.compiler")  # whose handler a trainer's bar is
    monkeypatch.setattr(precompile_kernels, "_compile", lambda launch: go.wait(60))
    monkeypatch.setattr(precompile_kernels, "_PATIENCE", 0.0)
    caplog.set_level(logging.INFO, log.name)
    log.addHandler(bar)
    compile_kernels([broken(2), broken(4)], CUDA)
    log.removeHandler(bar)
    assert told == ["compiling 2 kernels for the GPU"]


def test_what_fails_beside_other_threads_is_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Launch] = []

    def compile_alone(launch: Launch) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise SystemError("AST constructor recursion depth mismatch")
        compiled.append(launch)

    monkeypatch.setattr(precompile_kernels, "_compile", compile_alone)
    compile_kernels([broken(2), broken(4)], CUDA)
    assert len(compiled) == 2

"""Inductor: a block function's graph compiled by torch's own compiler, allocations in the open.

In: the functional graph of a block function. Out: the source of Inductor's Python wrapper, which calls fused
kernels, torch's products and our operators, and says itself where it takes memory. Invariants: every
allocation goes through torch's dispatcher, so that a meter counts it; no argument is written; the same
inputs give the same bits, since nothing is left to atomic additions or to timings.

This is private API of torch. All of it is used here; ``tests/unit/blocks/test_inductor.py`` fails
when it goes away.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from megacompile.capture.patches import Patch, replaced
from megacompile.errors import CaptureError, MegacompileError

_SETTINGS = {
    "benchmark_harness": False,  # no test bench behind each function
    "size_asserts": False,
    "alignment_asserts": False,
    "fx_graph_cache": False,
    "deterministic": True,  # no choice by timing
    "emulate_precision_casts": True,  # bf16 is rounded where eager rounds: recompute then equals forward
    "triton.cudagraphs": False,
    "triton.autotune_pointwise": False,  # it would try tilings in the first step, on memory that no plan has
}
_CHANCE = re.compile("atomic_add(?!_found': False)|index_put")
"""What a source contains where the order of a sum depends on threads; Triton kernels say that they do not."""


def check_compiler() -> None:
    """Refuse ``inductor=True`` where no C++ compiler is found."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        found = shutil.which(get_cpp_compiler())
    except RuntimeError:
        found = None
    if found is None:
        raise MegacompileError(
            f"inductor=True needs a C++ compiler, and none of {config.cpp.cxx} is found: install g++, set "
            "CXX to one, or leave inductor=True out."
        )


def wrapper_source(
    name: str, graph: fx.Graph, examples: Sequence[Tensor], mode: FakeTensorMode, device: torch.device
) -> str | None:
    """The wrapper for ``device``; None where sums would be in an order left to chance. Compiles nothing."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.utils import get_code

    with config.patch(_SETTINGS):
        with mode:
            fakes = [torch.empty_strided(e.shape, e.stride(), dtype=e.dtype, device=device) for e in examples]
        lowered = make_fx(fx.Interpreter(_on(graph, device)).run, select_decomp_table())(*fakes)
        output = lowered.graph.output_node()
        # results keep their strides
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
        try:
            source = get_code(compile_fx_inner, lowered, fakes)[0]
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise CaptureError(
                f"torch's Inductor cannot compile {name}: {reason}. Compile without inductor=True."
            ) from error
    return None if _CHANCE.search(source) else source


def _on(graph: fx.Graph, device: torch.device) -> fx.GraphModule:
    """A copy of a graph that makes its tensors on ``device``."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in copy.nodes:
        node.args, node.kwargs = map_aggregate(
            (node.args, node.kwargs), lambda a: device if isinstance(a, torch.device) else a
        )
    return fx.GraphModule({}, copy)


def load(source: str) -> Callable[[list[Any]], list[Any]]:
    """The function of a wrapper, its kernels compiled, or found in torch's cache."""
    return _boxed(_executed(source))


def dry(source: str, moved: list[int]) -> Callable[[list[Any]], list[Any]]:
    """The function of a wrapper for fake tensors: it allocates and frees, and its kernels do nothing; each
    call of one adds the bytes of its arguments to the list ``moved``."""
    from torch._inductor import async_compile

    patch = Patch(async_compile, "AsyncCompile", lambda theirs: _NoKernels(moved), "nothing is compiled")
    with replaced([patch]):
        namespace = _executed(source)
    namespace["reinterpret_tensor"] = _reinterpret
    namespace["copy_if_misaligned"] = lambda x: x  # from torch 2.15 on; a fake tensor has no address
    return _boxed(namespace)


def _executed(source: str) -> dict[str, Any]:
    """A wrapper's names, with allocations by torch itself."""
    namespace: dict[str, Any] = {"__name__": "megacompile_inductor"}
    exec(compile(source, "<megacompile inductor>", "exec"), namespace)
    for kind in ("cpu", "cuda"):
        namespace[f"empty_strided_{kind}"] = functools.partial(_empty, torch.device(kind))
    return namespace


def _empty(
    device: torch.device, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret(x: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    return x.as_strided(size, stride, x.storage_offset() + offset)


def _boxed(namespace: dict[str, Any]) -> Callable[[list[Any]], list[Any]]:
    call = namespace["call"]
    return lambda arguments: list(call(arguments))


class _NoKernels:
    """Stands in for Inductor's compiler: the kernels that it is asked for count what they are given."""

    def __init__(self, moved: list[int]) -> None:
        self._moved = moved

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        return lambda *source, **options: None if kind == "wait" else _Counting(self._moved)


class _Counting:
    """A kernel of either backend: C++ ones are called, Triton ones run."""

    def __init__(self, moved: list[int]) -> None:
        self._moved = moved

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self._moved.append(sum(a.numel() * a.element_size() for a in arguments if isinstance(a, Tensor)))

    run = __call__

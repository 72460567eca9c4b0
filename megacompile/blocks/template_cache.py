"""Keep the functions of templates: equal blocks are differentiated once, in this run or an earlier one.

In: a template, and what its functions are for. Out: its functions, printed and measured, from a file where an
equal template was differentiated before. A template's digest tells its computation; its name and the names of
its nodes, which are printed, and what else decides the functions are part of the key. A template that calls
anything but operators of torch and of ours is not kept, as other code may stand behind it in another run.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import megacompile
from megacompile import blocks, capture, graph, kernels
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.partition import Template
from megacompile.blocks.policies import differentiate
from megacompile.capture.opaque_functions import OPAQUE
from megacompile.errors import MegacompileError
from megacompile.file_cache import cached_file, code_digest, read_cached, write_cached
from megacompile.json_codec import from_plain, to_plain
from megacompile.kernels import _triton
from megacompile.kernels._triton import Gpu

_MOST = 1024  # files; the newest stay
_NAMESPACES = ("aten", "prims", "megacompile")  # of operators that are the same in every run


def differentiate_once(
    template: Template,
    mode: FakeTensorMode,
    inductor: torch.device | None = None,
    gpu: Gpu | None = None,
    chunk: int = 0,
    *,
    check: bool = True,
    fold: bool = False,
) -> DifferentiatedTemplate:
    """As :func:`~megacompile.blocks.policies.differentiate`, from a file where that is known.

    What Inductor compiles is not kept here: it has a cache of its own.
    """
    if inductor is not None or not _is_the_same_in_every_run(template.graph):
        return differentiate(template, mode, inductor, gpu, chunk, check=check, fold=fold)
    path = _place_of(template, gpu, chunk, check, fold)
    if (known := _read(path)) is not None:
        return replace(known, index=template.index)
    found = differentiate(template, mode, None, gpu, chunk, check=check, fold=fold)
    write_cached(path, to_plain(found), _MOST)
    return found


def _is_the_same_in_every_run(graph: fx.Graph) -> bool:
    return all(
        node.target.namespace in _NAMESPACES and node.target is not OPAQUE
        if isinstance(node.target, torch._ops.OpOverload)
        else getattr(node.target, "__module__", "") == "_operator"
        for node in graph.nodes
        if node.op == "call_function"
    )


def _place_of(template: Template, gpu: Gpu | None, chunk: int, *options: bool) -> Path:
    """The file of a template's functions."""
    code = code_digest(megacompile, blocks, capture, graph, kernels)
    return cached_file("templates", code, *what_decides(template, gpu, chunk), *options)


def what_decides(template: Template, gpu: Gpu | None, chunk: int) -> tuple[Hashable, ...]:
    """Everything but code that a template's functions depend on: equal values mean equal functions."""
    kernels_run = _triton.HAS_TRITON, _triton.INTERPRETED, _triton._gave_up
    modes = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    names = tuple(node.name for node in template.graph.nodes)
    own = template.name, template.digest, template.share, names
    return torch.__version__, kernels_run, modes, own, gpu, chunk


def _read(path: Path) -> DifferentiatedTemplate | None:
    with suppress(MegacompileError):
        if (plain := read_cached(path)) is not None:
            found: DifferentiatedTemplate = from_plain(DifferentiatedTemplate, plain, str(path))
            return found
    return None

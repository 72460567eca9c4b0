"""Bench: who computes an operation. Eager torch, torch.compile, megacompile, Liger, and files of users.

A provider maps an operation's name to a function with the arguments of its eager form, or to None
where it does not have the operation. A file of a user is a Python module with functions of those names.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacompile import kernels
from megacompile.bench.cases import ALPHA, EPS, LIMIT, OPERATIONS, SOFTCAP, WINDOW, Function
from megacompile.errors import MegacompileError

Provider = Callable[[str], Function | None]


def providers(files: Sequence[str], device: torch.device) -> dict[str, Provider]:
    """Those that can run on ``device``, by name, megacompile's and eager's first."""
    found: dict[str, Provider] = {"eager": lambda name: OPERATIONS[name].eager, "megacompile": OURS.get}
    if device.type == "cuda":
        found["torch.compile"] = _compiled
        if importlib.util.find_spec("liger_kernel") is not None:
            found["liger"] = _liger
    for file in files:
        found[Path(file).stem] = from_file(Path(file))
    return found


def _attention(softcap: float, window: int) -> Function:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        out: Tensor = torch.ops.megacompile.attention(
            q, k, v, None, None, None, scale, True, window, softcap, 0.0, 0, False
        )[0]
        return out

    return run


OURS: dict[str, Function] = {
    "rms_norm": lambda x, w: kernels.rms_norm(x, w, EPS),
    "add_rms_norm": lambda x, r, w: kernels.add_rms_norm(x, r, w, EPS),
    "layer_norm": lambda x, w, b: kernels.layer_norm(x, w, b, EPS),
    "glu": kernels.glu,
    "clamped_glu": lambda both: kernels.clamped_glu(both, LIMIT, ALPHA),
    "rope": kernels.rope,
    "qk_norm_rope": lambda x, w, cos, sin: kernels.qk_norm_rope(x, w, cos, sin, EPS),
    "linear_cross_entropy": lambda x, w, labels: kernels.linear_cross_entropy(x, w, labels).mean(),
    "attention": _attention(0.0, 0),
    "capped_attention": _attention(SOFTCAP, WINDOW),
    "gated_delta_rule": kernels.gated_delta_rule,
    "mamba2_chunk_scan": kernels.mamba2_chunk_scan,
}


def _compiled(name: str) -> Function:
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # one graph's backward is timed again and again
    function: Function = torch.compile(OPERATIONS[name].eager, dynamic=False)
    return function


def _liger(name: str) -> Function | None:
    """Liger-Kernel's functional interface; names as of its version 0.6."""
    liger = importlib.import_module("liger_kernel.transformers.functional")

    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # it rotates queries and keys together: half of the heads as each
        q, k = x.chunk(2, 1)
        turned = liger.liger_rope(q, k, cos[:, 0], sin[:, 0])
        return torch.cat(turned, 1)

    known: dict[str, Callable[..., Any]] = {
        "rms_norm": lambda x, w: liger.liger_rms_norm(x, w, EPS),
        "add_rms_norm": lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, EPS),
        "layer_norm": lambda x, w, b: liger.liger_layer_norm(x, w, b, EPS),
        "glu": lambda gate, up: liger.liger_swiglu(gate, up),
        "rope": rope,
        "linear_cross_entropy": lambda x, w, labels: liger.liger_fused_linear_cross_entropy(x, w, labels),
    }
    return known.get(name)


def from_file(path: Path) -> Provider:
    """The functions of a Python file, by name."""
    if not path.is_file():
        raise MegacompileError(f"--provider {path}: there is no such file.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise MegacompileError(f"--provider {path}: this is no Python file.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise MegacompileError(f"--provider {path} fails on import: {error}") from error
    if not any(hasattr(module, name) for name in OPERATIONS):
        raise MegacompileError(
            f"--provider {path} defines none of the operations: name its functions {', '.join(OPERATIONS)}."
        )
    return lambda name: getattr(module, name, None)

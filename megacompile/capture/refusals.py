"""What a forward may not do, because a captured graph would lose it: refused by name, with the way out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind

from megacompile.errors import CaptureError
from megacompile.graph.captured import module_path, strip
from megacompile.graph.node_storage import is_mutable
from megacompile.kernels.sdpa import attention
from megacompile.user_warning import warn_user

aten = torch.ops.aten
_PRODUCT_OPERATORS = {
    attention._opoverload,
    *(
        getattr(aten, name).default
        for name in ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "convolution")
    ),
}


def gradient_hook(theirs: Any, tensor: Tensor, hook: Any) -> None:
    """``Tensor.register_hook``, refused."""
    raise CaptureError(
        f"The forward registers a gradient hook on a tensor of shape {tuple(tensor.shape)}, which would "
        "never run: scale the tensor itself, or its loss."
    )


def is_cuda(tensor: Tensor) -> bool:
    """Return no for ``Tensor.is_cuda`` in a capture; on a machine with a GPU, tell a model that asks."""
    asked = sys._getframe(1)
    if _has_gpu() and asked.f_globals.get("__name__", "").split(".")[0] not in ("torch", "megacompile"):
        place = f"{Path(asked.f_code.co_filename).name}:{asked.f_lineno}"
        warn_user(
            f"The forward asks at {place} whether a tensor is on a GPU: it is captured as on a CPU, and "
            "every device runs the branch that a CPU takes."
        )
    return bool(Tensor.is_cuda.__get__(tensor))  # type: ignore[attr-defined]


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def refuse_writes(exported: torch.export.ExportedProgram) -> None:
    """Refuse a forward that writes into a parameter (through ``.data``): only buffers are looked at later."""
    constants = {
        spec.arg.name
        for spec in exported.graph_signature.input_specs
        if spec.kind in (InputKind.CONSTANT_TENSOR, InputKind.PARAMETER)
    }
    for node in exported.graph.nodes:
        if is_mutable(node):
            written = node.args[0] if node.args else None
            if isinstance(written, fx.Node) and written.op == "placeholder" and written.name in constants:
                raise CaptureError(
                    f"{module_path(node) or 'The forward'} writes into a parameter ({node.target}): do that "
                    "between steps, on program.state_dict() and load_state_dict()."
                )


def refuse_sparse(exported: torch.export.ExportedProgram) -> None:
    """Refuse a forward that makes a sparse tensor: kernels, and the schedule's bytes, are of dense ones."""
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                f"{module_path(node) or 'The forward'} makes a sparse tensor ({node.target}), which is not "
                "supported: compute with dense ones; of PEFT's adapters take LoRA in place of SHiRA."
            )


def refuse_mixed_products(graph: fx.Graph) -> None:
    """Refuse a product of two dtypes, which tracing lets pass and running does not.

    What :mod:`~megacompile.capture.patches` leaves: integers, float64, and attention.
    """
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _PRODUCT_OPERATORS:
            continue
        values = [a.meta["val"] for a in node.args[:3] if isinstance(a, fx.Node)]
        dtypes = sorted({str(v.dtype) for v in values if isinstance(v, Tensor)})
        if "torch.float64" in dtypes[1:]:
            raise CaptureError(
                f"{module_path(node) or 'The forward'} multiplies {' by '.join(dtypes)}: a program computes "
                "in float32 at most, so give the batch's floats in float32, or cast in the forward."
            )
        if len(dtypes) > 1:
            raise CaptureError(
                f"{module_path(node) or 'The forward'} multiplies {' by '.join(dtypes)}: cast one to the "
                "dtype of the other."
            )


def refuse_mutations(signature: ExportGraphSignature) -> None:
    """Refuse a forward that writes into parameters or the batch."""
    for name in signature.user_inputs_to_mutate.values():
        raise CaptureError(
            f"The forward writes in place into {name} of the batch: clone it there first, or compute a new "
            "tensor."
        )
    for spec in signature.output_specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.BUFFER_MUTATION):
            raise CaptureError(
                f"The forward writes into {strip(str(spec.target))}: do that between steps, on "
                "program.state_dict() and load_state_dict()."
            )

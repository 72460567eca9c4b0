"""Find who computes an operation: eager torch, torch.compile, megacompile, Liger, and files of users.

A provider maps an operation's name to a function with the arguments of its eager form, or to None where it
does not have the operation. A file of a user is a Python module with functions of those names.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from megacompile.bench.operations import OPERATIONS
from megacompile.errors import MegacompileError
from megacompile.kernels.eager_form import Function
from megacompile.kernels.registry import EAGER_FORMS

Provider = Callable[[str], Function | None]


def providers(files: Sequence[str], device: torch.device) -> dict[str, Provider]:
    """Those that can run on ``device``, by name, megacompile's and eager's first."""
    found: dict[str, Provider] = {"eager": lambda name: EAGER_FORMS[name].eager, "megacompile": OURS.get}
    if device.type == "cuda":
        found["torch.compile"] = _compiled
        if importlib.util.find_spec("liger_kernel") is not None:
            found["liger"] = _liger
    for file in files:
        found[Path(file).stem] = from_file(Path(file))
    return found


OURS: dict[str, Function] = {name: form.ours for name, form in sorted(EAGER_FORMS.items())}


def _compiled(name: str) -> Function:
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # one graph's backward is timed again and again
    function: Function = torch.compile(EAGER_FORMS[name].eager, dynamic=False)
    return function


def _liger(name: str) -> Function | None:
    """Liger-Kernel's functional interface."""
    run = OPERATIONS[name].liger
    interface = importlib.import_module("liger_kernel.transformers.functional")
    return None if run is None else partial(run, interface)


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

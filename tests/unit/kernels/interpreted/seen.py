"""Which inputs the interpreted tests give to which operator: watched while they run, not listed by hand.

From its import on, every call of an operator and of the two launchers of attention is recorded; ``write``
leaves a process's record as JSON where ``MEGACOMPILE_SEEN`` names a folder. ``test_interpreted.py`` puts the
records of all processes together and looks for holes.
"""

import functools
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS

from megacompile.kernels import attention, dropout

_seen: dict[str, set[str]] = defaultdict(set)


def properties(tensors: list[Tensor]) -> Iterator[str]:
    """What is special about the floating-point inputs of one call."""
    for x in tensors:
        if not x.is_contiguous() and x.numel() > 1:
            yield "strided"
        if x.numel() == 0:
            yield "empty"
            continue
        yield str(x.dtype).removeprefix("torch.")
        columns = x.shape[-1] if x.ndim else 1
        rows = x.numel() // columns
        if x.ndim > 1:
            yield from (["one row"] if rows == 1 else ["199 rows"] if rows >= 199 and rows % 2 else [])
        if columns > 1:
            yield from (["odd columns"] if columns % 2 else ["4096 columns"] if columns >= 4096 else [])
        size = x.detach().abs()
        size = torch.where(size.isfinite(), size, 0.0)
        yield from ["zeros"] if not size.any(-1).all() else []
        yield from ["large"] if size.max() >= 1e4 else []
        if ((size > 0) & (size < torch.finfo(x.dtype).tiny)).any():
            yield "denormal"


def record(name: str, arguments: Any) -> None:
    """Add a call to what was seen."""
    flat = [a for a in arguments if isinstance(a, Tensor) and a.is_floating_point()]
    _seen[name].update(properties(flat))


def _recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        record(name, [*args, *kwargs.values()])
        return function(*args, **kwargs)

    return run


for module, name in (
    (attention, "flash_attention_forward"),
    (attention, "flash_attention_backward"),
    (dropout, "dropout"),
):
    setattr(module, name, _recorded(name, getattr(module, name)))
for name, operator in OPDEFS.items():
    if name.startswith("megacompile::"):  # where it runs: a dispatch mode would look at all of torch's, too
        implementations = operator._backend_fns
        for device, implementation in implementations.items():
            implementations[device] = _recorded(name.split("::")[1], implementation)


def write() -> None:
    """Leave this process's record in the folder that ``MEGACOMPILE_SEEN`` names, if it does."""
    folder = os.environ.get("MEGACOMPILE_SEEN")
    if folder:
        found = {name: sorted(kinds) for name, kinds in sorted(_seen.items())}
        (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(found))

"""megacompile: train models far larger than device memory, at full precision, on one accelerator."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megacompile.errors import BudgetError, CaptureError, MegacompileError, ProgramError

if TYPE_CHECKING:
    from megacompile.api.compile import compile
    from megacompile.api.pretrained import from_pretrained
    from megacompile.api.program import Program
    from megacompile.capture.patches import our_operators
    from megacompile.runtime.step_results import NonFiniteError
    from megacompile.schedule.plan import Plan

__version__ = "0.1.0"
__all__ = [
    "BudgetError",
    "CaptureError",
    "MegacompileError",
    "NonFiniteError",
    "Plan",
    "Program",
    "ProgramError",
    "compile",
    "from_pretrained",
    "our_operators",
]
_MODULES = {  # imported when a name is asked for: torch alone takes seconds, which --help need not wait for
    "NonFiniteError": "megacompile.runtime.step_results",
    "Plan": "megacompile.schedule.plan",
    "Program": "megacompile.api.program",
    "compile": "megacompile.api.compile",
    "from_pretrained": "megacompile.api.pretrained",
    "our_operators": "megacompile.capture.patches",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(_MODULES[name]), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""megacompile: train models far larger than device memory, at full precision, on one accelerator."""

from megacompile.api import compile
from megacompile.assemble.plan import Plan
from megacompile.capture.patching import our_operators
from megacompile.errors import BudgetError, CaptureError, MegacompileError, ProgramError
from megacompile.pretrained import from_pretrained
from megacompile.program import Program
from megacompile.runtime.step_io import NonFiniteError

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

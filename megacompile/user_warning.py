"""Warn the user at a line of the user's own."""

from __future__ import annotations

import sys
import warnings

# packages that we call, or that call us
_BETWEEN = ("megacompile", "torch", "transformers", "trl", "accelerate")


def warn_user(text: str) -> None:
    """Warn of what the user's code did: the warning names its line, not one of the packages between.

    A fixed ``stacklevel`` would name another line after each change of the calls between.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _package(frame.f_globals) in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]

"""Functions of the whole process, replaced for the calls of one thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


def in_this_thread(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """``ours`` for calls from the thread that asks for it, ``theirs`` for all others."""
    thread = threading.get_ident()

    @functools.wraps(theirs, assigned=("__name__", "__doc__"))
    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if threading.get_ident() == thread else theirs)(*args, **kwargs)

    return call

"""Refuse a program in a forked child, which has none of the threads that the program works with."""

from __future__ import annotations

import os

from megacompile.errors import ProgramError


def refuse_forked_child(pid: int) -> None:
    """Refuse a program of the process ``pid`` in any other."""
    if os.getpid() != pid:
        raise ProgramError(
            "This program was made in another process, whose worker threads a fork does not copy: use it "
            "there, or compile in this process."
        )

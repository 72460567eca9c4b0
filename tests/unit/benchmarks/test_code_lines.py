"""The command that counts lines of code."""

from __future__ import annotations

from pathlib import Path

from benchmarks.code_lines import code_lines, packages

_MODULE = '''"""A docstring
of two lines."""

import os
from os import (
    path,
)

TEXT = """a value
of two lines"""  # a comment


# another
def f():
    """A docstring."""
    return path.join(
        TEXT,
    )
'''


def test_blank_lines_docstrings_comments_and_imports_are_no_code() -> None:
    assert code_lines(_MODULE) == 6  # TEXT, def and return


def test_packages_of_the_product_are_counted_apart(tmp_path: Path) -> None:
    for name in ("megacompile/errors.py", "megacompile/api/a/b.py", "kernels/a/b.py", "tests/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert packages(tmp_path) == {"megacompile": 1, "megacompile/api": 1, "kernels": 1}

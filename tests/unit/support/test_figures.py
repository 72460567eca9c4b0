"""The figures of the source tree."""

from __future__ import annotations

from tests.support.figures import code_lines

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

"""The reference page is what the docstrings say, and leaves nothing out."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import megacompile

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").exists())


def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    assert page == maker().page(), "run python docs/make_reference.py"


def test_the_reference_tells_of_everything_public() -> None:
    page = maker().page()
    for name in megacompile.__all__:
        assert f"`{name}" in page or f"`megacompile.{name}" in page, name
    for name in inspect.signature(megacompile.compile).parameters:
        assert f"| `{name}` |" in page, f"compile's docstring does not tell of {name}"
    for name, member in inspect.getmembers(megacompile.Program):
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            assert f"| `{name}" in page, f"Program.{name} has no docstring"

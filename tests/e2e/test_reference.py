"""The reference page is what the docstrings say, and leaves nothing out."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

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


PAGES = [ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs" / "architecture").glob("*.md"))]
PLACE = re.compile(r"`((?:[a-z0-9_]+/)+[a-z0-9_]+)((?:\.\w+)*)`")


def is_there(module: str, names: list[str]) -> bool:
    """Return whether a module, as pages write it, has such a name; attributes of instances are looked for in
    the source of their class."""
    folder = next(
        (f for f in (ROOT / "megacompile", ROOT / "tests", ROOT) if (f / module).parent.is_dir()), ROOT
    )
    if names and (folder / f"{module}.{'.'.join(names)}").exists():
        return True
    if not (folder / f"{module}.py").exists():
        return (folder / module).is_dir() and not names
    found: object = importlib.import_module(f"megacompile.{module.replace('/', '.')}")
    for name in names:
        if not hasattr(found, name):
            return inspect.isclass(found) and f"self.{name}" in inspect.getsource(found)
        found = getattr(found, name)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_that_a_page_names_is_there(page: Path) -> None:
    named = PLACE.findall(page.read_text())
    assert not [module + names for module, names in named if not is_there(module, names.split(".")[1:])]

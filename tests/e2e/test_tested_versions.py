"""The versions that pages, doctor and a warning name are those that the tests run with."""

from __future__ import annotations

import re
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

import megacompile
from megacompile import tested_versions
from megacompile.tested_versions import TESTED, describe_tested, is_newer
from tests.support.models import build

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").exists())
PIN = re.compile(r"\b([a-z]+)==([0-9]+\.[0-9]+)")


def pins() -> dict[str, set[str]]:
    """The releases of each package that an environment of the Makefile or constraints.txt pins."""
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"\b(TORCH|TRITON) ?:?= ?([0-9]+\.[0-9]+)", makefile)
    pinned = [*PIN.findall(makefile), *PIN.findall((ROOT / "constraints.txt").read_text())]
    found: dict[str, set[str]] = {}
    for name, release in [*pinned, *((name.lower(), release) for name, release in named)]:
        found.setdefault(name, set()).add(release)
    return found


@pytest.mark.parametrize("name", TESTED)
def test_the_ends_of_each_range_are_pinned(name: str) -> None:
    releases = pins()[name]
    assert set(TESTED[name]) <= releases
    order = sorted(releases, key=lambda release: tuple(map(int, release.split("."))))
    assert (order[0], order[-1]) == TESTED[name]


def test_the_page_has_the_same_table() -> None:
    rows = re.findall(r"^\| ([a-z]+) \| ([0-9. to]+) \|$", (ROOT / "docs" / "index.md").read_text(), re.M)
    assert rows == [(name, describe_tested(name)) for name in TESTED]


def compiled() -> None:
    model = build("plain")
    megacompile.compile(model, "1GB", optimizer=torch.optim.AdamW(model.parameters())).close()


def test_a_newer_version_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tested_versions._warn.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.99.0a0+git1234")
    with pytest.warns(UserWarning, match=r"torch 2\.99.* is newer than .* \(2\.11 to ") as told:
        compiled()
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is newer than")
        compiled()


@pytest.mark.parametrize(
    "version, newer",
    [("2.11.0", False), ("2.15.3", False), ("2.16.0.dev20270101", True), ("3.0", True), ("x", False)],
)
def test_a_release_is_its_first_two_numbers(version: str, newer: bool) -> None:
    assert is_newer("torch", version) == newer


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited == [project["version"]] == [megacompile.__version__]

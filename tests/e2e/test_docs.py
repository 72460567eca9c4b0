"""The commands that the documentation shows exist, and what it says of them is so."""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import shlex
import tempfile
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megacompile.cli.main import _build, main
from megacompile.cli.presets import PRESETS
from megacompile.hardware.catalog import PROFILES, load_machine
from megacompile.report.schedule_page import _SCRIPTS

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("cli.md", "how-to/train.md", "how-to/vision-language.md")),
    *(
        ROOT / "docs" / "how-to" / name
        for name in ("rl.md", "fit.md", "budget.md", "70b-on-80gb.md", "long-sequences.md")
    ),
)
GUIDES = (
    ROOT / "docs" / "index.md",
    *sorted(p for p in (ROOT / "docs" / "how-to").glob("*.md") if "```python\n" in p.read_text()),
    ROOT / "docs" / "troubleshooting.md",
)


def shown(path: Path) -> list[list[str]]:
    """The arguments of every ``megacompile`` command in a page's code blocks, continued lines joined."""
    found = []
    for block in re.findall(r"^```(?:sh|console)\n(.*?)^```", path.read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if line.removeprefix("$ ").startswith("megacompile "):
                found.append(shlex.split(line.removeprefix("$ "), comments=True)[1:])
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_every_command_that_is_shown_is_understood(path: Path) -> None:
    commands = shown(path)
    assert commands
    parser, _ = _build()
    for arguments in commands:
        if "--help" in arguments:
            continue
        options, unknown = parser.parse_known_args(arguments)
        assert not unknown, arguments
        if options.command == "plan":
            model = options.model
            assert model in PRESETS or model.endswith("config.json") or model.count("/") == 1
            if not options.machine.endswith(".json"):
                load_machine(options.machine)


@pytest.mark.slow_cases(r"(?!long)")
@pytest.mark.parametrize(
    "path",
    [*PAGES[-4:-1], *(pytest.param(page, marks=pytest.mark.nightly) for page in (*PAGES[3:5], PAGES[-1]))],
    ids=lambda p: p.stem,
)
def test_the_figures_of_a_guide_are_those_of_its_commands(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line of output that is shown is one, up to where it is cut by …, in that order."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```console\n(\$ megacompile plan .*?)^```", path.read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        command, *lines = block.replace("\\\n", " ").splitlines()
        main(shlex.split(command)[2:])
        said = iter(capsys.readouterr().out.splitlines())
        for line in filter(str.strip, lines):
            start = line.removesuffix("…")
            assert any(one == line or (start != line and one.startswith(start)) for one in said), line


@pytest.mark.slow_cases(r"(8b|70b|read|trl|trainer|rl|vision-language)")
@pytest.mark.parametrize("path", GUIDES, ids=lambda p: p.stem)
def test_the_python_of_a_guide_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page, in their order, as one program: what a reader who copies them all runs."""
    source = "\n".join(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S))
    assert "megacompile." in source
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(source, str(path), "exec"), {"__name__": "page"})


def measured() -> dict[tuple[str, str, str, int], dict[str, Any]]:
    """Return what GPUs took for steps, by (peer or "", model, budget, tokens); a later machine counts."""
    found = {}
    for file in sorted((ROOT / "benchmarks" / "results").glob("*/results.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            if "step s" in row and row["what"].rpartition(", ")[2].endswith("tokens"):
                found[row.get("peer", ""), row["model"], row["budget"], row["tokens"]] = row
    return found


def as_shown(value: float, like: str) -> str:
    """A figure as a page shows it: with as many decimals, or, without any, four digits of it."""
    decimals = len(like.partition(".")[2])
    return f"{value:.{decimals}f}" if decimals else f"{float(f'{value:.4g}'):,.0f}"


def shown_steps() -> Iterator[tuple[str, int, str, dict[str, str]]]:
    """Yield (name, tokens, budget, figures by their names in results) of the rows of two pages' tables."""
    page = (ROOT / "docs" / "gpu.md").read_text()
    columns = ("step s", "predicted s", "tokens/s", "model TFLOP/s", "held")
    for name, tokens, budget, cells in re.findall(
        r"^\| (.+?) \| ([\d,]+) \| (\d+ GB) \| (.+) \|$", page, re.M
    ):
        yield name, int(tokens.replace(",", "")), budget, dict(zip(columns, cells.split(" | "), strict=True))
    readme, name = (ROOT / "README.md").read_text(), ""
    for named, budget, step, speed in re.findall(
        r"^\| (.*?)\s?\| (\d+ GB) \| ([\d.]+) \| ([\d,]+) \|$", readme, re.M
    ):
        name = named or name
        tokens = int(re.findall(r", (\d+)k tokens", name)[0]) * 1024
        yield name, tokens, budget, {"step s": step, "tokens/s": speed}


def test_the_steps_of_pages_are_those_that_were_measured() -> None:
    """A figure stands in several pages, and in the results of the run that measured it."""
    rows, results, model = list(shown_steps()), measured(), ""
    assert len(rows) >= 14
    for name, tokens, budget, figures in rows:
        peer = "fsdp2" if "FSDP2" in name else "plain" if "plain PyTorch" in name else ""
        model = model if name.startswith("the same") else name.partition(",")[0].lower()
        row = results[peer, model, budget.replace(" ", ""), tokens]
        for column, text in figures.items():
            figure = text.split()[0]
            value = row["held"] / 1e9 if column == "held" else row.get(column)
            assert figure == "–" or figure == as_shown(value, figure), (name, budget, column)


def test_the_site_shows_every_page() -> None:
    """And every link between pages goes to one that is there: `make docs` is strict, this needs no site."""
    shown_pages = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert shown_pages == pages
    for page in pages:
        path = ROOT / "docs" / page
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / link).is_file(), (page, link)


def test_the_readme_counts_what_is_built_in() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"for {len(PRESETS)} built-in models or any config.json, and for {len(PROFILES)} machines" in readme
    )


def test_every_class_of_errors_is_on_the_page_of_errors() -> None:
    from megacompile import NonFiniteError, errors

    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(kinds) > 5
    for kind in (*kinds, NonFiniteError):
        assert f"| `{kind.__name__}` |" in page


def test_every_option_of_every_command_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    _, commands = _build()
    for name, parser in commands.items():
        assert f"megacompile {name}" in text, f"docs/cli.md does not tell of {name}"
        for action in parser._actions:
            if not isinstance(action, argparse._HelpAction):
                names = action.option_strings or [action.metavar or action.dest]
                assert any(f"`{n}" in text for n in names), f"docs/cli.md does not tell of {names} of {name}"


def test_the_sections_of_an_answer_are_those_documented(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The example's headings, in their order, are those of a real answer."""
    config = tmp_path / "config.json"
    (text,) = re.findall(r"^```json\n(.*?)^```", (ROOT / "docs" / "cli.md").read_text(), re.M | re.S)
    config.write_text(text)
    arguments = ["--machine", "rtx-4090", "--batch", "2", "--seq", "128", "--tokens", "1e9", "--price", "2"]
    assert main(["plan", "--model", str(config), *arguments]) == 0
    real = capsys.readouterr().out
    page = (ROOT / "docs" / "cli.md").read_text().replace("\\\n", "")
    example = re.findall(r"^```console\n\$ megacompile plan [^\n]*\n(.*?)^```", page, re.M | re.S)[0]
    headings = [_heading(line) for line in example.splitlines()[1:] if re.match(r"[A-Z]", line)]
    assert len(headings) >= 7
    there = [_heading(line) for line in real.splitlines() if re.match(r"[A-Z]", line)]
    assert [h for h in there if h in headings] == headings


def _heading(line: str) -> str:
    return line.split("  ")[0].split(",")[0]


def test_what_the_package_reads_at_run_time_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    there = {
        "megacompile": ("py.typed",),
        "megacompile.state": ("adam.c", "adam.h", "adam_coded.c"),
        "megacompile.report": ("page.html", "page.css", *_SCRIPTS),
    }
    for package, names in there.items():
        patterns = settings["package-data"][package]
        for name in names:
            assert (ROOT / package.replace(".", "/") / name).is_file()
            assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name

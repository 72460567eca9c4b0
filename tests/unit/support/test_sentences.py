"""Docstrings and pages keep to the checkable rules of prose (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MOST = 2
"""Relative words in a sentence. One is the aim: a second one mostly stands for a noun that is missing."""
_RELATIVE = re.compile(r"\b(?:that|which|where)\b", re.IGNORECASE)
_NO_VERB = re.compile(r"(?:Let|Have|Make)\b")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"\s*(?:[-*>#|]|\d+\.|\w+: |``\w+``: )")
_END = re.compile(r"(?<=[.!?:])[*\")]*\s+")


@functools.cache
def docstrings() -> list[tuple[Path, int, str]]:
    """Return (file, first line, text) of each docstring of the product and of the benchmarks."""
    found = []
    for room in ("megacompile", "kernels", "passes", "benchmarks"):
        for file in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node)
                    found += [(file.relative_to(ROOT), node.body[0].lineno, text)] if text else []
    return found


def pages() -> list[tuple[Path, int, str]]:
    """Return (file, 1, text) of each page."""
    files = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md")
    return [(file.relative_to(ROOT), 1, file.read_text()) for file in sorted(files)]


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a text, each with the number of the line that its paragraph begins in.

    An item of a list, a cell of a table and what follows a colon are sentences of their own. Code is left
    out: between backticks, and paragraphs that are set in.
    """
    text = _CODE.sub(lambda found: "\n" * found[0].count("\n") or "code", text)
    paragraph: list[str] = []
    begin = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if not line.strip() or _ITEM.match(line):
            yield from ((begin, sentence) for sentence in _END.split(" ".join(paragraph)) if sentence)
            paragraph = []
        if line.startswith("    ") and not paragraph:
            continue
        for cell in line.split(" | ") if line.startswith("|") else [line]:
            if paragraph and line.startswith("|"):
                yield from ((begin, sentence) for sentence in _END.split(" ".join(paragraph)))
                paragraph = []
            begin = begin if paragraph else number
            paragraph += [cell.strip(" |-*>#")] if cell.strip() else []
        if line.startswith("#"):
            yield number, " ".join(paragraph)
            paragraph = []


def faults(texts: list[tuple[Path, int, str]]) -> list[str]:
    """Return the sentences that break a rule, each with the rule, and the place of its paragraph."""
    found = []
    for file, first, text in texts:
        for line, sentence in sentences(text):
            place = f"{file}:{first + line - 1}"
            relative = len(_RELATIVE.findall(sentence))
            if relative > MOST:
                found.append(f"{place}: {relative} of that, which, where: {sentence}")
            if sentence.startswith("Of "):
                found.append(f"{place}: begins with Of: {sentence}")
    return found


def test_docstrings_say_what_is_done_and_name_things() -> None:
    no_verb = [f"{file}:{line}: {text}" for file, line, text in docstrings() if _NO_VERB.match(text)]
    assert not no_verb, "\n".join(["These begin with Let, Have or Make:", *no_verb])
    found = faults(docstrings())
    assert not found, "\n".join(found)


def test_pages_name_things() -> None:
    found = faults(pages())
    assert not found, "\n".join(found)


def test_a_sentence_is_found_in_lists_and_tables() -> None:
    lists = "# Name\nOne\nline. Two: three.\n\n- four `that which`\n  goes on\n- five\n\n"
    text = f"{lists}| six | seven |\n```\nNone.\n```"
    assert [sentence for _, sentence in sentences(text)] == [
        *("Name", "One line.", "Two:", "three.", "four code goes on", "five", "six", "seven"),
    ]
    assert faults([(Path("page"), 1, "Of these none.\n\nThat which stands where it stood.")]) == [
        "page:1: begins with Of: Of these none.",
        "page:3: 3 of that, which, where: That which stands where it stood.",
    ]

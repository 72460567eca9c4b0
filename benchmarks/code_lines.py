"""Lines of code of the product by package: without blank lines, docstrings, comments and imports.

``python -m benchmarks.code_lines [folder]``; the folder holds a checkout, such as an older one.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_PRODUCT = ("megacompile", "kernels", "passes")
_NO_CODE = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)


def code_lines(source: str) -> int:
    """Return the number of lines of a module that hold code other than imports."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for t in tokens if t.type not in _NO_CODE for n in range(t.start[0], t.end[0] + 1)}
    return len(lines - set(_left_out(ast.parse(source))))


def _left_out(module: ast.Module) -> Iterator[int]:
    """Yield the lines of imports and docstrings."""
    for node in ast.walk(module):
        found: ast.stmt | None = None
        if isinstance(node, ast.Import | ast.ImportFrom):
            found = node
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
        if found is not None:
            yield from range(found.lineno, (found.end_lineno or found.lineno) + 1)


def packages(root: Path) -> Counter[str]:
    """Count the lines below a checkout by package; those of ``megacompile`` by its own packages."""
    found: Counter[str] = Counter()
    for top in _PRODUCT:
        for path in (root / top).rglob("*.py"):
            folder = path.relative_to(root).parent.parts
            package = "/".join(folder[:2]) if top == "megacompile" else top
            found[package] += code_lines(path.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="of a checkout (default: here)")
    found = packages(parser.parse_args().folder)
    for name, lines in found.most_common():
        print(f"{lines:>7,}  {name}")
    print(f"{found.total():>7,}  in all")


if __name__ == "__main__":
    main()

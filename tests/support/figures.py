"""Print the figures of the source tree that the rules of CONTRIBUTING.md are about.

    python -m tests.support.figures [CHECKOUT]

Counted is the product: ``megacompile``, ``kernels`` and ``passes``. A file names an operator where it has the
operator's name as an identifier, an attribute of anything but torch's own namespaces, or a whole string.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from types import FunctionType

import torch
from torch import Tensor, fx, nn
from transformers import TrainingArguments

ROOMS = ("megacompile", "kernels", "passes")
_RELATIVE = re.compile(r"(What|Whether|Where|How|Which|Of)\b")
_REGISTERED = re.compile(r'custom_op\(\s*"megacompile::(\w+)"')
_TORCHS = {"aten", "F", "functional", "torch", "nn"}
_BORROWED = (fx.Node, nn.Module, Tensor, torch.optim.Optimizer, TrainingArguments, FunctionType)
_OF_INSTANCES = {"args", "kwargs", "target", "state", "param_groups"}  # of these classes


def product(root: Path) -> dict[Path, str]:
    """Return the text of each product file."""
    files = sorted(file for room in ROOMS for file in (root / room).rglob("*.py"))
    return {file.relative_to(root): file.read_text() for file in files}


def operators(texts: dict[Path, str]) -> set[str]:
    """Return the names of our operators; a backward, an operator with gradients or one in place counts to
    its own."""
    names = {name for text in texts.values() for name in _REGISTERED.findall(text)}
    return {re.sub(r"(_backward|_with_gradients)?_?$", "", name) for name in names}


def words(tree: ast.AST) -> Iterator[str]:
    """Yield identifiers and strings of a file, but the names of torch's own functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in _TORCHS):
                yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition("::")[2] or node.value


def naming(texts: dict[Path, str]) -> dict[str, list[Path]]:
    """Return, for each operator, the files that name it or one of its torch operators."""
    names = operators(texts)
    forms = {
        name + suffix: name
        for name in names
        for suffix in ("", "_backward", "_", "_backward_", "_with_gradients")
    }
    files: dict[str, list[Path]] = {name: [] for name in sorted(names)}
    for file, text in texts.items():
        for name in {forms[word] for word in words(ast.parse(text)) if word in forms}:
            files[name].append(file)
    return files


def imports(texts: dict[Path, str]) -> Counter[str]:
    """Count for each product module the other modules that import it."""
    modules = {str(f.with_suffix("")).replace("/", "."): f for f in texts}
    modules = {f"megacompile.{n.removeprefix('megacompile.')}": f for n, f in modules.items()}
    importers: Counter[str] = Counter(dict.fromkeys(modules, 0))
    for file, text in texts.items():
        wanted = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
            elif isinstance(node, ast.Import):
                wanted |= {a.name for a in node.names}
        importers.update(name for name in wanted if name in modules and modules[name] != file)
    return importers


def assigned(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield what is assigned to, in the order of the source."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else targets
        yield from (x for t in targets for x in (t.elts if isinstance(t, ast.Tuple) else [t]))


def _of(place: ast.expr, names: Container[str]) -> bool:
    return isinstance(place, ast.Name) and place.id in names


def declared(tree: ast.AST) -> set[str]:
    """Return the attributes of the classes of a module."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {
        t.attr
        for c in classes
        for t in assigned(c)
        if isinstance(t, ast.Attribute) and _of(t.value, ["self"])
    }
    return own | {t.id for c in classes for t in assigned(c) if isinstance(t, ast.Name)}


def assigned_outside(trees: Mapping[Path, ast.AST]) -> list[str]:
    """List the assignments to attributes of another object, of a class of the product that another module
    declares. Names that functions and classes of torch or transformers have too are taken to be theirs."""
    theirs = {name for kind in _BORROWED for name in dir(kind)} | _OF_INSTANCES
    by_module = {path: declared(tree) - theirs for path, tree in trees.items()}
    return [
        f"{path}:{t.lineno} {ast.unparse(t)}"
        for path, tree in trees.items()
        for t in assigned(tree)
        if isinstance(t, ast.Attribute)
        and not _of(t.value, ("self", "cls", "ctx"))
        and t.attr not in by_module[path]
        and any(t.attr in names for names in by_module.values())
    ]


def docstrings(text: str) -> Iterator[str]:
    """Yield the docstrings of a file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
}


def code_lines(text: str) -> int:
    """Count the lines of a file that hold code: no blank lines, docstrings, comments or imports."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for t in tokens if t.type not in _NO_CODE for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found: ast.AST | None = node if isinstance(node, (ast.Import, ast.ImportFrom)) else None
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            found = node.body[0]
        if isinstance(found, ast.stmt):
            lines -= {*range(found.lineno, (found.end_lineno or found.lineno) + 1)}
    return len(lines)


def repeated(names: list[str]) -> int:
    """Count the names that occur more than once."""
    return sum(count > 1 for count in Counter(names).values())


def figures(root: Path) -> dict[str, int | str]:
    """Return the figures of a checkout, each under what it counts."""
    texts = product(root)
    named = {path: ast.parse(text) for path, text in texts.items()}
    trees = list(named.values())
    classes = [n.name for t in trees for n in ast.walk(t) if isinstance(n, ast.ClassDef)]
    names = naming(texts)
    most = max(names, key=lambda name: len(names[name]), default="")
    contract = re.search(r"^layers = \[(.*?)^\]", (root / "pyproject.toml").read_text(), re.M | re.S)
    return {
        "lines of the product": sum(len(text.splitlines()) for text in texts.values()),
        "lines of code, without blank lines, docstrings, comments and imports": sum(
            map(code_lines, texts.values())
        ),
        "files": len(texts),
        "modules with a single importer": sum(count == 1 for count in imports(texts).values()),
        "file names that occur twice": repeated([f.stem for f in texts if f.stem != "__init__"]),
        "public class names that occur twice": repeated([n for n in classes if not n.startswith("_")]),
        "layers of the import contract": len(re.findall(r'"megacompile', contract[1])) if contract else 0,
        "files that name rms_norm": len(names.get("rms_norm", ())),
        "files that name an operator, at most": f"{len(names[most])} ({most})" if most else 0,
        "attributes assigned from outside of the module that declares them": len(assigned_outside(named)),
        "docstrings that begin with a relative clause": sum(
            bool(_RELATIVE.match(doc)) for text in texts.values() for doc in docstrings(text)
        ),
    }


if __name__ == "__main__":
    for what, value in figures(Path(*sys.argv[1:2])).items():
        print(f"{value!s:>12}  {what}")
    for operator, files in naming(product(Path(*sys.argv[1:2]))).items():
        print(f"{len(files):>12}  {operator}: {', '.join(map(str, files))}")

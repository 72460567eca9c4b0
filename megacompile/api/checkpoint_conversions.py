"""Find where transformers merges a checkpoint's tensors into one parameter, as the experts of a mixture.

In: a model, a parameter's name, the names in the files. Out: the names to stack and to concatenate. Which
tensors belong together is transformers' own table (private to it, read here alone); of what it can do,
stacking along the first dimension and then concatenating along the second is understood, and renaming of a
part of the name. Anything else is left to the caller to refuse.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Merged:
    """``sources``: one list of names per part; each list is stacked, the parts concatenated along dim 1."""

    sources: tuple[tuple[str, ...], ...]


class Conversions:
    """transformers' table of conversions for one model; empty where it has none."""

    def __init__(self, model: nn.Module) -> None:
        self._merges: list[tuple[str, list[str]]] = []
        self._renames: list[tuple[str, str]] = []
        self._rules: list[Any] = []  # that rename by a regular expression, in order
        for entry in _table(model):
            targets, sources = list(entry.target_patterns), list(entry.source_patterns)
            steps = [(type(o).__name__, o.dim) for o in getattr(entry, "operations", []) if hasattr(o, "dim")]
            if steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
                self._merges.append((targets[0], sources))
            elif type(entry).__name__ == "WeightRenaming" and len(targets) == len(sources) == 1:
                self._renames.append((targets[0], sources[0]))
            if not hasattr(entry, "operations"):
                self._rules.append(entry)

    def names(self, name: str) -> list[str]:
        """Return the names that a parameter may have in the files, its own first."""
        return [name, *(name.replace(ours, theirs) for ours, theirs in self._renames if ours in name)]

    def renamed(self, keys: Iterable[str]) -> dict[str, str]:
        """The names in files by those that transformers gives them, where these are others."""
        found = {}
        for key in keys:
            name = key
            for rule in self._rules:
                name, _ = rule.rename_source_key(name)
            if name != key:
                found[name] = key
        return found

    def merged(self, name: str, held: Container[str]) -> Merged | None:
        """The tensors that make up a parameter, or None where the files do not hold them."""
        for target, patterns in self._merges:
            if not name.endswith(target):
                continue
            for stem in self.names(name.removesuffix(target) + "."):
                stem = stem.removesuffix(".")
                parts = tuple(tuple(_numbered_names(stem + pattern, held)) for pattern in patterns)
                if parts[0] and len({len(p) for p in parts}) == 1:
                    return Merged(parts)
        return None


def _numbered_names(pattern: str, held: Container[str]) -> list[str]:
    names = (pattern.replace("*", str(i), 1) for i in itertools.count())
    return list(itertools.takewhile(lambda name: name in held, names))


def _table(model: nn.Module) -> list[Any]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return []
    found: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    return found

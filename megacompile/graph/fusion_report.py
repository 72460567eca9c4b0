"""What the fuse stage says it did: placements, near misses, and their folded table."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from megacompile.units import runs_of


@dataclass(frozen=True)
class OperatorPlacement:
    """A fused operator that stands in the module ``where``."""

    pattern: str
    where: str


@dataclass(frozen=True)
class NearMiss:
    """A subgraph in the module ``where`` that is nearly a pattern, and why it was left alone."""

    pattern: str
    where: str
    reason: str


@dataclass(frozen=True)
class Fusions:
    """The report of fusion: what was fused where, what nearly was and why not, and which patterns were
    switched off."""

    placements: tuple[OperatorPlacement, ...]
    near_misses: tuple[NearMiss, ...]
    off: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """The number of placements of each pattern."""
        return dict(Counter(p.pattern for p in self.placements))

    def __str__(self) -> str:
        lines = []
        for name, count in self.counts.items():
            lines.append(f"{name} (×{count})")
            lines += [f"  {text}" for text in fold(p.where for p in self.placements if p.pattern == name)]
        if self.near_misses:
            lines.append("not fused")
            reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
            for miss in self.near_misses:
                reasons[miss.pattern, _plain_name(miss.reason)].append(miss.where)
            for (name, reason), places in reasons.items():
                lines += [f"  {name}: {text}: {reason}" for text in fold(places)]
        if self.off:
            lines.append(f"switched off: {', '.join(self.off)}")
        return "\n".join(lines)


def _plain_name(reason: str) -> str:
    """A reason without the running numbers of node names, so that equal layers fold."""
    return re.sub(r"(?<=[a-z])_\d+\b", "", reason)


def fold(places: Iterable[str]) -> list[str]:
    """One line for places that differ in their first number: ``model.layers.0-31.mlp (×32)``."""
    groups: dict[tuple[str, str], list[int]] = {}
    for place in places:
        head, digits, tail = re.findall(r"^(\D*)(\d*)(.*)$", place)[0]
        groups.setdefault((head, tail if digits else ""), []).append(int(digits) if digits else -1)
    lines = []
    for (head, tail), numbers in groups.items():
        runs = [] if numbers[0] < 0 else runs_of(sorted(set(numbers)))
        span = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
        name = f"{head}{span}{tail}" or "the model itself"
        lines.append(f"{name} (×{len(numbers)})" if len(numbers) > 1 else name)
    return lines

"""Operations put between those of a step: what several passes do with what they made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megacompile.step.operations import Op


def weave(
    ops: Sequence[Op], before: Mapping[int, Sequence[Op]], after: Mapping[int, Sequence[Op]]
) -> tuple[Op, ...]:
    """``ops`` with others before and after them, by their index in ``ops``."""
    woven: list[Op] = []
    for index, op in enumerate(ops):
        woven += [*before.get(index, ()), op, *after.get(index, ())]
    return tuple(woven)

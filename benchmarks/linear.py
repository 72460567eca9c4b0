"""A linear program that is written row by row and solved by HiGHS: a test and benchmark dependency."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

Row = Mapping[int, float]  # variable -> coefficient


class LinearProgram:
    """Variables are at least zero, and numbered as they are made."""

    def __init__(self) -> None:
        self._upper: list[float | None] = []
        self._rows: list[tuple[Row, float]] = []
        self._equal: list[tuple[Row, float]] = []

    def variable(self, upper: float | None = None) -> int:
        self._upper.append(upper)
        return len(self._upper) - 1

    def at_most(self, row: Row, limit: float) -> None:
        self._rows.append((dict(row), limit))

    def at_least(self, row: Row, limit: float) -> None:
        self._rows.append(({v: -x for v, x in row.items()}, -limit))

    def equal(self, row: Row, value: float) -> None:
        self._equal.append((dict(row), value))

    def minimise(self, variable: int) -> tuple[float, list[float]]:
        """The least value of a variable, inf where the rows contradict each other; and all values."""
        cost = np.zeros(len(self._upper))
        cost[variable] = 1.0
        result = linprog(
            cost, A_ub=self._matrix([r for r, _ in self._rows]), b_ub=[x for _, x in self._rows],
            A_eq=self._matrix([r for r, _ in self._equal]), b_eq=[x for _, x in self._equal],
            bounds=[(0, u) for u in self._upper], method="highs",
        )  # fmt: skip
        if result.status == 2:
            return float("inf"), []
        assert result.status == 0, result.message
        return float(result.fun), [float(x) for x in result.x]

    def _matrix(self, rows: list[Row]) -> coo_array:
        entries = [(i, j, x) for i, row in enumerate(rows) for j, x in row.items()]
        i, j, x = zip(*entries, strict=True)
        return coo_array((x, (i, j)), shape=(len(rows), len(self._upper)))


def total(*rows: Row) -> dict[int, float]:
    """The sum of rows."""
    found: dict[int, float] = {}
    for row in rows:
        for variable, x in row.items():
            found[variable] = found.get(variable, 0.0) + x
    return found


def times(factor: float, row: Row) -> dict[int, float]:
    return {variable: factor * x for variable, x in row.items()}

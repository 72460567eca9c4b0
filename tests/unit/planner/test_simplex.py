"""The small linear programs of the planner against scipy's solver."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from megacompile.planner.simplex import minimise


@pytest.mark.parametrize("seed", range(60))
def test_as_good_as_highs(seed: int) -> None:
    random = np.random.default_rng(seed)
    columns, rows = random.integers(2, 12), random.integers(1, 9)
    a, b = random.normal(size=(rows, columns)), 2 * random.normal(size=rows)
    c = random.uniform(0, 1, size=columns)
    if seed % 2:  # an equality, as a row either way
        a, b = np.vstack([a, -a[:1]]), np.append(b, -b[0])
    x, expected = minimise(c, a, b), linprog(c, A_ub=a, b_ub=b, bounds=(0, None))
    if expected.status == 2:
        assert x is None
        return
    assert x is not None and (x >= 0).all() and (a @ x <= b + 1e-6).all()
    assert c @ x == pytest.approx(expected.fun, abs=1e-6)

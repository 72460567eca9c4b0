"""Read the tables of the ahead-of-time gate: what compiled kernels use, and how fast they can be.

``resources.csv`` and ``ceilings.csv`` lie beside this module, one row per case, kernel and chip.
"""

import csv
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar, get_type_hints

from megacompile.kernels.chips import Ceiling, CompiledKernel

TABLE, CEILINGS = (Path(__file__).with_name(name) for name in ("resources.csv", "ceilings.csv"))


@dataclass(frozen=True, order=True)
class Resources(CompiledKernel):
    """One row of the table."""

    registers: int
    local: int
    shared: int
    load: int
    narrow_loads: int
    store: int


Row = TypeVar("Row", Resources, Ceiling)


def read_table(path: Path = TABLE) -> list[Resources]:
    """The checked-in rows."""
    return _read_rows(Resources, path)


def read_ceilings(path: Path = CEILINGS) -> list[Ceiling]:
    """The checked-in rows."""
    return _read_rows(Ceiling, path)


def _read_rows(kind: type[Row], path: Path) -> list[Row]:
    with path.open(newline="") as file:
        file.readline()
        rows = list(csv.DictReader(file))
    types = get_type_hints(kind)
    return sorted(kind(**{f.name: types[f.name](row[f.name]) for f in fields(kind)}) for row in rows)

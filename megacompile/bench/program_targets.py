"""Read the shapes of one program, and say what each kernel is worth in a step of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacompile.bench.kernel_bench import Row, shape_text
from megacompile.bench.operations import OPERATIONS
from megacompile.blocks.kernel_calls import Calls, KernelCall, eager_use, total
from megacompile.errors import MegacompileError
from megacompile.json_codec import from_plain, parse_json
from megacompile.kernels.eager_form import Shape
from megacompile.text_files import read_text


@dataclass(frozen=True)
class Target:
    """A benchmark of a program: an operation on a shape, and its calls per step."""

    operation: str
    dtype: str
    shape: Shape
    forward: int
    backward: int


def read_calls(plan: Path) -> Calls:
    """The calls of the program whose plan this is, from the file that its dump wrote beside it."""
    path = plan.with_name("kernel_calls.json")
    if not plan.is_file():
        raise MegacompileError(f"--plan {plan}: there is no such file.")
    if not path.is_file():
        raise MegacompileError(
            f"--plan {plan}: the shapes of a plan stand in kernel_calls.json beside it, which is missing: "
            "give the plan.json of a dump (megacompile.compile(..., dump=folder))."
        )
    items = from_plain(list[dict[str, Any]], parse_json(read_text(path), str(path)), str(path))
    counts = [from_plain(int, item.pop("calls", None), f"{path}: calls") for item in items]
    calls = from_plain(tuple[KernelCall, ...], items, str(path), partial=True)
    return total(zip(calls, counts, strict=True))


def targets(calls: Calls) -> tuple[list[Target], list[str]]:
    """Return what a program's calls are benchmarked as; and the calls for which there is no benchmark."""
    counts: dict[tuple[str, str, Shape], Counter[str]] = defaultdict(Counter)
    unknown = []
    for call, count in calls:
        found = eager_use(call)
        if found is None:
            unknown.append(f"{call.op} on {' '.join(map(shape_text, call.shapes))} (×{count})")
            continue
        operation, shape, passes = found
        counts[operation, call.dtype, shape].update(dict.fromkeys(passes, count))
    made = [Target(*key, kinds["forward"], kinds["backward"]) for key, kinds in counts.items()]
    return sorted(made, key=lambda t: (list(OPERATIONS).index(t.operation), t.dtype, t.shape)), unknown


def worth(made: Sequence[Target], rows: Sequence[Row]) -> str:
    """Calls per step and milliseconds per step of each provider, as Markdown."""
    times = {row.key: row.median_ms for row in rows if row.median_ms}
    names = list(dict.fromkeys(row.provider for row in rows))
    lines = [
        "| kernel | calls forward | backward | "
        + " | ".join(f"{n}, ms per step" for n in names)
        + " | saved |",
        "|---|--:|--:|" + "--:|" * (len(names) + 1),
    ]
    sums: Counter[str] = Counter()
    for target in made:
        spent = {n: t for n in names if (t := _per_step(target, n, times)) is not None}
        sums.update(spent)
        name = f"{target.operation} {target.dtype} {shape_text(target.shape)}"
        lines.append(_worth_line(name, f"{target.forward} | {target.backward}", names, spent))
    lines.append(_worth_line("all", " | ", names, dict(sums)))
    return "\n".join(lines)


def _per_step(
    target: Target, provider: str, times: dict[tuple[str, str, str, str, str], float]
) -> float | None:
    head = target.operation, target.dtype, shape_text(target.shape), provider
    found = [times.get((*head, mode)) for mode in ("forward", "backward")]
    if any(t is None for t in found):
        return None
    return target.forward * (found[0] or 0.0) + target.backward * (found[1] or 0.0)


def _worth_line(name: str, counts: str, names: Sequence[str], spent: dict[str, float]) -> str:
    cells = [f"{spent[n]:.2f}" if n in spent else "" for n in names]
    both = "eager" in spent and "megacompile" in spent
    saved = f"{spent['eager'] - spent['megacompile']:.2f}" if both else ""
    return f"| {name} | {counts} | " + " | ".join([*cells, saved]) + " |"

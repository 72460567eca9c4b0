"""Write results as Markdown, CSV, JSON and a picture; compare them with older ones; print ceilings."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megacompile.bench.ceilings import CHIPS, read_ceilings, read_table
from megacompile.bench.kernel_bench import MODES, Row
from megacompile.json_codec import from_plain, parse_json, to_plain
from megacompile.own_files import replace_text, replacing_file
from megacompile.text_files import read_text

SLOWER = 1.05
"""A median this many times an older one is called slower: below that is noise."""
Hardware = Mapping[str, Any]


def markdown(rows: Sequence[Row], hardware: Hardware) -> str:
    """One table per operation, dtype and shape."""
    lines = [", ".join(f"{name} {value}" for name, value in hardware.items()), ""]
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.key[:3]].append(row)
    for (operation, dtype, shape), members in groups.items():
        lines += [f"### {operation} {dtype} {shape}", ""]
        lines += ["| provider | pass | ms | 20 %–80 % | GB/s | TFLOPS | % of roofline | peak MB | error | |"]
        lines += ["|---|---|--:|--:|--:|--:|--:|--:|--:|---|"]
        lines += [_markdown_row(row) for row in sorted(members, key=lambda r: MODES.index(r.mode))]
        lines.append("")
    return "\n".join(lines)


def _markdown_row(row: Row) -> str:
    cells = [row.provider, row.mode]
    if row.median_ms:
        flops = f"{row.teraflops:.1f}" if row.teraflops else ""
        cells += [f"{row.median_ms:.4f}", f"{row.low_ms:.4f}–{row.high_ms:.4f}",
                  f"{row.gigabytes_per_second:,.0f}", flops, f"{row.roofline:.0%}",
                  f"{row.peak_bytes / 1e6:,.1f}"]  # fmt: skip
    else:
        cells += [""] * 6
    return "| " + " | ".join([*cells, f"{row.error:.1e}", row.note]) + " |"


def write(folder: Path, rows: Sequence[Row], hardware: Hardware) -> list[Path]:
    """kernels.json, kernels.csv, kernels.md and, with matplotlib, kernels.png in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*hardware, *(f.name for f in fields(Row))], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**hardware, **asdict(row)} for row in rows)
    document = {"hardware": dict(hardware), "rows": to_plain(rows)}
    files = {
        "kernels.json": json.dumps(document, indent=1, allow_nan=False) + "\n",
        "kernels.csv": text.getvalue(),
        "kernels.md": markdown(rows, hardware) + "\n",
    }
    for name, content in files.items():
        replace_text(folder / name, content)
    picture = _plot(folder / "kernels.png", rows)
    return [folder / name for name in files] + ([picture] if picture else [])


def _plot(path: Path, rows: Sequence[Row]) -> Path | None:
    """Share of the roofline per operation and provider, one panel per pass."""
    timed = [row for row in rows if row.median_ms]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not timed:
        return None
    names = list(dict.fromkeys(f"{r.operation} {r.dtype}\n{r.shape}" for r in timed))
    providers = list(dict.fromkeys(r.provider for r in timed))
    figure = Figure(figsize=(2.5 + 1.3 * len(names), 10), layout="constrained")
    for mode, axes in zip(MODES, figure.subplots(3, 1, sharex=True), strict=True):
        for i, provider in enumerate(providers):
            mine = [r for r in timed if r.provider == provider and r.mode == mode]
            at = [names.index(f"{r.operation} {r.dtype}\n{r.shape}") for r in mine]
            width = 0.8 / len(providers)
            bars = [x - 0.4 + (i + 0.5) * width for x in at]
            axes.bar(bars, [100 * r.roofline for r in mine], width, label=provider)
        axes.set_ylabel(f"{mode}: % of roofline")
        axes.set_xticks(range(len(names)), names, fontsize=7)
    figure.axes[0].legend(ncols=len(providers))
    with replacing_file(path) as written:
        figure.savefig(written, dpi=120)
    return path


def read_rows(path: Path) -> list[Row]:
    """The rows of a kernels.json."""
    what = f"--compare {path}: this is no kernels.json of bench kernels; it"
    document = parse_json(read_text(path), what)
    table = from_plain(dict[str, Any], document, what)
    rows: list[Row] = from_plain(list[Row], table.get("rows"), f"{what}s list of rows")
    return rows


def compare(old: Sequence[Row], new: Sequence[Row]) -> str:
    """Medians then and now, as Markdown; what became slower or wrong is marked."""
    before = {row.key: row for row in old}
    lines = ["| operation | provider | pass | ms then | ms now | ratio | |", "|---|---|---|--:|--:|--:|---|"]
    for row in new:
        past = before.get(row.key)
        if past is None or not (past.median_ms and row.median_ms):
            continue
        ratio = row.median_ms / past.median_ms
        mark = "slower" if ratio > SLOWER else "faster" if ratio < 1 / SLOWER else ""
        name = f"{row.operation} {row.dtype} {row.shape}"
        cells = [
            name,
            row.provider,
            row.mode,
            f"{past.median_ms:.4f}",
            f"{row.median_ms:.4f}",
            f"{ratio:.2f}",
        ]
        lines.append("| " + " | ".join([*cells, mark]) + " |")
    if len(lines) == 2:
        return "Nothing was timed both then and now."
    return "\n".join(lines)


def ceilings() -> str:
    """The checked-in ceilings of the ahead-of-time gate and what binds, a line per kernel and case."""
    chips = sorted(CHIPS)
    lines = [
        "| kernel | case | " + " | ".join(f"{CHIPS[chip].name} (sm_{chip})" for chip in chips) + " |",
        "|---|---|" + "---|" * len(chips),
    ]
    cells: dict[tuple[str, str, int, str], dict[int, str]] = defaultdict(dict)
    spilled = {row.key: f", {row.local} B spilled" for row in read_table() if row.local}
    for row in read_ceilings():
        more = f", executes {row.executed:.2f}" if row.executed > 1 else ""
        cells[row.kernel, row.case, row.variant, row.operator][row.arch] = (
            row.text + more + spilled.get(row.key, "")
        )
    for (kernel, case, *_), found in cells.items():
        lines.append(f"| {kernel} | {case} | " + " | ".join(found.get(chip, "") for chip in chips) + " |")
    return "\n".join(lines)

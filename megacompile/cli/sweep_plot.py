"""The picture of a sweep: tokens per second over the axis, with clipping and without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacompile.cli.report_json import as_json
from megacompile.cli.report_rows import Report
from megacompile.errors import MegacompileError
from megacompile.report.plots import canvas, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_AXES = {"hbm-budget": "device budget (GB)", "batch": "sequences per micro-batch",
         "seq": "tokens per sequence", "gpus": "cards", "machine": ""}  # fmt: skip
_MODES = (("with_clipping", "#3b5b8c"), ("without_clipping", "#5aa9a3"))
_Series = list[tuple[float, float, float]]  # place, predicted tokens per second, those of the bound


def draw_sweep(points: Sequence[tuple[str, float, Report]], over: str, path: Path, machine: str) -> None:
    """Write a PNG: what is predicted, and as a dotted line or a mark what the lower bound allows.

    ``points`` are labels, places on the axis and reports; ``machine`` names that of an axis of another kind.
    """
    found = [(label, place, as_json(report)) for label, place, report in points]
    first = found[0][2]
    seq, batch, model = first["seq"], first["batch"], first["model"]
    where = "" if over == "machine" else f" on {machine}"
    shape = {"batch": f"{seq:,} tokens per sequence", "seq": f"{batch} sequences"}
    subtitle = shape.get(over, f"{batch} × {seq:,} tokens per micro-batch")
    name = "/".join(Path(model).parts[-2:])
    figure, axes = canvas(f"Predicted training speed of {name}{where}", subtitle)
    for index, (mode, colour) in enumerate(_MODES):
        series = [_heights(place, answer[mode]) for _, place, answer in found if answer[mode]]
        if series:
            draw = _draw_bars if over == "machine" else _draw_line
            draw(axes, series, index, mode.replace("_", " "), colour)
    _scale(axes, [(label, place) for label, place, _ in points], over)
    axes.set_xlabel(_AXES[over])
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9.5)
    try:
        save(figure, path)
    except (OSError, ValueError) as error:
        raise MegacompileError(f"--plot {path}: the picture cannot be written: {error}.") from error


def _heights(place: float, predicted: dict[str, Any]) -> tuple[float, float, float]:
    speed, bound = predicted["tokens_per_second"], predicted["lower_bound"]["seconds"]
    return place, speed, speed * predicted["step_seconds"] / bound


def _draw_line(axes: Axes, found: _Series, index: int, label: str, colour: str) -> None:
    x, y, bound = zip(*found, strict=True)
    axes.plot(x, y, marker="o", markersize=5, linewidth=1.8, color=colour, label=label, zorder=3)
    axes.plot(x, bound, linestyle=(0, (1, 2)), linewidth=1.6, color=colour, label=f"its upper limit, {label}")
    axes.annotate(f"{y[-1]:,.0f}", (x[-1], y[-1]), (0, 8 if index else -15), textcoords="offset points",
                  ha="right", color=colour, weight="bold", fontsize=9.5)  # fmt: skip


def _draw_bars(axes: Axes, found: _Series, index: int, label: str, colour: str) -> None:
    width = 0.38
    places = [x + (index - 0.5) * width for x, _, _ in found]
    axes.bar(places, [y for _, y, _ in found], width * 0.94, color=colour, label=label)
    left, right = [p - width / 2 for p in places], [p + width / 2 for p in places]
    axes.hlines([b for _, _, b in found], left, right, color=colour, linewidth=1.6,
                linestyle=(0, (1, 1)), label=f"its upper limit, {label}")  # fmt: skip


def _scale(axes: Axes, ticks: Sequence[tuple[str, float]], over: str) -> None:
    """Ticks where values were asked for; batches and lengths, which double, on a logarithmic axis."""
    if over in ("batch", "seq"):
        axes.set_xscale("log", base=2)
    if over != "hbm-budget":
        turned = over == "machine" and len(ticks) > 5
        axes.set_xticks([place for _, place in ticks], [label for label, _ in ticks],
                        rotation=35 if turned else 0, ha="right" if turned else "center")  # fmt: skip
        axes.minorticks_off()

"""The picture of a sweep: tokens per second over the axis, with clipping and without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megacompile.cli_ways import Point
from megacompile.errors import MegacompileError

_AXES = {"hbm-budget": "device budget (GB)", "batch": "sequences per micro-batch",
         "seq": "tokens per sequence", "machine": ""}  # fmt: skip
_COLOURS = {True: "#3b5b8c", False: "#5aa9a3"}


def draw_sweep(points: Sequence[Point], over: str, path: Path, model: str) -> None:
    """Write a PNG: solid lines are predictions, dotted ones the lower bound's tokens per second."""
    figure = Figure(figsize=(8.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for clip, name in ((True, "with clipping"), (False, "without clipping")):
        found = [(p.value, p.answer.prediction(clip), p.answer.question.tokens) for p in points]
        shown = [(x, p.tokens_per_second, tokens / p.bound.seconds) for x, p, tokens in found if p]
        if shown:
            x, y, bound = zip(*shown, strict=True)
            axes.plot(x, y, marker="o", color=_COLOURS[clip], label=name)
            axes.plot(x, bound, linestyle=":", color=_COLOURS[clip], label=f"bound {name}")
    if over in ("batch", "seq"):
        axes.set_xscale("log", base=2)
    if over != "hbm-budget":
        axes.set_xticks([p.value for p in points], [p.label for p in points],
                        rotation=30 if over == "machine" else 0)  # fmt: skip
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(_AXES[over])
    axes.set_ylabel("tokens per second, predicted")
    where = "by machine" if over == "machine" else points[0].answer.question.profile.title
    axes.set_title(f"{model}, {where}", loc="left")
    axes.grid(axis="y", color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise MegacompileError(f"--plot {path}: the picture cannot be written: {error}.") from error

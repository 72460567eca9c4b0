"""Pictures of a run as PNG files: a step's device memory over its operations, and loss curves.

matplotlib is imported only when a picture is drawn; nothing else in megacompile needs it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from megacompile.errors import MegacompileError
from megacompile.schedule.op_table import COMPUTES, Token
from megacompile.schedule.step import Op, Step, memory_curve
from megacompile.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#3b5b8c", "#5aa9a3", "#f2b661")  # weight slots, kept tensors, temporaries
_LINE, _PALE_LINE = "#3b5b8c", "#b8c4d6"
_ALARM, _INK, _FAINT = "#b3372f", "#222222", "#8a8a8a"
_NARROWEST_LABEL = 0.12  # of the picture's width; a narrower phase is not named


NO_PICTURE = "No picture: pip install 'megacompile[plots]' draws one."


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def memory_timeline(
    step: Step, path: str | os.PathLike[str], *, budget_bytes: int, subtitle: str = ""
) -> Path:
    """Draw the device bytes of each operation of ``step``, by what holds them, under the budget."""
    figure, axes = canvas("Device memory during one training step", subtitle)
    ops, layers = _memory_layers(step)
    name, unit = ("GB", 1e9) if budget_bytes >= 2e9 else ("MB", 1e6)
    edges, floor = range(len(ops) + 1), [0.0] * (len(ops) + 1)
    for (label, heights), colour in zip(layers.items(), _COLOURS, strict=True):
        top = [h / unit for h in (*heights, *heights[-1:])]
        axes.fill_between(edges, floor, top, step="post", color=colour, linewidth=0, label=label)
        floor = top
    _draw_budget(axes, budget_bytes, unit, len(ops))
    _name_phases(axes, ops)
    axes.set_xlim(0, len(ops))
    axes.set_xlabel("operations on the device, in order")
    axes.set_ylabel(f"device memory ({name})")
    axes.locator_params(axis="x", integer=True)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
    return save(figure, path)


def loss_curve(
    train: Sequence[tuple[int, float]],
    held_out: Sequence[tuple[int, float]],
    path: str | os.PathLike[str],
    *,
    subtitle: str = "",
    unit: str = "nats per token",
) -> Path:
    """Draw losses of training and of held-out data, as (steps taken, loss) points."""
    figure, axes = canvas("Loss during training", subtitle)
    points = [step for step, _ in train], [loss for _, loss in train]
    axes.plot(*points, color=_PALE_LINE, linewidth=1.1, label="training batch")
    if held_out:
        steps, losses = zip(*held_out, strict=True)
        axes.plot(steps, losses, color=_LINE, marker="o", markersize=5, linewidth=1.6,
                  label="held-out text", clip_on=False, zorder=3)  # fmt: skip
        for point, side in {held_out[-1]: "right", held_out[0]: "left"}.items():
            axes.annotate(f"{point[1]:.2f}", point, (0, 9), textcoords="offset points", color=_LINE,
                          weight="bold", ha=side)  # fmt: skip
    axes.set_xlim(0, max((step for step, _ in (*train, *held_out)), default=1))
    axes.set_ylim(0, 1.06 * max((loss for _, loss in (*train, *held_out)), default=1.0))
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(f"loss ({unit})")
    axes.legend(loc="upper right", frameon=False)
    return save(figure, path)


def kept_before(step: Step) -> list[int]:
    """Device bytes that lie between operations when each operation starts: slots, constants, tokens."""
    kept, alive = step.slab_bytes + step.constant_bytes, dict[Token, int]()
    before = []
    for op in step.ops:
        before.append(kept + sum(alive.values()))
        alive |= {t: step.token_bytes[t] for t in op.writes if t.on_device}
        for token in (*op.donates, *op.frees):
            alive.pop(token, None)
    return before


def _memory_layers(step: Step) -> tuple[list[Op], dict[str, list[int]]]:
    """Operations that take memory, and by what holds it the tops of the stacked bytes at each."""
    fixed = step.slab_bytes + step.constant_bytes
    constants = " and constants" if step.constant_bytes > fixed / 100 else ""
    before = kept_before(step)
    takes = ("load", "gather", "load_grad", "reload", *COMPUTES)
    curve = [(i, total) for i, total in memory_curve(step) if step.ops[i].kind in takes]
    return [step.ops[i] for i, _ in curve], {
        f"weight slots{constants}": [fixed for _ in curve],
        "activations and gradients between blocks": [
            before[i] if step.ops[i].kind in COMPUTES else total  # a copy has no temporaries
            for i, total in curve
        ],
        "temporaries of the running block": [total for _, total in curve],
    }


def _draw_budget(axes: Axes, budget_bytes: int, unit: float, width: int) -> None:
    height = budget_bytes / unit
    axes.axhline(height, color=_ALARM, linewidth=1.4, linestyle=(0, (5, 2)))
    axes.text(width, height * 1.012, f"budget {format_bytes(budget_bytes)}", color=_ALARM,
              ha="right", va="bottom", weight="bold")  # fmt: skip
    axes.set_ylim(0, height * 1.16)


def _name_phases(axes: Axes, ops: Sequence[Op]) -> None:
    """Name runs of forward and of backward operations above the curve, and part them by a line."""
    start = 0
    going = ("load", "gather", "copy_result", "forward")
    for phase, run in groupby(ops, key=lambda op: "forward" if op.kind in going else "backward"):
        length = len(list(run))
        if start:
            axes.axvline(start, color=_FAINT, linewidth=0.8, linestyle=":", zorder=0)
        if length >= _NARROWEST_LABEL * len(ops):
            axes.text(start + length / 2, 0.945, phase, transform=axes.get_xaxis_transform(),
                      ha="center", va="center", color=_FAINT)  # fmt: skip
        start += length


def canvas(title: str, subtitle: str) -> tuple[Figure, Axes]:
    """An empty picture in the house's style; ``subtitle`` stands under the title."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MegacompileError("Pictures need matplotlib: pip install 'megacompile[plots]'.") from error
    figure = Figure(figsize=(8.6, 4.4), layout="constrained")
    axes = figure.add_subplot()
    lift = 26 if subtitle else 10
    axes.set_title(title, loc="left", fontsize=13, weight="bold", color=_INK, pad=lift)
    axes.annotate(subtitle, (0, 1), (0, 10), xycoords="axes fraction", textcoords="offset points",
                  color="#555555", fontsize=9.5)  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(color=_FAINT, labelcolor=_INK)
    return figure, axes


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a PNG; folders are made, and equal pictures are equal files."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=160, facecolor="white", metadata={"Software": None})
    return target

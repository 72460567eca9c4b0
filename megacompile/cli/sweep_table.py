"""A sweep in print: one answer a row."""

from __future__ import annotations

from collections.abc import Sequence

from megacompile.estimate.sweeps import Point
from megacompile.units import format_bytes, format_seconds


def sweep_table(points: Sequence[Point], over: str, clip: bool) -> str:
    """A sweep as a table: per row, whether it fits and what it gives with and without clipping."""
    mode = "with clipping" if clip else "without clipping"
    names = f"{'device':>8} {'host':>8} {'step':>8} {'tokens/s':>9} {'TFLOP/s':>8} {'MFU':>6}"
    lines = [f"{over:>16}  fits  {names}  lower bound, {mode}"]
    for point in points:
        a, p = point.answer, point.answer.prediction(clip)
        start = f"{point.label:>16}  {'yes' if a.fits(clip) else 'no':<4}"
        if p is None:
            lines.append(f"{start}  needs {format_bytes(a.least.device_bytes)} of the device")
            continue
        lines.append(
            f"{start}  {format_bytes(p.planned.peak_bytes):>8} {format_bytes(p.host.total):>8} "
            f"{format_seconds(p.seconds):>8} {p.tokens_per_second:>9,.0f} "
            f"{p.model_flops_per_second / 1e12:>8.1f} {p.mfu:>6.1%}  "
            f"{format_seconds(p.bound.seconds)}: {p.bound.binding}"
            + (", with a copy of the state in each machine" if a.question.replicated else "")
        )
    return "\n".join(lines) + "\n"

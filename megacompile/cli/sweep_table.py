"""The table of a sweep: a report a row, with clipping or without."""

from __future__ import annotations

from collections.abc import Sequence

from megacompile.cli.report_rows import Report, figures

_COLUMNS = (
    ("device", 8, "{mode}.peak_bytes"), ("host", 8, "host_bytes.{host}.total"),
    ("step", 8, "{mode}.step_seconds"), ("tokens/s", 9, "{mode}.tokens_per_second"),
    ("TFLOP/s", 8, "{mode}.model_flops_per_second"), ("MFU", 6, "{mode}.mfu"),
)  # fmt: skip
_BOUND = "{mode}.lower_bound."


def sweep_table(labels: Sequence[str], reports: Sequence[Report], over: str, clip: bool) -> str:
    """Per report, whether it fits and what it gives; ``reports`` are of the mode that ``clip`` says."""
    names = (
        {"mode": "with_clipping", "host": "clipped"}
        if clip
        else {"mode": "without_clipping", "host": "streamed"}
    )
    heads = " ".join(f"{head:>{width}}" for head, width, _ in _COLUMNS)
    lines = [f"{over:>16}  fits  {heads}  lower bound, {names['mode'].replace('_', ' ')}"]
    for label, report in zip(labels, reports, strict=True):
        found = figures(report)
        value = {key: row.values[0] for key, row in found.items()}
        longest = value["longest"]
        start = f"{label:>16}  {'yes' if value['fits'] else 'no':<4}"
        if names["mode"] in value:  # which is None
            lines.append(f"{start}  needs {found['least_hbm_budget'].texts()[0]} of the device")
            continue
        cells = " ".join(f"{found[key.format(**names)].texts()[0]:>{width}}" for _, width, key in _COLUMNS)
        bound, binding = (found[_BOUND.format(**names) + name].texts()[0] for name in ("seconds", "binding"))
        lines.append(
            f"{start}  {cells}  {bound}: {binding}"
            + (", with a copy of the state in each machine" if value["replicated"] else "")
            + (f", longer than the model's own {longest:,}" if longest and value["seq"] > longest else "")
        )
    return "\n".join(lines) + "\n"

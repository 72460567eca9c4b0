"""What a campaign found: a page of Markdown, lines for the screen, and the timetable of its stages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.campaign import TIMELINE, Stage, entries

_SCREEN_CHARACTERS, _LINE_CHARACTERS = 9000, 240
_LONG = (
    "trace",
    "streams",
    "memory",
    "nvidia-smi",
    "losses",
    "by kind",
    "tail",
    "busy s",
    "predicted busy s",
    "said",
    "dearest, ms",
)


def latest(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The last entry of each finding, by stage and by what it is about."""
    return {(e["stage"], e["what"]): e for e in entries(folder) if "what" in e}


def screen(folder: Path) -> str:
    """A line for each finding, wrong ones first, as far as a screen that keeps its last lines holds."""
    findings = [
        e for e in latest(folder).values() if e["what"] not in ("step ended", "memory touched", TIMELINE)
    ]
    lines = []
    for entry in sorted(findings, key=lambda e: e.get("right", True)):
        shown = {k: _rounded(v) for k, v in entry.items() if k not in (*_LONG, "stage", "what")}
        lines.append(
            f"{entry['stage']}: {entry['what']}: {json.dumps(shown, default=str)}"[:_LINE_CHARACTERS]
        )
    return "\n".join(lines)[:_SCREEN_CHARACTERS]


def timetable(stages: Sequence[Stage]) -> str:
    """A row for each stage: what it is expected to take, from which second, and its limit."""
    rows, begin = [], 0
    for stage in stages:
        beside = f" (beside those before {stage.beside})" if stage.beside else ""
        rows.append(
            [str(begin), stage.name + beside, str(stage.expected), str(stage.limit), stage.needs or "–"]
        )
        begin += 0 if stage.beside else stage.expected
    return _table(["from s", "stage", "expected s", "limit s", "needs"], rows)


def page(folder: Path, stages: Sequence[Stage]) -> str:
    """All findings; what was not measured says why."""
    found = list(latest(folder).values())
    versions = next((e for e in found if e["what"] == "versions"), {})
    card = next((e["said"] for e in found if e["what"] == "card"), "") or "no card"
    lines = [
        f"# Measured on {card.split(',')[0]}",
        "",
        "Card: " + card,
        "Versions: " + ", ".join(f"{k} {v}" for k, v in versions.items() if k not in ("stage", "what")),
    ]
    lines += _section("Steps", _steps(found))
    lines += _section("Peers", _peers(found))
    lines += _section("Where a peer's step goes, ms of the host and of the card", _dearest(found))
    lines += _section("Small models beside plain torch", _small_models(found))
    lines += _section("Kernels beside float64", _errors(found))
    lines += _section("Times of kernels, bf16: ms, and the share of the roof", _times(found))
    lines += _section("The machine", _machine(found))
    lines += _section("Stages", _ended(folder, stages))
    wrong = [e for e in found if e.get("right") is False]
    lines += _section("Wrong", "\n".join(f"- {e['stage']}: {e['what']}: {_why(e)}" for e in wrong))
    return "\n".join(lines) + "\n"


def _section(title: str, text: str) -> list[str]:
    return ["", f"## {title}", "", text or "Nothing."]


def _steps(found: list[dict[str, Any]]) -> str:
    head = [
        "model", "budget", "tokens", "step s", "predicted s", "bound s", "bound by", "tokens/s",
        "model TFLOP/s", "peak GB", "predicted GB", "card held GB", "compute idle", "groups on the card",
        "compile s",
    ]  # fmt: skip
    rows = []
    for e in found:
        if e["what"].startswith("step: ") and "step s" in e:
            how = e["what"].partition(" tokens")[2]  # ", clipped"
            cells = [
                e[k] for k in ("step s", "predicted s", "bound s", "bound by", "tokens/s", "model TFLOP/s")
            ]
            cells += [e[k] / 1e9 for k in ("peak", "predicted peak", "held")]
            idle = e.get("compute idle")
            cells += ["–" if idle is None else f"{idle:.0%}", f"{e['groups on the device']} of {e['groups']}"]
            rows.append([e["model"], e["budget"] + how, e["tokens"], *cells, e["compile s"]])
    return _table(head, rows)


def _peers(found: list[dict[str, Any]]) -> str:
    rows = []
    for e in found:
        if "peer" in e:
            figures = [e.get(k, e.get("not measured", "–")) for k in ("step s", "tokens/s", "model TFLOP/s")]
            held = e["held"] / 1e9 if "held" in e else "–"
            rows.append([e["peer"], e["model"], e["budget"], e["tokens"], *figures, held])
    return _table(
        ["peer", "model", "budget", "tokens", "step s", "tokens/s", "model TFLOP/s", "card held GB"], rows
    )


def _dearest(found: list[dict[str, Any]]) -> str:
    rows = [
        [e["peer"], e["model"], what, *spent]
        for e in found
        for what, spent in e.get("dearest, ms", {}).items()
    ]
    return _table(["peer", "model", "what", "host", "card"], rows)


def _small_models(found: list[dict[str, Any]]) -> str:
    names = ["loss off by", "weights off by", "bits of plain torch", "bits repeat"]
    rows = [[e["what"], *(e.get(n, "–") for n in names), e["right"]] for e in found if "loss off by" in e]
    return _table(["way", *names, "right"], rows)


def _errors(found: list[dict[str, Any]]) -> str:
    rows = [
        [e["what"], e.get("error", "–"), e["right"]]
        for e in found
        if e["what"].startswith(("kernel ", "attention ")) and "right" in e
    ]
    return _table(["kernel", "error, of the largest value", "right"], rows)


def _times(found: list[dict[str, Any]]) -> str:
    rows = []
    for e in found:
        for provider in ("eager", "torch.compile", "megacompile"):
            passes = [e.get(f"{provider} {mode}") for mode in ("forward", "backward", "full")]
            if "operation" in e and any(passes):
                shown = [f"{p[0]:.4g} ({p[1]:.0%})" if isinstance(p, list) else p or "–" for p in passes]
                rows.append([e["operation"], e["shape"], provider, *shown])
    return _table(["operation", "shape", "provider", "forward", "backward", "full"], rows)


def _machine(found: list[dict[str, Any]]) -> str:
    lines = [f"- {e['what']}: {json.dumps(e['value'], default=str)}" for e in found if "value" in e]
    profile = next((e["text"] for e in found if e["what"] == "profile" and "text" in e), "")
    return "\n".join([*lines, "", "```", profile, "```"]) if profile else "\n".join(lines)


def _ended(folder: Path, stages: Sequence[Stage]) -> str:
    ended = {e["stage"]: e for e in entries(folder) if "status" in e}
    rows = []
    for stage in stages:
        entry = ended.get(stage.name, {})
        rows.append([stage.name, entry.get("status", "not run"), entry.get("seconds", "–"), stage.expected])
    return _table(["stage", "status", "s", "expected s"], rows)


def _why(entry: dict[str, Any]) -> str:
    return str(
        entry.get("error") or entry.get("wrong") or {k: v for k, v in entry.items() if k not in _LONG}
    )[:300]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(_rounded(cell)) for cell in line) + " |" for line in lines)


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value

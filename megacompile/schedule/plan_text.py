"""Print a plan in words, equal layers folded: ``layers 2–77 (×76)  recompute …, saved_on to host``.

In: a plan and the names of blocks and weight groups. Lines stand in the order in which layers first appear;
what alternates is folded too (``layers 0, 2, 4–9 (×8)``).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

from megacompile.schedule.workload import Workload
from megacompile.units import format_bytes, runs_of

if TYPE_CHECKING:
    from megacompile.schedule.plan import BlockPlan, GroupPlan, Plan

_WIDTH = 106  # of a printed line
_POLICY_TEXTS = {
    "all": "keep everything",
    "some": "recompute norms and activations",
    "narrow": "recompute norms, activations, gate and up",
    "attention": "recompute all but attention",
    "none": "recompute everything",
    "least": "recompute everything, norms twice",
}
_RESIDENCY_TEXTS = {
    "stream": "weights streamed",
    "micro": "weights stay from forward to backward",
    "step": "weights stay on the device",
}
_PLACES = {"device": "on device", "host": "on host", "nvme": "on NVMe"}
_PIECE = re.compile(r"\[(\d+:\d+)\]")  # of a weight, as the tile stage names it
_ROWS_SUFFIX = "[ids]"  # ends the name of a block of gathered rows
_STATE_TEXTS = {
    "device": "state on the device",
    "nvme": "state on NVMe",
    "nvme-all": "weights and state on NVMe",
}


def block_text(plan: BlockPlan) -> str:
    """Say what a block keeps and where that waits."""
    checkpoint = _POLICY_TEXTS.get(plan.checkpoint, f"keep {plan.checkpoint}")
    where = f"{checkpoint}, saved {_PLACES[plan.saved_on]}"
    if plan.saved_on == "device":
        return where
    leaves = f" within {plan.free_after} operations" if plan.free_after > 1 else ""
    comes = f", back {plan.reload} ahead" if plan.reload > 1 else "" if plan.reload else ", back just in time"
    return f"{where}{leaves}{comes}"


def group_text(plan: GroupPlan, ranks: int = 1) -> str:
    """Say how long a weight group stays, how early it comes, and what else differs from the usual.

    Several ``ranks`` gather weights whose shards stay on their devices.
    """
    if plan.state == "device" and ranks == 1:
        return f"{_RESIDENCY_TEXTS['step']}, state too"
    ahead = f"prefetch {plan.prefetch_depth} ahead" if plan.prefetch_depth else "prefetch just in time"
    parts = [_RESIDENCY_TEXTS[plan.residency], ahead]
    for item in fields(plan):
        value = getattr(plan, item.name)
        if item.name in ("residency", "prefetch_depth") or value == item.default:
            continue
        parts.append(_STATE_TEXTS.get(value, f"{item.name} {value}"))
    return ", ".join(parts)


@dataclass(frozen=True)
class PlanRow:
    """Layers with equal text: ``title`` names them, ``members`` are their places in the plan."""

    title: str
    text: str
    members: tuple[int, ...]


def plan_rows(
    plan: Plan, blocks: Sequence[str], groups: Sequence[str], sizes: Sequence[int], ranks: int = 1
) -> list[PlanRow]:
    """One row per set of equal layers; a group of a block's own name stands in that block's row.

    ``members`` count blocks, and after them the groups that have a row of their own.
    """
    named = {
        name: group_text(g, ranks).replace(
            "weights", f"weights of {format_bytes(size)}" if size else "weights", 1
        )
        for name, g, size in zip(groups, plan.groups, sizes or [0] * len(groups), strict=True)
    }
    rows = []
    for name, item in zip(blocks, plan.blocks, strict=True):
        own = named.pop(name, None)
        rows.append((name, block_text(item) + (f"; {own}" if own else "")))
    rows += [(f"weights {name}", text.removeprefix("weights").strip()) for name, text in named.items()]
    return folded(rows)


def plan_lines(
    plan: Plan,
    blocks: Sequence[str],
    groups: Sequence[str],
    sizes: Sequence[int] = (),
    loops: tuple[int, int] = (0, 0),
    ranks: int = 1,
) -> list[str]:
    """The plan as text: its rows as a table, and the choices of the whole step."""
    rows = plan_rows(plan, blocks, groups, sizes, ranks)
    width = min(34, max((len(row.title) for row in rows), default=0))
    lines = []
    for row in rows:
        fits = width + 2 + len(row.text) <= _WIDTH
        first, *rest = [row.text] if fits else row.text.split("; ")
        lines += [f"{row.title:<{width}}  {first}", *(f"{'':<{width}}  {text}" for text in rest)]
    wrapped = [*textwrap.wrap(cut_text(blocks), _WIDTH), *textwrap.wrap(loops_text(loops), _WIDTH)]
    return [*lines, *wrapped, *textwrap.wrap(whole_step(plan), _WIDTH)]


def loops_text(loops: tuple[int, int]) -> str:
    """Into how many chunks of how many tokens a sequence is cut; "" where it is whole."""
    length, chunk = loops
    return f"sequences in {-(-length // chunk)} chunks of {chunk:,} tokens" if chunk else ""


def cut_text(blocks: Sequence[str]) -> str:
    """Name the weights that were cut, with their numbers of pieces, and the tables whose rows the host
    gathers, from the names of blocks; "" if there are none."""
    pieces: dict[str, set[str]] = {}
    for name in blocks:
        if match := _PIECE.search(name):
            pieces.setdefault(name[: match.start()], set()).add(match[1])
    rows = folded((name, f"into {len(found)}") for name, found in pieces.items())
    cut = f"cut: {'; '.join(f'{row.title} {row.text}' for row in rows)}" if rows else ""
    looked_up = dict.fromkeys(
        name.removesuffix(_ROWS_SUFFIX) for name in blocks if name.endswith(_ROWS_SUFFIX)
    )
    tables = ", ".join(row.title for row in folded((name, "") for name in looked_up))
    return "; ".join(part for part in (cut, tables and f"rows of {tables} gathered on the host") if part)


def plan_table(plan: Plan, work: Workload) -> str:
    """The plan of a workload, folded, with the bytes of its weight groups."""
    names = [b.name for b in work.blocks], [g.name for g in work.groups]
    return "\n".join(plan_lines(plan, *names, [g.nbytes for g in work.groups], work.loops, work.ranks))


def whole_step(plan: Plan) -> str:
    """The choices of the whole step, in one line."""
    parts = [
        "all micro-batches through a layer" if plan.order == "breadth" else "micro-batch after micro-batch",
        f"gradients leave within {plan.grad_lag} operation{'' if plan.grad_lag == 1 else 's'}",
        f"{plan.ring} host buffers for streamed gradients",
    ]
    known = {"blocks", "groups", "order", "grad_lag", "ring", "names", "loops"}
    for item in fields(plan):
        value = getattr(plan, item.name)
        if item.name not in known and (item.default is MISSING or value != item.default):
            parts.append(f"{item.name} {value}")
    return "; ".join(parts)


def folded(rows: Iterable[tuple[str, str]]) -> list[PlanRow]:
    """(name, text) pairs with equal text and names that differ in one number, as one row each."""
    found: dict[tuple[str, str], list[tuple[int | None, int]]] = {}
    for index, (name, text) in enumerate(rows):
        name = _PIECE.sub("[…]", name)
        match = re.search(r"\d+", name)
        stem = f"{name[: match.start()]}\0{name[match.end() :]}" if match else name
        found.setdefault((stem, text), []).append((int(match.group()) if match else None, index))
    return [
        PlanRow(_title(stem, [n for n, _ in members]), text, tuple(i for _, i in members))
        for (stem, text), members in found.items()
    ]


def _title(stem: str, numbers: list[Any]) -> str:
    stem = stem.removeprefix("model.").replace("weights model.", "weights ")
    if "\0" not in stem:
        return stem if len(numbers) == 1 else f"{stem} (×{len(numbers)})"
    before, after = stem.split("\0")
    count = f" (×{len(numbers)})" if len(numbers) > 1 else ""
    if not after and before.endswith("."):
        before = f"{before[:-1]} "
    return f"{before}{_ranges(sorted(set(numbers)))}{after}{count}"


def _ranges(numbers: Sequence[int]) -> str:
    """``0–3, 7, 9–10`` of ascending numbers; after six ranges the rest is counted."""
    shown = [f"{a}–{b}" if b > a else f"{a}" for a, b in runs_of(numbers)]
    return ", ".join(shown) if len(shown) <= 6 else f"{', '.join(shown[:5])}, … {shown[-1]}"

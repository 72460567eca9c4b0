"""The plan: every decision that shapes a step, frozen; its exact JSON form, and its words."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from megacompile.errors import MegacompileError
from megacompile.json_codec import from_plain, parse_json, to_plain
from megacompile.printable import is_printable
from megacompile.schedule.workload import Workload
from megacompile.units import format_bytes, runs_of

# ------------------------------------------------------------------------------------------------------------
# A plan in words, equal layers folded: ``layers 2–77 (×76)  recompute …, saved_on to host``.
#
# In: a plan and the names of blocks and weight groups. Lines stand in the order in which layers first appear;
# what alternates is folded too (``layers 0, 2, 4–9 (×8)``).


_WIDTH = 106  # of a printed line
_POLICY_TEXTS = {
    "all": "keep everything",
    "some": "recompute norms and activations",
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
_ROWS = "[ids]"  # ends the name of a block of gathered rows
_STATES = {"device": "state on the device", "nvme": "state on NVMe", "nvme-all": "weights and state on NVMe"}


def block_text(plan: BlockPlan) -> str:
    """Say what a block keeps and where that waits."""
    checkpoint = _POLICY_TEXTS.get(plan.checkpoint, f"keep {plan.checkpoint}")
    waits = "" if plan.reload or plan.saved_on == "device" else ", back just in time"
    return f"{checkpoint}, saved {_PLACES[plan.saved_on]}{waits}"


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
        parts.append(_STATES.get(value, f"{item.name} {value}"))
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
    """Say which weights were cut into how many pieces, and of which tables the host gathers rows, from the
    names of blocks; "" where nothing was."""
    pieces: dict[str, set[str]] = {}
    for name in blocks:
        if match := _PIECE.search(name):
            pieces.setdefault(name[: match.start()], set()).add(match[1])
    rows = folded((name, f"into {len(found)}") for name, found in pieces.items())
    cut = f"cut: {'; '.join(f'{row.title} {row.text}' for row in rows)}" if rows else ""
    looked_up = dict.fromkeys(name.removesuffix(_ROWS) for name in blocks if name.endswith(_ROWS))
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


# ------------------------------------------------------------------------------------------------------------
# The plan: every decision that shapes a step, frozen, and its exact JSON form.


PLAN_VERSION = 5
_MOST_BUFFERS = 1 << 16


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """``checkpoint``: the checkpoint policy, what the block saves ("all", "some", "attention",
    "none", "least");
    ``saved_on``: where that waits for the backward, "nvme" by way of a few host buffers; ``reload``: how many
    compute operations ahead of its use it starts its way back, 0 or 1."""

    checkpoint: str
    saved_on: Literal["device", "host", "nvme"] = "device"
    reload: int = 1


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The plan of a weight group: how long it stays on the device, how early it is fetched, where its state
    lives.

    ``residency``: "stream" brings it for each use, "micro" holds it from a micro-batch's forward to its
    backward, "step" holds it for the whole step. ``prefetch_depth`` counts compute operations between the
    start of a prefetch and the first use. ``state``: "host" holds masters and moments in RAM; "nvme"
    leaves only the streamed weights there; "nvme-all" leaves nothing there;
    "device" keeps all of it on the device, where it is updated; of several ranks each keeps its shard, from
    which the weights are gathered. ``update``: where updates
    need not wait for the end of the backward, "immediate" updates when the gradient has landed, "deferred"
    after the backward, in the order of the next forward, with the gradient kept on the host until then. A
    forward waits for its own groups alone, so deferred updates of some groups let it start sooner.
    """

    residency: Literal["stream", "micro", "step"] = "stream"
    prefetch_depth: int = 2
    state: Literal["host", "nvme", "nvme-all", "device"] = "host"
    update: Literal["immediate", "deferred"] = "immediate"


@dataclass(frozen=True, slots=True)
class Plan:
    """One decision per block and weight group, and those of the whole step.

    ``order`` is "depth" (all layers for one micro-batch, then the next) or "breadth" (all
    micro-batches through a layer). ``grad_lag`` counts the compute operations that a gradient may
    take to leave the device, ``ring`` the host buffers through which streamed gradients pass, ``window``
    those through which state from NVMe passes, as many for weights, and as many for offloaded activations.
    ``workload`` is the digest of what the plan was made for; an empty one goes with any that has as many
    blocks and groups.
    """

    blocks: tuple[BlockPlan, ...]
    groups: tuple[GroupPlan, ...]
    order: Literal["depth", "breadth"] = "depth"
    grad_lag: int = 1
    ring: int = 2
    window: int = 2
    workload: str = ""

    names: tuple[tuple[str, ...], tuple[str, ...]] = field(default=((), ()), compare=False, repr=False)
    loops: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)

    def __str__(self) -> str:
        """The plan in words, equal layers folded; by number where the names are not known."""
        blocks = self.names[0] or [f"block {i}" for i in range(len(self.blocks))]
        groups = self.names[1] or [f"group {i}" for i in range(len(self.groups))]
        return "\n".join(plan_lines(self, blocks, groups, loops=self.loops))

    def to_json(self) -> str:
        plain = {name: value for name, value in to_plain(self).items() if name not in ("names", "loops")}
        return json.dumps({"version": PLAN_VERSION, **plain}, indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str, what: str = "The plan file") -> Plan:
        """The exact inverse of :meth:`to_json`; :class:`MegacompileError` for anything else.

        A plan file has no digest, so that it can be edited: its numbers are checked, and what it leads to is
        proven. ``what`` begins the sentence about a fault.
        """
        given = parse_json(text, what)
        if not isinstance(given, dict) or "version" not in given:
            raise MegacompileError(f"{what} is no plan file: it has no version.")
        version = given.pop("version")
        if version != PLAN_VERSION:
            raise MegacompileError(
                f"{what} has version {version}, this is version {PLAN_VERSION}: plan again."
            )
        plan: Plan = from_plain(Plan, {**given, "names": [[], []], "loops": [0, 0]}, what)
        check_counts(plan, what)
        _check_policies(plan, what)
        return plan


def _check_policies(plan: Plan, what: str) -> None:
    """Refuse names of checkpoint policies that cannot be printed."""
    for i, block in enumerate(plan.blocks):
        if not is_printable(block.checkpoint):
            raise MegacompileError(
                f"{what}.blocks[{i}].checkpoint is {block.checkpoint[:40]!r}: no policy has this name."
            )


def check_counts(plan: Plan, what: str) -> None:
    """Refuse counts of operations below 0, of buffers below 1 or that no step fills."""
    counts = {f"groups[{i}].prefetch_depth": g.prefetch_depth for i, g in enumerate(plan.groups)} | {
        "grad_lag": plan.grad_lag
    }
    late = [i for i, b in enumerate(plan.blocks) if b.reload not in (0, 1)]
    if late:
        raise MegacompileError(
            f"{what}.blocks[{late[0]}].reload is {plan.blocks[late[0]].reload}: give 0 or 1."
        )
    buffers = {"ring": plan.ring, "window": plan.window}
    for name, value in (counts | buffers).items():
        if value < (name in buffers) or (name in buffers and value > _MOST_BUFFERS):
            raise MegacompileError(f"{what}.{name} is {value}, which cannot be.")


@dataclass(frozen=True, slots=True)
class Mode:
    """The mode of a step: which program of a model it is.

    "train" runs forward, backward and update; "accumulate" leaves gradients on the host, "update"
    applies them, "evaluate" runs the forward alone. ``deferred`` says that updates wait for the end of
    the backward: with clipping, with several micro-batches, or where a fault must leave the state
    whole. ``landed`` are the weight groups that an "update" applies where other kinds of batch have
    given gradients to more groups than the one that it is lowered for.
    """

    kind: Literal["train", "accumulate", "update", "evaluate"]
    micro_batches: int = 1
    deferred: bool = False
    landed: tuple[int, ...] = ()

    @property
    def keeps_gradients(self) -> bool:
        """Return whether whole gradients wait on the host, 4 bytes per parameter (2 for bf16)."""
        return self.deferred or self.kind != "train" or self.micro_batches > 1


def updated_groups(work: Workload, mode: Mode) -> tuple[int, ...]:
    """The weight groups to which a step of this mode gives gradients, or applies those that wait."""
    return mode.landed or tuple(work.contributions)


def norm_bytes(work: Workload, mode: Mode, group: int) -> int:
    """Bytes that the host reads for the norm of a trained group's whole gradient; 0 where it takes none.

    A gradient that arrives in one piece and is used up in its step waits in its own dtype; sums are FP32, as
    is a rank's shard of one.
    """
    if mode.kind not in ("train", "update") or not mode.keeps_gradients:
        return 0
    if work.ranks > 1:
        return work.groups[group].shard_bytes
    whole = mode.kind == "train" and mode.micro_batches * len(work.contributions[group]) == 1
    return work.groups[group].nbytes if whole else 4 * work.groups[group].elements

"""The plan: every decision that shapes a step, frozen, and its exact JSON form."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

from megacompile.errors import MegacompileError
from megacompile.json_codec import LATER, from_plain, parse_json, to_plain
from megacompile.printable import is_printable
from megacompile.schedule.plan_text import plan_lines
from megacompile.schedule.workload import Workload

PLAN_VERSION = 5
_MOST_BUFFERS = 1 << 16
LONGEST_WINDOW = 4  # operations in which saved activations leave the device, or come back


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """``checkpoint``: the checkpoint policy, what the block saves ("all", "some", "narrow", "attention",
    "none", "least"). ``saved_on``: the place of these values until the backward, "nvme" by way of a few host
    buffers. ``reload``: how many compute operations ahead of their use they start their way back, up to 4.
    ``free_after``: how many operations they may take to leave the device, 1 to 4."""

    checkpoint: str
    saved_on: Literal["device", "host", "nvme"] = "device"
    reload: int = 1
    free_after: int = field(default=1, metadata={LATER: True})


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

    ``order`` is "depth" (all layers for one micro-batch, then the next) or "breadth" (all micro-batches
    through a layer). ``grad_lag`` counts the compute operations that a gradient may take to leave the device,
    ``ring`` the host buffers of streamed gradients, ``window`` the host buffers of state from NVMe, as many
    for weights, and as many for offloaded activations. ``workload`` is the digest of the plan's own workload;
    an empty one goes with any workload of as many blocks and groups.
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
    for i, block in enumerate(plan.blocks):
        for name, value, least in (("reload", block.reload, 0), ("free_after", block.free_after, 1)):
            if not least <= value <= LONGEST_WINDOW:
                raise MegacompileError(
                    f"{what}.blocks[{i}].{name} is {value}: give {least} to {LONGEST_WINDOW}."
                )
    buffers = {"ring": plan.ring, "window": plan.window}
    for name, value in (counts | buffers).items():
        if value < (name in buffers) or (name in buffers and value > _MOST_BUFFERS):
            raise MegacompileError(f"{what}.{name} is {value}, which cannot be.")


@dataclass(frozen=True, slots=True)
class Mode:
    """The mode of a step: which program of a model it is.

    "train" runs forward, backward and update; "accumulate" leaves gradients on the host, "update" applies
    them, "evaluate" runs the forward alone. ``deferred`` says that updates wait for the end of the backward:
    with clipping, with several micro-batches, or where a fault must leave the state whole. ``landed`` are the
    weight groups that an "update" applies, if other kinds of batch have given gradients to more groups than
    the update's own kind.
    """

    kind: Literal["train", "accumulate", "update", "evaluate"]
    micro_batches: int = 1
    deferred: bool = False
    landed: tuple[int, ...] = ()

    @property
    def computes_gradients(self) -> bool:
        """Return whether a step runs a backward."""
        return self.kind in ("train", "accumulate")

    @property
    def keeps_gradients(self) -> bool:
        """Return whether whole gradients wait on the host, 4 bytes per parameter (2 for bf16)."""
        return self.deferred or self.kind != "train" or self.micro_batches > 1


def updated_groups(work: Workload, mode: Mode) -> tuple[int, ...]:
    """The weight groups to which a step of this mode gives gradients, or applies those that wait."""
    return mode.landed or tuple(work.contributions)


def named_bytes(work: Workload, mode: Mode, group: int) -> int:
    """Return the bytes of the most rows of a gathered table that a step names, in the dtype of streamed
    weights, if these are updated apart from its other rows; 0 if one update is of all.

    Not apart are rows whose moments are in codes, whose blocks go over rows, and those that another optimizer
    than Adam updates. Nor are rows of FP32 tables if a norm is taken: it has the bits of ``clip_grad_norm_``,
    which depend on a row's place in the whole table.
    """
    table, lookups = work.groups[group], work.lookups.get(group, ())
    if mode.kind != "train" or work.ranks > 1 or not lookups or not table.has_plain_moments:
        return 0
    if mode.keeps_gradients and table.nbytes >= 4 * table.elements:
        return 0
    looked_up = sum(n for b in lookups for _, n in work.blocks[b].grad_groups)
    return min(table.nbytes, mode.micro_batches * looked_up)


def norm_bytes(work: Workload, mode: Mode, group: int) -> int:
    """Bytes that the host reads for the norm of a trained group's whole gradient; 0 where it takes none.

    A gradient that arrives in one piece and is used up in its step waits in its own dtype; sums are FP32, as
    is a rank's shard of one.
    """
    if mode.kind not in ("train", "update") or not mode.keeps_gradients:
        return 0
    if work.ranks > 1:
        return work.groups[group].shard_bytes
    nbytes = named_bytes(work, mode, group) or work.groups[group].nbytes
    whole = mode.kind == "train" and mode.micro_batches * len(work.contributions[group]) == 1
    return nbytes if whole else 4 * work.groups[group].elements * nbytes // work.groups[group].nbytes

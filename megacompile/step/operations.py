"""The light step: one training step as a tuple of frozen operations on a few in-order streams.

Operations on one stream run in program order. Between streams only ``waits`` orders them: an
operation waits for the latest event of each name that was recorded before it in program order, as a
CUDA event does. Device bytes that live between operations are tokens; a token is taken by the
operation that writes it and given back by the one that lists it in ``frees``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from megacompile.plan.workload import Call, Choice

Stream = Literal["compute", "h2d", "d2h", "host", "nvme_read", "nvme_write"]
STREAMS: tuple[Stream, ...] = ("compute", "h2d", "d2h", "host", "nvme_read", "nvme_write")

Kind = Literal[
    "load",  # a leaf of the batch to the device, or rows of masters that the host gathers for it
    "prefetch",  # a weight group: host master -> slot
    "evict",  # end of a weight group's stay, or of a token that another stream read
    "forward",
    "recompute",
    "backward",
    "offload",  # a block's saved tensors: device -> host
    "reload",  # and back
    "push_grad",  # a block's contribution to a group's gradient: device -> host
    "accumulate",  # a block's contribution to the gradient of a group whose state is on the device
    "norm",  # squared norms of a group's landed gradient
    "clip_scale",  # the clipping coefficient from all norms
    "adam",  # update of a group's masters and moments
    "read",  # a group's weights or its state, or a stash: NVMe -> a buffer of the host window
    "write",  # what adam or an offload left in a buffer of the host window -> NVMe
]

Token = tuple[Any, ...]
"""A resource, a name followed by numbers: ("x", value, micro) a value, ("saved", block, micro) saved
tensors, ("g", value, micro) the gradient of a value, ("wg", group, block, micro) a block's gradient of a
group, ("w", group) a weight slot; on the host ("master", group), ("hgrad", group), ("ring", slot),
("stash", block, micro), ("norm", group), ("scale",), ("window", slot) a buffer that a group's state passes
through, ("staged", slot) one that streamed weights pass through, ("spill", slot) one for stashes that wait
on NVMe; ("disk", group, part) on NVMe, where part
0 is the streamed weights and part 1 the rest. ("resident", group) is state on the device, ("dgrad",
group) a gradient that waits there for its update, ("dring", 0) the buffer of one that does not."""

Event = tuple[Any, ...]
"""The name of an operation's completion: its kind followed by numbers."""
DEVICE_TOKENS = frozenset({"x", "saved", "g", "wg"})


class Op(NamedTuple):
    """One operation; a named tuple, as searches make a million and a frozen dataclass takes thrice as long.

    ``block``/``group``/``micro`` are -1 where they do not apply. ``reads`` and ``writes`` are tokens;
    a token in both is updated in place. ``donates`` are device tokens that the operation consumes and
    frees inside, ``frees`` those that end with it. ``peak_bytes`` and ``end_bytes`` are as in
    :class:`~megacompile.plan.workload.Call`. ``offset`` is a slot's byte offset in the slab, or a ring's.
    ``seconds`` is measured, 0 where it was not. ``choice`` is what a block keeps, whether a read is of
    "weights" or "state", that it or a write is of a "stash", or that a push is of gathered "rows".
    """

    kind: Kind
    stream: Stream
    block: int = -1
    group: int = -1
    micro: int = 0
    choice: str = ""
    reads: tuple[Token, ...] = ()
    writes: tuple[Token, ...] = ()
    donates: tuple[Token, ...] = ()
    frees: tuple[Token, ...] = ()
    waits: tuple[Event, ...] = ()
    nbytes: int = 0
    peak_bytes: int = 0
    end_bytes: int = 0
    flops: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    offset: int = -1

    @property
    def event(self) -> Event:
        """The name under which this operation's completion can be waited for."""
        if self.kind in ("forward", "recompute", "backward", "offload", "reload"):
            return (self.kind, self.block, self.micro)
        if self.choice == "stash":
            return (f"{self.kind}_stash", self.block, self.micro)
        if self.kind == "read":
            return (f"read_{self.choice}", self.group)
        if self.kind in ("push_grad", "accumulate"):
            return (self.kind, self.group, self.block, self.micro)
        if self.kind == "evict" and self.group < 0:
            place = (self.block, self.micro) if self.block >= 0 else self.frees[0][1:]
            return ("free", *place)
        if self.kind == "load":
            return (self.kind, *self.writes[0][1:])
        return (self.kind, self.group) if self.group >= 0 else (self.kind,)

    def with_(self, **changes: object) -> Op:
        return self._replace(**changes)  # type: ignore[arg-type]


def compute_op(
    kind: Kind,
    b: int,
    m: int,
    choice: Choice,
    call: Call,
    *,
    donates: tuple[Token, ...],
    writes: tuple[Token, ...],
    extra: int = 0,
) -> Op:
    """The operation of a block's function; ``extra`` bytes are its own beside those that were counted."""
    given: tuple[Token, ...] = tuple(("x", v, m) for v in call.reads)
    weights: tuple[Token, ...] = tuple(("w", g) for g in call.groups)
    return Op(
        kind=kind,
        stream="compute",
        block=b,
        micro=m,
        choice=choice.name,
        reads=given + weights + donates,
        writes=writes,
        donates=donates,
        peak_bytes=call.peak_bytes + extra,
        end_bytes=call.end_bytes + extra,
        flops=call.flops,
        moved_bytes=call.moved_bytes,
        seconds=call.seconds,
    )


@dataclass(frozen=True)
class Step:
    """Operations in program order, the bytes of device tokens, and what the passes established.

    ``slab_bytes`` is the size of the region that weight slots live in, ``ring`` the bytes of each host
    buffer that gradients stream through, ``window`` how many buffers state and weights from NVMe each
    pass through, ``resident`` the groups whose state is on the device (counted in ``constant_bytes``),
    ``done`` the properties that passes have provided so far.
    """

    ops: tuple[Op, ...]
    token_bytes: dict[Token, int]
    micro_batches: int
    slab_bytes: int = 0
    constant_bytes: int = 0
    ring: tuple[int, ...] = ()
    resident: tuple[int, ...] = ()
    window: int = 0
    done: frozenset[str] = frozenset()

    def on(self, stream: Stream) -> Iterator[Op]:
        return (op for op in self.ops if op.stream == stream)

    @cached_property
    def waited(self) -> frozenset[Event]:
        """The events that anything waits for."""
        return frozenset(event for op in self.ops for event in op.waits)

    def with_(self, **changes: object) -> Step:
        return replace(self, **changes)  # type: ignore[arg-type]


def kept_gradients(step: Step) -> dict[int, bool]:
    """Groups whose gradient waits in a host buffer of its own: whether it does so in its own dtype.

    It can where it arrives in one piece and is used up in the same step; sums are made in FP32.
    """
    pushes = [op for op in step.ops if op.kind == "push_grad"]
    updated = {op.group for op in step.ops if op.kind == "adam"}
    count = Counter(t[1] for op in pushes for t in op.writes if t[0] == "hgrad")
    return {group: count[group] == 1 and group in updated for group in sorted(count)}


def memory_curve(step: Step) -> list[tuple[int, int]]:
    """(index of an operation, device bytes at its highest point) for each that takes memory.

    Walked in program order, and yet a bound in every order that the streams allow: slots live in a
    slab of fixed size; device tokens are given back by the compute stream alone; and what is taken
    outside it, by a reload, waits for all compute operations before it in program order. So while a
    compute operation runs, what earlier ones gave back is gone, what later operations take has not
    come yet, and a reload that is late only makes the true number smaller. The bound is reached when
    no reload is late.
    """
    sizes = step.token_bytes
    alive: set[Token] = set()
    total = step.slab_bytes + step.constant_bytes
    curve = []
    for index, op in enumerate(step.ops):
        fresh = []
        growth = merged = 0
        for token in op.writes:
            if token[0] in DEVICE_TOKENS:
                if token in alive:  # a sum, for which nothing new is taken where it is read too: in place
                    merged = max(merged, sizes[token] * (token not in op.reads))
                else:
                    fresh.append(token)
                    growth += sizes[token]
        growth -= _let_go(alive, op.donates, sizes)
        if op.stream == "compute" or fresh or merged:
            high = max(op.peak_bytes, growth, op.end_bytes + merged if merged else 0)
            curve.append((index, total + high))
        alive.update(fresh)
        total += growth - _let_go(alive, op.frees, sizes)
    return curve


def _let_go(alive: set[Token], tokens: tuple[Token, ...], sizes: dict[Token, int]) -> int:
    """Remove those of the tokens that are alive; returns their bytes."""
    nbytes = 0
    for token in tokens:
        if token in alive:
            alive.remove(token)
            nbytes += sizes[token]
    return nbytes


def peak_bytes(step: Step) -> int:
    """Device bytes at the step's highest point."""
    return max((b for _, b in memory_curve(step)), default=step.slab_bytes + step.constant_bytes)


def stash_buffers(step: Step) -> dict[Token, int]:
    """Bytes of each host buffer for what blocks offload: its own, or one of a few on the way to NVMe."""
    own = {op.writes[0]: op.nbytes for op in step.ops if op.kind == "offload" and op.writes[0][0] == "stash"}
    largest = spilled_bytes(step)
    return own | {("spill", slot): largest for slot in range(step.window) if largest}


def spilled_bytes(step: Step) -> int:
    """The most bytes of a stash that waits on NVMe; 0 where none does."""
    return max((op.nbytes for op in step.ops if op.kind == "write" and op.choice == "stash"), default=0)


def name(op: Op) -> str:
    """How an operation is called in messages: ``prefetch of group 3 (h2d)``."""
    where = f" of group {op.group}" if op.group >= 0 else ""
    where += f" of block {op.block}" if op.block >= 0 else ""
    where += f", micro-batch {op.micro}" if op.micro else ""
    return f"{op.kind}{where} ({op.stream})"

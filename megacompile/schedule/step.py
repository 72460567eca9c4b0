"""The light step: one training step as a tuple of frozen operations on a few in-order streams.

Operations on one stream run in program order. Between streams only ``waits`` orders them: an operation waits
for the latest event of each name that was recorded before it in program order, as a CUDA event does. Device
bytes that live between operations are tokens; the operation that writes a token takes its bytes, the one with
the token in ``frees`` gives them back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from megacompile.schedule.op_table import (
    SPECS,
    Buffer,
    HostGrad,
    Kind,
    Offloaded,
    OfValue,
    Spill,
    Stream,
    Token,
    Value,
    Weights,
)
from megacompile.schedule.workload import Call, CheckpointPolicy, KernelWork

Event = tuple[Any, ...]
"""The name of an operation's completion: its kind, followed by the numbers that tell its place."""

_EVENTS: dict[Kind, Callable[[Op], Event]] = {
    kind: attrgetter("kind", *spec.place.split()) if spec.place else lambda op: (op.kind,)
    for kind, spec in SPECS.items()
}


class Op(NamedTuple):
    """One operation; a named tuple, as searches make a million and a frozen dataclass takes thrice as long.

    ``block``/``group``/``micro`` are -1 where they do not apply. ``reads`` and ``writes`` are tokens;
    a token in both is updated in place. ``donates`` are device tokens that the operation consumes and
    frees inside, ``frees`` those that end with it. ``peak_bytes`` and ``end_bytes`` are as in
    :class:`~megacompile.schedule.workload.Call`, as are ``launches``, ``attention_flops``, ``kernels``
    and ``grouped``.
    What rows of tables move through host memory is in ``moved_bytes`` of their gathers and pushes.
    ``offset`` is a slot's byte offset in the slab. ``seconds`` is measured, 0 where it was not. ``policy``
    says what a block keeps between forward and backward. ``ranks`` share ``nbytes``: each moves its part of
    them over its link.
    """

    kind: Kind
    stream: Stream
    block: int = -1
    group: int = -1
    micro: int = 0
    policy: str = ""
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
    launches: int = 0
    attention_flops: tuple[int, int] = (0, 0)
    kernels: tuple[KernelWork, ...] = ()
    grouped: tuple[int, int] = (0, 0)
    offset: int = -1
    ranks: int = 1

    @property
    def event(self) -> Event:
        """The name under which this operation's completion can be waited for."""
        return _EVENTS[self.kind](self)

    @property
    def value(self) -> int:
        """The value that a load or a gather brings, or of the results the one that is copied."""
        token = self.writes[0]
        assert isinstance(token, OfValue)
        return token.value

    @property
    def buffer(self) -> Buffer | None:
        """The buffer of the host window that the operation fills, changes or empties."""
        return next((t for t in self.reads + self.writes if isinstance(t, Buffer)), None)

    def with_(self, **changes: object) -> Op:
        return self._replace(**changes)  # type: ignore[arg-type]


def compute_op(
    kind: Kind,
    b: int,
    m: int,
    policy: CheckpointPolicy,
    call: Call,
    donates: tuple[Token, ...],
    writes: tuple[Token, ...],
) -> Op:
    """The operation of a block's function."""
    given: list[Token] = [Value(v, m) for v in call.reads]
    given += [Weights(g) for g in call.groups]
    return Op(
        kind, "compute", b, micro=m, policy=policy.name, reads=(*given, *donates), writes=writes,
        donates=donates, peak_bytes=call.peak_bytes, end_bytes=call.end_bytes, flops=call.flops,
        moved_bytes=call.moved_bytes, seconds=call.seconds, launches=call.launches,
        attention_flops=call.attention_flops, kernels=call.kernels, grouped=call.grouped,
    )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """Operations in program order, the bytes of device tokens, and what the passes established.

    ``slab_bytes`` is the size of the region of weight slots, ``ring`` the bytes of each host buffer for
    streamed gradients, ``window`` the number of buffers for state and for weights from NVMe, ``resident`` the
    groups whose state is on the device (counted in ``constant_bytes``), ``done`` the properties that passes
    have provided so far. With several ranks, ``shards`` are the bytes of each device buffer for a summed
    shard, ``exchange_bytes`` those of each of the two buffers for the exchange of gradients, both counted in
    ``constant_bytes``.
    """

    ops: tuple[Op, ...]
    token_bytes: dict[Token, int]
    micro_batches: int
    slab_bytes: int = 0
    constant_bytes: int = 0
    ring: tuple[int, ...] = ()
    resident: tuple[int, ...] = ()
    window: int = 0
    shards: tuple[int, ...] = ()
    exchange_bytes: int = 0
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

    It can where it arrives in one piece and is used up in the same step; sums, those over ranks too, are made
    in FP32.
    """
    updated = {op.group for op in step.ops if op.kind == "adam"}
    landing = (op for op in step.on("d2h") if op.kind != "push_update")
    pushes = [(t.group, op.kind) for op in landing for t in op.writes if isinstance(t, HostGrad)]
    count, summed = Counter(g for g, _ in pushes), {g for g, kind in pushes if kind == "push_shard"}
    return {g: count[g] == 1 and g in updated and g not in summed for g in sorted(count)}


def pushed_rows(step: Step) -> dict[int, int]:
    """Return the bytes of all pushed gradients of rows, for groups of tables whose named rows are updated
    apart. They are no less than the bytes of the rows' sums in the same dtype."""
    apart = {op.group for op in step.ops if op.kind == "adam_rest"}
    return {
        g: sum(op.nbytes for op in step.ops if op.kind == "push_rows" and HostGrad(g) in op.writes)
        for g in sorted(apart)
    }


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
            if token.on_device:
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


def offloads(step: Step, stream: Stream = "d2h") -> dict[Offloaded, int]:
    """Bytes of what blocks offload in host memory, or by way of "nvme_write" on NVMe."""
    return {home: op.nbytes for op in step.on(stream) for home in op.writes if isinstance(home, Offloaded)}


def offload_buffers(step: Step) -> dict[Token, int]:
    """Bytes of each host buffer for what blocks offload: its own, or one of a few on the way to NVMe."""
    largest = spilled_bytes(step)
    spills = {Spill(slot): largest for slot in range(step.window) if largest}
    return dict[Token, int](offloads(step)) | spills


def spilled_bytes(step: Step) -> int:
    """The most bytes of offloaded activations that waits on NVMe; 0 where none does."""
    return max(offloads(step, "nvme_write").values(), default=0)


def name(op: Op) -> str:
    """Return how an operation is called in messages: ``prefetch of group 3 (h2d)``."""
    where = f" of group {op.group}" if op.group >= 0 else ""
    where += f" of block {op.block}" if op.block >= 0 else ""
    where += f", micro-batch {op.micro}" if op.micro else ""
    return f"{op.kind}{where} ({op.stream})"


def weave(
    ops: Sequence[Op], before: Mapping[int, Sequence[Op]], after: Mapping[int, Sequence[Op]]
) -> tuple[Op, ...]:
    """``ops`` with others before and after them, by their index in ``ops``."""
    woven: list[Op] = []
    for index, op in enumerate(ops):
        woven += [*before.get(index, ()), op, *after.get(index, ())]
    return tuple(woven)

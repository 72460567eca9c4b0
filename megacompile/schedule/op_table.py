"""The table of operations: every kind, and every resource; the one table that all stages go by.

A kind is also the name of the event that its operations record and of the method that
:class:`~megacompile.runtime.executor.StepRun` runs them by. Resources are tokens, tuples that begin with a
tag, as emitted source prints them: ``Value(3, 0)`` is ``("x", 3, 0)``. So they hash as fast as tuples, and
tokens of two resources are never equal.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from operator import itemgetter
from types import UnionType
from typing import Any, ClassVar, Literal, dataclass_transform

Stream = Literal["compute", "h2d", "d2h", "host", "nvme_read", "nvme_write", "comm"]
STREAMS: tuple[Stream, ...] = ("compute", "h2d", "d2h", "host", "nvme_read", "nvme_write", "comm")

_TOKEN_CLASSES: dict[str, type[Token]] = {}  # by tag


@dataclass_transform(frozen_default=True)
class Token(tuple[Any, ...]):
    """A resource: its tag, and the numbers that a subclass names.

    ``on_device`` tokens take device bytes between operations; ``lasting`` ones outlive the step.
    """

    __slots__ = ()
    tag: ClassVar[str]
    numbers: ClassVar[tuple[str, ...]] = ()
    on_device: ClassVar[bool]
    lasting: ClassVar[bool]

    def __init_subclass__(cls, *, tag: str = "", on_device: bool = False, lasting: bool = False) -> None:
        cls.tag, cls.on_device, cls.lasting = tag, on_device, lasting
        cls.numbers += tuple(cls.__annotations__)
        for place, name in enumerate(cls.numbers, 1):
            setattr(cls, name, property(itemgetter(place)))
        if tag:
            _TOKEN_CLASSES[tag] = cls
            # one object for equal tokens: searches make millions, and the collector never untracks them
            make = functools.cache(lambda kind, *numbers: tuple.__new__(kind, (tag, *numbers)))
            cls.__new__ = make  # type: ignore[assignment]

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self[1:]


def typed(token: tuple[Any, ...]) -> Token:
    """The token that emitted source prints as a plain tuple."""
    return tuple.__new__(_TOKEN_CLASSES[token[0]], token)


class OfValue(Token):
    value: int
    micro: int


class OfBlock(Token):
    block: int
    micro: int


class OfGroup(Token):
    group: int


class Buffer(Token):
    """A buffer of the host window, through which passes what is on NVMe."""

    slot: int


class Value(OfValue, tag="x", on_device=True):
    """A value that blocks hand to each other: a leaf of the batch, an activation, the loss."""


class Result(OfValue, tag="result"):
    """A value on the host, as a forward alone gives it, or what a loss outside of the program reads."""


class ValueGrad(OfValue, tag="g", on_device=True):
    """The gradient of a value."""


class Saved(OfBlock, tag="saved", on_device=True):
    """The tensors that a block's forward or recompute keeps for its backward."""


class Offloaded(OfBlock, tag="offloaded"):
    """A block's saved activations where they wait: in host memory, or in a region on NVMe."""


class WeightGrad(Token, tag="wg", on_device=True):
    """One block's contribution to a weight group's gradient, where its backward wrote it."""

    group: int
    block: int
    micro: int


class Weights(OfGroup, tag="w"):
    """A weight group's slot, whose bytes are counted with the slab."""


class Buffers(Token, tag="buffers", lasting=True):
    """Buffers of the model that forwards change, counted with the constants; those of the same blocks."""

    number: int


class Resident(OfGroup, tag="resident", lasting=True):
    """A group's weights, masters and moments on the device; of several ranks, this one's shards of them."""


class ResidentGrad(OfGroup, tag="dgrad", lasting=True):
    """A gradient, or this rank's shard of its sum, that waits on the device for its update."""


class Update(OfGroup, tag="update", on_device=True):
    """The changes of a group's matrices, before it is orthogonal, in bf16."""


class Direction(OfGroup, tag="direction", on_device=True):
    """The same, orthogonal."""


class PassingGrad(Token, tag="dring"):
    """The buffer on the device of gradients whose update follows at once."""

    slot: int


class Master(OfGroup, tag="master", lasting=True):
    """A group's masters and moments on the host."""


class OtherRows(OfGroup, tag="rest", lasting=True):
    """The rows of a gathered table, and their moments, that no micro-batch of a step names."""


class HostGrad(OfGroup, tag="hgrad", lasting=True):
    """A gradient that waits on the host in a buffer of its own."""


class Ring(Token, tag="ring"):
    """A host buffer of those that streamed gradients pass through."""

    slot: int


class Shard(Token, tag="shard"):
    """A device buffer of those that this rank's shards of summed gradients pass through, in FP32."""

    slot: int


class Loss(Token, tag="loss"):
    """A micro-batch's loss on the host."""

    micro: int


class Agreed(Token, tag="agreed"):
    """The losses of all ranks, and whether they are finite."""


class Norm(OfGroup, tag="norm"):
    """The squared norms of a group's gradient."""


class Scale(Token, tag="scale"):
    """The clipping coefficient."""


class Disk(Token, tag="disk", lasting=True):
    """A group on NVMe: part 0 is the streamed weights, part 1 the rest of its state."""

    group: int
    part: int


class Window(Buffer, tag="window"):
    """One for the state of groups."""


class Staged(Buffer, tag="staged"):
    """One for streamed weights."""


class Spill(Buffer, tag="spill"):
    """One for offloaded activations."""


Kind = Literal[
    "load", "gather", "copy_result", "load_grad", "prefetch", "evict", "forward", "recompute", "backward",
    "free", "free_offloaded", "offload", "reload", "write_offloaded", "read_offloaded", "push_grad",
    "push_rows", "accumulate", "norm", "clip_scale", "momentum", "load_update", "orthogonalize",
    "push_update", "free_update", "adam", "adam_rest", "read_weights", "read_state", "write", "all_gather",
    "reduce", "all_reduce", "push_shard", "add_shard", "agree",
]  # fmt: skip

Cost = Literal[
    "nothing", "call", "products", "upload", "download", "device", "state", "nvme_read", "nvme_write",
    "fabric", "network",
]  # fmt: skip
"""By which rates of a machine an operation takes its time: :mod:`megacompile.hardware.simulate` has them."""

Part = Literal["batch", "compute", "offload", "reload", "fetch", "gradient", "norm", "update", "rest"]
"""The part of a step that an operation belongs to: :mod:`megacompile.planner.step_costs` sums by it."""

Tokens = type[Token] | UnionType | tuple[()]
"""Kinds of tokens, for ``isinstance``; of none is any token one."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One kind of operation.

    An operation of cost "state" runs on the compute stream if that state is on the device; a prefetch of
    weights on the device runs on the stream of collectives. ``place`` names the fields that follow the kind
    in its event. ``arguments`` are what its method is given in emitted source: a field, or a name and what it
    stands for: "read" and "write" are the first token, "reads", "writes" and "frees" all of them. ``slot=``,
    ``after=`` and ``free=`` are printed besides where an operation has a buffer of the host window, waits, or
    frees.
    """

    meaning: str
    stream: Stream
    part: Part
    place: str
    arguments: str
    cost: Cost
    reads: Tokens
    writes: Tokens


_GIVEN = Value | Weights | Resident
_KEPT = Value | Saved
_GRAD = HostGrad | Ring | ResidentGrad | PassingGrad

SPECS: dict[Kind, Spec] = {
    "load": Spec("a leaf of the batch to the device",
                 "compute", "batch", "value micro", "value micro", "nothing", (), Value),
    "gather": Spec("rows of masters that the host brings up to date and gathers for the batch, to the device",
                   "compute", "batch", "value micro", "value micro", "upload", Master, Value),
    "copy_result": Spec("a result of the forward from the device to the host",
                        "compute", "batch", "value micro", "value micro", "download", Value, Result),
    "load_grad": Spec("the gradient by a result, of a loss that is computed outside, to the device",
                      "compute", "batch", "value micro", "value micro", "upload", Result, ValueGrad | Loss),
    "prefetch": Spec("a weight group from the host, or a rank's shard of it from its device, to a slot",
                     "h2d", "fetch", "group", "group offset", "upload", Master | Staged | Resident, Weights),
    "evict": Spec("the end of a weight group's stay in its slot",
                  "compute", "fetch", "group", "group", "nothing", (), Weights),
    "forward": Spec("a block's forward, with what it keeps for the backward",
                    "compute", "compute", "block micro", "block micro checkpoint=policy", "call",
                    _GIVEN | Buffers, Value | Saved | ValueGrad | Loss | Buffers),
    "recompute": Spec("a block's forward again, for what its backward reads alone",
                      "compute", "compute", "block micro", "block micro checkpoint=policy",
                      "call", _GIVEN, Saved),
    "backward": Spec("a block's backward: gradients of its inputs and weights",
                     "compute", "compute", "block micro", "block micro checkpoint=policy", "call",
                     _GIVEN | Saved | ValueGrad, ValueGrad | WeightGrad),
    "free": Spec("the end of a gradient that another stream has read",
                 "compute", "gradient", "group block micro", "frees", "nothing", (), ()),
    "free_offloaded": Spec("the end of activations on the device that were offloaded",
                           "compute", "offload", "block micro", "block micro saved=frees", "nothing", (), ()),
    "offload": Spec("a block's saved activations from the device to the host",
                    "d2h", "offload", "block micro", "block micro saved=reads",
                    "download", _KEPT, Offloaded | Spill),
    "reload": Spec("and back",
                   "h2d", "reload", "block micro", "block micro saved=writes",
                   "upload", Offloaded | Spill, _KEPT),
    "write_offloaded": Spec("offloaded activations from a buffer of the host window to NVMe",
                            "nvme_write", "offload", "block micro", "block micro",
                            "nvme_write", Spill, Offloaded),
    "read_offloaded": Spec("and back",
                           "nvme_read", "reload", "block micro", "block micro",
                           "nvme_read", Offloaded, Spill),
    "push_grad": Spec("a block's contribution to a group's gradient from the device to the host",
                      "d2h", "gradient", "group block micro", "group block micro to=write", "download",
                      WeightGrad, HostGrad | Ring),
    "push_rows": Spec("a gradient of gathered rows, into those of all groups of their table",
                      "d2h", "gradient", "group block micro", "group block micro to=writes", "download",
                      WeightGrad, HostGrad),
    "accumulate": Spec("a block's contribution to the gradient of a group whose state is on the device",
                       "compute", "gradient", "group block micro", "group block micro to=write", "device",
                       WeightGrad, ResidentGrad | PassingGrad),
    "norm": Spec("squared norms of a group's whole gradient",
                 "host", "norm", "group", "group", "state", HostGrad | ResidentGrad, Norm),
    "clip_scale": Spec("the clipping coefficient from all norms",
                       "host", "norm", "", "", "nothing", Norm, Scale),
    "momentum": Spec("the momentum of a group's matrices, and their updates in the place of their gradients",
                     "host", "update", "group", "group grad=read", "state",
                     _GRAD | Scale | Window | Agreed, Master | Window | HostGrad | Ring),
    "load_update": Spec("those updates from the host to the device",
                        "h2d", "update", "group", "group grad=read", "upload", HostGrad | Ring, Update),
    "orthogonalize": Spec("their orthogonal factors in their place, by Newton–Schulz iterations",
                          "compute", "update", "group", "group", "products", Update, Direction),
    "push_update": Spec("and back to the host",
                        "d2h", "update", "group", "group to=write", "download", Direction, HostGrad | Ring),
    "free_update": Spec("the end of updates on the device that are back",
                        "compute", "update", "group", "group", "nothing", (), ()),
    "adam": Spec("the update of a group's masters and moments; of gathered tables, of rows that a step names",
                 "host", "update", "group", "group grad=read", "state",
                 _GRAD | Scale | Window | Agreed, Master | Resident | Window | OtherRows),
    "adam_rest": Spec("the update of the other rows of a group's tables, whose gradient is zero",
                      "host", "rest", "group", "group", "state", Loss | Scale, OtherRows),
    "read_weights": Spec("a group's streamed weights from NVMe to a buffer of the host window",
                         "nvme_read", "fetch", "group", "group", "nvme_read", Disk, Staged),
    "read_state": Spec("a group's state from NVMe to a buffer of the host window",
                       "nvme_read", "update", "group", "group", "nvme_read", Disk, Window),
    "write": Spec("a group's updated state from that buffer to NVMe",
                  "nvme_write", "update", "group", "group", "nvme_write", Window, Disk),
    "all_gather": Spec("the other shards of a weight group into its slot",
                       "comm", "fetch", "group", "group", "fabric", Weights, Weights),
    "reduce": Spec("this rank's shard of a gradient's sum over the ranks of its replica, in their order",
                   "comm", "gradient", "group block micro", "group block micro to=write",
                   "fabric", WeightGrad, Shard),
    "all_reduce": Spec("that shard summed over all replicas, in their order",
                       "comm", "gradient", "group block micro", "group block micro shard=write", "network",
                       Shard, Shard),
    "push_shard": Spec("that shard from the device to the host",
                       "d2h", "gradient", "group block micro", "group block micro shard=read to=write",
                       "download", Shard, HostGrad | Ring),
    "add_shard": Spec("that shard into the gradient of a group whose state is on the device",
                      "comm", "gradient", "group block micro", "group block micro shard=read to=write",
                      "device", Shard, ResidentGrad),
    "agree": Spec("the losses of all ranks, which decide alike whether they update",
                  "host", "norm", "", "", "nothing", Loss, Agreed),
}  # fmt: skip

COLLECTIVES = ("all_gather", "reduce", "all_reduce")
"""The operations that ranks make together on the stream that is theirs alone."""

COMPUTES = frozenset(kind for kind, spec in SPECS.items() if spec.cost == "call")
"""The operations that call a function of a block."""

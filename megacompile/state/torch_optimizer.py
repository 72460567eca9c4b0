"""Any torch optimizer on the host: its own class steps over the masters, one parameter at a time.

In:  an optimizer, or :class:`Several`. Out: :class:`Foreign`, which stands where a format of the state does:
it says which flat arrays a group has, and takes the steps of single parameters.

A step is that of a clone: an object of the optimizer's class with its attributes, one param group and one
parameter. It lives for that step alone. Tensors that it keeps lie in the group's arrays, numbers in the host
state. Where each element is stepped alone, a clone has a chunk of a parameter, which stays in the cache.

Adam and AdamW beside other optimizers take the host's own steps, as where they are the only one.

Invariant: parameters, state and settings become bitwise what the optimizer's own ``step`` makes of them; of
Adam and AdamW what torch's fused kernel does.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from megacompile.blocks.costs import WorkMeter
from megacompile.blocks.memory_meter import StorageMeter
from megacompile.blocks.weight_groups import GroupLayout, Parameter, Slot, padded_elements
from megacompile.capture.trace import TRACING
from megacompile.errors import MegacompileError
from megacompile.schedule.workload import MatrixUpdates
from megacompile.state import adam, muon
from megacompile.state.master_layout import own_part, owned, strided
from megacompile.state.plain_loop import foreign_hooks

CHUNK = 1 << 19  # elements that a clone steps over where it may: 2 MB of each array
PREFIX = "state."  # of the names of arrays, so that none is "weights" or "low"
_TORCH = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "RMSprop",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "ASGD",
    "Rprop",
)
_FREE = ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree")
ELEMENTWISE = frozenset(
    [f"torch.optim.{name.lower()}.{name}" for name in _TORCH]
    + [f"schedulefree.{name.removesuffix('ScheduleFree').lower()}_schedulefree.{name}" for name in _FREE]
    + ["lion_pytorch.lion_pytorch.Lion"]
)
"""Classes of which each element's step depends on that element alone. No trial finds them: some look so for
many steps."""
_STEPS = 40  # of a trial of clones beside the optimizer itself
_SMALL_SIZES = (
    11,
    13,
    17,
    19,
    23,
    29,
    31,
)  # of a small parameter: what it keeps tells by its sizes where they are from
_SAMPLE = 1 << 18  # elements of a parameter whose temporaries stand for those of a larger one
_NOT_OURS = ("amsgrad", "capturable", "differentiable")  # of Adam's options
_OPTIONS = {
    "fused": "its kernel rounds the last elements of a tensor otherwise",
    "capturable": "no CUDA graph is captured",
    "differentiable": "updates are in place",
}


class Several(torch.optim.Optimizer):
    """Optimizers that a program is given as a list: their param groups, one after another."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if not optimizers or not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
            kinds = ", ".join(type(o).__name__ for o in optimizers) or "nothing"
            raise MegacompileError(
                f"optimizer= is a list of {kinds}: give torch.optim.Optimizer objects in it."
            )
        self.optimizers = tuple(member for o in optimizers for member in members_of(o))
        groups = [group for member in self.optimizers for group in member.param_groups]
        parameters = [id(p) for group in groups for p in group["params"]]
        if len(set(parameters)) < len(parameters):
            raise MegacompileError("Two of the optimizers hold one parameter: give it to one of them.")
        super().__init__([{"params": []}], {})
        self.param_groups[:] = groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Have each of them step."""
        for member in self.optimizers:
            member.step(closure)

    def eval(self) -> None:
        """Switch those that average weights to the average."""
        for member in self.optimizers:
            getattr(member, "eval", lambda: None)()

    def train(self) -> None:
        """Switch those that average weights back to what they train."""
        for member in self.optimizers:
            getattr(member, "train", lambda: None)()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Have each of them drop its gradients."""
        for member in self.optimizers:
            member.zero_grad(set_to_none)


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that make up this one: itself, unless it is of several."""
    return optimizer.optimizers if isinstance(optimizer, Several) else (optimizer,)


def takes_our_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the host Adam takes an optimizer's steps: it is torch's Adam or AdamW, or a subclass
    with the same step, and keeps no maximum of second moments."""
    known = [inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW)]
    ours = isinstance(optimizer, torch.optim.Adam) and inspect.unwrap(type(optimizer).step) in known
    return ours and not any(group.get("amsgrad") for group in optimizer.param_groups)


def hyper_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> adam.AdamHyper:
    """Return the hyper-parameters of a group of Adam's or AdamW's, for the step that counts as its first."""
    for option in _NOT_OURS:
        if group.get(option):
            raise MegacompileError(f"The optimizer's option {option}=True is not supported.")
    return adam.AdamHyper(
        lr=_number("lr", group["lr"]),
        beta1=_number("first beta", group["betas"][0]),
        beta2=_number("second beta", group["betas"][1]),
        eps=_number("eps", group["eps"]),
        weight_decay=_number("weight_decay", group["weight_decay"]),
        decoupled=decouples(optimizer, group),
        maximize=bool(group.get("maximize", False)),
    )


def decouples(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a group's weights decay beside Adam's update: as the group says, whatever the class
    is."""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def _number(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise MegacompileError(f"The optimizer's {what} is {value!r}: it must be a finite number.")
    return number


@dataclass(frozen=True)
class GroupSettings:
    """One param group's settings for a step, and those that the step changes."""

    values: Mapping[str, Any]
    written: Mapping[str, Any]
    grad_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor that ``step`` keeps of a parameter; ``like``: it has an element for each of the parameter's,
    and lies as that does."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    like: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Work(NamedTuple):
    """The work of an update: bytes that it takes beside the state, bytes that it moves, FLOPs of products."""

    scratch: int
    moved: int
    flops: int


Numbers = dict[str, Any]
"""What a parameter's state holds beside tensors."""


class Foreign:
    """The state that an optimizer's own class keeps, as a format of the host's state.

    Raises :class:`MegacompileError` for an optimizer that cannot step over single parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._members = [m for m in members_of(optimizer) for _ in m.param_groups]
        self._attributes = {id(m): _attributes(m) for m in members_of(optimizer)}
        self.elementwise = tuple(name_of(type(m)) in ELEMENTWISE for m in self._members)
        self._orthogonal = tuple(muon.is_muon(m) for m in self._members)
        self._by_adam = tuple(takes_our_steps(m) for m in self._members)
        self._values = [self._trains(i, _settings(g)) for i, g in enumerate(optimizer.param_groups)]
        self._initial = [
            initial_state(m, group) for m, group in zip(self._members, optimizer.param_groups, strict=True)
        ]
        self._entries: dict[tuple[int, tuple[int, ...]], tuple[Entry, ...]] = {}
        self._works: dict[tuple[int, tuple[int, ...]], Work] = {}
        self._buffers = [torch.empty(0), torch.empty(0)]
        for index, group in enumerate(optimizer.param_groups):
            self._check_options(index, self._values[index])
            shapes = sorted(
                {(CHUNK,) if self.elementwise[index] else tuple(p.shape) for p in group["params"]}
            )
            for shape in shapes:
                self._entries_of(index, shape)
            if not (self.elementwise[index] or self._orthogonal[index]):
                self._check_alone(index, [*dict.fromkeys(map(_small, shapes))])
        self._writes = [bool(self._written(index, values)) for index, values in enumerate(self._values)]

    def __str__(self) -> str:
        return "+".join(dict.fromkeys(name_of(type(m)) for m in self._members))

    __repr__ = __str__

    @property
    def writes_settings(self) -> bool:
        """Return whether ``step`` changes settings of its param groups."""
        return any(self._writes)

    def matrices(self, group: GroupLayout, rank: int = 0) -> tuple[int, ...]:
        """Return the slots of a trained group whose updates a rank's device makes orthogonal."""
        if not group.trainable:
            return ()
        return tuple(i for i, s, _ in owned(group, rank) if self._orthogonal[s.parameter.param_group])

    def matrix_updates(self, group: GroupLayout) -> MatrixUpdates | None:
        """Return what devices and links have to do for those; None where there are none."""
        of_ranks = [
            [group.slots[i].parameter for i in self.matrices(group, rank)] for rank in range(group.ranks)
        ]
        if not any(of_ranks):
            return None
        owners = [tuple(_as_it_lies(p) for p in parameters) for parameters in of_ranks]
        iterations = max(self._values[p.param_group]["ns_steps"] for own in of_ranks for p in own)
        mean = -(-sum(p.numel for own in of_ranks for p in own) // group.ranks)
        return MatrixUpdates.of(owners, iterations, (muon.MOMENTUM_BYTES + _gradient_bytes(group)) * mean)

    def cuts(self, parameter: Parameter) -> bool:
        """Return whether a parameter may be cut: each of its elements is stepped alone."""
        return parameter.param_group < 0 or self.elementwise[parameter.param_group]

    def settings(self) -> list[GroupSettings]:
        """Return each param group's settings as they are now; refuse what needs state that is not there."""
        now = [_settings(group) for group in self.optimizer.param_groups]
        for index, (values, before) in enumerate(zip(now, self._values, strict=True)):
            self._check_options(index, values)
            if any(
                _setting_kind(values.get(k)) != _setting_kind(before.get(k))
                for k in values.keys() | before.keys()
            ):
                self._check_state(index, values)
        self._values = now
        written = [self._written(i, v) if self._writes[i] else {} for i, v in enumerate(now)]
        return [GroupSettings(values, new) for values, new in zip(now, written, strict=True)]

    def _check_options(self, index: int, values: Mapping[str, Any]) -> None:
        """Refuse options that name code which does not run on the host."""
        if self._by_adam[index]:
            hyper_of(self._members[index], values)
            return
        for option, why in _OPTIONS.items():
            if values.get(option):
                raise MegacompileError(
                    f"{name_of(type(self._members[index]))}({option}=True) is not supported, as {why}: leave "
                    "the option out."
                )

    def advance(self, settings: Sequence[GroupSettings]) -> None:
        """Let the param groups have what a step by these settings writes to them."""
        for group, taken in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(taken.written)

    def called(self, member: torch.optim.Optimizer, method: str) -> list[GroupSettings]:
        """Call a method of an optimizer, whose parameters hold no values; returns each param group's settings
        before and what the call wrote."""
        before = [_settings(group) for group in self.optimizer.param_groups]
        getattr(type(member), method)(member)
        now = [_settings(group) for group in self.optimizer.param_groups]
        return [
            GroupSettings(old, {k: v for k, v in new.items() if not _same_values(v, old.get(k))})
            for old, new in zip(before, now, strict=True)
        ]

    def _written(self, index: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that a step changes, whichever parameter it is of."""
        clone = self._trial(index, values, (_SMALL_SIZES[0],) * 2)
        self._take(index, clone)
        return _written_settings(clone, values)

    def _check_state(self, index: int, values: Mapping[str, Any]) -> None:
        for (group, shape), entries in self._entries.items():
            new = {e.name for e in self._tried(index, shape, values)} if group == index else set()
            if lacking := sorted(new - {e.name for e in entries}):
                raise MegacompileError(
                    f"{name_of(type(self._members[index]))} keeps {', '.join(lacking)} with the settings "
                    "that its param group has now, for which no memory was laid out: compile the model again."
                )

    def arrays(self, group: GroupLayout) -> dict[str, tuple[torch.dtype, int]]:
        """Return dtype and elements of each flat array that a trained group has beside its masters; of a
        shard as many as the largest of them has."""
        dtypes: dict[str, torch.dtype] = {}
        most: dict[str, int] = defaultdict(int)
        for rank in range(group.ranks):
            sizes: dict[str, int] = defaultdict(int)
            for slot in group.slots:
                for entry, elements in self._kept(group, slot, rank):
                    dtype = dtypes.setdefault(entry.name, entry.dtype)
                    if dtype != entry.dtype:
                        raise MegacompileError(
                            f"{self} keeps {entry.name} in {dtype}, and of {slot.parameter.name} in "
                            f"{entry.dtype}: use optimizers that keep one name in one dtype."
                        )
                    sizes[entry.name] += padded_elements(elements)
            most |= {name: max(most[name], elements) for name, elements in sizes.items()}
        return {PREFIX + name: (dtype, most[name]) for name, dtype in dtypes.items()}

    def views(
        self, group: GroupLayout, arrays: Mapping[str, Tensor], rank: int = 0
    ) -> Iterator[dict[str, Tensor]]:
        """Return by slot, by array's name, the flat views of what a rank keeps of it."""
        offsets: dict[str, int] = defaultdict(int)
        for slot in group.slots:
            views = {}
            for entry, elements in self._kept(group, slot, rank):
                name = PREFIX + entry.name
                views[name] = arrays[name][offsets[name] :][:elements]
                offsets[name] += padded_elements(elements)
            yield views

    def _kept(self, group: GroupLayout, slot: Slot, rank: int) -> Iterator[tuple[Entry, int]]:
        """Return the tensors that ``step`` keeps of a parameter, and how many elements a rank has of each; of
        an empty parameter the first rank has what is kept beside."""
        part = own_part(group, slot, rank)[0]
        none = part.start == part.stop and (rank > 0 or slot.parameter.numel > 0)
        for entry in self.entries(slot.parameter):
            elements = part.stop - part.start if entry.like else 0 if none else entry.numel
            yield entry, elements

    def entries(self, parameter: Parameter) -> tuple[Entry, ...]:
        """Return the tensors that ``step`` keeps of a parameter, or of a chunk of one."""
        index = parameter.param_group
        return self._entries_of(index, (CHUNK,) if self.elementwise[index] else parameter.shape)

    def shared_by_pieces(self, array: str) -> bool:
        """Return whether an array holds of each piece of a parameter what it holds of the whole one."""
        known = (e for found in self._entries.values() for e in found)
        return array.startswith(PREFIX) and not any(PREFIX + e.name == array and e.like for e in known)

    def _entries_of(self, index: int, shape: tuple[int, ...]) -> tuple[Entry, ...]:
        key = index, shape
        if key not in self._entries:
            self._entries[key] = self._tried(index, shape, self._values[index])
        return self._entries[key]

    def _tried(self, index: int, shape: tuple[int, ...], values: Mapping[str, Any]) -> tuple[Entry, ...]:
        """Return what ``step`` keeps of a parameter, by the sizes of what it keeps of a small one."""
        small = _small(shape)
        sizes = dict(zip(small, shape, strict=True)) | {1: 1}
        clone = self._trial(index, values, small)
        (parameter,) = clone.param_groups[0]["params"]
        kinds = []
        for _ in range(2):
            self._take(index, clone)
            kinds.append({name: type(value) for name, value in clone.state[parameter].items()})
        if kinds[0] != kinds[1]:
            self._refuse(index, "it keeps other things after its second step than after its first")
        entries = []
        for name, value in clone.state[parameter].items():
            if not isinstance(value, Tensor):
                if not (value is None or isinstance(value, (bool, int, float, str))):
                    self._refuse(
                        index, f"it keeps a {type(value).__name__} as {name}, which no checkpoint holds"
                    )
                continue
            if not set(value.shape) <= set(sizes) or value.layout != torch.strided or value.is_complex():
                self._refuse(
                    index,
                    f"of a parameter of {small} it keeps {name} of {tuple(value.shape)} in {value.dtype}, "
                    "which is not laid out by the parameter's sizes",
                )
            like = value.dim() > 0 and value.shape == small
            entries.append(Entry(name, value.dtype, tuple(sizes[n] for n in value.shape), like))
        return tuple(entries)

    def _check_alone(self, index: int, shapes: Sequence[tuple[int, ...]]) -> None:
        """Refuse an optimizer whose step of a parameter depends on others, or on random numbers."""
        values = self._values[index]
        together = self._trial(index, values, *(shape for shape in shapes for _ in range(2)))
        parameters = together.param_groups[0]["params"]
        clones = [self._clone(index, values, [nn.Parameter(p.detach().clone())]) for p in parameters]
        for clone, parameter in zip(clones, parameters, strict=True):
            clone.state.update({clone.param_groups[0]["params"][0]: self._start(index, parameter)})
        generator, before = torch.Generator().manual_seed(1), torch.random.get_rng_state()
        for step in range(_STEPS):
            for parameter, clone in zip(parameters, clones, strict=True):
                parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 3 - 1)
                clone.param_groups[0]["params"][0].grad = parameter.grad.clone()
            for each in (together, *clones):
                self._take(index, each)
            alike = all(
                _same_values(_unowned(clone), _unowned(together))
                and _same_values(clone.param_groups[0]["params"][0].data, p.data)
                for clone, p in zip(clones, parameters, strict=True)
            )
            if not torch.equal(before, torch.random.get_rng_state()):
                torch.random.set_rng_state(before)
                self._refuse(index, "its step draws random numbers")
            if not alike:
                self._refuse(index, "its step of one parameter depends on the others")

    def scratch_bytes(self, group: GroupLayout) -> int:
        """Return the most bytes that the step of one parameter of a trained group takes beside its state:
        master and gradient in FP32, and the temporaries of ``step``."""
        own = (item for rank in range(group.ranks) for item in owned(group, rank))
        return max((self._work_of(slot.parameter, elements).scratch for _, slot, elements in own), default=0)

    def update_work(self, group: GroupLayout) -> tuple[int, int]:
        """Return the bytes that the host reads and writes for a step of all parameters of a trained group,
        and the FLOPs of its products there; of shards the mean, as whole parameters go to ranks so that each
        has about as much in all."""
        moved, flops = zip(*(self._work_of_rank(group, rank) for rank in range(group.ranks)), strict=True)
        return -(-sum(moved) // group.ranks), -(-sum(flops) // group.ranks)

    def _work_of_rank(self, group: GroupLayout, rank: int) -> tuple[int, int]:
        gradient, halves = _gradient_bytes(group), group.dtype == torch.bfloat16
        moved = flops = 0
        for _, slot, elements in owned(group, rank):
            if self._orthogonal[slot.parameter.param_group]:
                moved += (muon.MOMENTUM_BYTES + gradient + muon.STEP_BYTES) * elements
                continue
            if self._by_adam[slot.parameter.param_group]:
                moved += (adam.STEP_BYTES + gradient) * elements
                continue
            work = self._work_of(slot.parameter, elements)
            moved += (4 + gradient + (16 if halves else 0)) * elements + work.moved
            flops += work.flops
        return moved, flops

    def _work_of(self, parameter: Parameter, elements: int) -> Work:
        """Return the work of a step of so many elements of a parameter: of all, unless each is stepped
        alone."""
        index, shape, chunks = parameter.param_group, parameter.shape, 1.0
        if self.elementwise[index]:
            shape = (min(CHUNK, elements),)
            chunks = elements / max(1, shape[0])
        key = index, shape
        if self._orthogonal[index]:
            return Work(muon.scratch_bytes(shape), 0, 0)
        if self._by_adam[index]:
            return Work(0, 0, 0)
        if key not in self._works:
            by = max(1.0, math.prod(shape) / _SAMPLE) ** (1 / max(1, len(shape)))
            sample = shape if self.elementwise[index] else tuple(math.ceil(n / by) for n in shape)
            ratio = max(1.0, math.prod(shape) / max(1, math.prod(sample)))
            temporary, moved, flops = self._tried_work(index, sample)
            # a product of matrices grows with the length of their sides cubed
            self._works[key] = Work(
                8 * math.prod(shape) + math.ceil(ratio * temporary),
                math.ceil(ratio * moved),
                round(ratio**1.5 * flops),
            )
        scratch, moved, flops = self._works[key]
        return Work(scratch, round(chunks * moved), flops)

    def _tried_work(self, index: int, shape: tuple[int, ...]) -> Work:
        """Return the most bytes of tensors that a step makes, the first one's state included, and what the
        second does."""
        clone = self._trial(index, self._values[index], shape)
        (parameter,) = clone.param_groups[0]["params"]
        peaks = []
        for _ in range(2):
            meter, work = StorageMeter(), WorkMeter()
            for tensor in (parameter, parameter.grad, *clone.state[parameter].values()):
                if isinstance(tensor, Tensor):
                    meter.ignore(tensor)
            with meter, work:
                self._take(index, clone)
            peaks.append(meter.peak)
        return Work(max(peaks), work.moved, work.flops)

    def _trial(self, index: int, values: Mapping[str, Any], *shapes: tuple[int, ...]) -> Any:
        """Return a clone over new parameters of these shapes, with gradients, at its start."""
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        clone = self._clone(index, values, parameters)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            clone.state[parameter] = self._start(index, parameter)
        return clone

    def _clone(self, index: int, values: Mapping[str, Any], parameters: list[nn.Parameter]) -> Any:
        """Return an object of an optimizer's class that has one of its param groups over these parameters."""
        member = self._members[index]
        clone: Any = object.__new__(type(member))
        vars(clone).update(self._attributes[id(member)])
        clone.param_groups = [{**values, "params": parameters}]
        clone.state = defaultdict(dict)
        return clone

    def _trains(self, index: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings as they are while a model is trained, where a class has a train() for that."""
        clone = self._clone(index, values, [])
        getattr(clone, "train", lambda: None)()
        return _unowned(clone)

    def _start(self, index: int, parameter: Tensor) -> dict[str, Any]:
        """Return the state that a parameter, or a chunk of one, has before its first step."""
        return {
            name: torch.full_like(parameter, fill.item(), dtype=fill.dtype) if like else copy.deepcopy(fill)
            for name, (fill, like) in self._initial[index].items()
        }

    def _take(self, index: int, clone: Any) -> None:
        """Have a clone step, in a trial; what it does beside its parameters is refused."""
        try:
            clone.step()
        except Exception as error:
            self._refuse(
                index, f"in a trial on small parameters its step raised {type(error).__name__}: {error}"
            )
        if strange := [key for key in clone.state if not isinstance(key, Tensor)]:
            self._refuse(index, f"its state has {strange[0]!r}, which is of no parameter")
        kept = self._attributes[id(self._members[index])]
        now = {k: v for k, v in vars(clone).items() if k not in ("state", "param_groups")}
        if strange := [key for key in now if key not in kept or now[key] is not kept[key]]:
            self._refuse(index, f"its step sets {strange[0]} of the optimizer itself")

    def _refuse(self, index: int, why: str) -> NoReturn:
        raise MegacompileError(
            f"{name_of(type(self._members[index]))} cannot run on the host, as {why.rstrip('.')}: use an "
            "optimizer that steps over each parameter alone, such as torch.optim.AdamW."
        )

    def add_momentum(
        self,
        group: GroupLayout,
        arrays: Mapping[str, Tensor],
        grad: Tensor,
        settings: Sequence[GroupSettings],
        steps: Sequence[int],
        slots: Collection[int],
        threads: int | None,
        rank: int = 0,
    ) -> None:
        """Let the momenta of a rank's matrices of a group in ``slots`` take their gradients, in whose place
        their updates then lie."""
        matrices = self.matrices(group, rank)
        with _threads(threads):
            for index, views in enumerate(self.views(group, arrays, rank)):
                if index not in slots or index not in matrices:
                    continue
                momentum, own = (
                    views[f"{PREFIX}momentum_buffer"],
                    settings[group.slots[index].parameter.param_group],
                )
                if steps[index] == 0:
                    momentum.zero_()
                buffer = self._buffer(0, min(muon.CHUNK, momentum.numel()))
                gradient = grad[own_part(group, group.slots[index], rank)[1]]
                muon.add_momentum(gradient, momentum, own.values, own.grad_scale, buffer, threads)

    def update(
        self,
        group: GroupLayout,
        arrays: Mapping[str, Tensor],
        grad: Tensor | None,
        settings: Sequence[GroupSettings],
        steps: Sequence[int],
        numbers: list[Numbers],
        slots: Collection[int],
        threads: int | None,
        method: str = "step",
        rank: int = 0,
    ) -> None:
        """Take a step of what is a rank's of a group's parameters in ``slots``, of each of which so many
        ``steps`` were taken; without a gradient call another ``method``, which changes parameters by their
        state. Of matrices whose updates the device makes orthogonal, these are in the place of the
        gradient."""
        kept = list(self.views(group, arrays, rank))
        for index, slot, numel in owned(group, rank):
            if index not in slots:
                continue
            owner, views, first = slot.parameter.param_group, kept[index], steps[index] == 0
            part = own_part(group, slot, rank)[1]
            masters = [arrays[name][part] for name in ("weights", "low") if name in arrays]
            if self._orthogonal[owner]:
                assert grad is not None, "Muon has no other method"
                self._go_along(slot, masters, muon.updates_in(grad[part]), settings[owner], threads)
                continue
            if self._by_adam[owner] and grad is not None:
                self._step_by_adam(owner, masters, grad[part], views, settings[owner], steps[index], threads)
                numbers[index] = {}
                continue
            alone, after = self.elementwise[owner], {}
            with _threads(threads if alone else None):
                for start in range(0, max(1, numel), CHUNK if alone else max(1, numel)):
                    piece = slice(start, min(numel, start + CHUNK) if alone else numel)
                    state = None if first else self._state(slot, piece, views, numbers[index])
                    gradient = None if grad is None else grad[part][piece]
                    halves = [m[piece] for m in masters]
                    after = self._call(method, slot, halves, gradient, settings[owner], state)
                    self._keep(slot, piece, views, after, last=piece.stop == numel)
            numbers[index] = {name: v for name, v in after.items() if not isinstance(v, Tensor)}

    def _step_by_adam(
        self, owner: int, masters: Sequence[Tensor], grad: Tensor, views: Mapping[str, Tensor],
        settings: GroupSettings, steps: int, threads: int | None,
    ) -> None:  # fmt: skip
        """Take a step of Adam or AdamW by the host's kernel, as where it is the only optimizer."""
        first, second = (views[PREFIX + name] for name in ("exp_avg", "exp_avg_sq"))
        if steps == 0:
            first.zero_(), second.zero_()
        hyper = hyper_of(self._members[owner], settings.values)
        hyper = replace(hyper, step=steps + 1, grad_scale=settings.grad_scale)
        master = masters[0] if len(masters) == 1 else (masters[0], masters[1])
        adam.adamw_step(master, first, second, grad, hyper, threads)
        views[f"{PREFIX}step"].fill_(steps + 1)

    def _go_along(
        self,
        slot: Slot,
        masters: Sequence[Tensor],
        factor: Tensor,
        settings: GroupSettings,
        threads: int | None,
    ) -> None:
        """Take the step of a matrix along its orthogonal update."""
        rows, columns = slot.parameter.shape
        buffer = self._buffer(0, muon.scratch_bytes((rows, columns)) // 8)
        with _threads(threads):
            muon.step(masters, factor, (rows, columns), settings.values, buffer, threads)

    def _state(
        self, slot: Slot, piece: slice, views: Mapping[str, Tensor], numbers: Numbers
    ) -> dict[str, Any]:
        """Return the state that a clone of a parameter, or of a piece of one, goes on with."""
        places = {e.name: self._place(slot, piece, views, e) for e in self.entries(slot.parameter)}
        alone = self.elementwise[slot.parameter.param_group]
        copied = {
            e.name for e in self.entries(slot.parameter) if alone and not e.like
        }  # each piece changes it
        return numbers | {name: p.clone() if name in copied else p for name, p in places.items()}

    def _place(self, slot: Slot, piece: slice, views: Mapping[str, Tensor], entry: Entry) -> Tensor:
        """Return where a tensor of a parameter's state, or of a piece's, lies, in its own shape."""
        view = views[PREFIX + entry.name]
        if not entry.like:
            return view.view(entry.shape)
        return view[piece] if self.elementwise[slot.parameter.param_group] else strided(view, 0, slot)

    def _call(
        self,
        method: str,
        slot: Slot,
        masters: Sequence[Tensor],
        grad: Tensor | None,
        settings: GroupSettings,
        state: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Call a method of a clone over what these masters are of, flat; returns its state."""
        index, low = slot.parameter.param_group, masters[1:]
        alone, flat = self.elementwise[index], masters[0]
        if low:
            flat = adam.join(flat, low[0], self._buffer(0, flat.numel()))
        value = flat if alone else strided(flat, 0, slot)
        parameter = nn.Parameter(value)
        if grad is not None:
            gradient = self._buffer(1, grad.numel()).copy_(grad)
            if settings.grad_scale != 1:
                gradient.mul_(settings.grad_scale)
            parameter.grad = gradient if alone else strided(gradient, 0, slot)
        clone = self._clone(index, settings.values, [parameter])
        clone.state[parameter] = self._start(index, value) if state is None else state
        with TRACING:  # meanwhile torch's optimizers would compute as in a graph, and round otherwise
            getattr(clone, method)()
        if parameter.data_ptr() != value.data_ptr():
            value.copy_(parameter.detach())
        if not _same_values(_written_settings(clone, settings.values), settings.written):
            raise MegacompileError(
                f"{name_of(type(clone))} writes other settings for {slot.parameter.name} than for another "
                "parameter, so its parameters depend on each other: use another optimizer."
            )
        if low:
            adam.split(flat, masters[0], low[0])
        after: dict[str, Any] = clone.state[parameter]
        return after

    def _buffer(self, which: int, elements: int) -> Tensor:
        """Return memory in FP32 for the master or the gradient of a step; it stays for the next of that size,
        as the first touch of a page costs as much as a pass over it."""
        if self._buffers[which].numel() != elements:
            self._buffers[which] = torch.empty(0)
            self._buffers[which] = torch.empty(elements)
        return self._buffers[which]

    def _keep(
        self, slot: Slot, piece: slice, views: Mapping[str, Tensor], after: Mapping[str, Any], *, last: bool
    ) -> None:
        """Put the tensors of a clone's state where they lie between steps."""
        entries = self.entries(slot.parameter)
        if {n for n, v in after.items() if isinstance(v, Tensor)} != {e.name for e in entries}:
            raise MegacompileError(
                f"The optimizer keeps {', '.join(after)} of {slot.parameter.name}, and kept "
                f"{', '.join(e.name for e in entries)} in a trial: use another optimizer."
            )
        for entry in entries:
            place, new = self._place(slot, piece, views, entry), after[entry.name]
            if (new.shape, new.dtype) != (place.shape, place.dtype):
                raise MegacompileError(
                    f"The optimizer keeps {entry.name} of {slot.parameter.name} as {tuple(new.shape)} in "
                    f"{new.dtype}, and not as in a trial: use another optimizer."
                )
            if new.data_ptr() != place.data_ptr() and (entry.like or last):
                place.copy_(new)


def _as_it_lies(matrix: Parameter) -> tuple[int, int]:
    """Return how many rows of how many elements lie one after another."""
    rows, columns = matrix.shape
    return (columns, rows) if matrix.stride[0] < matrix.stride[1] else (rows, columns)


def _gradient_bytes(group: GroupLayout) -> int:
    """Return the bytes of an element of a group's gradient where it is stepped by: sums over ranks are in
    FP32."""
    return group.dtype.itemsize if group.ranks == 1 else 4


def name_of(kind: type) -> str:
    """Return a class's name with its module's."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a clone has of the optimizer itself; what would not be called is refused."""
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise MegacompileError(
            f"{name_of(kind)} computes the loss anew in its step, by a closure, which no program calls: use "
            "an optimizer that steps by the gradient alone, such as torch.optim.AdamW."
        )
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise MegacompileError(
            f"This {kind.__name__} has a step of its own, which would never run: remove it."
        )
    before = torch_optimizer._global_optimizer_pre_hooks.values()
    if foreign_hooks(before) or torch_optimizer._global_optimizer_post_hooks:
        raise MegacompileError(
            "A step hook is registered for all optimizers, which would never run: remove it."
        )
    left = {"state", "param_groups", "step", "_opt_called"}
    return {
        key: OrderedDict() if key.endswith("_hooks") else value
        for key, value in vars(optimizer).items()
        if key not in left
    }


def initial_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, tuple[Any, bool]]:
    """Return the state that a group's parameters have before any step: what fills it, and whether there is
    one for each element. A state of which steps were taken is refused."""
    states = [(p, optimizer.state[p]) for p in group["params"] if optimizer.state.get(p)]
    initial: dict[str, tuple[Any, bool]] = {}
    for parameter, state in sorted(states, key=lambda item: -item[0].numel()):
        for name, value in state.items():
            like = initial[name][1] if name in initial else getattr(value, "shape", None) == parameter.shape
            fill = value.reshape(-1)[:1].clone().reshape(()) if like else value
            known = initial.setdefault(name, (fill, like))[0]
            uniform = bool((value == known).all()) if like and not value.is_meta else not like
            if not (uniform and _same_values(fill, known)) or state.get("step", 1) != 0:
                raise MegacompileError(
                    "The optimizer has already taken steps, whose state cannot be taken over yet: give a "
                    "fresh one."
                )
    return initial


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a param group's settings."""
    return {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}


def _unowned(clone: Any) -> dict[str, Any]:
    """Return a clone's settings."""
    return {k: v for k, v in clone.param_groups[0].items() if k != "params"}


def _written_settings(clone: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a clone has written."""
    return {k: v for k, v in _unowned(clone).items() if k not in values or not _same_values(v, values[k])}


def _same_values(a: Any, b: Any) -> bool:
    """Return whether two values are equal, tensors and NaN bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return torch.equal(a, b) or (
            torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_values(v, b[k]) for k, v in a.items())
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return a is b or bool(a == b) or (a != a and b != b)


def _setting_kind(value: Any) -> Any:
    """Return what of a setting may decide which state is kept: of numbers, whether they are zero."""
    if isinstance(value, Tensor):
        return Tensor
    return type(value), bool(value) if isinstance(value, (bool, int, float)) else value


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a small shape with equal sizes where the given one has, in the same order."""
    sizes = sorted({n for n in shape if n != 1})
    return tuple(1 if n == 1 else _SMALL_SIZES[sizes.index(n)] for n in shape)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Compute on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Read a param group of any torch optimizer by trials: what its step keeps of a parameter, changes and costs.

In:  an optimizer and one of its param groups. Out: :class:`ParamGroup`, which makes clones of the optimizer.

A clone is an object of the optimizer's class with its attributes, one param group and one parameter. It
lives for one step. Where each element is stepped alone, a clone has a chunk of a parameter, which stays in
the cache. A trial is the step of a clone on small parameters, whose sizes are distinct primes: each size of
what it keeps is one of the parameter's, or 1.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from megacompile.blocks.costs import WorkMeter
from megacompile.blocks.memory_meter import StorageMeter
from megacompile.blocks.weight_groups import Parameter
from megacompile.errors import MegacompileError
from megacompile.state import adam, muon
from megacompile.state.adam_settings import hyper_of, takes_our_steps
from megacompile.state.plain_loop import foreign_hooks

CHUNK = 1 << 19  # elements that a clone steps over where it may: 2 MB of each array
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
_OPTIONS = {
    "fused": "its kernel rounds the last elements of a tensor otherwise",
    "capturable": "no CUDA graph is captured",
    "differentiable": "updates are in place",
}


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


class ParamGroup:
    """One param group of an optimizer, as trials of the optimizer's class have shown it.

    ``elementwise``: each element is stepped alone. ``orthogonal``: the device makes updates orthogonal.
    ``by_adam``: the host's kernel takes the steps. ``values`` are the settings that were read last;
    ``writes_settings``: a step changes some of them. Raises :class:`MegacompileError` for a class that cannot
    step over single parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
        self._optimizer = optimizer
        self.kind = name_of(type(optimizer))
        self.elementwise = self.kind in ELEMENTWISE
        self.orthogonal = muon.is_muon(optimizer)
        self.by_adam = takes_our_steps(optimizer)
        self._attributes = _attributes(optimizer)
        self.values = self._trains(copied_settings(group))
        self._initial = initial_state(optimizer, group)
        self._entries: dict[tuple[int, ...], tuple[Entry, ...]] = {}
        self._works: dict[tuple[int, ...], Work] = {}
        self._check_options(self.values)
        shapes = sorted({(CHUNK,) if self.elementwise else tuple(p.shape) for p in group["params"]})
        for shape in shapes:
            self._entries_of(shape)
        if not (self.elementwise or self.orthogonal):
            self._check_alone([*dict.fromkeys(map(_small, shapes))])
        self.writes_settings = bool(self._written(self.values))

    def read(self, group: Mapping[str, Any]) -> GroupSettings:
        """Return the settings as they are now; refuse what needs state that is not there."""
        values, before = copied_settings(group), self.values
        self._check_options(values)
        names = values.keys() | before.keys()
        if any(_setting_kind(values.get(name)) != _setting_kind(before.get(name)) for name in names):
            self._check_state(values)
        self.values = values
        return GroupSettings(values, self._written(values) if self.writes_settings else {})

    def hyper(self, values: Mapping[str, Any]) -> adam.AdamHyper:
        """Return the hyper-parameters of a group that is Adam's or AdamW's."""
        return hyper_of(self._optimizer, values)

    def _check_options(self, values: Mapping[str, Any]) -> None:
        """Refuse options that name code which does not run on the host."""
        if self.by_adam:
            self.hyper(values)
            return
        for option, why in _OPTIONS.items():
            if values.get(option):
                raise MegacompileError(
                    f"{self.kind}({option}=True) is not supported, as {why}: leave the option out."
                )

    def _check_state(self, values: Mapping[str, Any]) -> None:
        for shape, entries in self._entries.items():
            new = {e.name for e in self._tried(shape, values)}
            if lacking := sorted(new - {e.name for e in entries}):
                raise MegacompileError(
                    f"{self.kind} keeps {', '.join(lacking)} with the settings that its param group has now, "
                    "for which no memory was laid out: compile the model again."
                )

    def _written(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that a step changes, whichever parameter it is of."""
        clone = self._trial(values, (_SMALL_SIZES[0],) * 2)
        self._take(clone)
        return changed_settings(clone_settings(clone), values)

    def pieces(self, elements: int) -> Iterator[slice]:
        """Yield what of a parameter clones step over: chunks where each element is stepped alone."""
        size = CHUNK if self.elementwise else max(1, elements)
        for start in range(0, max(1, elements), size):
            yield slice(start, min(elements, start + size))

    def entries(self, parameter: Parameter) -> tuple[Entry, ...]:
        """Return the tensors that ``step`` keeps of a parameter, or of a chunk of one."""
        return self._entries_of((CHUNK,) if self.elementwise else parameter.shape)

    @property
    def known_entries(self) -> Iterator[Entry]:
        """The tensors that it keeps of the parameters of any shape so far."""
        return (entry for entries in self._entries.values() for entry in entries)

    def _entries_of(self, shape: tuple[int, ...]) -> tuple[Entry, ...]:
        if shape not in self._entries:
            self._entries[shape] = self._tried(shape, self.values)
        return self._entries[shape]

    def _tried(self, shape: tuple[int, ...], values: Mapping[str, Any]) -> tuple[Entry, ...]:
        """Return what ``step`` keeps of a parameter, by the sizes of what it keeps of a small one."""
        small = _small(shape)
        sizes = dict(zip(small, shape, strict=True)) | {1: 1}
        clone = self._trial(values, small)
        (parameter,) = clone.param_groups[0]["params"]
        kinds = []
        for _ in range(2):
            self._take(clone)
            kinds.append({name: type(value) for name, value in clone.state[parameter].items()})
        if kinds[0] != kinds[1]:
            self._refuse("it keeps other things after its second step than after its first")
        entries = []
        for name, value in clone.state[parameter].items():
            if not isinstance(value, Tensor):
                if not (value is None or isinstance(value, (bool, int, float, str))):
                    self._refuse(f"it keeps a {type(value).__name__} as {name}, which no checkpoint holds")
                continue
            if not set(value.shape) <= set(sizes) or value.layout != torch.strided or value.is_complex():
                self._refuse(
                    f"of a parameter of {small} it keeps {name} of {tuple(value.shape)} in {value.dtype}, "
                    "which is not laid out by the parameter's sizes"
                )
            like = value.dim() > 0 and value.shape == small
            entries.append(Entry(name, value.dtype, tuple(sizes[n] for n in value.shape), like))
        return tuple(entries)

    def _check_alone(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Refuse an optimizer whose step of a parameter depends on others, or on random numbers."""
        together = self._trial(self.values, *(shape for shape in shapes for _ in range(2)))
        parameters = together.param_groups[0]["params"]
        alone = [nn.Parameter(p.detach().clone()) for p in parameters]
        clones = [self.clone(self.values, parameter) for parameter in alone]
        generator, before = torch.Generator().manual_seed(1), torch.random.get_rng_state()
        for step in range(_STEPS):
            for parameter, own in zip(parameters, alone, strict=True):
                parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 3 - 1)
                own.grad = parameter.grad.clone()
            for each in (together, *clones):
                self._take(each)
            alike = all(
                same_values(clone_settings(clone), clone_settings(together)) for clone in clones
            ) and all(same_values(own.data, p.data) for own, p in zip(alone, parameters, strict=True))
            if not torch.equal(before, torch.random.get_rng_state()):
                torch.random.set_rng_state(before)
                self._refuse("its step draws random numbers")
            if not alike:
                self._refuse("its step of one parameter depends on the others")

    def work(self, parameter: Parameter, elements: int) -> Work:
        """Return the work of a step of so many elements of a parameter, of all unless each is stepped alone;
        the gradient that it reads is not counted."""
        if self.orthogonal:
            moved = (muon.MOMENTUM_BYTES + muon.STEP_BYTES) * elements
            return Work(muon.scratch_bytes(parameter.shape), moved, 0)
        if self.by_adam:
            return Work(0, adam.STEP_BYTES * elements, 0)
        shape, chunks = parameter.shape, 1.0
        if self.elementwise:
            shape = (min(CHUNK, elements),)
            chunks = elements / max(1, shape[0])
        if shape not in self._works:
            by = max(1.0, math.prod(shape) / _SAMPLE) ** (1 / max(1, len(shape)))
            sample = shape if self.elementwise else tuple(math.ceil(n / by) for n in shape)
            ratio = max(1.0, math.prod(shape) / max(1, math.prod(sample)))
            temporary, moved, flops = self._tried_work(sample)
            # a product of matrices grows with the length of their sides cubed
            self._works[shape] = Work(
                8 * math.prod(shape) + math.ceil(ratio * temporary),
                math.ceil(ratio * moved),
                round(ratio**1.5 * flops),
            )
        scratch, moved, flops = self._works[shape]
        masters = 20 if parameter.dtype == torch.bfloat16 else 4  # halves are joined and split
        return Work(scratch, masters * elements + round(chunks * moved), flops)

    def _tried_work(self, shape: tuple[int, ...]) -> Work:
        """Return the most bytes of tensors that a step makes, the first one's state included, and what the
        second does."""
        clone = self._trial(self.values, shape)
        (parameter,) = clone.param_groups[0]["params"]
        peaks = []
        for _ in range(2):
            meter, work = StorageMeter(), WorkMeter()
            for tensor in (parameter, parameter.grad, *clone.state[parameter].values()):
                if isinstance(tensor, Tensor):
                    meter.ignore(tensor)
            with meter, work:
                self._take(clone)
            peaks.append(meter.peak)
        return Work(max(peaks), work.moved, work.flops)

    def _trial(self, values: Mapping[str, Any], *shapes: tuple[int, ...]) -> Any:
        """Return a clone over new parameters of these shapes, with gradients, at its start."""
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        clone = self.clone(values, *parameters)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        return clone

    def clone(
        self, values: Mapping[str, Any], *parameters: nn.Parameter, state: dict[str, Any] | None = None
    ) -> Any:
        """Return an object of the optimizer's class that has these settings and parameters; ``state`` is that
        of each parameter, None: as before any step."""
        clone: Any = object.__new__(type(self._optimizer))
        vars(clone).update(self._attributes)
        clone.param_groups = [{**values, "params": [*parameters]}]
        clone.state = defaultdict(dict)
        for parameter in parameters:
            clone.state[parameter] = self._start(parameter) if state is None else state
        return clone

    def _trains(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings as they are while a model is trained, where a class has a train() for that."""
        clone = self.clone(values)
        getattr(clone, "train", lambda: None)()
        return clone_settings(clone)

    def _start(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state that a parameter, or a chunk of one, has before its first step."""
        return {
            name: torch.full_like(parameter, fill.item(), dtype=fill.dtype) if like else copy.deepcopy(fill)
            for name, (fill, like) in self._initial.items()
        }

    def _take(self, clone: Any) -> None:
        """Step a clone in a trial; refuse what it does beside its parameters."""
        try:
            clone.step()
        except Exception as error:
            self._refuse(f"in a trial on small parameters its step raised {type(error).__name__}: {error}")
        if strange := [key for key in clone.state if not isinstance(key, Tensor)]:
            self._refuse(f"its state has {strange[0]!r}, which is of no parameter")
        kept = self._attributes
        now = {k: v for k, v in vars(clone).items() if k not in ("state", "param_groups")}
        if strange := [key for key in now if key not in kept or now[key] is not kept[key]]:
            self._refuse(f"its step sets {strange[0]} of the optimizer itself")

    def _refuse(self, why: str) -> NoReturn:
        raise MegacompileError(
            f"{self.kind} cannot run on the host, as {why.rstrip('.')}: use an optimizer that steps over "
            "each parameter alone, such as torch.optim.AdamW."
        )


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
            if not (uniform and same_values(fill, known)) or state.get("step", 1) != 0:
                raise MegacompileError(
                    "The optimizer has already taken steps, whose state cannot be taken over yet: give a "
                    "fresh one."
                )
    return initial


def copied_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a param group's settings."""
    return {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}


def clone_settings(clone: Any) -> dict[str, Any]:
    """Return a clone's settings."""
    return {k: v for k, v in clone.param_groups[0].items() if k != "params"}


def changed_settings(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of now that were others before, or were not there."""
    return {k: v for k, v in now.items() if k not in before or not same_values(v, before[k])}


def same_values(a: Any, b: Any) -> bool:
    """Return whether two values are equal, tensors and NaN bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return torch.equal(a, b) or (
            torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_values(v, b[k]) for k, v in a.items())
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

"""Host values: what a forward computes from its batch alone, and reads, runs on the host before the program.

In: a forward under capture, and the batch's real tensors. Out: a :class:`Prologue`, which computes for each
batch the values that this forward read. Numbers behind shapes and branches are alike for all batches of the
program; tensors are inputs of the program.

Tensors stay the traced ones. Each tensor that comes from the batch alone has its calls noted beside it, which
run on real values once these are needed. A number that is read is a guard. A tensor whose shape depends on
values becomes an input, and its shape a guard. A function of the model's own files that reads values of the
batch alone is one call: it runs as it is for each batch, and only its results count. So all batches with as
many positions in the results share a program. Sizes that only split a tensor are no guards, except their sum,
if the pieces are put together again as they are.

Random numbers of Python and NumPy are drawn by calls of the prologue, from the seed of a forward
(:mod:`~megacompile.capture.host_draws`). What depends on them is an input of the program, and never a guard.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megacompile.capture.call_tensors import given_by_name, storage_id, tensors_in, written_names
from megacompile.capture.host_draws import (
    ARRAYS,
    DRAWN,
    DecidesError,
    Drawn,
    Stream,
    as_operand,
    between_0_and_1,
    decides,
    drawn_in,
    draws,
)
from megacompile.capture.host_prologue import (
    Prologue,
    PrologueCall,
    PrologueValue,
    ReadSizes,
    SplitPieces,
    as_contiguous,
    read_plain,
)
from megacompile.capture.patches import Patch, replaced
from megacompile.capture.refused_calls import outside_tracing
from megacompile.errors import CaptureError

_CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_INDEXED = {Tensor.__getitem__, Tensor.__setitem__}
_SPLITS: set[Any] = {torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes}
_JOINS: set[Any] = {torch.cat, torch.concat, torch.concatenate}
_MADE_OF_NUMBERS: set[Any] = {torch.tensor, torch.as_tensor, torch.asarray}


class _NotAloneError(Exception):
    """A function needs more than the batch, or does more than return."""


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a function compute with real tensors alone, and write into none but its own; keeps what it
    made."""

    def __init__(self, given: Sequence[Tensor], made: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = set(map(storage_id, given))
        self._made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(x, FakeTensor) for x in tensors_in((args, kwargs))):
            raise _NotAloneError
        given = given_by_name(func, args, kwargs)
        written = [given.get(name) for name in written_names(func)]
        if any(isinstance(x, Tensor) and storage_id(x) in self._given for x in written):
            raise _NotAloneError
        result = func(*args, **kwargs)
        self._made += tensors_in(result)
        return result


@dataclass
class _Known:
    """A traced tensor that comes from the batch alone, its number, and a tensor like it without values;
    ``drawn``: from random numbers, too."""

    traced: Tensor
    number: int
    twin: Tensor
    drawn: bool = False


@dataclass(eq=False)
class HostValues(TorchFunctionMode):
    """Watches one forward of ``model`` under capture; ``leaves`` are the batch's, for real."""

    model: nn.Module
    leaves: Sequence[Any]
    _calls: list[PrologueCall] = field(default_factory=list)
    _values: dict[int, Any] = field(default_factory=dict)  # of numbers, as far as they were made
    _known: dict[int, _Known] = field(default_factory=dict)  # by the traced tensor's id
    _lost: set[int] = field(default_factory=set)  # storages into which something unknown was written
    _made: list[Tensor] = field(default_factory=list)  # for real, within calls
    _inputs: list[tuple[int, Tensor]] = field(default_factory=list)
    _inside: bool = False
    _tries: bool = False  # a function, to see whether it draws

    def __post_init__(self) -> None:
        super().__init__()
        self._stream = Stream(0)
        self._twins = FakeTensorMode()
        self._count = len(self.leaves)
        self._leaves: set[int] = set()  # storages of the tensors that stand for them
        self._values.update({i: x for i, x in enumerate(self.leaves) if isinstance(x, Tensor)})

    @contextlib.contextmanager
    def watching(self, traced: Sequence[Any]) -> Iterator[None]:
        """Within the context the forward runs on these, which stand for the batch's leaves."""
        for number, tensor in enumerate(traced):
            if isinstance(tensor, Tensor):
                self._known[id(tensor)] = _Known(tensor, number, self._twin(tensor))
                self._leaves.add(storage_id(tensor))
        patches = [
            Patch(nn.Module, "__call__", self.module, "a call beside the trace is none of its modules'"),
            Patch(FakeTensor, "tolist", self.tolist, "torch reads each element by itself"),
            Patch(torch, "from_numpy", self.from_numpy, "what is drawn is an input"),
            *draws(self.draw),
            *(Patch(*of, self.call, "may read values of the batch") for of in own_functions(self.model)),
        ]
        with replaced(patches), self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traced = get_proxy_mode() is not None
        if (
            traced
            and func in _SPLITS
            and any(isinstance(x, ReadSizes) for x in args[1:2])
            and not self._is_known(args[0])
        ):
            return self._split(func, args[1], args, kwargs)
        if traced and func in _JOINS and isinstance(args[0], SplitPieces):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            joined = args[0].plain()
            if dim % joined[0].dim() == args[0].dim:
                args = (joined, *args[1:])
        args = tuple(map(read_plain, args))
        kwargs = {name: read_plain(value) for name, value in kwargs.items()}
        if not traced:
            return func(*args, **kwargs)
        if drawn := drawn_in((args, kwargs)):
            if func in _MADE_OF_NUMBERS:
                return self.compute(torch.tensor, args, {k: v for k, v in kwargs.items() if k != "device"})
            inputs = {id(x): self.compute(as_operand, (x,), {}) for x in drawn}
            args, kwargs = pytree.tree_map_only(Drawn, lambda x: inputs[id(x)], (args, kwargs))
        if func in _INDEXED and not puts_alike(func, args):
            args = (args[0], self._plain_index(args[1], args[0]), *args[2:])
        tensors = tensors_in((args, kwargs))
        if not all(map(self._is_known, tensors)):
            args, kwargs = self._with_numbers(func, args, kwargs, tensors)
            result, written = _watched(func, args, kwargs, tensors)
            self._lose(written)
            return result
        if tensors and getattr(func, "__name__", "") != "__get__":
            try:
                self._dry(func, args, kwargs)
            except Exception:  # its values are needed, or it fails, as it will for real
                with contextlib.suppress(_NotAloneError):
                    return self._on_host(func, args, kwargs)
        result, written = _watched(func, args, kwargs, tensors)
        made = tensors_in(result)
        if made or written:
            self._record(func, args, kwargs, made, written)
        return result

    def call(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function of the model's on the host, if it reads values, and of the batch alone, or draws."""
        tensors = tensors_in((args, kwargs))
        within = self._inside or (self._tries and not tensors)
        if within or not all(map(self._is_known, tensors)):
            return theirs(*args, **kwargs)
        tried, result = Stream(0), None
        try:
            with self._trying(), tried.running():
                if tensors:
                    self._dry(theirs, args, kwargs)
                else:
                    result = theirs(*args, **kwargs)
        except _NotAloneError:
            return theirs(*args, **kwargs)
        except Exception as error:
            drawn = tried.draws or isinstance(error, DecidesError) or drawn_in((args, kwargs))
            if not (tensors or drawn):
                raise
        else:
            if not tried.draws:
                return theirs(*args, **kwargs) if tensors else result
        with contextlib.suppress(_NotAloneError):
            return self._on_host(theirs, args, kwargs, alone=True)
        return theirs(*args, **kwargs)

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """Within the context random numbers are drawn for real."""
        before, self._tries = self._tries, True
        try:
            yield
        finally:
            self._tries = before

    def draw(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Draw random numbers of Python or NumPy anew for each batch."""
        if self._tries or get_proxy_mode() is None:
            return theirs(*args, **kwargs)
        result = self._on_host(theirs, args, kwargs, numbers=True)
        if isinstance(result, Drawn):
            result.unit = between_0_and_1(theirs, args, kwargs)
        return result

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute with numbers that are drawn."""
        if not all(map(self._is_known, tensors_in((args, kwargs)))):
            raise DecidesError
        return self._on_host(function, args, kwargs, numbers=True)

    def from_numpy(self, theirs: Callable[..., Any], array: Any) -> Any:
        """Return the tensor of an array."""
        return self.compute(torch.tensor, (array,), {}) if isinstance(array, Drawn) else theirs(array)

    def _split(self, func: Callable[..., Any], sizes: ReadSizes, args: Any, kwargs: Any) -> Any:
        """Split a tensor in the trace; the sizes do not matter if its pieces are only put together again."""
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % args[0].dim()
        pieces = SplitPieces(func(args[0], sizes.plain(), *args[2:], **kwargs))
        pieces.sizes, pieces.dim, sizes.call.total = sizes, dim, args[0].shape[dim]
        return pieces

    def _dry(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Call a function on tensors without values, which fails where it reads any."""
        args, kwargs = pytree.tree_map_only(Drawn, lambda x: x.real, (args, kwargs))
        args, kwargs = pytree.tree_map_only(Tensor, self._twin_of, (args, kwargs))
        with self._aside(), self._twins:
            func(*args, **kwargs)

    def module(self, theirs: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module, beside the trace only one that has no tensors of its own."""
        if not self._inside:
            return theirs(module, *args, **kwargs)
        if any(True for _ in (*module.parameters(), *module.buffers())):
            raise _NotAloneError
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    def tolist(self, theirs: Callable[..., Any], tensor: Tensor) -> Any:
        """Return the elements of a tensor, which torch would read one by one."""
        return self._on_host(Tensor.tolist, (tensor,), {}) if self._is_known(tensor) else theirs(tensor)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Within the context calls are beside the trace."""
        self._inside = True
        try:
            with outside_tracing():
                yield
        finally:
            self._inside = False

    def prologue(self, used: Sequence[Tensor]) -> Prologue | None:
        """Return what was needed of the batch's values, and for which inputs; None: nothing was."""
        numbers = [next(n for n, real in self._inputs if real is x) for x in used]
        needed, calls = set(numbers), []
        for call in reversed(self._calls):
            if call.expected is not None or needed & {*call.results, *call.written}:
                needed |= call.reads
                calls.append(call)
        if not any(call.expected is not None for call in calls):
            return None
        prologue = Prologue(tuple(reversed(calls)), tuple(numbers))
        if any(call.draws for call in calls) and prologue(self.leaves, 1) is None:
            raise CaptureError(decides())
        return prologue

    def same_as(self, other: HostValues) -> bool:
        """Return whether another forward on the same batch needed the same values of it."""
        mine, others = ([c.expected for c in of._calls if c.expected is not None] for of in (self, other))
        inputs = zip(self._inputs, other._inputs, strict=False)
        return mine == others and all(torch.equal(x, y) for (_, x), (_, y) in inputs)

    def makes(self, constant: Any) -> bool:
        """Return whether a constant of the exported graph is an input from the prologue; refuse a constant
        that a function on the host left behind."""
        if any(constant is real for _, real in self._inputs):
            return True
        if not isinstance(constant, Tensor) or isinstance(constant, FakeTensor):
            return False
        if storage_id(constant) in map(storage_id, self._made):
            raise CaptureError(
                "A function of the model keeps a tensor that it made of the batch, and the forward reads it "
                "elsewhere: let the function return it."
            )
        return False

    # How tensors are known.

    def _is_known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known and storage_id(tensor) not in self._lost

    def _twin_of(self, tensor: Tensor) -> Tensor:
        return self._known[id(tensor)].twin if self._is_known(tensor) else self._twin(tensor)

    def _twin(self, of: Tensor) -> Tensor:
        shape, stride = tuple(of.shape), of.stride()
        with outside_tracing(), self._twins:
            return torch.empty_strided(shape, stride, dtype=of.dtype)

    def _placed(self, tree: Any) -> Any:
        tree = pytree.tree_map_only(Drawn, lambda x: PrologueValue(x.number), tree)
        return pytree.tree_map_only(Tensor, lambda x: PrologueValue(self._known[id(x)].number), tree)

    def _is_drawn(self, tree: Any) -> bool:
        """Return whether what a call is given depends on random numbers."""
        return bool(drawn_in(tree)) or any(self._known[id(x)].drawn for x in tensors_in(tree))

    def _lose(self, written: Sequence[Tensor]) -> None:
        storages = {storage_id(known.traced) for known in self._known.values()} if written else set()
        self._lost |= storages & set(map(storage_id, written))

    def _record(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        results: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> None:
        """Note a traced call, to run it on real values if these are needed."""
        if not self._leaves.isdisjoint(map(storage_id, written)):  # which is refused: see refuse_mutations
            self._lose(written)
            return
        drawn = self._is_drawn((args, kwargs))
        args, kwargs = self._placed((args, kwargs))
        storages = set(map(storage_id, written))
        touched = (
            [k.number for k in self._known.values() if storage_id(k.traced) in storages] if written else []
        )
        numbers = tuple(range(self._count, self._count + len(results)))
        self._count += len(results)
        call = PrologueCall(func, args, kwargs, numbers, tuple(touched))
        for number, traced in zip(numbers, results, strict=True):
            self._known[id(traced)] = _Known(traced, number, self._twin(traced), drawn)
        if written:  # what reads these tensors, as they were before, comes first
            for earlier in self._calls:
                if not earlier.made and earlier.reads & set(touched):
                    self._make(earlier)
        self._calls.append(call)
        if written:
            self._make(call)

    # How values are made.

    def _make(self, call: PrologueCall) -> None:
        """Run a call on real values, after the calls that it needs."""
        needed, pending = set(call.reads), [call]
        for earlier in reversed(self._calls):
            if not earlier.made and earlier is not call and needed & set(earlier.results):
                needed |= earlier.reads
                pending.append(earlier)
        for each in reversed(pending):
            stream = Stream(0)
            with outside_tracing(), stream.running():
                result = each.run(self._values)
            if stream.draws:
                raise DecidesError
            self._values.update(zip(each.results, tensors_in(result), strict=True))
            each.made = True

    def _real(self, number: int) -> Any:
        if number not in self._values:
            self._make(next(call for call in self._calls if number in call.results))
        return self._values[number]

    def _on_host(
        self, func: Callable[..., Any], args: Any, kwargs: Any, *, alone: bool = False, numbers: bool = False
    ) -> Any:
        """Run a call on real values now: its numbers are guards, its tensors inputs of the program.
        ``alone``: a function of the model's. ``numbers``: a function of random draws that may return numbers,
        too."""
        given_args, given_kwargs = self._placed((args, kwargs))
        call = PrologueCall(func, given_args, given_kwargs, (), drawn=self._is_drawn((args, kwargs)))
        if call.drawn and not (alone or numbers):
            raise DecidesError
        given = [real for number in call.reads if isinstance(real := self._real(number), Tensor)]
        watch, before, held = _Alone(given, self._made), _identity((args, kwargs)), self._attributes()
        try:
            with self._aside(), watch, self._stream.running():
                result = pytree.tree_map(as_contiguous, call.run(self._values))
        except (_NotAloneError, CaptureError):
            raise
        except Exception:
            if alone:
                raise _NotAloneError from None
            raise
        leaves = pytree.tree_leaves(result)
        if alone and before != _identity((args, kwargs)):
            raise _NotAloneError
        call.draws = self._stream.draws
        call.drawn = call.drawn or call.draws
        if call.draws and (changed := [n for n, x in self._attributes().items() if held.get(n) is not x]):
            raise CaptureError(
                f"{getattr(func, '__name__', func)} of the model draws random numbers and changes "
                f"{changed[0]}, which a program would not: let it return what it draws."
            )
        if call.drawn and not all(isinstance(leaf, DRAWN if numbers else ARRAYS) for leaf in leaves):
            raise DecidesError if numbers else _NotAloneError
        if not call.drawn and not all(isinstance(leaf, (Tensor, *_CONSTANTS)) for leaf in leaves):
            raise _NotAloneError
        call.expected, call.made = call.description(result), True
        call.results = tuple(range(self._count, self._count + len(call.numbered(result))))
        self._count += len(call.results)
        self._calls.append(call)
        if call.drawn:
            standing = [self._standing(*of) for of in zip(call.results, leaves, strict=True)]
            return pytree.tree_unflatten(standing, pytree.tree_structure(result))
        if isinstance(result, list) and result and all(type(x) is int for x in result):
            return ReadSizes(result, call)
        places = iter(call.results)
        return pytree.tree_map_only(Tensor, lambda x: self._input(next(places), x), result)

    def _attributes(self) -> dict[str, Any]:
        modules = self.model.named_modules()
        return {f"{path}.{name}".lstrip("."): x for path, m in modules for name, x in vars(m).items()}

    def _standing(self, number: int, real: Any) -> Any:
        """What stands in the trace for a result that is drawn."""
        if isinstance(real, Tensor):
            return self._input(number, real, drawn=True)
        self._values[number] = real
        return Drawn(real, number, self.compute)

    def _input(self, number: int, real: Tensor, *, drawn: bool = False) -> Tensor:
        """The traced tensor that stands for a result of the host."""
        if not real.numel():
            traced = torch.zeros(real.shape, dtype=real.dtype)
        else:
            with outside_tracing():
                real = real.detach()  # an object of its own, by which it is known again
            proxy_mode = get_proxy_mode()
            assert proxy_mode is not None
            tracer = proxy_mode.tracer
            with _disable_current_modes():
                fresh = torch.ops.aten.lift_fresh_copy.default
                constant = fx.Proxy(tracer.create_arg(real), tracer)  # type: ignore[arg-type]
                proxy = tracer.create_proxy("call_function", fresh, (constant,), {})
            traced = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
            track_tensor_tree(traced, proxy, constant=None, tracer=tracer)
            self._inputs.append((number, real))
        self._values[number] = real
        self._known[id(traced)] = _Known(traced, number, self._twin(real), drawn)
        return traced

    # Where a call of the trace needs numbers. An index by a mask is by the places where it holds, of which it
    # is known how many there are.

    def _with_numbers(
        self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[Tensor]
    ) -> Any:
        """The arguments of a call, those that it takes as sizes as numbers."""

        def is_number(x: Any) -> bool:
            known = isinstance(x, Tensor) and self._is_known(x)
            return known and not x.dim() and not x.is_floating_point()

        if any(map(is_number, tensors)):
            try:
                self._dry(func, args, kwargs)
            except Exception:
                numbers = lambda x: self._on_host(Tensor.item, (x,), {}) if is_number(x) else x  # noqa: E731
                return pytree.tree_map_only(Tensor, numbers, (args, kwargs))
        return args, kwargs

    def _plain_index(self, index: Any, of: Tensor) -> Any:
        if isinstance(index, tuple):
            parts: list[Any] = []
            for part in index:
                plain = self._plain_index(part, of)
                masked = isinstance(plain, tuple) and plain and isinstance(plain[0], Tensor)
                parts += plain if masked else [plain]
            return tuple(parts)
        if isinstance(index, slice):
            return slice(*(self._plain_index(part, of) for part in (index.start, index.stop, index.step)))
        if not isinstance(index, Tensor) or not self._is_known(index):
            return index
        if index.dtype in (torch.bool, torch.uint8):
            return index if self._is_known(of) else self._on_host(_places, (index,), {})
        return self._on_host(Tensor.item, (index,), {}) if not index.dim() else index


def puts_alike(func: Any, args: Any) -> bool:
    """Return whether a call puts the same into all places where a mask holds, however many there are."""
    if func is not Tensor.__setitem__ or not isinstance(args[1], Tensor) or args[1].dtype != torch.bool:
        return False
    return not isinstance(args[2], Tensor) or is_alike(args[2], args[0].dim() - args[1].dim())


def is_alike(value: Tensor, rest: int) -> bool:
    """Return whether what is put to where a mask holds, ``rest`` dimensions at each place, is the same at
    all."""
    return value.dim() <= rest or (value.dim() == rest + 1 and value.shape[0] == 1)


def _places(mask: Tensor) -> tuple[Tensor, ...]:
    """The indices at which a mask holds, in each dimension."""
    return mask.nonzero(as_tuple=True)


def own_functions(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """The functions of a model's files, with the classes or files that hold them: methods of its modules, but
    for the forwards, and functions that these may call by their names."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    kinds = {k for k in kinds if issubclass(k, nn.Module) and k.__module__.partition(".")[0] != "torch"}
    files = {sys.modules[k.__module__] for k in kinds if k.__module__ in sys.modules}
    for owner in (*kinds, *files):
        for name, value in list(vars(owner).items()):
            if isinstance(value, types.FunctionType) and name != "forward" and not name.startswith("__"):
                yield owner, name


def _identity(tree: Any) -> tuple[str, list[int]]:
    """Return what containers hold, to see whether a call changed them."""
    leaves, spec = pytree.tree_flatten(tree)
    return str(spec), list(map(id, leaves))


def _watched(
    func: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[Tensor]
) -> tuple[Any, list[Tensor]]:
    """The result of a call in the trace, and the tensors into which it wrote."""
    versions = [tensor._version for tensor in tensors]
    result = func(*args, **kwargs)
    return result, [x for x, version in zip(tensors, versions, strict=True) if x._version != version]

"""Functions that run for real: what torch cannot trace is called, forward and backward, as it is.

A call's tensors are arguments and results of two operators, :func:`opaque` and :func:`opaque_backward`. What
the function keeps on ``ctx`` is found by running it on made-up values of the call's shapes: arguments,
results and views of them are read where they are, other tensors and arrays are further results, numbers
travel in a tensor, and all else must be the same in every call, which is checked. Its memory is what it takes
on the made-up values. A function that writes into its arguments is given copies. A function with other bits
for equal arguments, such as one of random numbers, is called once: its results are snapshots, which a
recompute reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import random
import struct
import types
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from megacompile.capture.call_tensors import tensors_in
from megacompile.capture.changed_buffers import buffer_snapshot
from megacompile.capture.function_context import (
    FunctionContext,
    call_forward,
    first_line_of,
    function_refusal,
    has_gradient,
    refuse_several,
)
from megacompile.capture.own_gradients import BACKWARD_GRAPHS, own_gradient
from megacompile.capture.refused_calls import none_refused, outside_tracing
from megacompile.errors import CaptureError, MegacompileError
from megacompile.kernels.registry import OpPass, OpSpec, declare

_OPAQUE_CALLS: dict[str, _OpaqueCall] = {}
_CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), type, types.FunctionType, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_OF_CONTEXTS = {"needs_input_grad", "_marks"}


@torch.library.custom_op("megacompile::opaque", mutates_args=())
def opaque(given: Sequence[Tensor], call: str, keeps: bool) -> list[Tensor]:
    """Call the forward of a function for real; return its results, then what else its backward reads."""
    return _OPAQUE_CALLS[call].forward(given, keeps)


@torch.library.custom_op("megacompile::opaque_backward", mutates_args=())
def opaque_backward(saved: Sequence[Tensor], grads: Sequence[Tensor], call: str) -> list[Tensor]:
    """Call the backward of a function for real; return the gradients of the arguments that have one."""
    return _OPAQUE_CALLS[call].backward(saved, grads)


@opaque.register_fake
def _(given: Sequence[Tensor], call: str, keeps: bool) -> list[Tensor]:
    return [form.empty(given[0].device) for form in _OPAQUE_CALLS[call].result_forms(keeps)]


@opaque_backward.register_fake
def _(saved: Sequence[Tensor], grads: Sequence[Tensor], call: str) -> list[Tensor]:
    return [form.empty(grads[0].device) for form in _OPAQUE_CALLS[call].gradient_forms]


OPAQUE = torch.ops.megacompile.opaque.default
declare(OpSpec("opaque", backward=OpPass(), kept=True, varies=True))


@runtime_checkable
class Meter(Protocol):
    """A mode that counts the memory of tensors, but for those that it is told to ignore."""

    def ignore(self, tensor: Tensor) -> None: ...


class _TensorForm(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> _TensorForm:
        return _TensorForm(tuple(x.shape), tuple(x.stride()), x.dtype)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def made_up(self, seed: int, device: torch.device) -> Tensor:
        """Fill a tensor with numbers between 0 and 1, with True, or, for integers, with zeros, which index
        anything."""
        x, generator = self.empty(torch.device("cpu")), torch.Generator().manual_seed(seed)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return x.copy_(0.05 + 0.9 * torch.rand(self.shape, generator=generator)).to(device)
        return x.fill_(self.dtype == torch.bool).to(device)

    def laid_out(self, x: Tensor) -> Tensor:
        """Return a tensor of this shape and dtype in this order in memory."""
        return x if x.stride() == self.stride else self.empty(x.device).copy_(x)


class _TensorPlace(NamedTuple):
    """Stands for a tensor among results, or arguments, by its number."""

    number: int


class _Kept(NamedTuple):
    """Stands for a tensor or array of a context: a view of what ``source`` names, an argument or a result."""

    source: tuple[str, int]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    array: bool = False


class _Number(NamedTuple):
    """Stands for a number of a context, by its type and its place in the tensor of them all."""

    kind: type
    place: int


class _Layout(NamedTuple):
    """The common parts of all calls of a kind: how results and context are made of tensors."""

    results: tuple[Any, ...]
    several: bool
    without_gradient: tuple[int, ...]
    materialize: bool
    dirty: tuple[tuple[int, int], ...]  # arguments, and the results that stand for them
    kept: tuple[Any, ...]
    names: str  # of what is kept
    forms: tuple[tuple[Any, ...], ...]  # of the tensors that the forward returns, kept ones last

    def apart(self, other: _Layout) -> str:
        """Name the first difference."""
        pairs = zip(self._fields, self, other, strict=True)
        return next(f"{name}: {mine}, then {others}" for name, mine, others in pairs if mine != others)


class _NotForRealError(Exception):
    """A function needs, gives or keeps what no operator can."""


class _OpaqueCall:
    """A function with its constants, for arguments of certain forms. ``examination`` counts how often all
    functions were to be looked at anew."""

    examination = 0

    def __init__(
        self, function: Any, name: str, needs: tuple[bool, ...], args: tuple[Any, ...], grad: bool
    ) -> None:
        leaves, self._spec = pytree.tree_flatten(args)
        self._function, self._needs, self._name, self._grad = function, needs, name, grad
        self._forms = [_TensorForm.of(x) for x in leaves if isinstance(x, Tensor)]
        self._leaves = [_TensorPlace(0) if isinstance(x, Tensor) else x for x in leaves]
        for leaf in self._leaves:
            if not isinstance(leaf, (_TensorPlace, *_CONSTANTS)):
                raise _NotForRealError(f"is given a {type(leaf).__name__}: give it tensors and numbers alone")
        code = [x for x in (function, *self._leaves) if callable(x)]
        named = [x.__qualname__ if x in code else x for x in (function, *self._leaves)]
        self.key = f"{name} {named} {needs} {grad} {self._spec} {self._forms}", code, self.examination
        self.layout = _Layout((), False, (), True, (), (), "", ())
        self.written: set[int] = set()  # arguments into which the forward writes
        self._overwritten: set[int] = set()  # tensors into which the backward does
        self.inputs: list[int] = []  # arguments that get a gradient
        self.gradient_forms: list[_TensorForm] = []

    def examine(self) -> None:
        """Call it on made-up values, to know what it returns, keeps, and writes into."""
        given = self._try()
        self.written = _arguments_written(given, self._made_up())
        self.layout, results = self._run(self._made_up())
        again, repeated = self._run(self._made_up())
        other, _ = self._run(self._made_up(1))
        for kept in self.layout.kept:
            if not isinstance(kept, (_Kept, _Number, *_CONSTANTS)):
                name = type(kept).__name__
                raise _NotForRealError(f"keeps a {name} on ctx: keep tensors, arrays and numbers alone")
        for layout in (again, other):
            if layout != self.layout:
                apart = self.layout.apart(layout)
                raise _NotForRealError(f"gives or keeps what differs from call to call ({apart})")
        self.repeats = all(map(_same_bits, results, repeated))
        self._result_forms = [_TensorForm.of(x) for x in results]
        if self._grad and self.graded and any(self._needs):
            given = self._saved_example()
            found = self._gradients(given)
            self._overwritten = _arguments_written(given, self._saved_example())
            self.inputs = [i for i, needed in enumerate(self._needs) if needed and found[i] is not None]
            self.gradient_forms = [_TensorForm.of(found[i]) for i in self.inputs]

    def _try(self) -> list[Tensor]:
        """Choose the device on which it runs; return what it was given there."""
        for kind in ["cuda"] * torch.cuda.is_available() + ["cpu"]:
            self._device = torch.device(kind)
            given = self._made_up()
            try:
                self._run(given)
                break
            except CaptureError:
                raise
            except Exception:
                if kind == "cpu":
                    raise
        return given

    @property
    def graded(self) -> list[int]:
        """The results that have a gradient, by their places among all."""
        layout = self.layout
        places = [i for i, x in enumerate(layout.results) if isinstance(x, _TensorPlace)]
        return [i for i in places if i not in layout.without_gradient]

    @property
    def _has_numbers(self) -> bool:
        return any(isinstance(x, _Number) for x in self.layout.kept)

    @property
    def sources(self) -> list[tuple[str, int]]:
        """The places of the forward's arguments and results that the backward is given."""
        found = dict.fromkeys(x.source for x in self.layout.kept if isinstance(x, _Kept))
        return [*found, *[("result", len(self._result_forms) - 1)] * self._has_numbers]

    def result_forms(self, keeps: bool) -> list[_TensorForm]:
        """Return the forms of what :func:`opaque` returns, kept tensors too."""
        count = sum(isinstance(x, _TensorPlace) for x in self.layout.results)
        return self._result_forms if keeps else self._result_forms[:count]

    # On real values; on fake ones, which a meter does, it runs on made-up ones and takes the same memory.

    def forward(self, given: Sequence[Tensor], keeps: bool) -> list[Tensor]:
        forms = self.result_forms(keeps)
        if isinstance(given[0], FakeTensor):
            with unset_fake_temporarily(), draws_undone():
                self._run(_uncounted(self._made_up))
            return [form.empty(given[0].device) for form in forms]
        layout, results = self._run([form.laid_out(x) for form, x in zip(self._forms, given, strict=True)])
        if layout != self.layout:
            raise MegacompileError(
                f"{self._name}, gave or kept something else than on other values of the same shapes "
                f"({self.layout.apart(layout)}): a program is one for all values."
            )
        return [form.laid_out(x) for form, x in zip(forms, results, strict=False)]

    def backward(self, saved: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        if isinstance(grads[0], FakeTensor):
            with unset_fake_temporarily(), draws_undone():
                self._gradients(_uncounted(self._saved_example))
            return [form.empty(grads[0].device) for form in self.gradient_forms]
        forms = {"given": self._forms, "result": self._result_forms}
        saved = [forms[kind][n].laid_out(x) for (kind, n), x in zip(self.sources, saved, strict=True)]
        found = self._gradients([*saved, *grads])
        made: list[Tensor] = []
        for i, needed in enumerate(self._needs):
            if needed and (found[i] is not None) != (i in self.inputs):
                raise MegacompileError(
                    f"{self._name}, returned gradients of other arguments than on other values of the same "
                    "shapes: a program is one for all values."
                )
        for i, form in zip(self.inputs, self.gradient_forms, strict=True):
            made.append(form.laid_out(_fresh(found[i], {*map(_storage_address, (*saved, *grads, *made))})))
        return made

    def _made_up(self, seed: int = 0) -> list[Tensor]:
        return [form.made_up(seed, self._device) for form in self._forms]

    def _saved_example(self) -> list[Tensor]:
        """Invent saved tensors and gradients as arguments of a backward."""
        given = self._made_up()
        tensors = {"given": given, "result": self._run(given)[1]}
        results = [tensors["result"][self.layout.results[i].number] for i in self.graded]
        grads = [_TensorForm.of(x.contiguous()).made_up(2, self._device) for x in results]
        return [*(tensors[kind][n].clone() for kind, n in self.sources), *grads]

    def _run(self, given: Sequence[Tensor]) -> tuple[_Layout, list[Tensor]]:
        """Call the forward; return how its results are made, and its tensors, each in memory of its own."""
        device, context = given[0].device, FunctionContext(self._needs)
        given = [x.clone() if i in self.written else x for i, x in enumerate(given)]
        rest = iter(given)
        with _as_in_eager():
            leaves = [
                next(rest).detach() if isinstance(x, _TensorPlace) else _on(device, x) for x in self._leaves
            ]
            args = pytree.tree_unflatten(leaves, self._spec)
            for x, needed in zip(args, self._needs, strict=True):
                if needed:
                    x.requires_grad_()
            output = call_forward(self._function, context, args)
        marks, several = context._marks, isinstance(output, tuple)
        results = list(output) if several else [output]
        graded = {i: x for i, x in enumerate(results) if has_gradient(x, marks)}
        refuse_several(self._name, graded, marks)
        tensors = _Tensors(given, self.written)
        places = tuple(tensors.place(x) if isinstance(x, Tensor) else x for x in results)
        state = {name: x for name, x in vars(context).items() if name not in _OF_CONTEXTS}
        fixed = [*self._leaves, *(size for form in self._forms for size in form.shape)]
        leaves, self._kept_spec = pytree.tree_flatten(state)
        pairs = zip_longest(leaves, self.layout.kept[: len(leaves)])
        kept = tuple(tensors.keep(x, fixed, expected) for x, expected in pairs)
        made = tensors.made + [torch.tensor(tensors.numbers, device=device)] * bool(tensors.numbers)
        written = [i for i, x in enumerate(args) if any(x is y for y in marks.dirty)]
        if any(not any(args[i] is x for x in results) for i in written):
            raise _NotForRealError("marks an argument as dirty that it does not return")
        dirty = tuple((i, k) for i in written for k, x in enumerate(results) if x is args[i])
        without = tuple(i for i, x in enumerate(results) if isinstance(x, Tensor) and i not in graded)
        forms = tuple((tuple(x.shape), x.dtype) for x in made)
        names = str(self._kept_spec)
        return _Layout(places, several, without, marks.materialize, dirty, kept, names, forms), made

    def _gradients(self, given: Sequence[Tensor]) -> tuple[Any, ...]:
        """Call the backward, given saved tensors and gradients; return what it returns for each argument."""
        given = [x.clone() if i in self._overwritten else x for i, x in enumerate(given)]
        count = len(self.sources)
        tensors, grads = dict(zip(self.sources, given, strict=False)), given[count:]
        numbers = given[count - 1].tolist() if self._has_numbers else []
        known = dict(zip(self.graded, grads, strict=True))
        device = grads[0].device

        def real(x: Any) -> Any:
            if isinstance(x, _Number):
                return _of_bits(x.kind, numbers[x.place])
            if not isinstance(x, _Kept):
                return _on(device, x)
            base = tensors[x.source]
            view = base.as_strided(x.shape, x.stride, base.storage_offset() + x.offset)
            return view.cpu().numpy() if x.array else view

        with _as_in_eager():
            context = FunctionContext(self._needs)
            state = pytree.tree_unflatten([real(x) for x in self.layout.kept], self._kept_spec)
            vars(context).update(state)
            values = [
                known.get(i) if i in known or not isinstance(x, _TensorPlace) or not self.layout.materialize
                else self._result_forms[x.number].empty(device).zero_()
                for i, x in enumerate(self.layout.results)
            ]  # fmt: skip
            found = self._function.backward(context, *values)
        return found if isinstance(found, tuple) else (found,)


class _Tensors:
    """The tensors that a forward returns and keeps, told apart by their memory."""

    def __init__(self, given: Sequence[Tensor], changed: set[int]) -> None:
        self.made: list[Tensor] = []
        self.numbers: list[int] = []
        self._given, self._device = given, given[0].device
        self._examined = {
            _storage_address(x): (("given", i), x)
            for i, x in enumerate(given)
            if i not in changed and x.numel()
        }

    def place(self, x: Tensor) -> _TensorPlace:
        """Put a tensor among those that are returned, and tell where."""
        fresh, place = _fresh(x, self._examined), _TensorPlace(len(self.made))
        if fresh.numel():
            self._examined[_storage_address(fresh)] = ("result", place.number), fresh
        self.made.append(fresh)
        return place

    def keep(self, x: Any, fixed: Sequence[Any], expected: Any) -> Any:
        """Return the place of a context's tensor, the ``expected`` one if it is there, because arguments may
        share memory; ``fixed`` numbers are constants."""
        if isinstance(x, torch.device):
            return torch.device("cpu")  # stands for that of the tensors
        if isinstance(x, numpy.ndarray) and x.dtype != object:
            place = self.place(torch.from_numpy(x).clone().to(self._device)).number
            return _Kept(("result", place), *_TensorForm.of(self.made[place])[:2], 0, True)
        if isinstance(x, Tensor):
            x = x.detach()
            if isinstance(expected, _Kept) and expected.source[0] == "given":
                base = self._given[expected.source[1]]
                view = base.as_strided(*expected[1:3], base.storage_offset() + expected.offset)
                if (x.data_ptr(), _TensorForm.of(x)) == (view.data_ptr(), _TensorForm.of(view)):
                    return expected
            if _storage_address(x) not in self._examined or not x.numel():
                place = self.place(x).number
                return _Kept(("result", place), *_TensorForm.of(self.made[place])[:2], 0)
            source, base = self._examined[_storage_address(x)]
            if x.dtype == base.dtype:
                return _Kept(source, *_TensorForm.of(x)[:2], x.storage_offset() - base.storage_offset())
            place = self.place(x.clone()).number
            return _Kept(("result", place), *_TensorForm.of(self.made[place])[:2], 0)
        number = isinstance(x, (bool, int, float))
        if number and not any(type(x) is type(y) and x == y for y in fixed):
            self.numbers.append(struct.unpack("q", struct.pack("d", x))[0] if type(x) is float else int(x))
            return _Number(type(x), len(self.numbers) - 1)
        return x


def _of_bits(kind: type, bits: int) -> Any:
    return struct.unpack("d", struct.pack("q", bits))[0] if kind is float else kind(bits)


def _on(device: torch.device, constant: Any) -> Any:
    """A constant for tensors on a device, which may be that of the trace."""
    return device if isinstance(constant, torch.device) else constant


def _storage_address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _fresh(x: Tensor, known: Container[int]) -> Tensor:
    """A tensor, or a copy where it does not have memory of its own."""
    alone = x.numel() and _storage_address(x) not in known and x.untyped_storage().nbytes() == x.nbytes
    return x.detach() if alone else x.detach().clone()


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return bool(
        torch.equal(x.contiguous().view(-1).view(torch.uint8), y.contiguous().view(-1).view(torch.uint8))
    )


def _arguments_written(given: Sequence[Tensor], before: Sequence[Tensor]) -> set[int]:
    return {i for i, (x, y) in enumerate(zip(given, before, strict=True)) if not _same_bits(x, y)}


def _uncounted(make: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Allocate tensors that no meter of memory counts."""
    with _disable_current_modes():
        tensors = make()
    modes: list[Any] = _get_current_dispatch_mode_stack()
    for meter in [mode for mode in modes if isinstance(mode, Meter)]:
        for x in tensors:
            meter.ignore(x)
    return tensors


@contextlib.contextmanager
def _as_in_eager() -> Iterator[None]:
    """Within the context, which is inside of an operator, torch knows gradients, as it does in eager."""
    keys = torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView
    with contextlib.ExitStack() as stack:
        for key in keys:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.no_grad())
        yield


@contextlib.contextmanager
def draws_undone() -> Iterator[None]:
    """Within the context random numbers may be drawn, and are drawn again afterwards."""
    python, arrays = random.getstate(), numpy.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=range(torch.cuda.device_count() if torch.cuda.is_available() else 0)):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)  # noqa: NPY002


def call_for_real(function: Any, name: str, needs: tuple[bool, ...], args: tuple[Any, ...], why: str) -> Any:
    """Put a call into the trace that runs for real, as torch cannot trace it."""
    call, digest = _examined(function, name, needs, args, why)
    tensors = tensors_in(args)
    with torch.no_grad():
        made = opaque([x.detach() for x in tensors], digest, bool(call.inputs))
        if not call.repeats:
            made = [buffer_snapshot(x) for x in made]
    results = [made[x.number] if isinstance(x, _TensorPlace) else x for x in call.layout.results]
    if call.inputs:
        saved = [(tensors if kind == "given" else made)[n].detach() for kind, n in call.sources]
        BACKWARD_GRAPHS[digest] = _backward_graph(len(saved), len(call.graded), len(call.inputs), digest)
        graded = [results[i].detach() for i in call.graded]
        inputs = [args[i] for i in call.inputs]
        for i, x in zip(call.graded, own_gradient(graded, inputs, saved, digest), strict=True):
            results[i] = x
    for i, k in call.layout.dirty:
        args[i].copy_(results[k])
        results[k] = args[i]
    return tuple(results) if call.layout.several else results[0]


def run_for_real(function: Any, name: str, args: tuple[Any, ...], why: str) -> tuple[tuple[Any, ...], bool]:
    """Put a call into the trace that runs for real and has no gradient, as torch cannot trace it.

    ``function`` has a ``forward(ctx, *args)`` that returns a tuple. Return its results, and whether it writes
    into its arguments, of which it is then given copies.
    """
    needs = (False,) * len(args)
    results = call_for_real(function, name, needs, args, why)
    return results, bool(_examined(function, name, needs, args, why)[0].written)


def examine_anew() -> None:
    """Call each function on made-up values again before a graph holds it: what its code reads has changed."""
    _OpaqueCall.examination += 1


def _examined(
    function: Any, name: str, needs: tuple[bool, ...], args: tuple[Any, ...], why: str
) -> tuple[_OpaqueCall, str]:
    """A call of this kind, which was examined, and the name under which operators find it."""
    try:
        call = _OpaqueCall(function, name, needs, args, torch.is_grad_enabled())
        digest = hashlib.sha256(call.key[0].encode()).hexdigest()[:16]
        while (
            digest in _OPAQUE_CALLS and _OPAQUE_CALLS[digest].key != call.key
        ):  # of another function of this name
            digest += "_"
        if digest not in _OPAQUE_CALLS:
            with outside_tracing(), none_refused(), draws_undone():
                call.examine()
            _OPAQUE_CALLS[digest] = call
    except CaptureError:
        raise
    except Exception as error:
        said = "" if isinstance(error, _NotForRealError) else "fails on made-up values of such shapes: "
        raise function_refusal(
            name, f"cannot be traced ({why}), and cannot run as it is: it {said}{first_line_of(error)}"
        ) from None
    return _OPAQUE_CALLS[digest], digest


def _backward_graph(saved: int, grads: int, results: int, call: str) -> fx.GraphModule:
    """The rule of a function that runs for real: one call."""
    graph = fx.Graph()
    given = [
        [graph.placeholder(f"{kind}_{i}") for i in range(n)]
        for kind, n in (("saved", saved), ("grad", grads))
    ]
    found = graph.call_function(opaque_backward._opoverload, (*given, call))
    graph.output([graph.call_function(operator.getitem, (found, i)) for i in range(results)])
    return fx.GraphModule({}, graph)

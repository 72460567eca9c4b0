"""Gradients of one's own: what a ``torch.autograd.Function`` computes, as operators of the graph.

In: a call of a function under capture. Out: its forward, traced where it stands and cut off from torch's
gradients, and :func:`own_gradient`, which hands its results on and whose gradient is the function's backward,
traced once as a graph by itself. Of a template's joint graph it is gone: what is left are the operators of
forward and backward, so that saved tensors are planned as any.

A function that torch cannot trace (NumPy, ``.item()``, kernels of others) is two operators that call it for
real, :func:`opaque` and :func:`opaque_backward`: all that it keeps between them are tensors of the graph.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import random
import struct
import types
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from megacompile.capture.changed_buffers import buffer_snapshot
from megacompile.capture.refusals import none_refused, outside_tracing, random_states
from megacompile.capture.written_arguments import return_writes
from megacompile.errors import CaptureError, MegacompileError
from megacompile.kernels.registry import OpPass, OpSpec, declare

aten = torch.ops.aten
_RULES: dict[str, fx.GraphModule] = {}  # backwards, by what they compute


@torch.library.custom_op("megacompile::own_gradient", mutates_args=())
def own_gradient(
    results: Sequence[Tensor], inputs: Sequence[Tensor], saved: Sequence[Tensor], rule: str
) -> list[Tensor]:
    """Hand on ``results``, whose gradients become those of ``inputs`` by a rule that reads ``saved``."""
    return [result.clone() for result in results]


@own_gradient.register_fake
def _(
    results: Sequence[Tensor], inputs: Sequence[Tensor], saved: Sequence[Tensor], rule: str
) -> list[Tensor]:
    return [torch.empty_like(result) for result in results]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    results, _, saved, rule = inputs
    ctx.save_for_backward(*saved)
    ctx.rule, ctx.counts = rule, (len(results), len(saved))


def _backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    results, saved = ctx.counts
    rule = fx.Interpreter(_RULES[ctx.rule])
    found = rule.run(*ctx.saved_tensors, *(grad.contiguous() for grad in grads))
    return [None] * results, list(found), [None] * saved, None


own_gradient.register_autograd(_backward, setup_context=_setup)
declare(OpSpec("own_gradient"))
_OPERATOR = own_gradient._opoverload


def hand_on(graph: fx.Graph) -> None:
    """Let what reads results of :func:`own_gradient` read the function's, where gradients are traced."""
    for node in [n for n in graph.nodes if n.target is _OPERATOR]:
        for item in list(node.users):
            item.replace_all_uses_with(node.args[0][item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)


@dataclass
class _Marks:
    """The tensors that a forward marked."""

    constant: tuple[Tensor, ...] = ()
    dirty: tuple[Tensor, ...] = ()
    materialize: bool = True


class _Context:
    """Holds what a forward leaves for its backward, beside attributes of its own."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self._marks = _Marks()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Keep nothing: no program differentiates forward."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self._marks.constant = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        self._marks.dirty = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._marks.materialize = value


_AS_TORCH_WOULD = {
    "transformers.models.bloom.modeling_bloom.GeLUFunction",
    "peft.tuners.loha.layer.HadaWeight",  # HadaWeightCP's is none: two of its gradients differ
}
"""Functions whose own gradient is the derivative of their forward, which torch's rules give as well."""


def apply(theirs: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.Function.apply`` in a forward that is captured."""
    path = f"{function.__module__}.{function.__name__}"
    name, checkpoint = f"{path}, a torch.autograd.Function", "checkpoint" in function.__module__
    if path in _AS_TORCH_WOULD or (function.__module__.startswith("torch.") and not checkpoint):
        return theirs(function, *args, **kwargs)
    if checkpoint:
        raise _refusal(
            name,
            "is a checkpoint: use checkpoint(..., use_reentrant=False), or none, as the plan decides "
            "what is recomputed",
        )
    return _traced(function, name, args)


def _traced(function: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Trace a call of a function whose gradient is its own; one that cannot be traced runs for real."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise _refusal(name, "is called within a transform such as vmap or jvp: call it outside of that")
    needs = tuple(isinstance(x, Tensor) and x.requires_grad for x in args)
    if (why := _not_traced(function, needs, args)) is not None:
        return _for_real(function, name, needs, args, why)
    context = _Context(needs)
    with torch.no_grad():
        output = _forward(function, context, args)
    marks = context._marks
    results = list(output) if isinstance(output, tuple) else [output]
    graded = {i: x for i, x in enumerate(results) if _has_gradient(x, marks)}
    if not graded or not torch.is_grad_enabled() or not any(needs):
        return output
    _refuse_several(name, graded, marks)
    try:
        rule = _Rule(function, context, results, list(graded))
    except Exception as error:
        return _for_real(function, name, needs, args, f"in its backward: {_first_line(error)}")
    inputs = [args[i] for i in rule.inputs]
    made = own_gradient([x.detach() for x in graded.values()], inputs, rule.saved, rule.digest)
    for i, x in zip(graded, made, strict=True):
        results[i] = x
    return tuple(results) if isinstance(output, tuple) else results[0]


def _forward(function: Any, context: _Context, args: Sequence[Any]) -> Any:
    if function.setup_context is _SingleLevelFunction.setup_context:
        return function.forward(context, *args)
    output = function.forward(*args)
    function.setup_context(context, tuple(args), output)
    return output


def _not_traced(function: Any, needs: tuple[bool, ...], args: tuple[Any, ...]) -> str | None:
    """Say why a forward cannot be traced, by calling it on tensors without values beside the trace."""
    tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
    mode = next((x.fake_mode for x in tensors if isinstance(x, FakeTensor)), None)
    if mode is None:
        return None
    context, shapes = _Context(needs), mode.shape_env
    mode.shape_env = None  # by which a number that is taken out of a tensor would be a symbol
    try:
        with _aside(), _draws_undone(), mode:
            before = random_states()
            _forward(function, context, pytree.tree_map_only(Tensor, _like, args))
            drawn = random_states() != before
    except Exception as error:
        return _first_line(error)
    finally:
        mode.shape_env = shapes
    if drawn:
        return "it draws random numbers"
    return "it writes over an argument" if context._marks.dirty else None


def _like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).requires_grad_(x.requires_grad)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _refuse_several(name: str, graded: dict[int, Any], marks: _Marks) -> None:
    if len(graded) > 1 and not marks.materialize:
        raise _refusal(name, "has several results and set_materialize_grads(False): leave that out")


def _has_gradient(result: Any, marks: _Marks) -> bool:
    differentiable = isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex())
    return differentiable and not any(result is x for x in marks.constant)


def _refusal(name: str, why: str) -> CaptureError:
    return CaptureError(f"The forward calls {name}, which {why}.")


class _Rule:
    """A backward as a graph: (saved, gradients of results) -> gradients of ``inputs``, arguments by their
    places. ``saved`` are tensors of the forward's trace, and constants."""

    def __init__(self, function: Any, context: _Context, results: list[Any], graded: list[int]) -> None:
        self._function, self._context, self._graded = function, context, graded
        self._leaves, self._spec = pytree.tree_flatten(vars(context))
        self._forms = [(x.shape, x.dtype) if isinstance(x, Tensor) else None for x in results]
        self.inputs: list[int] = []
        kept = [x for x in self._leaves if isinstance(x, Tensor)]
        module = self._trace([(tuple(x.shape), x.stride(), x.dtype) for x in kept])
        self.saved = [x.detach() for x in kept] + _as_inputs(module, len(kept))
        lines = [f"{n.format_node()} {n.meta.get('val')}" for n in module.graph.nodes]
        self.digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        _RULES[self.digest] = module

    def _trace(self, forms: list[tuple[Any, Any, torch.dtype]]) -> fx.GraphModule:
        with _aside(), FakeTensorMode():
            saved = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in forms]
            grads = [torch.empty(form[0], dtype=form[1]) for i in self._graded if (form := self._forms[i])]
            module = make_fx(lambda *given: self._backward(*given))(saved, grads)
            hand_on(module.graph)
            return_writes(module.graph)
            if any(map(_writes, module.graph.nodes)):
                module = make_fx(torch.func.functionalize(module, remove="mutations"))(saved, grads)
        module.graph.eliminate_dead_code()
        return module

    def _backward(self, saved: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Run the function's backward, of a context that holds these."""
        rest, known = iter(saved), dict(zip(self._graded, grads, strict=True))
        leaves = [next(rest) if isinstance(x, Tensor) else x for x in self._leaves]
        context = _Context(())
        vars(context).update(pytree.tree_unflatten(leaves, self._spec))
        given = [
            known.get(i) if i in known or form is None else torch.zeros(form[0], dtype=form[1])
            for i, form in enumerate(self._forms)
        ]
        found = self._function.backward(context, *given)
        found = found if isinstance(found, tuple) else (found,)
        needs = context.needs_input_grad
        self.inputs = [i for i, needed in enumerate(needs) if needed and found[i] is not None]
        return [found[i] for i in self.inputs]


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Within the context torch computes beside the forward's trace, and takes gradients of its own."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        disable_proxy_modes_tracing(),
        torch.no_grad(),
        none_refused(),
    ):
        yield


def _as_inputs(module: fx.GraphModule, count: int) -> list[Tensor]:
    """Let a graph take its constants as inputs, behind the first ``count``, and return them."""
    graph, constants = module.graph, []
    before = [n for n in graph.nodes if n.op == "placeholder"][count:]
    for node in list(graph.nodes):
        if node.target is aten.view.default:  # of a result that may be laid out in another way
            node.target = aten.reshape.default
        if node.op == "get_attr":
            constants.append(getattr(module, str(node.target)))
            with graph.inserting_before(before[0]):
                place = graph.placeholder(node.name)
            node.replace_all_uses_with(place)
            graph.erase_node(node)
    module.recompile()
    return constants


# ------------------------------------------------------------------------------------------------------------
# Functions that run for real: what torch cannot trace is called, forward and backward, as it is.
#
# A call's tensors are arguments and results of two operators. What the function keeps on ``ctx`` is found by
# running it on made-up values of the call's shapes: arguments, results and views of them are read where they
# are, other tensors and arrays are further results, numbers travel in a tensor, and all else must be the same
# in every call, which is checked. Its memory is what it takes on the made-up values. A function that writes
# into its arguments is given copies. One that gives other bits for equal arguments, such as one that draws
# random numbers, is called once: its results are snapshots, which whoever recomputes reads.


_CALLS: dict[str, _Call] = {}
_CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), type, types.FunctionType, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_OF_CONTEXTS = {"needs_input_grad", "_marks"}


@torch.library.custom_op("megacompile::opaque", mutates_args=())
def opaque(given: Sequence[Tensor], call: str, keeps: bool) -> list[Tensor]:
    """Call the forward of a function for real; return its results, then what else its backward reads."""
    return _CALLS[call].forward(given, keeps)


@torch.library.custom_op("megacompile::opaque_backward", mutates_args=())
def opaque_backward(saved: Sequence[Tensor], grads: Sequence[Tensor], call: str) -> list[Tensor]:
    """Call the backward of a function for real; return the gradients of the arguments that have one."""
    return _CALLS[call].backward(saved, grads)


@opaque.register_fake
def _(given: Sequence[Tensor], call: str, keeps: bool) -> list[Tensor]:
    return [form.empty(given[0].device) for form in _CALLS[call].result_forms(keeps)]


@opaque_backward.register_fake
def _(saved: Sequence[Tensor], grads: Sequence[Tensor], call: str) -> list[Tensor]:
    return [form.empty(grads[0].device) for form in _CALLS[call].gradient_forms]


declare(OpSpec("opaque", backward=OpPass(), kept=True, varies=True))


@runtime_checkable
class Meter(Protocol):
    """A mode that counts the memory of tensors, but for those that it is told to ignore."""

    def ignore(self, tensor: Tensor) -> None: ...


class _Form(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> _Form:
        return _Form(tuple(x.shape), tuple(x.stride()), x.dtype)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def made_up(self, seed: int, device: torch.device) -> Tensor:
        """Make numbers between 0 and 1; of whole ones zeros, which index anything; or True."""
        x, generator = self.empty(torch.device("cpu")), torch.Generator().manual_seed(seed)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return x.copy_(0.05 + 0.9 * torch.rand(self.shape, generator=generator)).to(device)
        return x.fill_(self.dtype == torch.bool).to(device)

    def laid_out(self, x: Tensor) -> Tensor:
        """Return a tensor of this shape and dtype in this order in memory."""
        return x if x.stride() == self.stride else self.empty(x.device).copy_(x)


class _Place(NamedTuple):
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


class _Call:
    """A function with its constants, for arguments of certain forms."""

    def __init__(
        self, function: Any, name: str, needs: tuple[bool, ...], args: tuple[Any, ...], grad: bool
    ) -> None:
        leaves, self._spec = pytree.tree_flatten(args)
        self._function, self._needs, self._name, self._grad = function, needs, name, grad
        self._forms = [_Form.of(x) for x in leaves if isinstance(x, Tensor)]
        self._leaves = [_Place(0) if isinstance(x, Tensor) else x for x in leaves]
        for leaf in self._leaves:
            if not isinstance(leaf, (_Place, *_CONSTANTS)):
                raise _NotForRealError(f"is given a {type(leaf).__name__}: give it tensors and numbers alone")
        code = [x for x in (function, *self._leaves) if callable(x)]
        named = [x.__qualname__ if x in code else x for x in (function, *self._leaves)]
        self.key = f"{name} {named} {needs} {grad} {self._spec} {self._forms}", code
        self.layout = _Layout((), False, (), True, (), (), "", ())
        self.written: set[int] = set()  # arguments into which the forward writes
        self._overwritten: set[int] = set()  # tensors into which the backward does
        self.inputs: list[int] = []  # arguments that get a gradient
        self.gradient_forms: list[_Form] = []

    def examine(self) -> None:
        """Call it on made-up values, to know what it returns, keeps, and writes into."""
        given = self._try()
        self.written = _written(given, self._made_up())
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
        self.repeats = all(map(_equal, results, repeated))
        self._result_forms = [_Form.of(x) for x in results]
        if self._grad and self.graded and any(self._needs):
            given = self._saved_example()
            found = self._gradients(given)
            self._overwritten = _written(given, self._saved_example())
            self.inputs = [i for i, needed in enumerate(self._needs) if needed and found[i] is not None]
            self.gradient_forms = [_Form.of(found[i]) for i in self.inputs]

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
        places = [i for i, x in enumerate(layout.results) if isinstance(x, _Place)]
        return [i for i in places if i not in layout.without_gradient]

    @property
    def _has_numbers(self) -> bool:
        return any(isinstance(x, _Number) for x in self.layout.kept)

    @property
    def sources(self) -> list[tuple[str, int]]:
        """The places of the forward's arguments and results that the backward is given."""
        found = dict.fromkeys(x.source for x in self.layout.kept if isinstance(x, _Kept))
        return [*found, *[("result", len(self._result_forms) - 1)] * self._has_numbers]

    def result_forms(self, keeps: bool) -> list[_Form]:
        """Return the forms of what :func:`opaque` returns, kept tensors too."""
        count = sum(isinstance(x, _Place) for x in self.layout.results)
        return self._result_forms if keeps else self._result_forms[:count]

    # On real values; on fake ones, which a meter does, it runs on made-up ones and takes the same memory.

    def forward(self, given: Sequence[Tensor], keeps: bool) -> list[Tensor]:
        forms = self.result_forms(keeps)
        if isinstance(given[0], FakeTensor):
            with unset_fake_temporarily(), _draws_undone():
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
            with unset_fake_temporarily(), _draws_undone():
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
            made.append(form.laid_out(_fresh(found[i], {*map(_memory, (*saved, *grads, *made))})))
        return made

    def _made_up(self, seed: int = 0) -> list[Tensor]:
        return [form.made_up(seed, self._device) for form in self._forms]

    def _saved_example(self) -> list[Tensor]:
        """Make up saved tensors and gradients, which a backward is given."""
        given = self._made_up()
        tensors = {"given": given, "result": self._run(given)[1]}
        results = [tensors["result"][self.layout.results[i].number] for i in self.graded]
        grads = [_Form.of(x.contiguous()).made_up(2, self._device) for x in results]
        return [*(tensors[kind][n].clone() for kind, n in self.sources), *grads]

    def _run(self, given: Sequence[Tensor]) -> tuple[_Layout, list[Tensor]]:
        """Call the forward; return how its results are made, and its tensors, each in memory of its own."""
        device, context = given[0].device, _Context(self._needs)
        given = [x.clone() if i in self.written else x for i, x in enumerate(given)]
        rest = iter(given)
        with _as_in_eager():
            leaves = [next(rest).detach() if isinstance(x, _Place) else _on(device, x) for x in self._leaves]
            args = pytree.tree_unflatten(leaves, self._spec)
            for x, needed in zip(args, self._needs, strict=True):
                if needed:
                    x.requires_grad_()
            output = _forward(self._function, context, args)
        marks, several = context._marks, isinstance(output, tuple)
        results = list(output) if several else [output]
        graded = {i: x for i, x in enumerate(results) if _has_gradient(x, marks)}
        _refuse_several(self._name, graded, marks)
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
            context = _Context(self._needs)
            state = pytree.tree_unflatten([real(x) for x in self.layout.kept], self._kept_spec)
            vars(context).update(state)
            values = [
                known.get(i) if i in known or not isinstance(x, _Place) or not self.layout.materialize
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
        self._known = {
            _memory(x): (("given", i), x) for i, x in enumerate(given) if i not in changed and x.numel()
        }

    def place(self, x: Tensor) -> _Place:
        """Put a tensor among those that are returned, and tell where."""
        fresh, place = _fresh(x, self._known), _Place(len(self.made))
        if fresh.numel():
            self._known[_memory(fresh)] = ("result", place.number), fresh
        self.made.append(fresh)
        return place

    def keep(self, x: Any, fixed: Sequence[Any], expected: Any) -> Any:
        """Tell where something that a context holds is, in the ``expected`` place if it is there, as
        arguments may share memory; numbers that are ``fixed`` are constants."""
        if isinstance(x, torch.device):
            return torch.device("cpu")  # stands for that of the tensors
        if isinstance(x, numpy.ndarray) and x.dtype != object:
            place = self.place(torch.from_numpy(x).clone().to(self._device)).number
            return _Kept(("result", place), *_Form.of(self.made[place])[:2], 0, True)
        if isinstance(x, Tensor):
            x = x.detach()
            if isinstance(expected, _Kept) and expected.source[0] == "given":
                base = self._given[expected.source[1]]
                view = base.as_strided(*expected[1:3], base.storage_offset() + expected.offset)
                if (x.data_ptr(), _Form.of(x)) == (view.data_ptr(), _Form.of(view)):
                    return expected
            if _memory(x) not in self._known or not x.numel():
                place = self.place(x).number
                return _Kept(("result", place), *_Form.of(self.made[place])[:2], 0)
            source, base = self._known[_memory(x)]
            if x.dtype == base.dtype:
                return _Kept(source, *_Form.of(x)[:2], x.storage_offset() - base.storage_offset())
            place = self.place(x.clone()).number
            return _Kept(("result", place), *_Form.of(self.made[place])[:2], 0)
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


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _fresh(x: Tensor, known: Container[int]) -> Tensor:
    """A tensor, or a copy where it does not have memory of its own."""
    alone = x.numel() and _memory(x) not in known and x.untyped_storage().nbytes() == x.nbytes
    return x.detach() if alone else x.detach().clone()


def _equal(x: Tensor, y: Tensor) -> bool:
    return bool(
        torch.equal(x.contiguous().view(-1).view(torch.uint8), y.contiguous().view(-1).view(torch.uint8))
    )


def _written(given: Sequence[Tensor], before: Sequence[Tensor]) -> set[int]:
    return {i for i, (x, y) in enumerate(zip(given, before, strict=True)) if not _equal(x, y)}


def _uncounted(make: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Make tensors that no meter of memory counts."""
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
def _draws_undone() -> Iterator[None]:
    """Within the context random numbers may be drawn, and are drawn again afterwards."""
    python, arrays = random.getstate(), numpy.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=range(torch.cuda.device_count() if torch.cuda.is_available() else 0)):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)  # noqa: NPY002


def _for_real(function: Any, name: str, needs: tuple[bool, ...], args: tuple[Any, ...], why: str) -> Any:
    """Put a call into the trace that runs for real, as torch cannot trace it."""
    call, digest = _known(function, name, needs, args, why)
    tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
    with torch.no_grad():
        made = opaque([x.detach() for x in tensors], digest, bool(call.inputs))
        if not call.repeats:
            made = [buffer_snapshot(x) for x in made]
    results = [made[x.number] if isinstance(x, _Place) else x for x in call.layout.results]
    if call.inputs:
        saved = [(tensors if kind == "given" else made)[n].detach() for kind, n in call.sources]
        _RULES[digest] = _backward_graph(len(saved), len(call.graded), len(call.inputs), digest)
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
    results = _for_real(function, name, needs, args, why)
    return results, bool(_known(function, name, needs, args, why)[0].written)


def _known(
    function: Any, name: str, needs: tuple[bool, ...], args: tuple[Any, ...], why: str
) -> tuple[_Call, str]:
    """A call of this kind, which was examined, and the name under which operators find it."""
    try:
        call = _Call(function, name, needs, args, torch.is_grad_enabled())
        digest = hashlib.sha256(call.key[0].encode()).hexdigest()[:16]
        while digest in _CALLS and _CALLS[digest].key != call.key:  # of another function of this name
            digest += "_"
        if digest not in _CALLS:
            with outside_tracing(), none_refused(), _draws_undone():
                call.examine()
            _CALLS[digest] = call
    except CaptureError:
        raise
    except Exception as error:
        said = "" if isinstance(error, _NotForRealError) else "fails on made-up values of such shapes: "
        raise _refusal(
            name, f"cannot be traced ({why}), and cannot run as it is: it {said}{_first_line(error)}"
        ) from None
    return _CALLS[digest], digest


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
